"""The simulator: a schedule and its costs give a trace."""

from __future__ import annotations

from collections.abc import Sequence

from pipeschool.actions import Schedule
from pipeschool.check import checked_order
from pipeschool.cost import Cost, number
from pipeschool.lower import handovers
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
    seconds, transfer = cost.seconds(schedule), cost.transfer(schedule)
    sizes = cost.message_sizes(schedule)
    handed = handovers(schedule)
    stage_ledgers = ledgers(schedule)
    free = [0.0] * schedule.p  # per worker
    link_free = dict.fromkeys((handover.link for handover in handed.values()), 0.0)
    # (F or B, stage, microbatch) -> when its input is there; (U, stage, number) -> when both copies
    # of a stage have their gradients.
    arrival = {("F", 0, k): number("release", time) for k, time in enumerate(release)}
    spans: list[Span] = []
    for worker, action in order:
        kind, stage, microbatch = action
        if kind not in seconds:
            continue  # a message of a lowered schedule
        needs = ("B" if kind == "I" else kind, stage, microbatch)
        if kind == "U" and schedule.copies > 1:  # whoever comes first waits for the other
            other = (stage + schedule.depth) % schedule.stages
            if needs not in arrival:
                arrival["U", other, microbatch] = free[worker]
                arrival[needs] = free[schedule.placement[other]]
        start = max(free[worker], arrival.pop(needs, 0.0))
        end = free[worker] = start + seconds[kind][stage]
        size = 0.0
        if handover := handed.get((kind, stage)):
            letter, neighbour, link = handover
            boundary = min(stage, neighbour)
            size = sizes[boundary]
            link_free[link] = left = max(end, link_free[link]) + transfer[boundary]
            arrival[letter, neighbour, microbatch] = left + cost.latency
        version, alive = stage_ledgers[stage].note(action)
        spans.append(Span(worker, action, start, end, version, alive, size))
    return Trace(
        schedule.name,
        schedule.p,
        schedule.m,
        schedule.v,
        tuple(spans),
        stage_bytes=cost.stage_bytes(schedule),
    )
