"""How a run fails: one message that names worker, action, microbatch and peer. No torch import."""

from __future__ import annotations

import linecache
from typing import NamedTuple

from pipeschool.actions import Action


class Frame(NamedTuple):
    """One line of a traceback, without its text: that is looked up where the source is known."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line} in {self.function}" + (f": {text}" if text else "")


class RunError(RuntimeError):
    """A run that ended early. All its workers are gone; the next run starts afresh.

    Attributes: `worker`, `action`, `peer` (each None where there is none), `frames` (the
    learner's own lines, outermost first).
    """

    def __init__(
        self,
        message: str,
        worker: int | None = None,
        action: Action | None = None,
        peer: int | None = None,
        frames: tuple[Frame, ...] = (),
    ):
        super().__init__(message)
        self.worker = worker
        self.action = action
        self.peer = peer
        self.frames = frames
        self.printed_elsewhere = False  # another process of this machine tells the user

    @property
    def microbatch(self) -> int | None:
        """The microbatch of `action`, or None."""
        return None if self.action is None else self.action.microbatch

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message, without the library's own frames."""
        return [f"{type(self).__name__}: {self}"]


class RunStopped(KeyboardInterrupt):
    """The stop button, or Ctrl-C, ended the run."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
