"""Interleaved 1F1B: several smaller chunks per worker, a bubble v times smaller."""

from __future__ import annotations

from pipeschool.actions import Action, B, F, Schedule
from pipeschool.arguments import whole_number
from pipeschool.schedules.pieces import looped_stages, take_turns


def interleaved_1f1b(p: int, m: int, v: int = 2, batches: int = 1) -> Schedule:
    """m(tF + tB) + (p - 1)(tF + tB)/v seconds for a batch of m >= p microbatches.

    Here tF and tB are the times of a worker's whole share, v chunks together; stage s is on worker
    s % p. The bubble is (p - 1)/(vm) of ideal (Narayanan et al., SC 2021, section 2.2). With m < p
    the rounds are too short to go round without a gap: (p + (m - 1)/v)(tF + tB) seconds.

    Where m is a multiple of p, of two rounds or more, worker 0 keeps p(1 + (p - 1)/(pv))
    activations. In general worker s has warm-up forwards for (v - 1)r + 2(p - 1 - s) chunks, where
    r is the size of the first round, and keeps min(vm, warm-up + 1) chunks. The factor 2 gives
    messages time to travel; with v = 1 it is left out, and the schedule is `one_f_one_b`.
    """
    v = whole_number("v", v)

    def order(worker: int, p: int, m: int) -> list[Action]:
        stages, turns = looped_stages(worker, p, v), rounds(p, m)
        forwards = [F(stage, k) for turn in turns for stage in stages for k in turn]
        backwards = [B(stage, k) for turn in turns for stage in reversed(stages) for k in turn]
        # A worker's first backward belongs to its last chunk: the first round goes through all
        # the others before.
        earlier_chunks = (v - 1) * len(turns[0])
        distance = p - 1 - worker
        return take_turns(
            forwards, backwards, earlier_chunks + (2 * distance if v > 1 else distance)
        )

    return Schedule.from_workers(order, p, m, batches=batches, name="interleaved_1f1b")


def rounds(p: int, m: int) -> list[range]:
    """The microbatches of each round, in which every chunk takes one microbatch after another.

    As many rounds as p goes into m, of p microbatches or a few more, the larger ones first. No
    round is smaller than p, unless m is: its last microbatch would have gone by before its first
    has come round to the next chunk, and the workers would wait.

    >>> rounds(4, 8), rounds(4, 11), rounds(4, 3)
    ([range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)], [range(0, 3)])
    """
    count = max(1, m // p)
    sizes = [m // count + (number < m % count) for number in range(count)]
    starts = [sum(sizes[:number]) for number in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
