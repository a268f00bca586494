"""The simulator: a schedule and its costs give a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeschool.actions import Action, Schedule
from pipeschool.arguments import number
from pipeschool.checking import checked_order
from pipeschool.cost import Cost
from pipeschool.dependencies import LETTERS, Channel, handovers
from pipeschool.trace import Span, Trace
from pipeschool.versions import Ledger, Policy, ledgers, with_weights


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
    free = [0.0] * schedule.p  # per worker
    # (F or B, stage, microbatch) -> when its input is there; (U, stage, number) -> when all workers
    # that take turns at the stage have come to this update.
    arrival = {("F", 0, k): number("release", time) for k, time in enumerate(release)}
    latency, period = cost.latency, schedule.period
    spans: list[tuple[int, Action, float, float, int, int, float, float]] = []
    for worker, action in order:
        kind, stage, microbatch = action
        step = steps[worker].get((kind, stage))
        if step is None:
            continue  # a message of a lowered schedule
        seconds, needs, handed, transfer, size, record = step
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
            letter, neighbour, wire = handover
            left = wire.free = (wire.free if wire.free > end else end) + transfer
            arrival[letter, neighbour, microbatch] = left + latency
        version, alive = record(action)
        spans.append((worker, action, start, end, version, alive, size, 0.0))
    return Trace(
        schedule.name,
        schedule.p,
        schedule.m,
        schedule.v,
        tuple(map(Span._make, spans)),
        stage_bytes=cost.stage_bytes(schedule),
    )


@dataclass(slots=True)
class Wire:
    """A channel as it is used."""

    free: float = 0.0  # when what has been handed to it will have gone


class Step(NamedTuple):
    """What all actions of one kind on one stage of a worker have in common."""

    seconds: float
    needs: str  # letter of what it waits for
    handovers: list[tuple[str, int, Wire] | None]  # by microbatch modulo the schedule's period
    transfer: float  # seconds for which its message occupies the wire
    size: float  # bytes of that message
    record: Callable[[Action], tuple[int, int]]  # of the stage's ledger of weight versions


def _steps(schedule: Schedule, cost: Cost) -> list[dict[tuple[str, int], Step]]:
    """For each worker the step of each (kind, stage), so that the simulator looks up one thing per
    action."""
    transfer, sizes = cost.transfer(schedule), cost.message_sizes(schedule)
    wires: defaultdict[Channel, Wire] = defaultdict(Wire)
    handed = {
        key: [(h.letter, h.stage, wires[h.channel]) if h else None for h in found]
        for key, found in handovers(schedule).items()
    }
    seconds = cost.seconds(schedule)
    nothing: list[tuple[str, int, Wire] | None] = [None] * schedule.period

    def step(kind: str, stage: int, ledger: Ledger) -> Step:
        found = handed.get((kind, stage))
        boundary = stage if kind == "F" else stage - 1
        return Step(
            seconds[kind][stage],
            LETTERS.get(kind, kind),
            found or nothing,
            transfer[boundary] if found else 0.0,
            sizes[boundary] if found else 0.0,
            ledger.record,
        )

    return [
        {(kind, stage): step(kind, stage, own[stage]) for kind in seconds for stage in own}
        for own in ledgers(schedule)
    ]
