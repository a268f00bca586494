"""Data parallel: the same pipeline several times, each on its share of the batch."""

from __future__ import annotations

from dataclasses import replace

from pipeschool.actions import Action, Schedule
from pipeschool.arguments import whole_number


def replicate(schedule: Schedule, lines: int) -> Schedule:
    """`lines` pipelines side by side, on `lines` times as many workers and microbatches.

    Line n is on workers n * p to n * p + p - 1, and does what `schedule` says with every
    `lines`-th microbatch, from number n on. An update sums the gradients of all lines: data times
    pipeline parallelism. It takes as long as one line does, and as much memory per worker.
    """
    lines = whole_number("lines", lines)
    if schedule.lowered:
        raise ValueError("replicate the schedule before it is lowered, not after")

    def on(line: int, a: Action) -> Action:
        return a if a.kind == "U" else a._replace(microbatch=a.microbatch * lines + line)

    return replace(
        schedule,
        name=f"{schedule.name} x {lines}",
        p=schedule.p * lines,
        m=schedule.m * lines,
        workers=tuple(
            tuple(on(line, a) for a in row) for line in range(lines) for row in schedule.workers
        ),
        updates_every=schedule.updates_every * lines,
        # With several workers at a stage already, all lines have their turn before the next worker.
        replicas=tuple(
            tuple(line * schedule.p + w for w in workers for line in range(lines))
            for workers in schedule.owners
        ),
        chunks=schedule.v,
        overlapped=frozenset(
            (on(line, a), on(line, b)) for line in range(lines) for a, b in schedule.overlapped
        ),
    )
