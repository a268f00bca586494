"""GPipe: all forwards, then all backwards, then the flush."""

from __future__ import annotations

from pipeschool.actions import Action, B, F, Schedule


def gpipe(p: int, m: int, batches: int = 1) -> Schedule:
    """Fill and drain: (m + p - 1)(tF + tB) seconds for a batch, m activations on every worker.

    Backwards run in the order of the forwards, as in PyTorch's engine; the paper (Huang et al.,
    2019, figure 2) draws them in reverse, which costs the same time and memory.
    """

    def order(worker: int, p: int, m: int) -> list[Action]:
        forwards = [F(worker, k) for k in range(m)]
        backwards = [B(worker, k) for k in range(m)]
        return forwards + backwards

    return Schedule.from_workers(order, p, m, batches=batches, name="gpipe")
