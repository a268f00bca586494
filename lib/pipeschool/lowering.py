"""Lowering: add the sends and receives that a compute-only schedule leaves implicit."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from typing import NamedTuple

from pipeschool.actions import Action, Schedule, require_schedule


class Link(NamedTuple):
    """One direction between two workers. Messages on a link never overtake each other."""

    source: int
    target: int


class Handover(NamedTuple):
    """What an action hands on: activations (``F``) or gradients (``B``), to which stage, how."""

    letter: str
    stage: int
    link: Link


def handover(kind: str, stage: int, microbatch: int, schedule: Schedule) -> Handover | None:
    """What an action hands to another worker, if it does.

    A forward hands its activations to the next stage, a backward (or its input half) hands the
    gradient to the stage before. Two stages on one worker need no message.
    """
    if kind == "F":
        letter, neighbour = "F", stage + 1
    elif kind in ("B", "I"):
        letter, neighbour = "B", stage - 1
    else:
        return None
    if not 0 <= neighbour < schedule.stages:
        return None
    link = Link(schedule.owner(stage, microbatch), schedule.owner(neighbour, microbatch))
    return None if link.source == link.target else Handover(letter, neighbour, link)


def handovers(schedule: Schedule) -> dict[tuple[str, int], list[Handover | None]]:
    """`handover` for each (kind, stage) that has one, by microbatch modulo `schedule.period`: look
    up here what is asked per action."""
    table = {
        (kind, stage): [handover(kind, stage, k, schedule) for k in range(schedule.period)]
        for stage in range(schedule.stages)
        for kind in (("F", "B", "I") if schedule.trains else ("F",))
    }
    return {key: found for key, found in table.items() if any(found)}


def message_of(action: Action) -> Action:
    """The name that a send and its receive share: the receive. ``1SEND_F3`` gives ``2RECV_F3``."""
    if action.kind == "SEND_F":
        return Action("RECV_F", action.stage + 1, action.microbatch)
    if action.kind == "SEND_B":
        return Action("RECV_B", action.stage - 1, action.microbatch)
    return action


def sender_of(receive: Action) -> Action:
    """The send that feeds `receive`: ``2RECV_F3`` gives ``1SEND_F3``."""
    step = -1 if receive.kind == "RECV_F" else 1
    return Action(receive.kind.replace("RECV", "SEND"), receive.stage + step, receive.microbatch)


def peer_of(message: Action, schedule: Schedule) -> int:
    """The worker at the other end of a send or receive."""
    forwards = message.kind in ("SEND_F", "RECV_B")
    return schedule.owner(message.stage + (1 if forwards else -1), message.microbatch)


def lower(schedule: Schedule) -> Schedule:
    """`schedule` with its messages: each send right after the compute that makes its content,
    each receive just before the compute that needs it, never out of the order of its link.

    The order matters because NCCL ignores tags: there the n-th receive from a worker gets that
    worker's n-th send, whatever it holds. Taking a message earlier than needed cannot block: it
    was sent before the one that is needed now.
    """
    require_schedule(schedule)
    if schedule.lowered:
        return schedule
    table, period = handovers(schedule), schedule.period
    nothing: list[Handover | None] = [None] * period
    sent: defaultdict[Link, deque[Action]] = defaultdict(deque)
    link_of: dict[Action, Link] = {}  # of each receive that no row has yet
    for row in schedule.workers:
        for kind, stage, microbatch in row:
            if found := table.get((kind, stage), nothing)[microbatch % period]:
                receive = Action(f"RECV_{found.letter}", found.stage, microbatch)
                sent[found.link].append(receive)
                link_of[receive] = found.link

    receives = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}
    rows = []
    for row in schedule.workers:
        lowered: list[Action] = []
        for action in row:
            kind, stage, microbatch = action
            needed = Action(receives.get(kind, ""), stage, microbatch)
            while link := link_of.get(needed):
                receive = sent[link].popleft()
                link_of.pop(receive, None)  # a forward listed twice is for `check` to refuse
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
