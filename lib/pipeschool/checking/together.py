"""All rows of a schedule together: run without a clock, message by message."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from pipeschool.actions import Action, IllegalSchedule, Schedule
from pipeschool.lowering import handovers

KindAndStage = tuple[str, int]
# What goes from worker to worker: F (activations) or B (gradients), the stage that needs it, and
# the microbatch.
Tensor = tuple[str, int, int]


def execution_order(schedule: Schedule, matching: str = "in_order") -> Iterator[tuple[int, Action]]:
    """(worker, action) for every action, in an order in which the workers could do them.

    For schedules whose rows are right by themselves. Raises `IllegalSchedule` where the workers
    cannot go on: a deadlock, or (``in_order``) a receive that would get somebody else's message.
    """
    rows = schedule.workers
    crossings, period = crossings_of(schedule), schedule.period
    nothing = [NO_CROSSING] * period
    meet = period > 1
    in_order = schedule.lowered and matching == "in_order"
    queues: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    given: set[Tensor] = set()
    waiting: dict[Tensor, int] = {}  # what is missing -> the worker that waits for it
    meetings: defaultdict[Action, list[int]] = defaultdict(list)  # update -> who has come to it
    position = [0] * len(rows)
    runnable = list(range(len(rows) - 1, -1, -1))
    while runnable:
        worker = runnable.pop()
        row = rows[worker]
        for index in range(position[worker], len(row)):
            kind, stage, microbatch = action = row[index]
            if meet and kind == "U":
                here, due = meetings[action], len(schedule.owners[stage])
                if worker not in here:
                    here.append(worker)
                    runnable += [w for w in here[:-1] if len(here) == due]
                if len(here) < due:
                    position[worker] = index
                    break
            take, give = crossings.get((kind, stage), nothing)[microbatch % period]
            if take:
                letter, source = take
                tensor = (letter, stage, microbatch)
                if tensor not in given:
                    waiting[tensor] = worker
                    position[worker] = index
                    break
                if in_order and (came := queues[source, worker].popleft()) != tensor:
                    raise _wrong_tensor(schedule, worker, action, tensor, came)
            if give:
                letter, neighbour, target = give
                tensor = (letter, neighbour, microbatch)
                given.add(tensor)
                if in_order:
                    queues[worker, target].append(tensor)
                if tensor in waiting:
                    runnable.append(waiting.pop(tensor))
            yield worker, action
    needs = {w: (_giver(schedule, t), _source(schedule, t)) for t, w in waiting.items()}
    for update, here in meetings.items():
        absent = [w for w in schedule.owners[update.stage] if w not in here]
        needs |= {w: (update, absent[0]) for w in here if absent}
    if needs:
        raise _deadlock(schedule, position, needs)


Take = tuple[str, int]  # letter, and the worker that it comes from
Give = tuple[str, int, int]  # letter, the stage that needs it, and the worker of that
Crossing = tuple[Take | None, Give | None]
NO_CROSSING: Crossing = (None, None)


def crossings_of(schedule: Schedule) -> dict[KindAndStage, list[Crossing]]:
    """For each (kind, stage), by microbatch modulo `schedule.period`: what it takes from another
    worker, and what it gives to one.

    Sends and receives do that in a lowered schedule, the compute itself in any other.
    """
    period = schedule.period
    takes: dict[KindAndStage, list[Take | None]] = {}
    gives: dict[KindAndStage, list[Give | None]] = {}
    for (kind, stage), found in handovers(schedule).items():
        letter = "F" if kind == "F" else "B"
        neighbour = stage + (1 if kind == "F" else -1)
        giver, takers = kind, ["F"] if letter == "F" else ["B", "I"]
        if schedule.lowered:
            giver, takers = f"SEND_{letter}", [f"RECV_{letter}"]
        gives[giver, stage] = [(letter, neighbour, h.link.target) if h else None for h in found]
        for taker in takers:
            takes[taker, neighbour] = [(letter, h.link.source) if h else None for h in found]
    nothing = [None] * period
    return {
        key: list(zip(takes.get(key, nothing), gives.get(key, nothing), strict=True))
        for key in (*takes, *gives)
    }


def _source(schedule: Schedule, tensor: Tensor) -> int:
    """The worker that gives `tensor` to its stage."""
    letter, stage, microbatch = tensor
    return schedule.owner(stage - 1 if letter == "F" else stage + 1, microbatch)


def _giver(schedule: Schedule, tensor: Tensor) -> Action:
    """The action that gives `tensor` to its stage."""
    letter, stage, microbatch = tensor
    source = stage - 1 if letter == "F" else stage + 1
    if schedule.lowered:
        return Action(f"SEND_{letter}", source, microbatch)
    half = Action("I", source, microbatch)
    split = letter == "B" and half in schedule.workers[_source(schedule, tensor)]
    return half if split else Action(letter, source, microbatch)


def _wrong_tensor(
    schedule: Schedule, worker: int, action: Action, tensor: Tensor, came: Tensor
) -> IllegalSchedule:
    due, sent = _giver(schedule, tensor), _giver(schedule, came)
    return IllegalSchedule(
        f"worker {worker} would get the wrong tensor at {action.describe()}: the next message from "
        f"worker {_source(schedule, tensor)} is {sent}, not {due}",
        worker,
        action,
    )


def _deadlock(
    schedule: Schedule, position: list[int], needs: dict[int, tuple[Action, int]]
) -> IllegalSchedule:
    """Follow who waits for whom until it closes into a circle, and say it. `needs`: for each worker
    that waits, the action that it waits for, and whose that is."""
    seen: list[int] = []
    worker = min(needs)
    while worker in needs and worker not in seen:
        seen.append(worker)
        worker = needs[worker][1]
    circle = seen[seen.index(worker) :] if worker in seen else seen
    at = {w: schedule.workers[w][position[w]] for w in circle}
    chain = "; ".join(
        f"worker {w} waits at {at[w].describe()} for {needs[w][0]} from worker {needs[w][1]}"
        for w in circle
    )
    first = min(circle)
    return IllegalSchedule(f"deadlock: {chain}", first, at[first])
