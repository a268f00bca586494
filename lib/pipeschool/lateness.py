"""By how much a run missed its prediction, and why.

An action starts when its worker is free and its input is there. Everything after that moment is a
delay, and the clocks say whose: of the delivery, of the worker itself between two actions, or of
the machine, where something else had the core.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipeschool.actions import Action
from pipeschool.dependencies import used_by
from pipeschool.trace import Span, Trace

DISTURBED = 0.03  # share of the prediction: from here on the machine was busy with something else


class Delay(NamedTuple):
    """What held up one action, in seconds.

    after: what it had to wait for last, on its own worker or another; None where for nothing.
    delivery: from the end of what made its input, on another worker, to its own start, where its
    worker was free by then. busy: for which its input was there, or on its way, while its worker
    still did something else; that is no loss. between: from the end of its worker's action before
    it, where its input was made by then. machine: for which its worker was kept waiting by
    something else, in its own time and before it. meeting: of an update that several workers make
    together, the part of its time in which its worker waited for the last of them.
    """

    span: Span
    after: Span | None
    delivery: float
    busy: float
    between: float
    machine: float
    meeting: float = 0.0


def delays(trace: Trace) -> list[Delay]:
    """One for each action of a measured or simulated trace, worker by worker."""
    return _beyond(trace, {})


def _beyond(trace: Trace, transit: Mapping[tuple[int, int], float]) -> list[Delay]:
    """`delays` beyond those that were declared: `transit` seconds of a message, from worker to
    worker, are no delay; its input counts as made when they are over."""
    made_by = {used_by(s.action): s for s in trace.spans if s.action.kind in ("F", "B", "I")}
    begin = min((span.start for span in trace.spans), default=0.0)
    last_to_come = _last_to_come(trace)
    found = []
    for row in trace.rows:
        before: Span | None = None
        for span in row:
            if meeting := last_to_come.get(span):
                start, its_before = meeting
                gap = start - (its_before.end if its_before else begin)
                waiting = start - span.start
                found.append(Delay(span, its_before, 0.0, 0.0, gap, span.waited, waiting))
                before = span
                continue
            source = made_by.get(_input_of(span.action))
            if source and source.worker == span.worker:
                source = None
            free, made = before.end if before else begin, begin
            if source:
                made = source.end + transit.get((source.worker, span.worker), 0.0)
            late = source is not None and made > free
            gap = span.start - max(free, made)
            found.append(
                Delay(
                    span,
                    source if late else before,
                    delivery=gap if late else 0.0,
                    busy=max(free - made, 0.0) if source else 0.0,
                    between=0.0 if late else gap,
                    machine=span.waited,
                )
            )
            before = span
    return found


def _last_to_come(trace: Trace) -> dict[Span, tuple[float, Span | None]]:
    """For each update that waited for other workers who make it, too, or that all workers meet
    before: when the last of them came to it, and what that one had done before."""
    before = {b: a for row in trace.rows for a, b in zip(row, row[1:], strict=False)}
    together: defaultdict[Action, list[Span]] = defaultdict(list)
    for span in trace.spans:
        if span.action.kind == "U":
            if not trace.updates_meet:
                together[span.action].append(span)
            elif span not in before or before[span].action.kind != "U":  # its batch's first here
                together[span.action._replace(stage=-1)].append(span)
    found: dict[Span, tuple[float, Span | None]] = {}
    for spans in together.values():
        last = max(spans, key=lambda span: span.start)
        found |= {s: (last.start, before.get(last)) for s in spans if s.start < last.start}
    return found


def _input_of(action: Action) -> Action:
    """The name under which `used_by` knows what `action` uses."""
    if action.kind in ("W", "U"):  # these take what their own worker has made
        return Action("", -1, -1)
    return action._replace(kind="B") if action.kind == "I" else action


@dataclass(frozen=True)
class Lateness:
    """Where the time went, on the chain of actions that made a run as long as it was: each started
    when the one before it, on its own worker or another, let it.

    predicted, measured: seconds of the whole run. work: by how much the actions of that chain took
    longer than predicted, late wake-ups included. delivery: how long its messages were under way,
    beyond what was predicted. between: what its workers needed from one action to the next.
    machine: of these three, the part for which something else had a worker's core. chain: the
    actions. paced: whether stages or messages waited out a declared time. workers, cores: how many
    there were.

    What could come out otherwise: none of these is set, all are differences of times that clocks
    have shown.
    """

    predicted: float
    measured: float
    work: float
    delivery: float
    between: float
    machine: float
    chain: tuple[Action, ...]
    paced: bool
    workers: int = 1
    cores: int = 1

    @property
    def share(self) -> float:
        """By how much the run was longer than predicted, as a share of the prediction."""
        return self.measured / self.predicted - 1

    @property
    def disturbed(self) -> bool:
        """Did the machine keep workers waiting for longer than DISTURBED of the prediction?"""
        return self.machine > DISTURBED * self.predicted

    def __str__(self) -> str:
        over = f"{abs(self.share):.1%} {'over' if self.share >= 0 else 'under'} the prediction"
        how = "measured, paced" if self.paced else "measured"
        if self.disturbed:
            kept = f"{how}: {over}, of which {self.machine / self.predicted:.1%} is"
            if self.workers > self.cores and not self.paced:
                cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
                return f"{kept} its {self.workers} workers sharing {cores}"
            return f"{kept} a worker that the machine kept waiting: run it again"
        parts = ", ".join(
            f"{name} {seconds / self.predicted:+.1%}"
            for name, seconds in (
                ("actions", self.work),
                ("messages", self.delivery),
                ("between actions", self.between),
            )
        )
        return f"{how}: {over} ({parts})"


def same_actions(predicted: Trace, measured: Trace) -> bool:
    """Has every worker the same actions in both, in whatever order?"""
    ours, theirs = ({(s.worker, s.action) for s in t.spans} for t in (predicted, measured))
    return ours == theirs


def tell(runs: Mapping[str, tuple[Trace, Trace]]) -> None:
    """Print the line of `why_late` for several runs that are compared with one another.

    runs: (predicted, measured) by the name of the run. A last line names those that the machine
    disturbed: to compare them would say more about the machine than about the runs.
    """
    found = {name: why_late(*traces) for name, traces in runs.items()}
    width = max(map(len, found), default=0)
    for name, lateness in found.items():
        print(f"{name:<{width}}  {lateness}")
    disturbed = [name for name, lateness in found.items() if lateness.disturbed]
    if disturbed:
        busy = ", ".join(disturbed)
        print(f"Before you compare: the machine was busy during {busy}. Run it again.")


def why_late(predicted: Trace, measured: Trace) -> Lateness:
    """By how much `measured` took longer than `predicted`, and where that time went.

    Both must be of the same schedule: ValueError where they do not have the same actions.
    """
    for trace in (predicted, measured):
        if not isinstance(trace, Trace):
            raise TypeError(
                "why_late compares two traces, the predicted and the measured one, "
                f"not {type(trace).__name__}"
            )
    expected = {(span.worker, span.action): span for span in predicted.spans}
    if not same_actions(predicted, measured):
        raise ValueError(
            f"a run can only be held against a prediction of the same actions: {predicted.name}, "
            f"p={predicted.p}, m={predicted.m} has {len(predicted.spans)}, and {measured.name}, "
            f"p={measured.p}, m={measured.m} has {len(measured.spans)}, not all the same"
        )
    if predicted.makespan <= 0:
        raise ValueError("the prediction takes no time: give its Cost the seconds of the run")
    known = {delay.span: delay for delay in _beyond(measured, _declared_transit(predicted))}
    work = delivery = between = machine = 0.0
    chain = []
    span: Span | None = max(measured.spans, key=lambda s: s.end)
    while span:
        delay = known[span]
        own = span.seconds - delay.meeting
        late = own - expected[span.worker, span.action].seconds
        work, between = work + late, between + delay.between
        delivery += delay.delivery
        machine += min(delay.machine, max(late + delay.delivery + delay.between, 0.0))
        chain.append(span.action)
        span = delay.after
    return Lateness(
        predicted.makespan,
        measured.makespan,
        work,
        delivery,
        between,
        min(machine, max(measured.makespan - predicted.makespan, 0.0)),
        tuple(reversed(chain)),
        "paced" in measured.label,
        measured.p,
        usable_cores(),
    )


def usable_cores() -> int:
    """The cores that this process, and so its workers, may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _declared_transit(predicted: Trace) -> Mapping[tuple[int, int], float]:
    """How long a message is under way in a prediction, from worker to worker: the least of all,
    since the others may have waited for a busy worker or a busy link."""
    found: dict[tuple[int, int], float] = {}
    made_by = {used_by(s.action): s for s in predicted.spans if s.action.kind in ("F", "B", "I")}
    for span in predicted.spans:
        source = made_by.get(_input_of(span.action))
        if source and source.worker != span.worker:
            way = source.worker, span.worker
            found[way] = min(found.get(way, float("inf")), span.start - source.end)
    return found
