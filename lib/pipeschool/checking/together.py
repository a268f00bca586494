"""All rows of a schedule together: run without a clock, message by message."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

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
                    source = _source(schedule, tensor)
                    wanted, sent = _giver(schedule, tensor), _giver(schedule, next_one)
                    raise wrong_tensor(source, worker, action, wanted, sent)
            if give:
                letter, target = give
                tensor = (letter, stage, microbatch)
                given.add(tensor)
                if in_order:
                    queues[worker, target].append(tensor)
                if tensor in waiting:
                    runnable.append(waiting.pop(tensor))
            yield worker, action
    waits = {
        w: (f"for {_giver(schedule, t)} from worker {_source(schedule, t)}", _source(schedule, t))
        for t, w in waiting.items()
    }
    for update, present in meetings.items():
        waits |= waits_at_update(schedule, update, present)
    if waits:
        raise deadlock({w: rows[w][position[w]] for w in waits}, waits)


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


def waits_at_update(
    schedule: Schedule, update: Action, present: Sequence[int]
) -> dict[int, tuple[str, int]]:
    """For what those `present` at an update wait, in words, and for which worker; empty where all
    workers of the stage have come."""
    absent = [w for w in schedule.owners[update.stage] if w not in present]
    return {w: (f"for {update} from worker {absent[0]}", absent[0]) for w in present if absent}


def wrong_tensor(
    source: int, worker: int, receive: Action, due: Action, sent: Action
) -> IllegalSchedule:
    """`worker`, at `receive`, would get `sent` from `source` instead of `due`."""
    return IllegalSchedule(
        f"worker {worker} would get the wrong tensor at {receive.describe()}: the next message "
        f"from worker {source} is {sent}, not {due}",
        worker,
        receive,
    )


def deadlock(at: Mapping[int, Action], waits: Mapping[int, tuple[str, int]]) -> IllegalSchedule:
    """Follow who waits for whom until it closes into a circle, and say it.

    at: where each worker that waits is. waits: for what, in words, and for which worker.
    """
    seen: list[int] = []
    worker = min(waits)
    while worker in waits and worker not in seen:
        seen.append(worker)
        worker = waits[worker][1]
    circle = seen[seen.index(worker) :] if worker in seen else seen
    first = min(circle)
    start = circle.index(first)
    circle = circle[start:] + circle[:start]
    # The message stays short: of a large circle the first few are named.
    said = [
        f"worker {w} waits at {at[w].describe() if len(circle) < 3 or w == first else at[w]} "
        f"{waits[w][0]}"
        for w in circle[:3]
    ]
    if len(circle) > 3:
        said.append(f"and so on, {len(circle)} workers in a circle")
    return IllegalSchedule(f"deadlock: {'; '.join(said)}", first, at[first])
