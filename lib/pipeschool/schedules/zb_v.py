"""ZB-V: two chunks in a V, no bubble on any worker, in the memory of 1F1B's first worker."""

from __future__ import annotations

from pipeschool.actions import Action, Schedule
from pipeschool.schedules.pieces import phases, v_stages


def zb_v(p: int, m: int, batches: int = 1) -> Schedule:
    """No bubble by the zero-bubble rate, and at most p activations on every worker.

    Handcrafted for tF = tI = tW = 1 on each of the two chunks. With m >= 2p - 1 microbatches each
    worker is busy for 6m seconds without a gap, and a batch takes 6m + p - 1 from first start to
    last end: (p - 1)/(6m) of ideal by that measure. With fewer the longest worker has gaps of
    2(2p - 1 - m) seconds, and the batch takes 6m + max(p - 1, 2(2p - 1 - m)). Worker s keeps
    min(2m, m + 1 + s, 2p) chunks, half an activation each (Qi et al., Zero Bubble, ICLR 2024, on
    ZB-V; I and W here are B and W there).

    Worker w holds stages w and 2p - 1 - w. The last stage is on worker 0 as the first is: the loss
    appears where the input came in.
    """
    return Schedule.from_workers(_order, p, m, batches=batches, name="zb_v")


def _order(worker: int, p: int, m: int) -> list[Action]:
    below = p - 1 - worker  # workers further down the V
    n = max(m, 2 * p - 1)
    return phases(
        v_stages(worker, p),
        m,
        ("F0", 2 * below + 1),
        ("F1 F0", worker),
        ("F1 I1 W1", below + 1),
        ("F0 I0 W0 F1 I1 W1", n - p - below),
        ("I0 W0 F1 I1 W1", below),
        ("I0 I1", worker),
        ("I0 W0", below + 1),
        ("W1", worker),
        ("W0", worker),
    )
