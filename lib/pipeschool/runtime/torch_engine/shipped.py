"""The schedules that PyTorch comes with, as its own tables have them.

The names used here are private and have moved between versions of PyTorch.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from pipeschool.actions import Schedule
from pipeschool.arguments import whole_number
from pipeschool.formats import from_csv

SHIPPED = {  # a name like ours -> PyTorch's, and the chunks per worker where nobody asks
    "gpipe": ("GPipe", 1),
    "1f1b": ("1F1B", 1),
    "interleaved_1f1b": ("Interleaved1F1B", 1),
    "looped_bfs": ("LoopedBFS", 1),
    "interleaved_zero_bubble": ("InterleavedZeroBubble", 1),
    "zbv_zero_bubble": ("ZBVZeroBubble", 2),
    "dualpipe_v": ("DualPipeV", 2),
}


def shipped(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """A schedule that PyTorch comes with, as its own table has it, with our updates at the end.

    name: ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``looped_bfs``, ``interleaved_zero_bubble``
        (with v=1 this is ZB-H1), ``zbv_zero_bubble`` or ``dualpipe_v``.
    v: chunks per worker; 1 where not given, and 2 for the last two, which know nothing else.

    One repair: PyTorch's table of 1F1B counts the last worker's forwards from 1, and its own check
    refuses it (its engine does not read that table). Here they count from 0.

    Raises ValueError for other names, and for sizes that PyTorch refuses.
    """
    if name not in SHIPPED:
        raise ValueError(f"PyTorch ships no schedule {name!r}; choose one of {', '.join(SHIPPED)}")
    theirs, usual = SHIPPED[name]
    p, m = whole_number("p", p), whole_number("m", m)
    v = usual if v is None else whole_number("v", v)
    make = schedules.get_schedule_class(theirs)
    alone = issubclass(make, schedules.PipelineScheduleSingle)
    if alone and v != 1:
        raise ValueError(f"{name} has one chunk per worker, so v must be 1, not {v}")
    # All that a table depends on; no process group is needed for it.
    stages = [
        SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, submod=None) for _ in range(v)
    ]
    try:
        order = make(stages[0] if alone else stages, m).pipeline_order
    except ValueError as error:
        raise ValueError(f"PyTorch's {theirs} refuses p={p}, m={m}, v={v}: {error}") from None
    rows = [order[rank] for rank in range(p)]
    if name == "1f1b":
        rows[-1] = counted_from_zero(rows[-1])
    text = "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows)
    return from_csv(text, p, m, name)


def counted_from_zero(row: list[Any]) -> list[Any]:
    """PyTorch's row of 1F1B with its forwards numbered in their order, from 0."""
    numbers = itertools.count()
    return [
        action._replace(microbatch_index=next(numbers))
        if action and action.computation_type == schedules.FORWARD
        else action
        for action in row
    ]
