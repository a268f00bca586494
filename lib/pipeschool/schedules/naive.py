"""Naive model parallelism: one microbatch at a time goes down the line and back."""

from __future__ import annotations

from pipeschool.actions import Action, B, F, Schedule


def naive(p: int, m: int, batches: int = 1) -> Schedule:
    """Only one worker is ever busy: p * m * (tF + tB) seconds for a batch.

    Worker 0 starts the next microbatch only after the backward of the last one has come back.
    """

    def order(worker: int, p: int, m: int) -> list[Action]:
        return [kind(worker, k) for k in range(m) for kind in (F, B)]

    return Schedule.from_workers(order, p, m, batches=batches, name="naive")
