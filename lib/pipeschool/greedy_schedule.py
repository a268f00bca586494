"""A schedule from a rule: whenever a worker is free, it takes the first of what it could do.

This is list scheduling, event by event. A rule does not look ahead, and leaves no worker idle for
something better to come; `optimal` shows what that costs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

from pipeschool.actions import Action, F, Schedule
from pipeschool.cost import Cost
from pipeschool.dependencies import Channel
from pipeschool.problem import Problem, problem


class Moment(NamedTuple):
    """What a rule may look at besides the action: who chooses, when, with how much in memory."""

    worker: int
    time: float  # seconds
    held: float  # activations of this worker, in units of A
    p: int
    m: int
    v: int


Rule = Callable[[Action, Moment], Any]  # returns a key that sorts


def greedy(
    p: int,
    m: int,
    *,
    placement: str = "loop",
    v: int | None = None,
    split: bool = False,
    memory_cap: float | Sequence[float] | None = None,
    priority: str | Rule = "BFW",
    cost: Cost | None = None,
    name: str = "greedy",
) -> Schedule:
    """The schedule of one batch in which every free worker takes what `priority` puts first.

    placement, v, split, memory_cap: as in `problem`. A forward waits where the memory left would
        not do to finish every microbatch that has begun.
    priority: kinds in their order, such as ``BFW`` (B stands for I as well), and the oldest
        microbatch first within a kind. Or ``priority(action, moment)``: a key that sorts, for an
        action that `moment.worker` could start now. The smallest key goes first.
    cost: what the rule's clock goes by; updates take no time on it.

    Raises ValueError where an argument is none of these.
    """
    sizes = problem(p, m, placement=placement, v=v, split=split, memory_cap=memory_cap, cost=cost)
    rule = priority if callable(priority) else by_kind(priority)
    rows = _play(sizes, rule)
    return Schedule.from_workers(lambda worker, p, m: rows[worker], p, m, name=name)


def by_kind(order: str) -> Rule:
    """The rule that goes by kind, in `order`, and takes the oldest microbatch within a kind."""
    if not isinstance(order, str) or sorted(order) not in (sorted("BFW"), sorted("BF")):
        raise ValueError(
            f"priority must put B, F and W in an order, such as 'BFW', or be a function, "
            f"not {order!r}"
        )
    place = {kind: number for number, kind in enumerate(order)}
    place["I"] = place["B"]
    place.setdefault("W", len(order))
    return lambda action, moment: (place[action.kind], action.microbatch)


def _play(sizes: Problem, rule: Rule) -> list[list[Action]]:
    """Each worker's row, found by going from event to event."""
    work, memory = sizes.unordered, _Memory(sizes)
    rows: list[list[Action]] = [[] for _ in range(work.p)]
    ready: list[list[Action]] = [[] for _ in range(work.p)]
    idle = set(range(work.p))
    channel_free: defaultdict[Channel, Fraction] = defaultdict(Fraction)
    # An action that arrives can be started, one that ends frees its worker. What happens at the
    # same time is taken together, before anybody chooses.
    ticket = count()
    arrivals = [(Fraction(0), next(ticket), "arrives", F(0, k)) for k in range(work.m)]
    events: list[tuple[Fraction, int, str, Action]] = arrivals
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, what, action = heapq.heappop(events)
            worker = sizes.worker(action)
            if what == "arrives":
                ready[worker].append(action)
                continue
            idle.add(worker)
            memory.end(action)
            for following in sizes.followers(action):
                arrival = now
                if message := sizes.message(action, following):
                    left = max(now, channel_free[message.channel]) + message.transfer
                    channel_free[message.channel] = left
                    arrival = left + message.latency
                heapq.heappush(events, (arrival, next(ticket), "arrives", following))
        for worker in sorted(idle):
            moment = Moment(
                worker, float(now), memory.held[worker] / work.v, work.p, work.m, work.v
            )
            ranked = sorted((rule(action, moment), action) for action in ready[worker])
            for _, action in ranked:
                if memory.allows(action):
                    memory.start(action)
                    ready[worker].remove(action)
                    rows[worker].append(action)
                    idle.remove(worker)
                    end = now + sizes.duration(action)
                    heapq.heappush(events, (end, next(ticket), "ends", action))
                    break
    return rows


class _Memory:
    """Who holds what, and whether one forward more would still let everything be finished.

    With several stages on a worker a cap can be filled with forwards that all wait for a forward
    there is no room for. So a forward is allowed only where the microbatches that have begun can
    be finished one after another, each in what is free and what those before it give back
    (Dijkstra's banker's algorithm).
    """

    def __init__(self, sizes: Problem) -> None:
        self.sizes = sizes
        self.workers = range(sizes.unordered.p)
        self.held = [0] * sizes.unordered.p  # chunks
        self.holds: dict[int, list[int]] = {}  # microbatch -> chunks on each worker
        self.needs: dict[int, list[int]] = {}  # microbatch -> forwards to come on each worker

    def start(self, action: Action) -> None:
        """A forward takes its memory when it starts."""
        if action.kind == "F":
            self._take(action, 1)

    def end(self, action: Action) -> None:
        """A backward, or its weight half, gives it back when it ends."""
        if action.kind in ("B", "W"):
            worker = self.sizes.worker(action)
            self.held[worker] -= 1
            self.holds[action.microbatch][worker] -= 1

    def allows(self, action: Action) -> bool:
        """Can `action` start, and everything that has begun still be finished?"""
        caps, worker = self.sizes.caps, self.sizes.worker(action)
        if caps is None or action.kind != "F":
            return True
        if self.held[worker] == caps[worker]:
            return False
        self._take(action, 1)
        safe = self._all_can_finish(caps)
        self._take(action, -1)
        return safe

    def _take(self, action: Action, sign: int) -> None:
        worker, microbatch = self.sizes.worker(action), action.microbatch
        holds = self.holds.setdefault(microbatch, [0] * self.sizes.unordered.p)
        needs = self.needs.setdefault(microbatch, [self.sizes.unordered.v] * self.sizes.unordered.p)
        self.held[worker] += sign
        holds[worker] += sign
        needs[worker] -= sign

    def _all_can_finish(self, caps: list[int]) -> bool:
        free = [cap - held for cap, held in zip(caps, self.held, strict=True)]
        waiting = [k for k, needs in self.needs.items() if any(needs) and any(self.holds[k])]
        for k, needs in self.needs.items():
            if not any(needs):  # nothing but backwards left
                free = [f + h for f, h in zip(free, self.holds[k], strict=True)]
        while waiting:
            able = [k for k in waiting if all(map(int.__le__, self.needs[k], free))]
            if not able:
                return False
            for k in able:
                free = [f + h for f, h in zip(free, self.holds[k], strict=True)]
            waiting = [k for k in waiting if k not in able]
        return True
