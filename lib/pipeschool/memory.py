"""What a worker has in memory, in bytes: predicted from a trace and the sizes of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

KindStageMicrobatch = tuple[str, int, int]  # an Action


class StageBytes(NamedTuple):
    """Sizes of one stage.

    parameters: one version of the weights. gradients: the sum that waits for the update.
    optimizer: its state, which comes with the first update. activations: what the forward of one
    microbatch keeps for the backward, besides the input. inputs: what came in, which is kept as
    well. working: what a backward needs for itself, and gives back at its end. recompute: between
    forward and backward only the input is kept.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    inputs: float = 0.0
    working: float = 0.0
    recompute: bool = False


class MemorySample(NamedTuple):
    """Bytes in the memory of one worker from `time` on, until the next level."""

    time: float
    weights: float  # one version of all stages here
    versions: float  # copies beyond that
    gradients: float
    optimizer: float
    activations: float
    buffers: float  # inputs received, kept until their backward is over
    working: float

    @property
    def total(self) -> float:
        """All of them together."""
        return sum(self[1:])


class Timed(Protocol):
    """What is needed of a span."""

    @property
    def action(self) -> KindStageMicrobatch: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def alive(self) -> int: ...


def levels(row: Sequence[Timed], sizes: Sequence[StageBytes]) -> list[MemorySample]:
    """The memory of a worker that does `row`: one level where an action starts, one at its end.

    Activations count from the start of the forward to the end of the backward, or of its weight
    half. A recomputing stage holds them from the start of the backward only.
    """
    stages = {stage for _, stage, _ in (span.action for span in row)}
    held = _Held({stage: sizes[stage] for stage in stages})
    return list(_steps(row, held))


def _steps(row: Iterable[Timed], held: _Held) -> Iterator[MemorySample]:
    yield held.level(0.0)
    for span in row:
        held.begin(span.action, span.alive)
        yield held.level(span.start)
        held.finish(span.action)
        yield held.level(span.end)


class _Held:
    """What is in memory now, by stage."""

    def __init__(self, sizes: dict[int, StageBytes]):
        self.sizes = sizes
        self.versions = dict.fromkeys(sizes, 1)
        self.gradients = dict.fromkeys(sizes, False)
        self.optimizer = dict.fromkeys(sizes, False)
        self.activations = dict.fromkeys(sizes, 0)  # microbatches
        self.inputs = dict.fromkeys(sizes, 0)  # microbatches
        self.working = 0.0

    def begin(self, action: KindStageMicrobatch, alive: int) -> None:
        kind, stage, _ = action
        size = self.sizes[stage]
        self.versions[stage] = alive
        if kind == "F":
            self.inputs[stage] += 1
            self.activations[stage] += 1
        elif kind in ("B", "I") and size.recompute:
            self.activations[stage] += 1
        self.working = size.working if kind in ("B", "I", "W") else 0.0

    def finish(self, action: KindStageMicrobatch) -> None:
        kind, stage, _ = action
        if kind == "F" and self.sizes[stage].recompute:
            self.activations[stage] -= 1
        elif kind in ("B", "W"):
            self.activations[stage] -= 1
            self.inputs[stage] -= 1
            self.gradients[stage] = True
        elif kind == "U":
            self.gradients[stage] = False
            self.optimizer[stage] = True
        self.working = 0.0

    def level(self, time: float) -> MemorySample:
        sizes = self.sizes.items()
        return MemorySample(
            time,
            sum(size.parameters for _, size in sizes),
            sum(size.parameters * (self.versions[s] - 1) for s, size in sizes),
            sum(size.gradients * self.gradients[s] for s, size in sizes),
            sum(size.optimizer * self.optimizer[s] for s, size in sizes),
            sum(size.activations * self.activations[s] for s, size in sizes),
            sum(size.inputs * self.inputs[s] for s, size in sizes),
            self.working,
        )
