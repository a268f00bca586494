"""What an action needs, and what it hands on.

A microbatch goes forward through all stages and back. A forward needs the activations of the stage
before; a backward, or its input half, needs its own stage's forward and the gradient of the stage
after; a weight half needs its input half. In a lowered schedule a send and a receive stand between
two stages on different workers. An update waits for a number of microbatches, not for one of them:
`check` counts those.

One action at a time: `needs`, `hands_on`, `consumer`, `used_by`. For loops over long rows there are
tables, which hold the same by (kind, stage) and by microbatch modulo `schedule.period`:
`needs_table`, `handovers`. A table calls both kinds of backward B: they hand on the same.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeschool.actions import Action, Schedule

KindAndStage = tuple[str, int]

# What a kind of compute hands from stage to stage: F, activations, or B, gradients.
LETTERS = {"F": "F", "B": "B", "I": "B"}
# How far up the stages that goes.
STEPS = {"F": 1, "B": -1}


class Channel(NamedTuple):
    """One direction between two workers. Messages on a channel never overtake each other."""

    source: int
    target: int


class Handover(NamedTuple):
    """What a compute hands to another worker: its letter, the stage that uses it, and the way."""

    letter: str
    stage: int
    channel: Channel


# --- one action ----------------------------------------------------------------------------------


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """The actions whose results `action` uses, in the order in which they get done.

    >>> from pipeschool.schedules import gpipe
    >>> [str(need) for need in needs(Action("B", 0, 5), gpipe(2, 8))]
    ['0F5', '1B5']
    """
    kind, stage, microbatch = action
    return [
        as_listed(Action(*need, microbatch), schedule)
        for need in _needs(kind, stage, microbatch, schedule)
    ]


def hands_on(action: Action, schedule: Schedule) -> list[Action]:
    """The actions that use the results of `action`: of the neighbour stage first, then its own.

    >>> from pipeschool.schedules import gpipe
    >>> [str(user) for user in hands_on(Action("F", 0, 5), gpipe(2, 8))]
    ['1F5', '0B5']
    """
    kind, stage, microbatch = action
    user = consumer(action, schedule)
    found = [user] if user else []
    if kind == "F" and schedule.trains:
        found.append(as_listed(Action("B", stage, microbatch), schedule))
    elif kind == "I":
        found.append(Action("W", stage, microbatch))
    return found


def consumer(action: Action, schedule: Schedule) -> Action | None:
    """Where the activations or gradients that `action` hands on go next; None where nowhere.

    From a compute to the neighbour stage's, from there through a send and a receive where that is
    on another worker and the schedule is lowered.
    """
    kind, stage, microbatch = action
    if kind.startswith("SEND"):
        return message_of(action)
    if kind.startswith("RECV"):
        return as_listed(Action(kind[-1], stage, microbatch), schedule)
    user = _user(kind, stage, schedule)
    if user is None:
        return None
    letter, neighbour = user
    if schedule.lowered and _crosses(stage, neighbour, microbatch, schedule):
        return Action(f"SEND_{letter}", stage, microbatch)
    return as_listed(Action(letter, neighbour, microbatch), schedule)


def used_by(action: Action) -> Action:
    """The compute that uses what `action` makes, sends or receives, whether there are messages or
    not; a backward is B there, whole or not. At the ends of a model it may be of no stage.

    >>> [str(used_by(Action(kind, 1, 5))) for kind in ("F", "SEND_F", "RECV_F", "I")]
    ['2F5', '2F5', '1F5', '0B5']
    """
    kind, stage, microbatch = action
    letter = LETTERS.get(kind, kind[-1])
    step = 0 if kind.startswith("RECV") else STEPS[letter]
    return Action(letter, stage + step, microbatch)


def message_of(action: Action) -> Action:
    """The name that a send and its receive share: the receive. ``1SEND_F3`` gives ``2RECV_F3``."""
    if not action.kind.startswith("SEND"):
        return action
    letter = action.kind[-1]
    return Action(f"RECV_{letter}", action.stage + STEPS[letter], action.microbatch)


def sender_of(receive: Action) -> Action:
    """The send that feeds `receive`: ``2RECV_F3`` gives ``1SEND_F3``."""
    letter = receive.kind[-1]
    return Action(f"SEND_{letter}", receive.stage - STEPS[letter], receive.microbatch)


def peer_of(message: Action, schedule: Schedule) -> int:
    """The worker at the other end of a send or receive."""
    send = message.kind.startswith("SEND")
    other_end = message_of(message) if send else sender_of(message)
    return schedule.owner(other_end.stage, message.microbatch)


# --- tables --------------------------------------------------------------------------------------


def needs_table(schedule: Schedule) -> dict[KindAndStage, list[list[KindAndStage]]]:
    """`needs`, as (kind, stage) of the same microbatch. B stands for I there."""
    kinds = ["F", "B", "I", "W"] if schedule.trains else ["F"]
    if schedule.lowered:
        kinds += [f"{way}_{letter}" for letter in kinds[:2] for way in ("SEND", "RECV")]
    return {
        (kind, stage): [_needs(kind, stage, turn, schedule) for turn in range(schedule.period)]
        for kind in kinds
        for stage in range(schedule.stages)
    }


def handovers(schedule: Schedule) -> dict[KindAndStage, list[Handover | None]]:
    """What every compute hands to another worker, if it does, lowered or not."""
    kinds = LETTERS if schedule.trains else ["F"]
    table: dict[KindAndStage, list[Handover | None]] = {}
    for stage in range(schedule.stages):
        for kind in kinds:
            if user := _user(kind, stage, schedule):
                ways = [
                    Channel(schedule.owner(stage, turn), schedule.owner(user[1], turn))
                    for turn in range(schedule.period)
                ]
                if any(way.source != way.target for way in ways):
                    table[kind, stage] = [
                        Handover(*user, way) if way.source != way.target else None for way in ways
                    ]
    return table


# --- the rule itself -----------------------------------------------------------------------------


def _user(kind: str, stage: int, schedule: Schedule) -> KindAndStage | None:
    """The neighbour's compute that uses what this one hands on."""
    letter = LETTERS.get(kind)
    if letter is None:
        return None
    neighbour = stage + STEPS[letter]
    return (letter, neighbour) if 0 <= neighbour < schedule.stages else None


def _needs(kind: str, stage: int, microbatch: int, schedule: Schedule) -> list[KindAndStage]:
    """What an action needs of its own stage, then of its neighbour."""
    if kind == "W":
        return [("I", stage)]
    if kind.startswith("SEND"):
        return [(kind[-1], stage)]
    letter = LETTERS.get(kind.removeprefix("RECV_"))
    if letter is None:  # an update
        return []
    found = [("F", stage)] if kind in ("B", "I") else []
    neighbour = stage - STEPS[letter]
    if 0 <= neighbour < schedule.stages:
        if kind.startswith("RECV"):
            found.append((f"SEND_{letter}", neighbour))
        elif schedule.lowered and _crosses(stage, neighbour, microbatch, schedule):
            found.append((f"RECV_{letter}", stage))
        else:
            found.append((letter, neighbour))
    return found


def _crosses(stage: int, neighbour: int, microbatch: int, schedule: Schedule) -> bool:
    return schedule.owner(stage, microbatch) != schedule.owner(neighbour, microbatch)


def as_listed(action: Action, schedule: Schedule) -> Action:
    """A backward as the schedule lists it: whole, or its input half."""
    split = action.kind == "B" and action[1:] in schedule.split
    return action._replace(kind="I") if split else action
