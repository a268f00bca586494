"""A schedule: one row of actions per worker."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeschool.actions.action import Action, U
from pipeschool.actions.form import as_pairs, as_replicas, as_rows, groups, row_from_order, shown
from pipeschool.arguments import whole_number


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
    fused: sends and receives that stand next to each other in a row are one group. They begin
        together, and the worker goes on when all of them are done, in whatever order that comes, as
        between NCCL's ncclGroupStart and ncclGroupEnd. So their order means nothing, and a row has
        the sends first.

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
    fused: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("p", 1),
            ("m", 1),
            ("batches", 1),
            ("updates_every", 0),
            ("chunks", 0),
        ):
            whole_number(name, getattr(self, name), least)
        if not isinstance(self.fused, bool):
            raise ValueError(f"fused must be True or False, not {shown(self.fused)}")
        formed = {
            "workers": as_rows(self.workers, self.name, self.microbatches, self.fused),
            "updates_every": self.updates_every or self.m,
            "replicas": as_replicas(self.replicas),
            "overlapped": as_pairs(self.overlapped),
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
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) of every backward that is done in two halves, I and W."""
        return frozenset(
            (a.stage, a.microbatch) for row in self.workers for a in row if a.kind == "I"
        )

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

    def steps_of(self, worker: int) -> Iterator[tuple[Action, ...]]:
        """What `worker` begins together, in order: each action by itself, or a group of messages
        where they are `fused`."""
        row = self.workers[worker]
        return groups(row) if self.fused else ((action,) for action in row)

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
                f"not {shown(order)}"
            )
        label = str(name or getattr(order, "__name__", "my order"))
        stream = 1 if weights == "flush" else batches
        every = whole_number("updates_every", updates_every or (m if weights == "flush" else 1))
        rows = [row_from_order(order, label, worker, p, m * stream) for worker in range(p)]
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
        title += ", fused" if self.fused else ""
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


def require_schedule(value: object) -> None:
    """ValueError where `value` is no schedule."""
    if not isinstance(value, Schedule):
        raise ValueError(
            f"schedule must be a pipeschool Schedule, such as ps.gpipe(p=4, m=8), "
            f"not {type(value).__name__}"
        )
