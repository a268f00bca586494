"""ZB-H2: twice the memory of ZB-H1, and every worker is busy from its first action to its last."""

from __future__ import annotations

from pipeschool.actions import Action, Schedule
from pipeschool.schedules.pieces import phases


def zb_h2(p: int, m: int, batches: int = 1) -> Schedule:
    """No bubble by the zero-bubble rate: each worker is busy for 3m seconds without a gap.

    Handcrafted for tF = tI = tW = 1. It takes m >= 2p - 1 microbatches, and min(m, 2p - 1)
    activations on every worker. Worker s starts s seconds after worker 0 and ends s seconds after
    it, so that a batch takes 3m + p - 1 from first start to last end. With m < 2p - 1 the longest
    worker has gaps of 2p - 1 - m seconds. With other times, tW at most tF and tI, they are
    (p - 1)(tF + tI - 2 tW) (Qi et al., Zero Bubble, ICLR 2024, section 2.2; I and W here are B and
    W there).
    """
    return Schedule.from_workers(_order, p, m, batches=batches, name="zb_h2")


def _order(worker: int, p: int, m: int) -> list[Action]:
    ahead = 2 * (p - 1 - worker)
    return phases(
        [worker],
        m,
        ("F0", ahead),
        ("F0 I0", 2 * worker),
        ("F0 I0 W", max(m, 2 * p - 1) - 2 * (p - 1)),
        ("I0 W", ahead),
        ("W", 2 * worker),
    )
