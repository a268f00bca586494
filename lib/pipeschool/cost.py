"""What actions and messages cost: seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeschool.actions import Schedule

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Cost:
    """Seconds of every action, and the time a message is under way.

    forward, backward: seconds per microbatch; one number, or one per stage.
    input_backward, weight_backward: the halves of a split backward; half of `backward` each
        where they are not given.
    update: seconds of an optimizer update; one number, or one per stage.
    speed: how fast a worker is; one number, or one per worker. 2 halves its times.
    comm: seconds for which a message occupies its link.
    latency: seconds that each message takes in addition, without occupying the link.
    bandwidth: bytes per second of a link; with `message_bytes` (one number, or one per stage: the
        size of what the stage hands on) this adds to `comm`.
    parameter_bytes: bytes of one version of a stage's weights; one number, or one per stage.

    A message travels while both workers compute. Messages on one link follow each other.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    input_backward: PerStage | None = None
    weight_backward: PerStage | None = None
    update: PerStage = 0.0
    speed: PerStage = 1.0
    comm: float = 0.0
    latency: float = 0.0
    bandwidth: float = math.inf
    message_bytes: PerStage = 0.0
    parameter_bytes: PerStage = 0.0

    def __post_init__(self) -> None:
        per_stage = ["forward", "backward", "update", "message_bytes", "parameter_bytes"]
        halves = ["input_backward", "weight_backward"]
        per_stage += [name for name in halves if getattr(self, name) is not None]
        for name in (*per_stage, "speed"):
            value = _numbers(name, getattr(self, name), positive=name == "speed")
            object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else
        number("comm", self.comm)
        number("latency", self.latency)
        number("bandwidth", self.bandwidth, positive=True, infinite=True)

    def seconds(self, schedule: Schedule) -> dict[str, list[float]]:
        """For each kind of action, its seconds on every stage of `schedule`."""
        stages = schedule.stages
        speed = per_item("speed", self.speed, schedule.p, "worker")
        backward = per_item("backward", self.backward, stages, "stage")
        half = [b / 2 for b in backward]
        table = {
            "F": per_item("forward", self.forward, stages, "stage"),
            "B": backward,
            "I": self._half("input_backward", half),
            "W": self._half("weight_backward", half),
            "U": per_item("update", self.update, stages, "stage"),
        }
        return {
            kind: [t / speed[schedule.placement[s]] for s, t in enumerate(times)]
            for kind, times in table.items()
        }

    def _half(self, name: str, default: list[float]) -> list[float]:
        given = getattr(self, name)
        return default if given is None else per_item(name, given, len(default), "stage")

    def weights(self, schedule: Schedule) -> tuple[float, ...]:
        """Bytes of one version of the weights of each worker."""
        sizes = per_item("parameter_bytes", self.parameter_bytes, schedule.stages, "stage")
        return tuple(sum(sizes[s] for s in schedule.stages_of(w)) for w in range(schedule.p))

    def transfer(self, schedule: Schedule) -> list[float]:
        """Seconds for which a message at the boundary behind each stage occupies its link.

        The gradient of an activation is as large as the activation, so both ways cost the same.
        """
        sizes = per_item("message_bytes", self.message_bytes, schedule.stages, "stage")
        return [self.comm + size / self.bandwidth for size in sizes]

    def message_size(self, boundary: int) -> float:
        """Bytes of a message across the boundary behind stage `boundary`."""
        sizes = self.message_bytes
        return sizes[boundary] if isinstance(sizes, Sequence) else sizes


def per_item(name: str, value: PerStage, count: int, item: str) -> list[float]:
    """`value` as a list of `count` numbers; ValueError where it is a list of another length."""
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise ValueError(f"{name} needs one number, or one per {item}: {count}, not {len(value)}")
    return [float(x) for x in value]


def number(name: str, value: object, positive: bool = False, infinite: bool = False) -> float:
    """`value` as a float of 0 or more; otherwise ValueError, in one sentence.

    `positive` refuses 0 as well, `infinite` allows infinity.
    """
    wrong = f"{name} must be a number, {'above 0' if positive else '0 or more'}, not {value!r}"
    if isinstance(value, (str, bytes, bool)):  # float() would take them
        raise ValueError(wrong)
    try:
        result = float(value)  # type: ignore[arg-type]  # whether it can is the question
    except (TypeError, ValueError):
        raise ValueError(wrong) from None
    finite = math.isfinite(result) or (infinite and result == math.inf)
    if not finite or result < 0 or (positive and result == 0):
        raise ValueError(wrong)
    return result


def _numbers(name: str, value: object, positive: bool) -> float | tuple[float, ...]:
    """`value` as a float, or as floats where it is a list, a tuple or an array of numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(number(name, item, positive) for item in value)
    return number(name, value, positive)
