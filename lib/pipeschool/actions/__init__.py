"""Actions and schedules: who does what, in which order. Plain data, no torch.

An `Action` is one cell of a pipeline chart. Its text is the one that PyTorch's schedule files use:
``2F5`` is the forward of microbatch 5 on stage 2. A `Schedule` is one row of actions per worker.
Everything else in pipeschool reads these two: the simulator, the workers, the plots, the graders.
"""

from pipeschool.actions.action import (
    COMPUTE_KINDS,
    KIND_NAMES,
    KINDS,
    MESSAGE_KINDS,
    Action,
    B,
    F,
    I,
    IllegalSchedule,
    U,
    W,
)
from pipeschool.actions.schedule import Schedule, peak_in_flight, require_schedule, with_updates

__all__ = [
    "COMPUTE_KINDS",
    "KINDS",
    "KIND_NAMES",
    "MESSAGE_KINDS",
    "Action",
    "B",
    "F",
    "I",
    "IllegalSchedule",
    "Schedule",
    "U",
    "W",
    "require_schedule",
    "peak_in_flight",
    "with_updates",
]
