"""PipeDream: asynchronous 1F1B. No flush; every microbatch updates the weights."""

from __future__ import annotations

from pipeschool.actions import Schedule
from pipeschool.schedules.one_f_one_b import one_f_one_b_order


def pipedream(p: int, m: int, batches: int = 1) -> Schedule:
    """One stream of N = m * batches microbatches, (N + p - 1)(tF + tB) seconds in all.

    Each microbatch counts as a batch of its own: every stage updates right after its backward.
    With weight stashing stage s keeps p - s versions and is p - 1 - s updates late
    (Narayanan et al., SOSP 2019, section 3.3).
    """
    return Schedule.from_workers(
        one_f_one_b_order, p, m, batches=batches, weights="stash", name="pipedream"
    )
