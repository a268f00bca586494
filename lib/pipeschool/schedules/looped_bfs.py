"""Breadth-first: every microbatch through one chunk before the next chunk begins."""

from __future__ import annotations

from pipeschool.actions import Action, B, F, Schedule
from pipeschool.arguments import whole_number
from pipeschool.schedules.pieces import looped_stages


def looped_bfs(p: int, m: int, v: int = 2, batches: int = 1) -> Schedule:
    """As fast as `interleaved_1f1b`, with the memory of GPipe: m activations on every worker.

    m(tF + tB) + (p - 1)(tF + tB)/v seconds for a batch of m >= p microbatches, and
    (p + (m - 1)/v)(tF + tB) for fewer, where tF and tB are the times of a worker's whole share.
    Stage s is on worker s % p; with v = 1 this is `gpipe`. A chunk's work for the whole batch is
    done in one go, so sharded weights need to be gathered only once for it (Lamy-Poirier, MLSys
    2023, breadth-first pipeline parallelism). Backwards run in the order of the forwards.
    """
    v = whole_number("v", v)

    def order(worker: int, p: int, m: int) -> list[Action]:
        stages = looped_stages(worker, p, v)
        forwards = [F(stage, k) for stage in stages for k in range(m)]
        backwards = [B(stage, k) for stage in reversed(stages) for k in range(m)]
        return forwards + backwards

    return Schedule.from_workers(order, p, m, batches=batches, name="looped_bfs")
