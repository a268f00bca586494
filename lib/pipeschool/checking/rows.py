"""Each row of a schedule by itself: complete, on the right worker, in an order that can be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from pipeschool.checking.together import Crossing, crossings_of
from pipeschool.dependencies import KindAndStage, needs_table
from pipeschool.versions import Ledger, ledgers

_KIND_AND_STAGE, _MICROBATCH = itemgetter(0, 1), itemgetter(2)


def check_placement(schedule: Schedule) -> None:
    """Actions that exist, and every stage on one worker, or on several that take turns."""
    if len(schedule.workers) != schedule.p:
        raise IllegalSchedule(
            f"{schedule.name} has rows for {len(schedule.workers)} workers, but p is {schedule.p}"
        )
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
    if schedule.replicas:
        _check_replicas(schedule)


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


def check_complete(schedule: Schedule) -> None:
    """Each compute action once.

    Rows are long, so they are counted, not searched. First, no row has an action twice or one for a
    microbatch that does not exist. Then a stage with as many forwards as it has microbatches has
    the forward of each, because they cannot be others. Only where the number is wrong is the row
    searched, for an action to name.
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


def check_messages(schedule: Schedule) -> None:
    """Each message that is needed once, and no other."""
    due = crossings_of(schedule)
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


def needs_from_own_row(schedule: Schedule) -> dict[KindAndStage, list[list[KindAndStage]]]:
    """`needs_table`, without what comes from other workers."""
    return {
        (kind, stage): [
            [need for need in needs if schedule.owner(need[1], k) == schedule.owner(stage, k)]
            for k, needs in enumerate(by_turn)
        ]
        for (kind, stage), by_turn in needs_table(schedule).items()
    }


def check_row(
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


def check_updates(schedule: Schedule, worker: int, row: Sequence[Action]) -> None:
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


def check_versions(schedule: Schedule) -> None:
    """The weight version that each forward and backward asks for exists, and is still kept."""
    stage_ledgers = ledgers(schedule)
    for worker, row in enumerate(schedule.workers):
        for action in row:
            if action.is_message:
                continue
            own = stage_ledgers[worker][action.stage]
            try:
                own.record(action)
            except IllegalSchedule as error:
                why = _too_many_in_flight(schedule, action.stage, own)
                raise IllegalSchedule(f"{why}worker {worker}: {error}", worker, action) from None


def _too_many_in_flight(schedule: Schedule, stage: int, own: Ledger) -> str:
    """Why the policy of `own`, the ledger of `stage` on one worker, does not suit `schedule`."""
    most = own.policy.most_in_flight
    entering = (len(own.used) + 1) * len(schedule.owners[stage])
    if most is None or entering <= most:
        return ""
    turns = ", because workers take turns" if schedule.period > 1 else ""
    return (
        f"{schedule.name} does not go with weights={own.policy.name!r}, which counts on at most "
        f"{most} microbatches in flight at a stage: stage {stage} has {entering}{turns}; "
    )


def check_memory(schedule: Schedule, caps: Sequence[float]) -> None:
    """No worker holds more activations, in units of A, than its own of `caps`."""
    for worker, (row, cap) in enumerate(zip(schedule.workers, caps, strict=True)):
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
            if not schedule.trains:
                held = 0  # no backward follows: a forward keeps nothing beyond its own end


def _first(row: Sequence[Action], kind: str, stage: int) -> Action:
    return next(action for action in row if action.kind == kind and action.stage == stage)


def _never(worker: int, action: Action) -> IllegalSchedule:
    return IllegalSchedule(f"worker {worker} never does {action.describe()}", worker, action)
