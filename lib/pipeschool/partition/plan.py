"""A plan: where a model is cut, on how many workers each stage is, and what that promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeschool.actions import Schedule
from pipeschool.arguments import number, per_item, whole_number
from pipeschool.cost import Cost, PerStage
from pipeschool.partition.cuts import ranges_of
from pipeschool.partition.profile import Profile
from pipeschool.schedules import one_f_one_b, pipedream, round_robin

if TYPE_CHECKING:
    from torch import nn

    from pipeschool.partition.chain import Layers


@dataclass(frozen=True)
class Plan:
    """Stages of consecutive layers, and their predicted times. The planners make plans.

    ranges: the layers of each stage. replicas: the workers of each stage, which take turns.
    stage_seconds: time per microbatch of each stage. boundary_seconds: the same for the messages
    across the boundary behind each stage but the last. speed: of each stage's workers.
    """

    profile: Profile
    ranges: tuple[range, ...]
    replicas: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    boundary_seconds: tuple[float, ...]
    speed: tuple[float, ...]
    bandwidth: float = math.inf
    latency: float = 0.0

    @property
    def p(self) -> int:
        """Number of stages."""
        return len(self.ranges)

    @property
    def workers(self) -> int:
        """Number of workers, all stages together."""
        return sum(self.replicas)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The number of the first layer behind each cut."""
        return tuple(layers.start for layers in self.ranges[1:])

    @property
    def bottleneck(self) -> float:
        """Seconds per microbatch of what is slowest, a stage or a boundary."""
        return max(*self.stage_seconds, *self.boundary_seconds, 0.0)

    @property
    def throughput(self) -> float:
        """Microbatches per second in steady state: what the bottleneck lets through.

        Warm-up, drain and updates are not in it. Where messages take time, 1F1B may stay below: it
        lets so few microbatches in that workers wait for messages. ``ps.eager_1f1b(plan.p, m)``
        lets more in, and `simulate` with the plan's `cost` tells what either makes of it.
        """
        return 1 / self.bottleneck if self.bottleneck else math.inf

    def cost(self) -> Cost:
        """What the stages cost, for `simulate`. The bytes a stage keeps are those of its layers
        added up: an upper bound, as a layer may let go what it got from the one before."""

        def totals(name: str) -> list[float]:
            return [self.profile.total(name, layers) for layers in self.ranges]

        speeds = zip(self.speed, self.replicas, strict=True)
        return Cost(
            forward=totals("forward"),
            backward=totals("backward"),
            update=totals("update"),
            speed=[speed for speed, replicas in speeds for _ in range(replicas)],
            bandwidth=self.bandwidth,
            latency=self.latency,
            message_bytes=[self.profile.layers[layers[-1]].output_bytes for layers in self.ranges],
            parameter_bytes=totals("parameter_bytes"),
            gradient_bytes=totals("gradient_bytes"),
            optimizer_bytes=totals("optimizer_bytes"),
            activation_bytes=totals("activation_bytes"),
            working_bytes=[self.profile.most("working_bytes", layers) for layers in self.ranges],
        )

    def schedule(self, m: int, batches: int = 1, weights: str = "flush") -> Schedule:
        """1F1B on these stages: with a flush after every batch of `m` microbatches, or, with
        weights ``stash``, PipeDream. Round robin where a stage has several workers."""
        if weights not in ("flush", "stash"):
            raise ValueError(f"weights must be 'flush' or 'stash', not {weights!r}")
        if self.workers > self.p:
            return round_robin(self.replicas, m, batches=batches, weights=weights)
        return (one_f_one_b if weights == "flush" else pipedream)(self.p, m, batches=batches)

    def stages(self, model: Layers) -> Sequence[nn.Module]:
        """`model` as one module per stage, for `run`; a tuple that a layer returns goes on whole.

        ValueError where the model has other layers than the profile.
        """
        from pipeschool.partition.chain import stages_of

        return stages_of(model, self.ranges, len(self.profile))

    def __str__(self) -> str:
        lines = [
            f"stages: {self.p}, workers: {self.workers}, predicted: {self.bottleneck:.4g} s per "
            f"microbatch, {self.throughput:.4g} microbatches/s"
        ]
        for s, (layers, workers) in enumerate(zip(self.ranges, self.replicas, strict=True)):
            what = (
                f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
            )
            lines.append(
                f"stage {s} | {what} | {workers} worker{'s'[: workers > 1]} | "
                f"{self.stage_seconds[s]:.4g} s"
            )
        return "\n".join(lines)


def cut_at(
    profile: Profile,
    cuts: Sequence[int],
    *,
    speed: PerStage = 1.0,
    bandwidth: float = math.inf,
    latency: float = 0.0,
) -> Plan:
    """The plan with your own `cuts`: each is the number of the first layer behind it.

    A stage takes the forwards and backwards of its layers over the `speed` of its worker, one
    number or one per worker. A message takes output_bytes / bandwidth; a link takes messages both
    ways at once, as `Cost` has it. Latency does not occupy it, and so costs no throughput.
    ValueError where the cuts are not rising numbers of layers.
    """
    n = len(profile)
    whole = [whole_number("a cut", cut) for cut in cuts]
    ends = [*whole, n]
    if any(a >= b for a, b in zip([0, *ends], ends, strict=False)):
        raise ValueError(
            f"cuts must rise from 1 to {n - 1} at most, the numbers of the first layers behind "
            f"them, not {whole}"
        )
    ranges = ranges_of(ends)
    speeds = speeds_of(speed, len(ranges))
    link = number("bandwidth", bandwidth, positive=True, infinite=True)
    return Plan(
        profile,
        ranges,
        (1,) * len(ranges),
        tuple(stage_seconds(profile, r, v) for r, v in zip(ranges, speeds, strict=True)),
        tuple(boundary_seconds(profile, r.stop, link) for r in ranges[:-1]),
        tuple(speeds),
        link,
        number("latency", latency),
    )


def speeds_of(speed: PerStage, workers: int) -> list[float]:
    """One speed per worker."""
    return per_item("speed", Cost(speed=speed).speed, workers, "worker")


def stage_seconds(profile: Profile, layers: range, speed: float) -> float:
    """Forward and backward of a microbatch on one worker."""
    return profile.total("seconds", layers) / speed


def boundary_seconds(profile: Profile, cut: int, bandwidth: float) -> float:
    """One message across the cut before layer `cut`: activations, or their gradients, which are as
    many and go the other way at the same time."""
    return profile.layers[cut - 1].output_bytes / bandwidth
