"""Eager 1F1B: more forwards in advance, so that messages travel while the workers compute."""

from __future__ import annotations

from pipeschool.actions import Action, B, F, Schedule
from pipeschool.schedules.pieces import take_turns


def eager_1f1b(p: int, m: int, batches: int = 1) -> Schedule:
    """As fast as 1F1B where messages are free, faster where they take time.

    With messages of c seconds a batch takes (m + p - 1)(tF + tB) + 2(p - 1)c as long as 2c is at
    most tF + tB: only the first microbatch's way there and back is not hidden. 1F1B takes
    2c * floor((m - 1)(p - 1) / p) more, because its worker s has just the p - s microbatches in
    flight that a round trip needs without messages. Here it has up to 2(p - s) - 1, and
    min(m, 2(p - s) - 1) activations (the eager-1F1B of Zhuang et al., MLSys 2023, section 4).
    """
    return Schedule.from_workers(_order, p, m, batches=batches, name="eager_1f1b")


def _order(worker: int, p: int, m: int) -> list[Action]:
    forwards = [F(worker, k) for k in range(m)]
    backwards = [B(worker, k) for k in range(m)]
    return take_turns(forwards, backwards, warm_up=2 * (p - 1 - worker))
