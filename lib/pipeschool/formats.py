"""PyTorch's schedule files, both ways: one CSV row per worker, one action per cell.

`to_csv` writes what ``torch.distributed.pipelining`` loads with ``_load_csv``: ``compute_only``
for a schedule as the builders make it, ``compute_comms`` for one that went through `lower`.
Such a file describes one batch. It has no updates; the flush at the end is understood.
"""

from __future__ import annotations

import csv
import io
import re

from pipeschool.actions import Action, Schedule, whole_number, with_updates

# Cells that PyTorch adds where parameters are sharded over data-parallel ranks.
SHARDING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def to_csv(schedule: Schedule) -> str:
    """`schedule` as PyTorch's CSV text, updates left out; ends in a newline.

    Raises ValueError for what the file could not say: a flush between batches, a second copy of
    the model.
    """
    if schedule.copies > 1:
        raise ValueError(
            f"PyTorch's schedule file knows one copy of the model, but {schedule.name} trains "
            f"{schedule.copies}"
        )
    if schedule.synchronous and schedule.batches > 1:
        raise ValueError(
            f"PyTorch's schedule file holds one batch, but this {schedule.name} flushes between "
            f"{schedule.batches}: write it with batches=1"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in schedule.workers:
        writer.writerow(action for action in row if action.kind != "U")
    return text.getvalue()


def from_csv(
    text: str, p: int | None = None, m: int | None = None, name: str = "from CSV"
) -> Schedule:
    """The schedule in PyTorch's CSV `text`, with the flush and its updates at the end of each row.

    p, m: workers and microbatches; where they are not given, the number of rows and of
        microbatches in the file. Cells may be empty (idle), and sharding cells are left out.
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
        m = 1 + max(action.microbatch for row in rows for action in row if action)
    whole_number("m", m)
    workers = tuple(
        tuple(with_updates([action for action in row if action], every=m)) for row in rows
    )
    return Schedule(name, len(rows), m, workers)


def _cell(cell: str, row: int, column: int) -> Action | None:
    """The action in a cell; None where there is none to do."""
    cell = cell.strip()
    if not cell or SHARDING.fullmatch(cell):
        return None
    where = f"row {row} (worker {row - 1}), column {column}"
    if "OVERLAP" in cell:
        raise ValueError(
            f"{where}: {cell} overlaps a forward with a backward, which cannot be read here: give "
            "them a cell each"
        )
    try:
        action = Action.parse(cell)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if action.kind == "U":
        raise ValueError(f"{where}: {cell} is an update, which a schedule file does not list")
    return action


def _check_numbering(rows: list[list[Action | None]]) -> None:
    """No stage and no microbatch has a number beyond how many there are."""
    cells = [
        (action, row, column)
        for row, actions in enumerate(rows, start=1)
        for column, action in enumerate(actions, start=1)
        if action
    ]
    for what in ("stage", "microbatch"):
        count = len({getattr(action, what) for action, _, _ in cells})
        action, row, column = max(cells, key=lambda cell: getattr(cell[0], what))
        if getattr(action, what) >= count:
            raise ValueError(
                f"row {row} (worker {row - 1}), column {column}: {action} is of {what} "
                f"{getattr(action, what)}, but the file names only {count}, to be numbered from 0"
            )
