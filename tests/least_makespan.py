"""The least makespan by trying everything: an oracle for `par` that shares no code with it.

At every event each free worker starts one of the actions that it could, or waits for the next
event. Nothing else can help: in a fastest schedule pushed to the left, every action starts when
its worker becomes free or its input arrives. Equal situations are searched once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

Step = tuple[str, int]  # kind, stage
Work = tuple[Step, int]  # of a microbatch


class Situation(NamedTuple):
    """Between two events. Times are those still to go."""

    started: frozenset[Work]
    running: tuple[tuple[Work, int] | None, ...]  # per worker
    under_way: frozenset[tuple[Work, int]]  # what a message on its way will allow
    links: frozenset[tuple[tuple[int, int], int]]  # busy ones


def least_makespan(
    placement: Sequence[int],
    m: int,
    seconds: dict[str, Sequence[int]],
    *,
    caps: Sequence[int] | None = None,
    transfer: int = 0,
    latency: int = 0,
    in_order: bool = True,
) -> float:
    """Of a batch of `m` microbatches on stages placed so; whole seconds per kind and stage.

    caps: chunks that each worker may hold. in_order: whether microbatches have to keep their order
    in each kind of work on each stage.
    """
    stages, workers = len(placement), range(max(placement) + 1)
    back = "I" if "I" in seconds else "B"
    steps: list[Step] = [("F", s) for s in range(stages)]
    steps += [(back, s) for s in reversed(range(stages))]
    needs: dict[Step, Step | None] = dict(zip(steps, [None, *steps], strict=False))
    if back == "I":
        needs |= {("W", s): ("I", s) for s in range(stages)}
    every = {(step, k) for step in needs for k in range(m)}

    def options(now: Situation, worker: int) -> Iterator[Work | None]:
        yield None
        if now.running[worker]:
            return
        busy = {entry[0] for entry in now.running if entry}
        on_the_way = {work for work, _ in now.under_way}
        for step, need in needs.items():
            if placement[step[1]] != worker:
                continue
            if step[0] == "F" and caps is not None:
                mine = [w for w in now.started - busy if placement[w[0][1]] == worker]
                kinds = [kind for (kind, _), _ in mine]
                if kinds.count("F") - kinds.count("W" if back == "I" else "B") >= caps[worker]:
                    continue
            for k in range(m):
                work = (step, k)
                if work in now.started:
                    continue
                done = need is None or ((need, k) in now.started and (need, k) not in busy)
                if done and work not in on_the_way:
                    yield work
                if in_order:
                    break

    def after_event(now: Situation, chosen: Sequence[Work | None]) -> tuple[int, Situation] | None:
        running = [
            (work, seconds[work[0][0]][work[0][1]]) if work else old
            for work, old in zip(chosen, now.running, strict=True)
        ]
        pending = [left for _, left in now.under_way] + [entry[1] for entry in running if entry]
        if not pending:
            return None
        step = min(pending)
        links = {link: left - step for link, left in now.links if left > step}
        under_way = {(work, left - step) for work, left in now.under_way if left > step}
        for worker, entry in enumerate(running):
            if entry is None:
                continue
            (done, k), left = entry
            running[worker] = ((done, k), left - step) if left > step else None
            for following, need in needs.items():
                if left > step or need != done:
                    continue
                link = (worker, placement[following[1]])
                if link[0] != link[1] and transfer + latency:
                    links[link] = links.get(link, 0) + transfer
                    under_way.add(((following, k), links[link] + latency))
        started = now.started | {work for work in chosen if work}
        busy_links = frozenset((link, left) for link, left in links.items() if left)
        return step, Situation(started, tuple(running), frozenset(under_way), busy_links)

    @cache
    def to_go(now: Situation) -> float:
        if now.started == every:
            return max(entry[1] if entry else 0 for entry in now.running)
        best = math.inf
        for chosen in product(*(list(options(now, worker)) for worker in workers)):
            if following := after_event(now, chosen):
                best = min(best, following[0] + to_go(following[1]))
        return best

    return to_go(Situation(frozenset(), (None,) * len(workers), frozenset(), frozenset()))
