"""How the system runs a worker: on which core, and how exactly it ends its sleeps."""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_TIMERSLACK = 29  # of Linux's <sys/prctl.h>


def wake_in_time() -> None:
    """Ask Linux to end this thread's sleeps when they are over. It may else add 0.05 ms to each,
    which is half of what a paced action is late; to spin instead would take the core from another
    worker."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def keep_to_one_core(process: int) -> None:
    """Keep this process on one core, neighbours of a pipeline on different ones. For paced workers,
    which sleep most of the time.

    A system that wakes a receiver may put it on the core of its sender, and there it waits until
    the sender sleeps. That is what virtual machines do, in which an idle core looks taken; it
    doubles the time that a message takes. Workers that really compute are better left to the
    system: two slow stages could find themselves on one core. Where there is no such call (macOS,
    Windows) nothing is done.
    """
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[process % len(allowed)]})
