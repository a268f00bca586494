"""Lowering: add the sends and receives that a compute-only schedule leaves implicit."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

from pipeschool.actions import Action, Schedule, require_schedule
from pipeschool.dependencies import LETTERS, Channel, Handover, handovers


def lower(schedule: Schedule) -> Schedule:
    """`schedule` with its messages: each send right after the compute that makes its content,
    each receive just before the compute that needs it, never out of the order of its channel.

    The order matters because NCCL ignores tags: there the n-th receive from a worker gets that
    worker's n-th send, whatever it holds. Taking a message earlier than needed cannot block: it
    was sent before the one that is needed now.
    """
    require_schedule(schedule)
    if schedule.lowered:
        return schedule
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


def compute_only(schedule: Schedule) -> Schedule:
    """`schedule` without its sends and receives."""
    rows = tuple(tuple(a for a in row if not a.is_message) for row in schedule.workers)
    return replace(schedule, workers=rows)
