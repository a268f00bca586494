"""Actions and schedules: who does what, in which order. Plain data, no torch.

An `Action` is one cell of a pipeline chart. Its text is the one that PyTorch's schedule files use:
``2F5`` is the forward of microbatch 5 on stage 2. A `Schedule` is one row of actions per worker.
Everything else in pipeschool reads these two: the simulator, the workers, the plots, the graders.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

COMPUTE_KINDS = ("F", "B", "I", "W")
MESSAGE_KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
KINDS = (*COMPUTE_KINDS, "U", *MESSAGE_KINDS)

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "U": "optimizer update",
    "SEND_F": "send of the activations",
    "RECV_F": "receive of the activations",
    "SEND_B": "send of the gradients",
    "RECV_B": "receive of the gradients",
}
MOST_ACTIONS = 10_000  # of a worker for one microbatch: a row with more would never end


class IllegalSchedule(ValueError):
    """A schedule that must not run. The message is one sentence.

    Attributes: `worker` (its number or None) and `action` (an `Action` or None).
    """

    def __init__(self, message: str, worker: int | None = None, action: Action | None = None):
        super().__init__(message)
        self.worker = worker
        self.action = action

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence, without the library's own frames."""
        return [f"{type(self).__name__}: {self}"]

    @property
    def microbatch(self) -> int | None:
        """The microbatch of `action`; None where there is none, as in an update."""
        return None if self.action is None or self.action.kind == "U" else self.action.microbatch


class Action(NamedTuple):
    """One thing that one worker does: `kind` on `stage` for `microbatch`, all counted from 0.

    Kinds: ``F`` forward, ``B`` whole backward, ``I`` input gradient, ``W`` weight gradient,
    ``U`` optimizer update, and the messages ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
    For ``U`` the number counts updates, not microbatches.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_message(self) -> bool:
        """True for sends and receives."""
        return self.kind in MESSAGE_KINDS

    def describe(self) -> str:
        """In words, for error messages: ``2F5 (forward of microbatch 5 on stage 2)``."""
        what = "number" if self.kind == "U" else "of microbatch"
        return f"{self} ({KIND_NAMES[self.kind]} {what} {self.microbatch} on stage {self.stage})"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `text` names, such as ``2F5``; ValueError where it names none."""
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text.strip())
        if not match or match[2] not in KINDS:
            raise ValueError(
                f"{text!r} is no action: write stage, kind and microbatch, such as 2F5, "
                f"with a kind out of {', '.join(KINDS)}"
            )
        return cls(match[2], int(match[1]), int(match[3]))


def F(stage: int, microbatch: int) -> Action:
    """Forward of `microbatch` on `stage`."""
    return Action("F", stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    """Whole backward (input and weight gradients) of `microbatch` on `stage`."""
    return Action("B", stage, microbatch)


def I(stage: int, microbatch: int) -> Action:  # noqa: E743  (the field's own letter)
    """Input-gradient half of a split backward."""
    return Action("I", stage, microbatch)


def W(stage: int, microbatch: int) -> Action:
    """Weight-gradient half of a split backward."""
    return Action("W", stage, microbatch)


def U(stage: int, update: int) -> Action:
    """Optimizer update number `update` of `stage`."""
    return Action("U", stage, update)


def whole_number(name: str, value: object, at_least: int = 1) -> int:
    """`value` as an int of `at_least` or more; otherwise ValueError, in one sentence."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be a whole number of at least {at_least}, not {value!r}")
    number = int(value.__index__())
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {number}")
    return number


def a_schedule(value: object) -> None:
    """ValueError where `value` is no schedule."""
    if not isinstance(value, Schedule):
        raise ValueError(
            f"schedule must be a pipeschool Schedule, such as ps.gpipe(p=4, m=8), "
            f"not {type(value).__name__}"
        )


@dataclass(frozen=True)
class Schedule:
    """One row of actions per worker, in the order in which that worker does them.

    `m` is the number of microbatches of one batch, `batches` how many batches follow each other;
    microbatches are numbered through, 0 to m * batches - 1. `weights` names the weight-version
    policy: ``flush`` (synchronous: one update per batch, with nothing in flight) or a policy of
    an asynchronous schedule, such as ``stash``; ``frozen`` is for forwards alone. An update takes
    the gradients of `updates_every` microbatches.

    overlapped: pairs of a forward and a backward, next to each other in a row, that a device may do
        at the same time, as DualPipe has them; here the two are done in turn.
    replicas: the workers of each stage, where some have several. They hold a copy of the stage
        each and take turns: microbatch k is for number k % (how many there are). An update sums
        the gradients of all.
    chunks: stages into which a worker's share of one model is cut; where it is not given, as many
        as there are stages per worker.

    What has another form than this raises ValueError, or `IllegalSchedule` where it is in a row.
    Whether the schedule can be done is for `check` to say.
    """

    name: str
    p: int
    m: int
    workers: tuple[tuple[Action, ...], ...]
    batches: int = 1
    weights: str | type = "flush"
    updates_every: int = 0  # 0 stands for m
    replicas: tuple[tuple[int, ...], ...] = ()
    chunks: int = 0
    overlapped: frozenset[tuple[Action, Action]] = frozenset()

    def __post_init__(self) -> None:
        for name, least in (
            ("p", 1),
            ("m", 1),
            ("batches", 1),
            ("updates_every", 0),
            ("chunks", 0),
        ):
            whole_number(name, getattr(self, name), least)
        formed = {
            "workers": _as_rows(self.workers, self.name, self.microbatches),
            "updates_every": self.updates_every or self.m,
            "replicas": _as_replicas(self.replicas),
            "overlapped": _as_pairs(self.overlapped),
        }
        for name, value in formed.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else

    @property
    def microbatches(self) -> int:
        """All microbatches of all batches."""
        return self.m * self.batches

    @property
    def synchronous(self) -> bool:
        """True where every batch ends in a flush before any weight changes."""
        return self.weights == "flush"

    @property
    def trains(self) -> bool:
        """False where there are forwards alone: inference."""
        return self.weights != "frozen"

    @cached_property
    def lowered(self) -> bool:
        """True where the rows hold sends and receives, not compute alone."""
        return any(action.is_message for row in self.workers for action in row)

    @cached_property
    def stages(self) -> int:
        """Number of stages, all workers together."""
        return 1 + max((action.stage for row in self.workers for action in row), default=-1)

    @property
    def v(self) -> int:
        """Chunks per worker: stages into which its share of one model is cut.

        Where nothing trains, several stages of a worker are one and the same at different tokens.
        """
        return self.chunks or (max(1, self.stages // self.p) if self.trains else 1)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The worker of each stage; the first, where several take turns."""
        if self.replicas:
            return tuple(workers[0] for workers in self.replicas)
        owner = {action.stage: w for w, row in enumerate(self.workers) for action in row}
        return tuple(owner.get(stage, -1) for stage in range(self.stages))

    @cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each stage, one or several that take turns."""
        return self.replicas or tuple((worker,) for worker in self.placement)

    @cached_property
    def period(self) -> int:
        """After how many microbatches all turns begin again; 1 where every stage has one worker."""
        return math.lcm(*map(len, self.owners))

    def owner(self, stage: int, microbatch: int) -> int:
        """The worker that does `microbatch` on `stage`."""
        workers = self.owners[stage]
        return workers[microbatch % len(workers)]

    def microbatches_of(self, stage: int, worker: int) -> range:
        """The microbatches that `worker` does on `stage`, which it holds."""
        workers = self.owners[stage]
        return range(workers.index(worker), self.microbatches, len(workers))

    def stages_of(self, worker: int) -> list[int]:
        """The stages that `worker` holds, in order."""
        return [stage for stage, workers in enumerate(self.owners) if worker in workers]

    def repeat(self, batches: int) -> Schedule:
        """A synchronous schedule for `batches` batches: after each flush the same order again."""
        whole_number("batches", batches)
        if not self.synchronous or self.batches != 1:
            raise ValueError(
                f"only a synchronous schedule of one batch can be repeated; {self.name} has "
                f"weights={self.weights!r} and batches={self.batches}: build it with batches="
            )

        def later(a: Action, n: int) -> Action:
            return Action(a.kind, a.stage, a.microbatch + n * (1 if a.kind == "U" else self.m))

        return replace(
            self,
            workers=tuple(
                tuple(later(a, n) for n in range(batches) for a in row) for row in self.workers
            ),
            batches=batches,
            overlapped=frozenset(
                (later(a, n), later(b, n)) for n in range(batches) for a, b in self.overlapped
            ),
        )

    @classmethod
    def from_workers(
        cls,
        order: Callable[[int, int, int], Iterable[Action]],
        p: int,
        m: int,
        *,
        batches: int = 1,
        weights: str | type = "flush",
        updates_every: int | None = None,
        name: str | None = None,
    ) -> Schedule:
        """A schedule from your own ``order(worker, p, m)``, which lists one worker's actions.

        List `F` and `B` (or `I` and `W`). Where you give no `U`, an update follows after every
        `updates_every` backwards of a stage: m of them when `weights` is ``flush``, otherwise one,
        unless you say so. An asynchronous order is asked once, with all m * batches microbatches
        of the stream. `weights` is the name of a policy, or a subclass of `versions.Policy`.

        Raises ValueError for arguments that do not fit, and where `order` fails or lists something
        else than actions. Its NotImplementedError is let through: it is not written yet.

        >>> Schedule.from_workers(lambda w, p, m: [F(w, 0), B(w, 0)], p=2, m=1).workers[1]
        (Action(kind='F', stage=1, microbatch=0), Action(kind='B', stage=1, microbatch=0), \
Action(kind='U', stage=1, microbatch=0))
        """
        p, m = whole_number("p", p), whole_number("m", m)
        batches = whole_number("batches", batches)
        if not callable(order):
            raise ValueError(
                f"order must be a function order(worker, p, m) that lists the actions of a worker, "
                f"not {_shown(order)}"
            )
        label = str(name or getattr(order, "__name__", "my order"))
        stream = 1 if weights == "flush" else batches
        every = whole_number("updates_every", updates_every or (m if weights == "flush" else 1))
        rows = [_asked(order, label, worker, p, m * stream) for worker in range(p)]
        if not any(action.kind == "U" for row in rows for action in row):
            rows = [with_updates(row, every) for row in rows]
        schedule = cls(
            name=label,
            p=p,
            m=m,
            workers=tuple(map(tuple, rows)),
            batches=stream,
            weights=weights,
            updates_every=every,
        )
        return schedule if stream == batches else schedule.repeat(batches)

    def __str__(self) -> str:
        title = f"{self.name}: p={self.p}, m={self.m}"
        title += f", batches={self.batches}" if self.batches > 1 else ""
        cells = [[str(action) for action in row] for row in self.workers]
        width = max((len(cell) for row in cells for cell in row), default=1)
        lines = [
            f"worker {w} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
            for w, row in enumerate(cells)
        ]
        return "\n".join([title, *lines])


def with_updates(row: Sequence[Action], every: int) -> list[Action]:
    """`row` with an optimizer update of a stage after every `every` of its backwards.

    Where sends follow the backward they go first: a neighbour waits for them.
    """
    done: list[Action] = []
    due: list[Action] = []
    backwards: Counter[int] = Counter()
    for action in row:
        if action.kind not in ("SEND_F", "SEND_B"):
            done += due
            due = []
        done.append(action)
        if action.kind in ("B", "W"):
            backwards[action.stage] += 1
            if backwards[action.stage] % every == 0:
                due.append(U(action.stage, backwards[action.stage] // every - 1))
    return done + due


def peak_in_flight(actions: Iterable[Action]) -> int:
    """The most activations held at once by a worker that does `actions` in this order.

    A forward takes one; the backward (or, when it is split, its weight half) gives it back. Where
    no backward follows, a forward keeps nothing beyond its own end.
    """
    held = peak = 0
    row = list(actions)
    if not any(action.kind in ("B", "W") for action in row):
        return min(1, sum(action.kind == "F" for action in row))
    for action in row:
        if action.kind == "F":
            held += 1
            peak = max(peak, held)
        elif action.kind in ("B", "W"):
            held -= 1
    return peak


def _asked(
    order: Callable[[int, int, int], Iterable[Action]], label: str, worker: int, p: int, m: int
) -> list[Action]:
    """What `order` lists for `worker`, in the form of a row; ValueError where it is none."""
    try:
        row = _as_row(order(worker, p, m), label, worker, m, "returned", "it must return")
    except (IllegalSchedule, NotImplementedError):
        raise
    except Exception as error:
        failed = f"{type(error).__name__}: {_shown(error, str)}".removesuffix(": ")
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


def _as_rows(workers: object, label: str, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """`workers` as one row of actions per worker; ValueError where it holds something else."""
    if isinstance(workers, (str, Action)) or not isinstance(workers, Sequence):
        raise ValueError(
            f"workers must be a list with one row of actions per worker, such as [[ps.F(0, 0), "
            f"ps.B(0, 0)]], not {_shown(workers)}"
        )
    return tuple(
        _as_row(row, label, worker, microbatches, "has", "a row must be")
        for worker, row in enumerate(workers)
    )


def _as_row(
    actions: object, label: str, worker: int, microbatches: int, has: str, must: str
) -> tuple[Action, ...]:
    """`actions` as a row; IllegalSchedule where it is none. Whether there are such kinds, stages
    and microbatches is not asked here."""
    wanted = f"{must} a list of actions such as [ps.F(0, 0), ps.B(0, 0)]"
    unlike = (str, Action, Set, Mapping)  # iterable, but no list of actions
    if isinstance(actions, unlike) or not isinstance(actions, Iterable):
        raise IllegalSchedule(
            f"{label} {has} {_shown(actions)} for worker {worker}: {wanted}", worker
        )
    most = MOST_ACTIONS * microbatches
    row = tuple(islice(actions, most + 1))
    if len(row) > most:
        raise IllegalSchedule(
            f"{label} {has} more than {most} actions for worker {worker} and {microbatches} "
            f"microbatches: {must} a list that comes to an end",
            worker,
        )
    if _well_formed(row):
        return row
    for item in row:
        if not isinstance(item, Action):
            raise IllegalSchedule(
                f"{label} listed {_shown(item)} for worker {worker}: {wanted}", worker
            )
        if not isinstance(item.kind, str):
            raise IllegalSchedule(
                f"{label} listed kind {_shown(item.kind)}; allowed are {', '.join(KINDS)}", worker
            )
        for name, value in (("stage", item.stage), ("microbatch", item.microbatch)):
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise IllegalSchedule(
                    f"the {name} of {_shown(item, str)} must be a whole number of at least 0, not "
                    f"{_shown(value)}",
                    worker,
                )
    return row


def _well_formed(row: Sequence[object]) -> bool:
    """Quickly, for long rows: are these plain actions, of text and two ints?"""
    if not {*map(type, row)} <= {Action}:
        return False
    return all(
        {*map(type, map(itemgetter(place), row))} <= {plain}  # type: ignore[arg-type]  # see above
        for place, plain in enumerate((str, int, int))
    )


def _as_replicas(replicas: object) -> tuple[tuple[int, ...], ...]:
    """`replicas` as the workers of each stage; ValueError where it is something else."""
    wrong = ValueError(
        "replicas must list the workers of each stage by their numbers, such as ((0, 1), (2,)), "
        f"not {_shown(replicas)}"
    )
    if isinstance(replicas, str) or not isinstance(replicas, Sequence):
        raise wrong
    for workers in replicas:
        if isinstance(workers, str) or not isinstance(workers, Sequence):
            raise wrong
        if any(isinstance(w, bool) or not hasattr(w, "__index__") for w in workers):
            raise wrong
    return tuple(map(tuple, replicas))


def _as_pairs(overlapped: Any) -> frozenset[tuple[Action, Action]]:
    """`overlapped` as a set of pairs; ValueError where it is something else."""
    pairs = overlapped if isinstance(overlapped, (Set, Sequence)) else [overlapped]
    for pair in pairs:
        actions = isinstance(pair, (tuple, list)) and all(isinstance(a, Action) for a in pair)
        if not actions or len(pair) != 2:
            raise ValueError(
                "overlapped must be a set of pairs of actions, such as {(ps.F(0, 1), ps.B(0, 0))}, "
                f"not {_shown(overlapped)}"
            )
    return frozenset((a, b) for a, b in pairs)


def _shown(value: object, text: Callable[[object], str] = repr) -> str:
    """`value` for a sentence: on one line, and not too long."""
    line = " ".join(text(value).split())
    return line if len(line) <= 100 else f"{line[:97]}..."
