"""The stop button, held back where it would leave something half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """An interrupt that comes within this is raised at its end.

    An import that is broken off leaves half a module behind, and only a new process cures that.
    Python interrupts the main thread alone, so in any other there is nothing to do.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pressed: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            before(signal.SIGINT, pressed[0])


@contextmanager
def blocked_for_children() -> Iterator[None]:
    """A process that is started within this begins deaf to Ctrl-C, which the terminal sends to it
    as well. For this one it is delayed until the end."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
