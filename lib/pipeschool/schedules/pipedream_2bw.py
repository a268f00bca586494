"""PipeDream-2BW: asynchronous 1F1B with one update per batch and two weight versions."""

from __future__ import annotations

from pipeschool.actions import Schedule
from pipeschool.schedules.one_f_one_b import one_f_one_b_order


def pipedream_2bw(p: int, m: int, batches: int = 1) -> Schedule:
    """One stream of N = m * batches microbatches, (N + p - 1)(tF + tB) seconds in all.

    Every stage updates after each m microbatches, and is one update late:
    w(t+1) = w(t) - lr * gradient at w(t-1) (Narayanan et al., ICML 2021, section 3.1). The paper
    asks for m >= p. One less will do: stage 0 lets the first microbatch of batch b in after
    b * m - (p - 1) backwards, and needs version b - 1, which is made after (b - 1) * m of them.
    """
    schedule = Schedule.from_workers(
        one_f_one_b_order,
        p,
        m,
        batches=batches,
        weights="double_buffer",
        updates_every=m,
        name="pipedream_2bw",
    )
    if m < p - 1:
        raise ValueError(
            f"pipedream_2bw needs m of at least p - 1 = {p - 1}, not {m}: with fewer, a microbatch "
            "enters before the weight version that it uses exists"
        )
    return schedule
