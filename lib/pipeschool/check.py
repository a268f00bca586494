"""Is a schedule complete, in dependency order, within its memory, free of deadlock?

Two steps. First every worker's row on its own: is each action there once, and after what it needs
from the same worker? Then all rows together: run them without a clock. Each worker does its
actions in order and waits where something from another worker is missing; sends never wait. The
outcome does not depend on who moves first, so one run settles it (a Kahn process network).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator

from pipeschool.actions import Action, IllegalSchedule, Schedule, peak_in_flight
from pipeschool.lower import lower, message_of, outgoing, peer_of, sender_of

MATCHING = ("in_order", "tag")


def check(
    schedule: Schedule, *, memory_cap: float | None = None, matching: str = "in_order"
) -> Schedule:
    """Return `schedule`, or raise `IllegalSchedule` with one sentence that says what is wrong.

    memory_cap: the most activations that a worker may hold, in units of A.
    matching: how receives find their message in a lowered schedule. ``tag``: by stage and
        microbatch, as gloo does. ``in_order``: the n-th receive from a worker gets that worker's
        n-th send, whatever it holds, as NCCL does; what passes here also passes with tags.
    """
    if matching not in MATCHING:
        raise ValueError(f"matching must be one of {', '.join(MATCHING)}, not {matching!r}")
    _check_placement(schedule)
    for worker, row in enumerate(schedule.workers):
        _check_row(schedule, worker, row)
    if schedule.lowered:
        _check_messages(schedule)
    for _ in execution_order(schedule, matching):
        pass
    if memory_cap is not None:
        _check_memory(schedule, memory_cap)
    return schedule


def execution_order(
    schedule: Schedule, matching: str = "in_order"
) -> Iterator[tuple[int, Action]]:
    """(worker, action) for every action, in an order in which the workers could do them.

    Raises `IllegalSchedule` where they cannot go on: a deadlock, or (``in_order``) a receive that
    would get somebody else's message.
    """
    rows = schedule.workers
    position = [0] * len(rows)
    needs = _message_needs if schedule.lowered else _compute_needs
    done: set[Action] = set()
    queues: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    waiting: dict[Action, int] = {}  # missing action -> worker that waits for it
    runnable = list(range(len(rows) - 1, -1, -1))
    while runnable:
        worker = runnable.pop()
        row = rows[worker]
        while position[worker] < len(row):
            action = row[position[worker]]
            need = needs(action, schedule)
            if need is not None and need not in done:
                waiting[need] = worker
                break
            if matching == "in_order" and action.is_message:
                _pass_in_order(action, worker, schedule, queues)
            position[worker] += 1
            done.add(action)
            yield worker, action
            if action in waiting:
                runnable.append(waiting.pop(action))
    if any(position[w] < len(row) for w, row in enumerate(rows)):
        raise _deadlock(schedule, position, {w: need for need, w in waiting.items()})


def _compute_needs(action: Action, schedule: Schedule) -> Action | None:
    """What `action` of a compute-only schedule needs from another worker."""
    kind, stage, microbatch = action
    if kind == "F" and stage > 0:
        return Action("F", stage - 1, microbatch)
    if kind in ("B", "I") and stage < schedule.stages - 1:
        split = Action("I", stage + 1, microbatch)
        return split if split in _split(schedule) else Action("B", stage + 1, microbatch)
    return None


def _message_needs(action: Action, schedule: Schedule) -> Action | None:
    """What `action` of a lowered schedule needs from another worker."""
    if action.kind in ("RECV_F", "RECV_B"):
        return sender_of(action)
    need = _compute_needs(action, schedule)
    if need is None or schedule.placement[need.stage] == schedule.placement[action.stage]:
        return need
    return None  # it came by message; the row's own check has seen to that


def _split(schedule: Schedule) -> frozenset[Action]:
    """The input halves of all split backwards, worked out once per schedule."""
    cached = schedule.__dict__.get("_split")
    if cached is None:
        cached = frozenset(a for row in schedule.workers for a in row if a.kind == "I")
        schedule.__dict__["_split"] = cached
    return cached


def _pass_in_order(
    action: Action,
    worker: int,
    schedule: Schedule,
    queues: defaultdict[tuple[int, int], deque[Action]],
) -> None:
    peer = peer_of(action, schedule)
    if action.kind.startswith("SEND"):
        queues[worker, peer].append(action)
        return
    came = queues[peer, worker].popleft()
    if message_of(came) != action:
        raise IllegalSchedule(
            f"worker {worker} would get the wrong tensor at {action.describe()}: the next message "
            f"from worker {peer} is {came}, not {sender_of(action)}",
            worker,
            action,
        )


def _check_placement(schedule: Schedule) -> None:
    if len(schedule.workers) != schedule.p:
        raise IllegalSchedule(
            f"{schedule.name} has rows for {len(schedule.workers)} workers, but p is {schedule.p}"
        )
    for worker, row in enumerate(schedule.workers):
        for action in row:
            owner = schedule.placement[action.stage]
            if owner != worker:
                raise IllegalSchedule(
                    f"stage {action.stage} is on worker {owner} and on worker {worker} "
                    f"(at {action}): every stage lives on one worker",
                    worker,
                    action,
                )
            if action.kind != "U" and action.microbatch >= schedule.microbatches:
                raise IllegalSchedule(
                    f"worker {worker} lists {action.describe()}, but there are only "
                    f"{schedule.microbatches} microbatches, numbered from 0",
                    worker,
                    action,
                )
    if -1 in schedule.placement:
        missing = schedule.placement.index(-1)
        raise IllegalSchedule(f"stage {missing} is on no worker")
    for worker, row in enumerate(schedule.workers):
        if not row:
            raise IllegalSchedule(f"worker {worker} has nothing to do", worker)


def _check_row(schedule: Schedule, worker: int, row: Iterable[Action]) -> None:
    """Everything that one worker's row can get wrong by itself."""
    done: set[Action] = set()
    for action in row:
        if action in done:
            raise IllegalSchedule(f"worker {worker} does {action.describe()} twice", worker, action)
        for need in _own_needs(action, schedule):
            if not done.intersection(need):
                raise IllegalSchedule(
                    f"worker {worker} does {action.describe()} before "
                    f"{' or '.join(map(str, need))}, which it needs",
                    worker,
                    action,
                )
        if action.kind == "B" and Action("I", *action[1:]) in done:
            raise IllegalSchedule(
                f"worker {worker} lists {action.describe()} as well as its halves", worker, action
            )
        if action.kind == "I" and Action("B", *action[1:]) in done:
            raise IllegalSchedule(
                f"worker {worker} lists {action.describe()} as well as the whole", worker, action
            )
        done.add(action)
    for stage in schedule.stages_of(worker):
        _check_complete(schedule, worker, stage, done)
        _check_updates(schedule, worker, stage, row)


def _own_needs(action: Action, schedule: Schedule) -> list[tuple[Action, ...]]:
    """What must stand before `action` in its own row: one of each tuple."""
    kind, stage, k = action
    needs: list[tuple[Action, ...]] = []
    if kind in ("B", "I"):
        needs.append((Action("F", stage, k),))
    if kind == "W":
        needs.append((Action("I", stage, k),))
    if kind == "SEND_F":
        needs.append((Action("F", stage, k),))
    if kind == "SEND_B":
        needs.append((Action("B", stage, k), Action("I", stage, k)))
    if schedule.lowered and kind in ("F", "B", "I"):
        neighbour = stage - 1 if kind == "F" else stage + 1
        here = schedule.placement[stage]
        if 0 <= neighbour < schedule.stages and schedule.placement[neighbour] != here:
            needs.append((Action("RECV_F" if kind == "F" else "RECV_B", stage, k),))
    return needs


def _check_complete(schedule: Schedule, worker: int, stage: int, done: set[Action]) -> None:
    for k in range(schedule.microbatches):
        halves = Action("I", stage, k) in done
        wanted = [Action("F", stage, k)]
        wanted += [Action("W", stage, k)] if halves else [Action("B", stage, k)]
        for action in wanted:
            if action not in done:
                raise IllegalSchedule(
                    f"worker {worker} never does {action.describe()}", worker, action
                )


def _check_updates(schedule: Schedule, worker: int, stage: int, row: Iterable[Action]) -> None:
    """Update t comes after the backwards of its own microbatches, in order; a synchronous one
    also has nothing in flight."""
    size = schedule.updates_every
    backwards = 0
    updates = 0
    in_flight = 0
    for action in row:
        if action.stage != stage:
            continue
        if action.kind == "F":
            in_flight += 1
        elif action.kind in ("B", "W"):
            in_flight -= 1
            backwards += 1
        elif action.kind == "U":
            if action.microbatch != updates:
                raise IllegalSchedule(
                    f"worker {worker} does {action.describe()} where update {updates} is next",
                    worker,
                    action,
                )
            updates += 1
            if backwards < updates * size or (schedule.synchronous and in_flight):
                raise IllegalSchedule(
                    f"worker {worker} does {action.describe()} after {backwards} backwards with "
                    f"{in_flight} microbatches in flight, but it needs the gradients of "
                    f"{updates * size}" + (" and a flush" if schedule.synchronous else ""),
                    worker,
                    action,
                )
    wanted = schedule.microbatches // size
    if updates != wanted:
        missing = Action("U", stage, updates)
        raise IllegalSchedule(
            f"worker {worker} never does {missing.describe()}: {wanted} updates are due",
            worker,
            missing,
        )


def _check_messages(schedule: Schedule) -> None:
    """Every message that is needed is sent once and received once, and there is no other."""
    wanted: dict[Action, int] = {}
    for worker, row in enumerate(schedule.workers):
        for action in row:
            if message := outgoing(action, schedule):
                wanted[message[0]] = worker
                wanted[message[1]] = message[2].target
    listed = Counter(a for row in schedule.workers for a in row if a.is_message)
    for action, worker in wanted.items():
        if not listed[action]:
            raise IllegalSchedule(f"worker {worker} never does {action.describe()}", worker, action)
    for worker, row in enumerate(schedule.workers):
        for action in row:
            if action.is_message and action not in wanted:
                raise IllegalSchedule(
                    f"worker {worker} does {action.describe()}, which nobody is at the other end of",
                    worker,
                    action,
                )


def _check_memory(schedule: Schedule, cap: float) -> None:
    for worker, row in enumerate(schedule.workers):
        peak = peak_in_flight(row) / schedule.v
        if peak > cap:
            action = next(
                row[i]
                for i in range(len(row))
                if peak_in_flight(row[: i + 1]) / schedule.v > cap
            )
            raise IllegalSchedule(
                f"worker {worker} holds the activations of {peak:g} microbatches at its peak, and "
                f"the cap of {cap:g} is passed at {action.describe()}",
                worker,
                action,
            )


def _deadlock(
    schedule: Schedule, position: list[int], missing: dict[int, Action]
) -> IllegalSchedule:
    """Follow who waits for whom until it closes into a circle, and say it."""
    at = {w: schedule.workers[w][position[w]] for w in missing}
    owner = {action: w for w, row in enumerate(schedule.workers) for action in row}
    worker = min(missing)
    seen: list[int] = []
    while worker not in seen and worker in missing:
        seen.append(worker)
        worker = owner.get(missing[worker], -1)
    circle = seen[seen.index(worker) :] if worker in seen else seen
    first = min(circle)
    chain = "; ".join(
        f"worker {w} waits at {at[w]} for {missing[w]}"
        + (f" from worker {owner[missing[w]]}" if missing[w] in owner else ", which nobody does")
        for w in circle
    )
    return IllegalSchedule(f"deadlock: {chain}", first, at[first])


__all__ = ["MATCHING", "IllegalSchedule", "check", "execution_order", "lower"]
