"""pipeschool: pipeline-parallel training that a learner can write, run and check.

A schedule is plain data; the simulator, the workers, the plots and the graders all read it.
Importing pipeschool does not import torch: that waits until something runs.
"""

from __future__ import annotations

import importlib
from typing import Any

from pipeschool.actions import Action, B, F, I, IllegalSchedule, Schedule, U, W
from pipeschool.check import check
from pipeschool.cost import Cost
from pipeschool.lower import lower
from pipeschool.run import RunError, RunStopped, profile, run, train
from pipeschool.schedules import (
    SCHEDULES,
    build,
    chimera,
    forward_only,
    gpipe,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
)
from pipeschool.simulate import simulate
from pipeschool.trace import Span, Trace
from pipeschool.versions import Policy

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
    "forward_only",
    "gpipe",
    "lower",
    "naive",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "profile",
    "run",
    "simulate",
    "train",
]

_LATER = {"draw", "formats", "grade", "partition", "widgets"}  # modules that load when first used


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"pipeschool.{name}")
    raise AttributeError(f"module 'pipeschool' has no attribute {name!r}")
