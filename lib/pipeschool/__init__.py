"""pipeschool: pipeline-parallel training that a learner can write, run and check.

A schedule is plain data; the simulator, the workers, the plots and the graders all read it.
Importing pipeschool does not import torch: that waits until something runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeschool.actions import Action, B, F, I, IllegalSchedule, Schedule, U, W
from pipeschool.checking import check
from pipeschool.cost import Cost
from pipeschool.greedy_schedule import greedy
from pipeschool.lateness import delays, why_late
from pipeschool.lowering import lower
from pipeschool.optimal import par
from pipeschool.runtime import RunError, RunStopped, profile, run, train
from pipeschool.schedules import (
    SCHEDULES,
    build,
    chimera,
    dualpipe_v,
    eager_1f1b,
    forward_only,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    replicate,
    round_robin,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipeschool.simulator import simulate
from pipeschool.trace import Span, Trace
from pipeschool.versions import Policy

if TYPE_CHECKING:  # the modules of _LATER, for editors and type checkers
    from pipeschool import draw as draw
    from pipeschool import formats as formats
    from pipeschool import grade as grade
    from pipeschool import mix as mix
    from pipeschool import partition as partition
    from pipeschool import stability as stability
    from pipeschool import tune as tune
    from pipeschool import widgets as widgets

__version__ = "0.1.0"

__all__ = [
    "SCHEDULES",
    "Action",
    "B",
    "Cost",
    "F",
    "I",
    "IllegalSchedule",
    "Policy",
    "RunError",
    "RunStopped",
    "Schedule",
    "Span",
    "Trace",
    "U",
    "W",
    "build",
    "check",
    "chimera",
    "delays",
    "forward_only",
    "dualpipe_v",
    "eager_1f1b",
    "gpipe",
    "greedy",
    "interleaved_1f1b",
    "looped_bfs",
    "lower",
    "naive",
    "one_f_one_b",
    "par",
    "pipedream",
    "pipedream_2bw",
    "profile",
    "replicate",
    "round_robin",
    "run",
    "simulate",
    "train",
    "why_late",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

_LATER = {  # modules that load when first used: they need torch, numpy or matplotlib, or are rare
    "draw", "formats", "grade", "mix", "partition", "stability", "tune", "widgets",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"pipeschool.{name}")
    raise AttributeError(f"module 'pipeschool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LATER)
