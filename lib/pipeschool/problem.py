"""A scheduling problem: which actions, on which workers, how long they take, what fits in memory.

`greedy` and `optimal` start from this. What they find is a `Schedule` like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pipeschool.actions import Action, B, F, I, Schedule, W
from pipeschool.arguments import numbers, per_item, whole_number
from pipeschool.cost import Cost
from pipeschool.dependencies import Channel, Handover, handovers, hands_on, needs
from pipeschool.schedules.pieces import looped_stages, v_stages

PLACEMENTS = ("loop", "V")


class Message(NamedTuple):
    """A message occupies its channel for `transfer` seconds, and takes `latency` seconds more."""

    channel: Channel
    transfer: Fraction
    latency: Fraction


@dataclass(frozen=True)
class Problem:
    """One batch of `unordered.m` microbatches; `unordered` lists all
    actions in an order that means nothing.

    seconds: of each kind of action on every stage. transfer: of a message at the boundary behind
    each stage, while it occupies its channel. latency: of each message in addition. All exact: sums
    of decimal times such as 0.1 are equal where they should be.
    caps: the most forwards of one chunk each that a worker may hold, or None.
    """

    unordered: Schedule
    split: bool
    seconds: dict[str, list[Fraction]]
    transfer: list[Fraction]
    latency: Fraction
    caps: list[int] | None
    handed: dict[tuple[str, int], Handover]

    def worker(self, action: Action) -> int:
        """The worker that does `action`."""
        return self.unordered.placement[action.stage]

    def duration(self, action: Action) -> Fraction:
        """Seconds that `action` takes."""
        return self.seconds[action.kind][action.stage]

    def followers(self, action: Action) -> list[Action]:
        """What can be done once the results of `action` have arrived: it is the last that they
        need, as their own stage's past is over by then."""
        users = hands_on(action, self.unordered)
        return [user for user in users if needs(user, self.unordered)[-1] == action]

    def message(self, action: Action, following: Action) -> Message | None:
        """What travels from `action` to `following`; None where they are on one worker."""
        handed = self.handed.get((action.kind, action.stage))
        if handed is None or action.stage == following.stage:  # a weight half uses what is there
            return None
        boundary = min(action.stage, following.stage)
        return Message(handed.channel, self.transfer[boundary], self.latency)


def problem(
    p: int,
    m: int,
    *,
    placement: str = "loop",
    v: int | None = None,
    split: bool = False,
    memory_cap: float | Sequence[float] | None = None,
    cost: Cost | None = None,
) -> Problem:
    """The problem with these sizes; ValueError, in one sentence, where they make none.

    placement: ``loop`` puts stage s on worker s % p, with v chunks per worker (1 unless given);
        ``V`` goes down the workers and back up, which makes v = 2.
    split: backwards in two halves, I and W.
    memory_cap: the most activations that a worker may hold, in units of A; one number, or one per
        worker. At least 1: a microbatch has to fit.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, not {placement!r}")
    chunks = whole_number("v", v) if v is not None else 2 if placement == "V" else 1
    if placement == "V" and chunks != 2:
        raise ValueError(f"v must be 2 for placement V, not {chunks}")
    kinds = (F, I, W) if split else (F, B)

    def everything(worker: int, p: int, m: int) -> list[Action]:
        looped = placement == "loop"
        stages = looped_stages(worker, p, chunks) if looped else v_stages(worker, p)
        return [kind(stage, k) for kind in kinds for stage in stages for k in range(m)]

    unordered = Schedule.from_workers(everything, p, m, name="unordered")
    cost = cost or Cost()
    return Problem(
        unordered=unordered,
        split=split,
        seconds={kind: list(map(_exact, row)) for kind, row in cost.seconds(unordered).items()},
        transfer=list(map(_exact, cost.transfer(unordered))),
        latency=_exact(cost.latency),
        caps=None if memory_cap is None else _caps(memory_cap, unordered),
        handed={key: found[0] for key, found in handovers(unordered).items() if found[0]},
    )


def _exact(seconds: float) -> Fraction:
    """The decimal number that a float was written as: 0.1 is a tenth."""
    return Fraction(str(seconds))


def _caps(memory_cap: float | Sequence[float], schedule: Schedule) -> list[int]:
    """`memory_cap` per worker, in whole chunks; no worker can hold more than the batch has."""
    given = numbers("memory_cap", memory_cap, infinite=True)
    per_worker = per_item("memory_cap", given, schedule.p, "worker")
    if min(per_worker) < 1:
        raise ValueError(
            f"memory_cap must be at least 1, not {min(per_worker):g}: a microbatch has to fit"
        )
    # A cap such as 7/3 stands for 7 chunks of 3, although its float may be a little less.
    return [math.floor(min(cap, schedule.m) * schedule.v + 1e-9) for cap in per_worker]
