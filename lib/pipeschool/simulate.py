"""The simulator: a schedule and its costs give a trace."""

from __future__ import annotations

from pipeschool.actions import Action, Schedule
from pipeschool.check import check, execution_order
from pipeschool.cost import Cost
from pipeschool.lower import compute_only, outgoing
from pipeschool.trace import Span, Trace
from pipeschool.versions import Ledger, policy_named


def simulate(schedule: Schedule, cost: Cost | None = None) -> Trace:
    """When does every action start and end? Default cost: forward 1, backward 2, free messages.

    An action starts as soon as its worker is free and what it needs has arrived. Raises
    `IllegalSchedule` where `check` does. The sends and receives of a lowered schedule are
    checked, and then left to the cost model.
    """
    cost = cost or Cost()
    schedule = compute_only(check(schedule))
    seconds = cost.seconds(schedule)
    transfer = cost.transfer(schedule)
    free = [0.0] * schedule.p  # per worker
    link_free = {}  # per link
    arrival: dict[tuple[str, int, int], float] = {}  # (F or B, stage, microbatch) -> input is there
    ledgers = [Ledger(policy_named(schedule.weights)) for _ in range(schedule.stages)]
    spans: list[Span] = []
    for worker, action in execution_order(schedule):
        kind, stage, microbatch = action
        needs = ("B" if kind == "I" else kind, stage, microbatch)
        start = max(free[worker], arrival.pop(needs, 0.0))
        end = free[worker] = start + seconds[kind][stage]
        size = 0.0
        if message := outgoing(action, schedule):
            _, receive, link = message
            boundary = min(stage, receive.stage)
            leaves = max(end, link_free.get(link, 0.0)) + transfer[boundary]
            link_free[link] = leaves
            arrival[receive.kind[-1], receive.stage, microbatch] = leaves + cost.latency
            size = cost.message_size(boundary)
        version, alive = ledgers[stage].note(action)
        spans.append(Span(worker, action, start, end, version, alive, size))
    return Trace(schedule.name, schedule.p, schedule.m, schedule.v, tuple(spans))
