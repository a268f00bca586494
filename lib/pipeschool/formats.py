"""PyTorch's schedule files, both ways: one CSV row per worker, one action per cell.

`to_csv` writes what ``torch.distributed.pipelining`` loads with ``_load_csv``: ``compute_only``
for a schedule as the builders make it, ``compute_comms`` for one that went through `lower`.
Such a file describes one batch. It has no updates; the flush at the end is understood. A cell may
join two actions that a device does at the same time: ``(0F7;7B3)OVERLAP_F_B``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Container, Iterator, Sequence
from itertools import chain

from pipeschool.actions import Action, Schedule, with_updates
from pipeschool.arguments import whole_number

# Cells that PyTorch adds where parameters are sharded over data-parallel ranks.
SHARDING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
JOINED = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """`schedule` as PyTorch's CSV text, updates left out; ends in a newline.

    A pair out of `schedule.overlapped` shares a cell where nothing stands between the two.
    Raises ValueError for what the file could not say: a flush between batches, several workers
    that take turns at a stage, messages that are fused.
    """
    if schedule.replicas:
        raise ValueError(
            f"PyTorch's schedule file knows one worker per stage, but in {schedule.name} several "
            "take turns"
        )
    if schedule.fused:
        raise ValueError(
            "PyTorch's schedule file cannot say which messages are fused: write lower(schedule), "
            "without fuse"
        )
    if schedule.synchronous and schedule.batches > 1:
        raise ValueError(
            f"PyTorch's schedule file holds one batch, but this {schedule.name} flushes between "
            f"{schedule.batches}: write it with batches=1"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in schedule.workers:
        writer.writerow(_cells([a for a in row if a.kind != "U"], schedule.overlapped))
    return text.getvalue()


def from_csv(
    text: str, p: int | None = None, m: int | None = None, name: str = "from CSV"
) -> Schedule:
    """The schedule in PyTorch's CSV `text`, with the flush and its updates at the end of each row;
    one of forwards alone is taken for inference.

    p, m: workers and microbatches; where they are not given, the number of rows and of
        microbatches in the file. Cells may be empty (idle), and sharding cells are left out. A cell
        that joins two actions gives both, in this order, and the pair to `Schedule.overlapped`.
    Raises ValueError, naming row and column counted from 1, where the text is no schedule. Whether
    the schedule is legal is for `check` to say.
    """
    lines = csv.reader(io.StringIO(text.lstrip("\ufeff").rstrip()))
    try:
        rows = [
            [_cell(cell, row, column) for column, cell in enumerate(cells, start=1)]
            for row, cells in enumerate(lines, start=1)
        ]
    except csv.Error as error:
        raise ValueError(f"row {lines.line_num}: {error}") from None
    if not any(any(row) for row in rows):
        raise ValueError("the schedule file holds no action: write one row of cells per worker")
    if p is not None and whole_number("p", p) != len(rows):
        raise ValueError(f"the schedule file has {len(rows)} rows, one per worker, but p is {p}")
    _check_numbering(rows)
    if m is None:
        m = 1 + max(action.microbatch for row in rows for cell in row for action in cell)
    whole_number("m", m)
    workers = tuple(tuple(with_updates(list(chain(*row)), every=m)) for row in rows)
    pairs = frozenset((cell[0], cell[1]) for row in rows for cell in row if len(cell) == 2)
    trains = any(action.kind in ("B", "I", "W") for row in workers for action in row)
    weights = "flush" if trains else "frozen"
    return Schedule(name, len(rows), m, workers, weights=weights, overlapped=pairs)


def _cells(row: Sequence[Action], overlapped: Container[object]) -> Iterator[str]:
    """The text of each cell of a row."""
    place = 0
    while place < len(row):
        pair = tuple(row[place : place + 2])
        joined = pair in overlapped
        yield f"({pair[0]};{pair[1]})OVERLAP_F_B" if joined else str(row[place])
        place += 2 if joined else 1


def _cell(cell: str, row: int, column: int) -> tuple[Action, ...]:
    """The actions in a cell: none, one, or two that are joined."""
    cell = cell.strip()
    if not cell or SHARDING.fullmatch(cell):
        return ()
    where = f"row {row} (worker {row - 1}), column {column}"
    joined = JOINED.fullmatch(cell)
    try:
        actions = tuple(map(Action.parse, joined[1].split(";") if joined else [cell]))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if any(action.kind == "U" for action in actions):
        raise ValueError(f"{where}: {cell} is an update, which a schedule file does not list")
    if joined and sorted(action.kind for action in actions) not in (["B", "F"], ["F", "I"]):
        raise ValueError(f"{where}: {cell} must join one forward and one backward")
    return actions


def _check_numbering(rows: list[list[tuple[Action, ...]]]) -> None:
    """No stage and no microbatch has a number beyond how many there are."""
    cells = [
        (action, row, column)
        for row, line in enumerate(rows, start=1)
        for column, actions in enumerate(line, start=1)
        for action in actions
    ]
    for what in ("stage", "microbatch"):
        count = len({getattr(action, what) for action, _, _ in cells})
        action, row, column = max(cells, key=lambda cell: getattr(cell[0], what))
        if getattr(action, what) >= count:
            raise ValueError(
                f"row {row} (worker {row - 1}), column {column}: {action} is of {what} "
                f"{getattr(action, what)}, but the file names only {count}, to be numbered from 0"
            )
