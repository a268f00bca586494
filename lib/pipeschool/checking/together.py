"""All rows of a schedule together: run without a clock, message by message."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from pipeschool.actions import Action, IllegalSchedule, Schedule
from pipeschool.dependencies import KindAndStage, as_listed, needs_table

# What goes from worker to worker, under the name of the action that gives it: kind, stage and
# microbatch. Both kinds of backward give it under the name of B.
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
                present, due = meetings[action], len(schedule.owners[stage])
                if worker not in present:
                    present.append(worker)
                    if len(present) == due:
                        runnable += present[:-1]
                if len(present) < due:
                    position[worker] = index
                    break
            take, give = crossings.get((kind, stage), nothing)[microbatch % period]
            if take:
                letter, giver, source = take
                tensor = (letter, giver, microbatch)
                if tensor not in given:
                    waiting[tensor] = worker
                    position[worker] = index
                    break
                if in_order and (next_one := queues[source, worker].popleft()) != tensor:
                    raise _wrong_tensor(schedule, worker, action, tensor, next_one)
            if give:
                letter, target = give
                tensor = (letter, stage, microbatch)
                given.add(tensor)
                if in_order:
                    queues[worker, target].append(tensor)
                if tensor in waiting:
                    runnable.append(waiting.pop(tensor))
            yield worker, action
    needs = {w: (_giver(schedule, t), _source(schedule, t)) for t, w in waiting.items()}
    for update, present in meetings.items():
        absent = [w for w in schedule.owners[update.stage] if w not in present]
        needs |= {w: (update, absent[0]) for w in present if absent}
    if needs:
        raise _deadlock(schedule, position, needs)


Take = tuple[str, int, int]  # kind and stage of the giver, and its worker
Give = tuple[str, int]  # kind under which it is given, and the worker that takes it
Crossing = tuple[Take | None, Give | None]
NO_CROSSING: Crossing = (None, None)


def crossings_of(schedule: Schedule) -> dict[KindAndStage, list[Crossing]]:
    """For each (kind, stage), by microbatch modulo `schedule.period`: what it takes from another
    worker, and what it gives to one.

    Sends and receives do that in a lowered schedule, the compute itself in any other.
    """
    nothing = [NO_CROSSING] * schedule.period
    crossings: dict[KindAndStage, list[Crossing]] = {}
    for (kind, stage), by_turn in needs_table(schedule).items():
        for turn, needs in enumerate(by_turn):
            worker = schedule.owner(stage, turn)
            for letter, giver in needs:
                source = schedule.owner(giver, turn)
                if source == worker:
                    continue
                _, give = crossings.setdefault((kind, stage), nothing[:])[turn]
                crossings[kind, stage][turn] = (letter, giver, source), give
                for half_or_whole in ("B", "I") if letter == "B" else (letter,):
                    take, _ = crossings.setdefault((half_or_whole, giver), nothing[:])[turn]
                    crossings[half_or_whole, giver][turn] = take, (letter, worker)
    return crossings


def _source(schedule: Schedule, tensor: Tensor) -> int:
    """The worker that gives `tensor`."""
    _, stage, microbatch = tensor
    return schedule.owner(stage, microbatch)


def _giver(schedule: Schedule, tensor: Tensor) -> Action:
    """The action that gives `tensor`."""
    return as_listed(Action(*tensor), schedule)


def _wrong_tensor(
    schedule: Schedule, worker: int, action: Action, tensor: Tensor, next_one: Tensor
) -> IllegalSchedule:
    due, sent = _giver(schedule, tensor), _giver(schedule, next_one)
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
