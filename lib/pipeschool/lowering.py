"""Lowering: add the sends and receives that a compute-only schedule leaves implicit."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from pipeschool.actions import Action, Schedule, require_schedule
from pipeschool.checking import checked_order
from pipeschool.dependencies import LETTERS, Channel, Handover, handovers, message_of, needs

SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1, "U": 0}  # by which messages are put in their places


def lower(schedule: Schedule, fuse: bool = False) -> Schedule:
    """`schedule` with its messages: each send right after the compute that makes its content,
    each receive just before the compute that needs it, never out of the order of its channel.

    The order matters because NCCL ignores tags: there the n-th receive from a worker gets that
    worker's n-th send, whatever it holds. Taking a message earlier than needed cannot block: it
    was sent before the one that is needed now.

    fuse: messages that stand next to each other are one group (`Schedule.fused`), sends first. And
        each receive stands where its worker is when the content has just been made, were a forward
        to take 1 second, a backward 2, either half of one 1. So it is right also where a send is
        done only when its receiver is there, as NCCL's are: both ends have the messages in the
        order of these times, and nobody waits long for the other. Raises `IllegalSchedule` where
        `check` does. Of a schedule that has its messages already they stay where they are.
    """
    require_schedule(schedule)
    if not schedule.lowered:
        schedule = _by_time(schedule) if fuse else _by_need(schedule)
    return replace(schedule, fused=schedule.lowered) if fuse else schedule


def compute_only(schedule: Schedule) -> Schedule:
    """`schedule` without its sends and receives."""
    rows = tuple(tuple(a for a in row if not a.is_message) for row in schedule.workers)
    return replace(schedule, workers=rows, fused=False)


def _by_need(schedule: Schedule) -> Schedule:
    """Each receive just before the compute that needs it."""
    table, period = handovers(schedule), schedule.period
    nothing: list[Handover | None] = [None] * period
    sent: defaultdict[Channel, deque[Action]] = defaultdict(deque)
    channel_of: dict[Action, Channel] = {}  # of each receive that no row has yet
    for row in schedule.workers:
        for kind, stage, microbatch in row:
            if found := table.get((kind, stage), nothing)[microbatch % period]:
                receive = Action(f"RECV_{found.letter}", found.stage, microbatch)
                sent[found.channel].append(receive)
                channel_of[receive] = found.channel

    rows = []
    for row in schedule.workers:
        lowered: list[Action] = []
        for action in row:
            kind, stage, microbatch = action
            needed = Action(f"RECV_{LETTERS.get(kind)}", stage, microbatch)
            while channel := channel_of.get(needed):
                receive = sent[channel].popleft()
                channel_of.pop(receive, None)  # a forward listed twice is for `check` to refuse
                lowered.append(receive)
            lowered.append(action)
            if found := table.get((kind, stage), nothing)[microbatch % period]:
                lowered.append(Action(f"SEND_{found.letter}", stage, microbatch))
        rows.append(tuple(lowered))
    return replace(schedule, workers=tuple(rows))


def _by_time(schedule: Schedule) -> Schedule:
    """Each message, at both ends, before the first action that starts when it has been made."""
    table, period = handovers(schedule), schedule.period
    nothing: list[Handover | None] = [None] * period
    rows: list[list[tuple[float, bool, Action]]] = [[] for _ in schedule.workers]
    for worker, action, start, end in _times(schedule):
        kind, stage, microbatch = action
        rows[worker].append((start, True, action))
        if found := table.get((kind, stage), nothing)[microbatch % period]:
            send = Action(f"SEND_{found.letter}", stage, microbatch)
            rows[found.channel.source].append((end, False, send))
            rows[found.channel.target].append((end, False, message_of(send)))
    for row in rows:
        row.sort(key=itemgetter(0, 1))  # stable: what starts at the same time stays in its order
    workers = tuple(tuple(action for _, _, action in row) for row in rows)
    return replace(schedule, workers=workers)


def _times(schedule: Schedule) -> Iterator[tuple[int, Action, float, float]]:
    """(worker, action, start, end) of every compute and update, with messages that take no time."""
    free = [0.0] * schedule.p  # per worker
    ends: dict[Action, float] = {}
    for worker, action in checked_order(schedule):
        ready = [ends[need] for need in needs(action, schedule)]
        if action.kind == "U":  # several workers of a stage meet here
            met = max(free[w] for w in schedule.owners[action.stage])
            ready = [ends.setdefault(action, met)]
        start = max(free[worker], *ready, 0.0)
        free[worker] = end = start + SECONDS[action.kind]
        ends[action] = end
        yield worker, action, start, end
