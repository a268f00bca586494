"""ZB-H1: weight gradients fill two thirds of the bubble, in the memory of 1F1B's first worker."""

from __future__ import annotations

from pipeschool.actions import Action, Schedule
from pipeschool.schedules.pieces import phases


def zb_h1(p: int, m: int, batches: int = 1) -> Schedule:
    """3m + p - 1 seconds for a batch with tF = tI = tW = 1 and m >= p, for which it is handcrafted.

    That is a bubble of (p - 1)/(3m) of ideal and (p - 1)/(3m + p - 1) of total. In seconds it is
    (p - 1)(tF + tI - tW) as long as tW is at most tF and tI, against (p - 1)(tF + tI + tW) of 1F1B.
    A batch of m < p microbatches takes 2(m + p) - 1.

    Worker s holds back the weight halves of its first s backwards, which gives the workers before
    it their gradients sooner; so every worker keeps min(m, p) activations, where 1F1B needs that
    on worker 0 alone (Qi et al., Zero Bubble, ICLR 2024, section 2.1; I and W here are B and W
    there).
    """
    return Schedule.from_workers(_order, p, m, batches=batches, name="zb_h1")


def _order(worker: int, p: int, m: int) -> list[Action]:
    ahead = p - 1 - worker  # forwards before the first backward can come back, as in 1F1B
    return phases(
        [worker],
        m,
        ("F0", ahead),
        ("F0 I0", worker),
        ("F0 I0 W", max(m, p) - (p - 1)),
        ("I0 W", ahead),
        ("W", worker),
    )
