"""The simulator: a schedule and its costs give a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pipeschool.actions import Schedule
from pipeschool.check import checked_order
from pipeschool.cost import Cost, number
from pipeschool.lower import Handover, Link, handovers
from pipeschool.trace import Span, Trace
from pipeschool.versions import Policy, ledgers, with_weights


def simulate(
    schedule: Schedule,
    cost: Cost | None = None,
    weights: str | type[Policy] | None = None,
    release: Sequence[float] = (),
) -> Trace:
    """When does every action start and end? Default cost: forward 1, backward 2, free messages.

    weights: weight-version policy of an asynchronous schedule; its own where not given.
    release: for each microbatch the time before which it is not there, such as a request that has
        yet to arrive; 0 where not given.

    An action starts as soon as its worker is free and what it needs has arrived. Raises
    `IllegalSchedule` where `check` does. The sends and receives of a lowered schedule are
    checked, and then left to the cost model.
    """
    cost = cost or Cost()
    schedule = with_weights(schedule, weights)
    order = checked_order(schedule)
    steps = _steps(schedule, cost)
    stage_ledgers = ledgers(schedule)
    free = [0.0] * schedule.p  # per worker
    link_free: defaultdict[Link, float] = defaultdict(float)
    # (F or B, stage, microbatch) -> when its input is there; (U, stage, number) -> when all workers
    # that take turns at the stage have come to this update.
    arrival = {("F", 0, k): number("release", time) for k, time in enumerate(release)}
    latency, period = cost.latency, schedule.period
    spans: list[Span] = []
    for worker, action in order:
        kind, stage, microbatch = action
        step = steps.get((kind, stage))
        if step is None:
            continue  # a message of a lowered schedule
        seconds, needs, handed, transfer, size = step
        start = free[worker]
        key = (needs, stage, microbatch)
        if period > 1 and kind == "U":
            start = arrival.setdefault(key, max(free[w] for w in schedule.owners[stage]))
        else:
            arrived = arrival.pop(key, start)
            if arrived > start:
                start = arrived
        end = free[worker] = start + seconds
        handover = handed[microbatch % period]
        if handover:
            letter, neighbour, link = handover
            left = link_free[link] = max(end, link_free[link]) + transfer
            arrival[letter, neighbour, microbatch] = left + latency
        version, alive = stage_ledgers[worker][stage].note(action)
        spans.append(Span(worker, action, start, end, version, alive, size))
    return Trace(
        schedule.name,
        schedule.p,
        schedule.m,
        schedule.v,
        tuple(spans),
        stage_bytes=cost.stage_bytes(schedule),
    )


class Step(NamedTuple):
    """What all actions of one kind on one stage have in common."""

    seconds: float
    needs: str  # letter of what it waits for
    handovers: list[Handover | None]  # by microbatch modulo the schedule's period
    transfer: float  # seconds for which its message occupies the link
    size: float  # bytes of that message


def _steps(schedule: Schedule, cost: Cost) -> dict[tuple[str, int], Step]:
    """The step of each (kind, stage), so that the simulator looks up one thing per action."""
    transfer, sizes = cost.transfer(schedule), cost.message_sizes(schedule)
    handed = handovers(schedule)
    steps = {}
    for kind, times in cost.seconds(schedule).items():
        for stage, seconds in enumerate(times):
            found = handed.get((kind, stage))
            boundary = stage if kind == "F" else stage - 1
            steps[kind, stage] = Step(
                seconds,
                "B" if kind == "I" else kind,
                found or [None] * schedule.period,
                transfer[boundary] if found else 0.0,
                sizes[boundary] if found else 0.0,
            )
    return steps
