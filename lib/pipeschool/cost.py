"""What actions and messages cost: seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeschool.actions import Schedule
from pipeschool.arguments import number, numbers, per_item
from pipeschool.memory import StageBytes

PerStage = float | Sequence[float]
PER_STAGE = (
    "forward", "backward", "input_backward", "weight_backward", "update", "message_bytes",
    "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "working_bytes",
)  # fmt: skip


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
    recompute: keep only a microbatch's input from its forward to its backward, which then goes
        forward again first, and takes that much longer; True, False, or one of them per stage.

    Bytes, each one number or one per stage:
    parameter_bytes: one version of the weights.
    gradient_bytes: what waits for the update; as much as `parameter_bytes` where not given.
    optimizer_bytes: the optimizer's state.
    activation_bytes: A, what a forward of one microbatch keeps for its backward, besides the
        input. That is what the stage before handed on, so its size is in `message_bytes`.
    working_bytes: what a backward needs for itself while it runs.

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
    recompute: bool | Sequence[bool] = False
    parameter_bytes: PerStage = 0.0
    gradient_bytes: PerStage | None = None
    optimizer_bytes: PerStage = 0.0
    activation_bytes: PerStage = 0.0
    working_bytes: PerStage = 0.0

    def __post_init__(self) -> None:
        for name in (*PER_STAGE, "speed"):
            if getattr(self, name) is not None:
                value = numbers(name, getattr(self, name), positive=name == "speed")
                object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else
        number("comm", self.comm)
        number("latency", self.latency)
        number("bandwidth", self.bandwidth, positive=True, infinite=True)

    def seconds(self, schedule: Schedule) -> dict[str, list[float]]:
        """For each kind of action, its seconds on every stage of `schedule`."""
        speed = per_item("speed", self.speed, schedule.p, "worker")
        forward = self._per_stage("forward", schedule)
        backward = self._per_stage("backward", schedule)
        half = [b / 2 for b in backward]
        again = [
            f if recompute else 0.0
            for f, recompute in zip(forward, self.recomputes(schedule), strict=True)
        ]
        table = {
            "F": forward,
            "B": [b + f for b, f in zip(backward, again, strict=True)],
            "I": self._per_stage("input_backward", schedule, half),
            "W": self._per_stage("weight_backward", schedule, half),
            "U": self._per_stage("update", schedule),
        }
        table["I"] = [i + f for i, f in zip(table["I"], again, strict=True)]
        for stage, workers in enumerate(schedule.owners):
            if len({speed[w] for w in workers}) > 1:
                raise ValueError(
                    f"the workers of stage {stage}, {', '.join(map(str, workers))}, take turns, so "
                    "they must have the same speed"
                )
        return {
            kind: [t / speed[schedule.placement[s]] for s, t in enumerate(times)]
            for kind, times in table.items()
        }

    def recomputes(self, schedule: Schedule) -> list[bool]:
        """For every stage, whether it does its forward again for a backward."""
        return recompute_table(self.recompute, schedule)

    def _per_stage(
        self, name: str, schedule: Schedule, default: list[float] | None = None
    ) -> list[float]:
        """One number for every stage."""
        given = getattr(self, name)
        if given is None:
            assert default is not None
            return default
        return per_item(name, given, schedule.stages, "stage")

    def stage_bytes(self, schedule: Schedule) -> tuple[StageBytes, ...]:
        """The sizes of every stage."""
        parameters = self._per_stage("parameter_bytes", schedule)
        messages = self._per_stage("message_bytes", schedule)
        return tuple(
            StageBytes(*sizes)
            for sizes in zip(
                parameters,
                self._per_stage("gradient_bytes", schedule, parameters),
                self._per_stage("optimizer_bytes", schedule),
                self._per_stage("activation_bytes", schedule),
                [0.0, *messages[:-1]],
                self._per_stage("working_bytes", schedule),
                self.recomputes(schedule),
                strict=True,
            )
        )

    def transfer(self, schedule: Schedule) -> list[float]:
        """Seconds for which a message at the boundary behind each stage occupies its link.

        The gradient of an activation is as large as the activation, so both ways cost the same.
        """
        return [self.comm + size / self.bandwidth for size in self.message_sizes(schedule)]

    def message_sizes(self, schedule: Schedule) -> list[float]:
        """Bytes of a message across the boundary behind each stage."""
        return self._per_stage("message_bytes", schedule)


def recompute_table(recompute: bool | Sequence[bool], schedule: Schedule) -> list[bool]:
    """`recompute` as one bool per stage; ValueError where it is something else."""
    given = [recompute] * schedule.stages if isinstance(recompute, bool) else recompute
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != schedule.stages:
        raise ValueError(
            f"recompute must be True, False or a list with one of them per stage: "
            f"{schedule.stages}, not {recompute!r}"
        )
    return [bool(item) for item in given]
