"""Round robin: 1F1B in which a slow stage is on several workers that take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from pipeschool.actions import Action, B, F, Schedule, with_updates
from pipeschool.arguments import whole_number


def round_robin(
    replicas: Sequence[int], m: int, batches: int = 1, weights: str | type = "stash"
) -> Schedule:
    """Stage s on `replicas[s]` workers, which take the microbatches in turn (PipeDream's 1F1B-RR).

    A stage on r workers takes a microbatch every (tF + tB)/r seconds, and the line is as fast as
    its slowest stage is then. For how many forwards a worker does in advance see `_warm_ups`.

    weights: ``flush`` for one update per batch, or the policy of a stream without flushes, such as
    ``stash``; ``vertical_sync`` and ``double_buffer`` count on fewer microbatches in flight than
    most of these schedules have, and `check` refuses those. Without flushes, an update takes as
    many microbatches as it needs for every worker to have had its turns: the least common multiple
    of `replicas`. Every update sums the gradients of all workers of a stage, which wait for each
    other.
    """
    counts = [whole_number("a number of workers", count) for count in replicas]
    if not counts:
        raise ValueError("replicas must name the number of workers of at least one stage")
    turns = math.lcm(*counts)
    ends = list(accumulate(counts))
    flushes = weights == "flush"
    every = m if flushes else turns
    stream = whole_number("m", m) * (1 if flushes else whole_number("batches", batches))
    if stream % turns:
        what = "m" if flushes else "m * batches"
        raise ValueError(
            f"{what} must be a multiple of {turns} for workers {tuple(counts)}, not {stream}"
        )
    warm_ups = _warm_ups(counts, flushes)
    rows = [
        tuple(with_updates(_order(stage, range(turn, stream, r), warm_ups[stage]), every // r))
        for stage, r in enumerate(counts)
        for turn in range(r)
    ]
    schedule = Schedule(
        "round_robin",
        p=ends[-1],
        m=m,
        workers=tuple(rows),
        batches=1 if flushes else batches,
        weights=weights,
        updates_every=every,
        replicas=tuple(tuple(range(end - n, end)) for n, end in zip(counts, ends, strict=True)),
    )
    return schedule.repeat(batches) if flushes else schedule


def _warm_ups(counts: Sequence[int], flushes: bool) -> list[int]:
    """For each stage, the forwards that a worker does before its first backward.

    As many as the workers of the next stage have in flight, shared among those of this one. Where
    all have one worker that is p - 1 - s. PipeDream's paper lets ceil(workers / workers of the
    input stage) microbatches in (SOSP 2019, section 3.2); with several workers further down that
    is too few, and `simulate` shows the gaps. Without flushes, the workers of a stage wait for each
    other at each of its many updates, so a stage beside one of another number needs some more.
    """
    warm_ups = [0]
    for own, after in zip(counts[-2::-1], counts[:0:-1], strict=True):
        waits = 0 if flushes or own == after else max(own, after) - 1
        warm_ups.insert(0, math.ceil((after * (warm_ups[0] + 1) + waits) / own))
    return warm_ups


def _order(stage: int, mine: range, warm_up: int) -> list[Action]:
    """1F1B for one worker of a stage: `warm_up` forwards, then one of each in turn."""
    warm_up = min(warm_up, len(mine))
    row = [F(stage, k) for k in mine[:warm_up]]
    for done, k in enumerate(mine[warm_up:]):
        row += [F(stage, k), B(stage, mine[done])]
    return row + [B(stage, k) for k in mine[len(mine) - warm_up :]]
