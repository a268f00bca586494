"""Is a schedule complete, in dependency order, within its memory, free of deadlock?

Three steps. Is everything there, once, on the right worker? Does every row by itself have each
action after what it needs from that row? Then all rows together: run them without a clock. Each
worker does its actions in order and waits where something from another worker is missing; sends
never wait. The outcome does not depend on who moves first, so one run settles it (a Kahn process
network).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from math import inf
from operator import itemgetter

from pipeschool.actions import (
    COMPUTE_KINDS,
    KINDS,
    MESSAGE_KINDS,
    Action,
    IllegalSchedule,
    Schedule,
)
from pipeschool.cost import number
from pipeschool.lower import handovers, lower
from pipeschool.versions import ledgers

MATCHING = ("in_order", "tag")

_KIND_AND_STAGE, _MICROBATCH = itemgetter(0, 1), itemgetter(2)

KindAndStage = tuple[str, int]
# What goes from worker to worker: F (activations) or B (gradients), the stage that needs it, and
# the microbatch.
Tensor = tuple[str, int, int]


def check(
    schedule: Schedule, *, memory_cap: float | None = None, matching: str = "in_order"
) -> Schedule:
    """Return `schedule`, or raise `IllegalSchedule` with one sentence that says what is wrong.

    memory_cap: the most activations that a worker may hold, in units of A.
    matching: how receives find their message in a lowered schedule. ``tag``: by stage and
        microbatch, as gloo does. ``in_order``: the n-th receive from a worker gets that worker's
        n-th send, whatever it holds, as NCCL does; what passes here also passes with tags.
    """
    for _ in checked_order(schedule, matching):
        pass
    if memory_cap is not None:
        _check_memory(schedule, number("memory_cap", memory_cap, infinite=True))
    return schedule


def checked_order(schedule: Schedule, matching: str = "in_order") -> Iterator[tuple[int, Action]]:
    """`execution_order` of a schedule that `check` has passed, in one walk."""
    if matching not in MATCHING:
        raise ValueError(f"matching must be one of {', '.join(MATCHING)}, not {matching!r}")
    _check_placement(schedule)
    _check_complete(schedule)
    if schedule.lowered:
        _check_messages(schedule)
    needs = _needs_from_own_row(schedule)
    for worker, row in enumerate(schedule.workers):
        _check_row(worker, row, needs)
        _check_updates(schedule, worker, row)
    if not schedule.synchronous:
        _check_versions(schedule)
    return execution_order(schedule, matching)


def execution_order(schedule: Schedule, matching: str = "in_order") -> Iterator[tuple[int, Action]]:
    """(worker, action) for every action, in an order in which the workers could do them.

    For schedules whose rows are right by themselves. Raises `IllegalSchedule` where the workers
    cannot go on: a deadlock, or (``in_order``) a receive that would get somebody else's message.
    """
    rows = schedule.workers
    crossings, period = _crossings(schedule), schedule.period
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


def _crossings(schedule: Schedule) -> dict[KindAndStage, list[Crossing]]:
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


def _check_placement(schedule: Schedule) -> None:
    """Actions that exist, and every stage on one worker, or on several that take turns."""
    if len(schedule.workers) != schedule.p:
        raise IllegalSchedule(
            f"{schedule.name} has rows for {len(schedule.workers)} workers, but p is {schedule.p}"
        )
    if schedule.replicas:
        _check_replicas(schedule)
    owner: dict[int, int] = {}
    for worker, row in enumerate(schedule.workers):
        if not row:
            raise IllegalSchedule(f"worker {worker} has nothing to do", worker)
        for kind, stage in dict.fromkeys(map(_KIND_AND_STAGE, row)):
            if kind not in KINDS or stage < 0:
                action = _first(row, kind, stage)
                raise IllegalSchedule(
                    f"worker {worker} lists {action}, but kinds are {', '.join(KINDS)} and stages "
                    f"are numbered from 0",
                    worker,
                    action,
                )
            if owner.setdefault(stage, worker) != worker and not schedule.replicas:
                action = _first(row, kind, stage)
                raise IllegalSchedule(
                    f"worker {worker} lists {action.describe()}, but stage {stage} is on worker "
                    f"{owner[stage]}: every stage lives on one worker",
                    worker,
                    action,
                )
    for stage in range(schedule.stages):
        if stage not in owner:
            raise IllegalSchedule(f"stage {stage} is on no worker")


def _check_replicas(schedule: Schedule) -> None:
    """Workers that take turns at a stage: those there are, each with its own microbatches."""
    if len(schedule.replicas) != schedule.stages:
        raise IllegalSchedule(
            f"replicas must name the workers of each stage: {schedule.stages} stages, not "
            f"{len(schedule.replicas)}"
        )
    for stage, workers in enumerate(schedule.replicas):
        known = all(0 <= worker < schedule.p for worker in workers)
        if not workers or not known or len(set(workers)) < len(workers):
            raise IllegalSchedule(
                f"stage {stage} has workers {workers}: it needs one or more different ones, "
                f"numbered from 0 to {schedule.p - 1}"
            )
        if schedule.updates_every % len(workers):
            raise IllegalSchedule(
                f"an update takes the gradients of {schedule.updates_every} microbatches, which "
                f"the {len(workers)} workers of stage {stage} cannot share equally"
            )
    for worker, row in enumerate(schedule.workers):
        for action in row:
            workers = schedule.owners[action.stage]
            if action.kind == "U" and worker in workers:
                continue
            due = schedule.owner(action.stage, action.microbatch)
            if due != worker:
                raise IllegalSchedule(
                    f"worker {worker} lists {action.describe()}, which is worker {due}'s: the "
                    f"workers of stage {action.stage} are {', '.join(map(str, workers))}, in turn",
                    worker,
                    action,
                )


def _check_complete(schedule: Schedule) -> None:
    """Each compute action once.

    Counting settles it: where all actions differ and their microbatches are in range, as many as
    there are microbatches are all of them. Only a wrong count makes us look for the action.
    """
    for worker, row in enumerate(schedule.workers):
        _check_distinct(schedule, worker, row)
        counts = Counter(map(_KIND_AND_STAGE, row))
        for stage in schedule.stages_of(worker):
            _check_all(schedule, worker, "F", stage, counts)
            if not schedule.trains:
                _check_forward_only(worker, row)
            elif counts["I", stage] or counts["W", stage]:
                _check_halves(schedule, worker, stage)
            else:
                _check_all(schedule, worker, "B", stage, counts)


def _check_messages(schedule: Schedule) -> None:
    """Each message that is needed once, and no other."""
    due = _crossings(schedule)
    for worker, row in enumerate(schedule.workers):
        counts = Counter(map(_KIND_AND_STAGE, row))
        for (kind, stage), crossings in due.items():
            if worker in schedule.owners[stage]:
                _check_all(schedule, worker, kind, stage, counts, crossings)
        for kind, stage in counts:
            if kind in MESSAGE_KINDS and (kind, stage) not in due:
                action = _first(row, kind, stage)
                raise IllegalSchedule(
                    f"worker {worker} does {action.describe()}, but there is nobody at its other "
                    f"end",
                    worker,
                    action,
                )


def _check_forward_only(worker: int, row: Sequence[Action]) -> None:
    for action in row:
        if action.kind in ("B", "I", "W", "U"):
            raise IllegalSchedule(
                f"worker {worker} does {action.describe()}, but with weights='frozen' there are "
                "forwards alone",
                worker,
                action,
            )


def _check_all(
    schedule: Schedule,
    worker: int,
    kind: str,
    stage: int,
    counts: Counter[KindAndStage],
    crossings: Sequence[Crossing] = (),
) -> None:
    """`kind` on `stage` is there for every microbatch; of `crossings`, for each that there is."""
    microbatches: Sequence[int] = schedule.microbatches_of(stage, worker)
    if schedule.period > 1 and crossings:
        microbatches = [k for k in microbatches if any(crossings[k % schedule.period])]
    if counts[kind, stage] != len(microbatches):
        listed = set(schedule.workers[worker])
        every = (Action(kind, stage, k) for k in microbatches)
        raise _never(worker, next(action for action in every if action not in listed))


def _check_distinct(schedule: Schedule, worker: int, row: Sequence[Action]) -> None:
    """No action twice, none for a microbatch that does not exist."""
    if len(set(row)) < len(row):
        action = next(action for action, n in Counter(row).items() if n > 1)
        raise IllegalSchedule(f"worker {worker} does {action.describe()} twice", worker, action)
    numbers = list(map(_MICROBATCH, row))
    if min(numbers) < 0 or max(numbers) >= schedule.microbatches:
        for action in row:
            if action.kind != "U" and not 0 <= action.microbatch < schedule.microbatches:
                raise IllegalSchedule(
                    f"worker {worker} lists {action.describe()}, but the last microbatch is "
                    f"{schedule.microbatches - 1}",
                    worker,
                    action,
                )


def _check_halves(schedule: Schedule, worker: int, stage: int) -> None:
    """Where some backwards are split: each is there whole or in both halves, not in between."""
    listed = set(schedule.workers[worker])
    for k in schedule.microbatches_of(stage, worker):
        whole, *halves = (Action(kind, stage, k) for kind in ("B", "I", "W"))
        if whole in listed:
            for half in halves:
                if half in listed:
                    raise IllegalSchedule(
                        f"worker {worker} does {whole.describe()} as well as its half {half}",
                        worker,
                        half,
                    )
        for half in halves:
            if whole not in listed and half not in listed:
                raise _never(worker, half)


def _needs_from_own_row(schedule: Schedule) -> dict[KindAndStage, list[list[KindAndStage]]]:
    """For each (kind, stage), by microbatch modulo `schedule.period`: the (kind, stage) of the same
    microbatch that must stand before it in its own row. The input half of a split backward counts
    as B here."""
    stages, period = range(schedule.stages), range(schedule.period)
    needs: dict[KindAndStage, list[list[KindAndStage]]] = {}
    for stage in stages:
        for kind, first in (("B", "F"), ("I", "F"), ("W", "I"), ("SEND_F", "F"), ("SEND_B", "B")):
            needs[kind, stage] = [[(first, stage)] for _ in period]
        for kind, letter, neighbour in (
            ("F", "F", stage - 1),
            ("B", "B", stage + 1),
            ("I", "B", stage + 1),
        ):
            if neighbour not in stages:
                continue
            for k, list_of_needs in zip(
                period, needs.setdefault((kind, stage), [[] for _ in period]), strict=True
            ):
                if schedule.owner(neighbour, k) == schedule.owner(stage, k):
                    list_of_needs.append((letter, neighbour))
                elif schedule.lowered:
                    list_of_needs.append((f"RECV_{letter}", stage))
    return needs


def _check_row(
    worker: int, row: Sequence[Action], needs: dict[KindAndStage, list[list[KindAndStage]]]
) -> None:
    """Each action of a row comes after what it needs from that row."""
    done: set[tuple[str, int, int]] = set()
    period = len(next(iter(needs.values())))
    nothing: list[list[KindAndStage]] = [[] for _ in range(period)]
    for action in row:
        kind, stage, microbatch = action
        for first, where in needs.get((kind, stage), nothing)[microbatch % period]:
            if (first, where, microbatch) not in done:
                half = Action("I", where, microbatch)
                need = half if first == "B" and half in row else Action(first, where, microbatch)
                raise IllegalSchedule(
                    f"worker {worker} does {action.describe()} before {need}, which it needs",
                    worker,
                    action,
                )
        done.add(action)
        if kind == "I":
            done.add(("B", stage, microbatch))


def _check_updates(schedule: Schedule, worker: int, row: Sequence[Action]) -> None:
    """Each update takes the gradients of `updates_every` microbatches, no more and no fewer.

    In a synchronous schedule they are those of its own batch, and the next batch waits for it:
    that is the flush.
    """
    every = schedule.updates_every
    stages = schedule.stages_of(worker)
    sizes = {stage: every // len(schedule.owners[stage]) for stage in stages}
    updates = dict.fromkeys(stages, 0)
    gradients = dict.fromkeys(stages, 0)
    # What is beyond this number must wait for the next update.
    bound = dict.fromkeys(stages, every if schedule.synchronous else inf)
    for action in row:
        kind, stage, number = action
        if kind == "U":
            if number != updates[stage]:
                raise IllegalSchedule(
                    f"worker {worker} does {action.describe()} where update {updates[stage]} is "
                    f"next",
                    worker,
                    action,
                )
            if gradients[stage] != sizes[stage]:
                raise IllegalSchedule(
                    f"worker {worker} does {action.describe()} with the gradients of "
                    f"{gradients[stage]} microbatches, but an update takes those of {sizes[stage]}",
                    worker,
                    action,
                )
            updates[stage] += 1
            gradients[stage] = 0
            bound[stage] += every
        elif kind not in COMPUTE_KINDS:
            continue  # messages may run ahead of an update
        elif number >= bound[stage]:
            raise IllegalSchedule(
                f"worker {worker} does {action.describe()} before "
                f"{Action('U', stage, number // every - 1)}: a synchronous schedule ends each "
                f"batch with a flush and an update",
                worker,
                action,
            )
        elif kind in ("B", "W"):
            gradients[stage] += 1
    for stage in stages:
        if schedule.trains and updates[stage] != schedule.microbatches // every:
            raise _never(worker, Action("U", stage, updates[stage]))


def _check_versions(schedule: Schedule) -> None:
    """The weight version that each forward and backward asks for exists, and is still kept."""
    stage_ledgers = ledgers(schedule)
    for worker, row in enumerate(schedule.workers):
        for action in row:
            if action.is_message:
                continue
            try:
                stage_ledgers[worker][action.stage].note(action)
            except IllegalSchedule as error:
                raise IllegalSchedule(f"worker {worker}: {error}", worker, action) from None


def _check_memory(schedule: Schedule, cap: float) -> None:
    for worker, row in enumerate(schedule.workers):
        held = 0
        for action in row:
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            if held / schedule.v > cap:
                raise IllegalSchedule(
                    f"worker {worker} holds the activations of {held / schedule.v:g} microbatches "
                    f"at {action.describe()}, and the cap is {cap:g}",
                    worker,
                    action,
                )


def _first(row: Sequence[Action], kind: str, stage: int) -> Action:
    return next(action for action in row if action.kind == kind and action.stage == stage)


def _never(worker: int, action: Action) -> IllegalSchedule:
    return IllegalSchedule(f"worker {worker} never does {action.describe()}", worker, action)


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


__all__ = ["MATCHING", "IllegalSchedule", "check", "checked_order", "execution_order", "lower"]
