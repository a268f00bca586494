"""How a run fails: one message that names worker, action, microbatch and peer. No torch import."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from pipeschool.actions import Action

LIBRARY = Path(__file__).parents[1]  # all of pipeschool
Given = ParamSpec("Given")
Result = TypeVar("Result")


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


def one_sentence_errors(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let a notebook show a ValueError of ours as its one sentence, without the library's frames.

    One that comes from the caller's own code, such as a loader, keeps its traceback.
    """

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if source.is_relative_to(LIBRARY):
                sentence = f"{type(error).__name__}: {error}"
                error._render_traceback_ = lambda: [sentence]  # type: ignore[attr-defined]
            raise

    return called


class RunStopped(KeyboardInterrupt):
    """The stop button, or Ctrl-C, ended the run."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class PeerLost(RuntimeError):
    """The other end of a message is gone; why is for the controller to find out."""


def is_lost_connection(error: BaseException, said: str) -> bool:
    """Has torch.distributed lost a peer? gloo says which file of its own noticed; NCCL and the
    store have types of their own. Any other error of torch is what it says."""
    types = {cls.__name__ for cls in type(error).__mro__}
    return "DistError" in types or (isinstance(error, RuntimeError) and "gloo/transport" in said)


def or_peer_lost(call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)``, a send or receive of ours: where it fails, the connection has."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise PeerLost(str(error).partition("\n")[0]) from None
