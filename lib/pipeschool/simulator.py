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
    matching: str = "in_order",
) -> Trace:
    """When does every action start and end? Default cost: forward 1, backward 2, free messages.

    weights: weight-version policy of an asynchronous schedule; its own where not given.
    release: for each microbatch the time before which it is not there, such as a request that has
        yet to arrive; 0 where not given.
    matching: as for `check`. With ``rendezvous`` a send takes its worker's time, too: from when the
        worker comes to it until its receiver is there, and the time of the message; so does the
        receive. A group of fused messages begins together and ends with the last of them. The
        trace has the messages then.

    An action starts as soon as its worker is free and what it needs has arrived. Raises
    `IllegalSchedule` where `check` does. The sends and receives of a lowered schedule are
    checked, and then left to the cost model, except at a rendezvous.
    """
    cost = cost or Cost()
    schedule = with_weights(schedule, weights)
    order = checked_order(schedule, matching)
    meeting = Meeting(schedule, cost) if matching == "rendezvous" else None
    steps = _steps(schedule, cost, travel=not meeting)
    free = [0.0] * schedule.p  # per worker
    # (F or B, stage, microbatch) -> when its input is there; (U, stage, number) -> when all workers
    # that take turns at the stage have come to this update.
    arrival = {("F", 0, k): number("release", time) for k, time in enumerate(release)}
    latency, period = cost.latency, schedule.period
    spans: list[tuple[int, Action, float, float, int, int, float, float]] = []
    for worker, action in order:
        kind, stage, microbatch = action
        step = steps[worker].get((kind, stage))
        if step is None:  # a message of a lowered schedule
            if meeting:
                meeting.have(worker, action, free)
            continue
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
        messages=tuple(meeting.spans) if meeting else (),
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


class Meeting:
    """Messages for which both workers wait: how long, and until when."""

    def __init__(self, schedule: Schedule, cost: Cost):
        self.transfer, self.latency = cost.transfer(schedule), cost.latency
        self.sizes = cost.message_sizes(schedule)
        self.first = [  # of each message the first one of its group
            {a: step[0] for step in schedule.steps_of(w) for a in step} for w in range(schedule.p)
        ]
        self.begun: list[tuple[Action | None, float]] = [(None, 0.0)] * schedule.p
        self.wires: defaultdict[Channel, Wire] = defaultdict(Wire)
        self.sent: tuple[int, Action, float] | None = None  # the send whose receive comes next
        self.spans: list[Span] = []

    def have(self, worker: int, message: Action, free: list[float]) -> None:
        """A send, or the receive that follows it. `free`: when each worker is, with what has passed
        of a group."""
        first, began = self.begun[worker]
        if first != self.first[worker][message]:
            began = free[worker]
            self.begun[worker] = self.first[worker][message], began
        if self.sent is None:
            self.sent = worker, message, began
            return
        source, send, ready = self.sent
        self.sent = None
        boundary = send.stage if send.kind == "SEND_F" else message.stage
        wire = self.wires[Channel(source, worker)]
        wire.free = max(ready, began, wire.free) + self.transfer[boundary]
        end = wire.free + self.latency
        for w, action, start in ((source, send, ready), (worker, message, began)):
            free[w] = max(free[w], end)
            self.spans.append(Span(w, action, start, end, bytes=self.sizes[boundary]))


def _steps(schedule: Schedule, cost: Cost, travel: bool) -> list[dict[tuple[str, int], Step]]:
    """For each worker the step of each (kind, stage), so that the simulator looks up one thing per
    action. travel: messages do, while their workers go on."""
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
            (travel and found) or nothing,
            transfer[boundary] if found else 0.0,
            sizes[boundary] if found else 0.0,
            ledger.record,
        )

    return [
        {(kind, stage): step(kind, stage, own[stage]) for kind in seconds for stage in own}
        for own in ledgers(schedule)
    ]
