"""Lowering: add the sends and receives that a compute-only schedule leaves implicit."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from typing import NamedTuple

from pipeschool.actions import Action, Schedule


class Link(NamedTuple):
    """One direction between two workers. Messages on a link never overtake each other."""

    source: int
    target: int


def outgoing(action: Action, schedule: Schedule) -> tuple[Action, Action, Link] | None:
    """The send that must follow `action`, its receive, and their link; None where none is needed.

    A forward hands its activations to the next stage, a backward (or its input half) hands the
    gradient to the stage before. Two stages on one worker need no message.
    """
    if action.kind == "F":
        neighbour, letter = action.stage + 1, "F"
    elif action.kind in ("B", "I"):
        neighbour, letter = action.stage - 1, "B"
    else:
        return None
    if not 0 <= neighbour < schedule.stages:
        return None
    link = Link(schedule.placement[action.stage], schedule.placement[neighbour])
    if link.source == link.target:
        return None
    send = Action(f"SEND_{letter}", action.stage, action.microbatch)
    receive = Action(f"RECV_{letter}", neighbour, action.microbatch)
    return send, receive, link


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
    return schedule.placement[message.stage + (1 if forwards else -1)]


def lower(schedule: Schedule) -> Schedule:
    """`schedule` with its messages: each send right after the compute that makes its content,
    each receive just before the compute that needs it, never out of the order of its link.

    The order matters because NCCL ignores tags: there the n-th receive from a worker gets that
    worker's n-th send, whatever it holds. Taking a message earlier than needed cannot block: it
    was sent before the one that is needed now.
    """
    if schedule.lowered:
        return schedule
    sent: defaultdict[Link, deque[Action]] = defaultdict(deque)
    for row in schedule.workers:
        for action in row:
            if message := outgoing(action, schedule):
                sent[message[2]].append(message[1])
    link_of = {receive: link for link, receives in sent.items() for receive in receives}

    rows = []
    for row in schedule.workers:
        lowered: list[Action] = []
        for action in row:
            needed = Action(
                {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(action.kind, ""),
                action.stage,
                action.microbatch,
            )
            link = link_of.get(needed)
            while link and needed in link_of:
                receive = sent[link].popleft()
                del link_of[receive]
                lowered.append(receive)
            lowered.append(action)
            if message := outgoing(action, schedule):
                lowered.append(message[0])
        rows.append(tuple(lowered))
    return replace(schedule, workers=tuple(rows))


def compute_only(schedule: Schedule) -> Schedule:
    """`schedule` without its sends and receives."""
    rows = tuple(tuple(a for a in row if not a.is_message) for row in schedule.workers)
    return replace(schedule, workers=rows)
