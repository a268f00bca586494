"""The form of a schedule: what is no list of actions is refused here, in one sentence.

Whether actions of the right form can be done, in this order, is for `check` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

from pipeschool.actions.action import KINDS, Action, IllegalSchedule
from pipeschool.arguments import whole_number

MOST_ACTIONS = 10_000  # of a worker for one microbatch: a row with more would never end


def row_from_order(
    order: Callable[[int, int, int], Iterable[Action]], label: str, worker: int, p: int, m: int
) -> list[Action]:
    """What `order` lists for `worker`, in the form of a row; ValueError where it is none."""
    try:
        row = as_row(order(worker, p, m), label, worker, m, "returned", "it must return")
    except (IllegalSchedule, NotImplementedError):
        raise
    except Exception as error:
        failed = f"{type(error).__name__}: {shown(error, str)}".removesuffix(": ")
        raise ValueError(
            f"{label} failed for worker {worker} of p={p}, m={m} with {failed}: order(worker, p, "
            "m) must list the actions of that worker"
        ) from error
    for item in row:
        if item.kind not in KINDS:
            raise ValueError(f"{label} listed kind {item.kind!r}; allowed are {', '.join(KINDS)}")
        whole_number(f"the stage of {item}", item.stage, at_least=0)
        whole_number(f"the microbatch of {item}", item.microbatch, at_least=0)
    return list(row)


def as_rows(
    workers: object, label: str, microbatches: int, fused: bool
) -> tuple[tuple[Action, ...], ...]:
    """`workers` as one row of actions per worker, the sends first in each of its groups where they
    are fused; ValueError where it holds something else."""
    if isinstance(workers, (str, Action)) or not isinstance(workers, Sequence):
        raise ValueError(
            f"workers must be a list with one row of actions per worker, such as [[ps.F(0, 0), "
            f"ps.B(0, 0)]], not {shown(workers)}"
        )
    rows = (
        as_row(row, label, worker, microbatches, "has", "a row must be")
        for worker, row in enumerate(workers)
    )
    return tuple(tuple(chain(*groups(row))) if fused else row for row in rows)


def as_row(
    actions: object, label: str, worker: int, microbatches: int, has: str, must: str
) -> tuple[Action, ...]:
    """`actions` as a row; IllegalSchedule where it is none. Whether there are such kinds, stages
    and microbatches is not asked here."""
    wanted = f"{must} a list of actions such as [ps.F(0, 0), ps.B(0, 0)]"
    unlike = (str, Action, Set, Mapping)  # iterable, but no list of actions
    if isinstance(actions, unlike) or not isinstance(actions, Iterable):
        raise IllegalSchedule(
            f"{label} {has} {shown(actions)} for worker {worker}: {wanted}", worker
        )
    most = MOST_ACTIONS * microbatches
    row = tuple(islice(actions, most + 1))
    if len(row) > most:
        raise IllegalSchedule(
            f"{label} {has} more than {most} actions for worker {worker} and {microbatches} "
            f"microbatches: {must} a list that comes to an end",
            worker,
        )
    if well_formed(row):
        return row
    for item in row:
        if not isinstance(item, Action):
            raise IllegalSchedule(
                f"{label} listed {shown(item)} for worker {worker}: {wanted}", worker
            )
        if not isinstance(item.kind, str):
            raise IllegalSchedule(
                f"{label} listed kind {shown(item.kind)}; allowed are {', '.join(KINDS)}", worker
            )
        for name, value in (("stage", item.stage), ("microbatch", item.microbatch)):
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise IllegalSchedule(
                    f"the {name} of {shown(item, str)} must be a whole number of at least 0, not "
                    f"{shown(value)}",
                    worker,
                )
    return row


def groups(row: Iterable[Action]) -> Iterator[tuple[Action, ...]]:
    """The row cut into what is fused: sends and receives that stand next to each other together,
    sends first; everything else by itself."""
    for messages, run in groupby(row, key=lambda action: action.is_message):
        if messages:
            yield tuple(sorted(run, key=lambda action: action.kind.startswith("RECV")))
        else:
            yield from ((action,) for action in run)


def well_formed(row: Sequence[object]) -> bool:
    """Quickly, for long rows: are these plain actions, of text and two ints?"""
    if not {*map(type, row)} <= {Action}:
        return False
    return all(
        {*map(type, map(itemgetter(place), row))} <= {plain}  # type: ignore[arg-type]  # see above
        for place, plain in enumerate((str, int, int))
    )


def as_replicas(replicas: object) -> tuple[tuple[int, ...], ...]:
    """`replicas` as the workers of each stage; ValueError where it is something else."""
    wrong = ValueError(
        "replicas must list the workers of each stage by their numbers, such as ((0, 1), (2,)), "
        f"not {shown(replicas)}"
    )
    if isinstance(replicas, str) or not isinstance(replicas, Sequence):
        raise wrong
    for workers in replicas:
        if isinstance(workers, str) or not isinstance(workers, Sequence):
            raise wrong
        if any(isinstance(w, bool) or not hasattr(w, "__index__") for w in workers):
            raise wrong
    return tuple(map(tuple, replicas))


def as_pairs(overlapped: Any) -> frozenset[tuple[Action, Action]]:
    """`overlapped` as a set of pairs; ValueError where it is something else."""
    pairs = overlapped if isinstance(overlapped, (Set, Sequence)) else [overlapped]
    for pair in pairs:
        actions = isinstance(pair, (tuple, list)) and all(isinstance(a, Action) for a in pair)
        if not actions or len(pair) != 2:
            raise ValueError(
                "overlapped must be a set of pairs of actions, such as {(ps.F(0, 1), ps.B(0, 0))}, "
                f"not {shown(overlapped)}"
            )
    return frozenset((a, b) for a, b in pairs)


def shown(value: object, text: Callable[[object], str] = repr) -> str:
    """`value` for a sentence: on one line, and not too long."""
    line = " ".join(text(value).split())
    return line if len(line) <= 100 else f"{line[:97]}..."
