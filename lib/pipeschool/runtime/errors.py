"""How a run fails: one message that names worker, action, microbatch and peer. No torch import."""

from __future__ import annotations

import errno
import linecache
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from pipeschool.actions import Action

MOST_TEXT = 400  # characters of what an exception says, before it is cut to SHORT_TEXT
SHORT_TEXT = 150
MOST_FRAMES = 6  # lines of a traceback that are shown
MOST_MESSAGE = 1000  # characters of a message
LOST_KINDS = {"DistBackendError", "DistNetworkError"}  # of torch.distributed
LOST_WORDS = (
    *("connection closed", "connection reset", "connection refused", "broken pipe", "timed out"),
    "gloo/transport",
)
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


def shortened(text: str, most: int = MOST_TEXT, to: int = SHORT_TEXT) -> str:
    """`text`; where it is longer than `most` characters, its start and its end: `to` in all."""
    if len(text) <= most:
        return text
    end = to // 4
    return f"{text[: to - end - 5]} ... {text[-end:]}"


def text_of(error: BaseException) -> str:
    """What `error` says, as far as it can."""
    try:
        return str(error)
    except Exception:
        return "(it cannot say what: its __str__ fails)"


def with_frames(message: str, frames: Sequence[Frame]) -> str:
    """`message`, and under it the learner's own lines, outermost first. Of many, as an endless
    recursion has, the first and the last are shown."""
    lines = [shortened(str(frame), 200) for frame in frames]
    if len(lines) > MOST_FRAMES:
        left_out = f"... {len(lines) - MOST_FRAMES + 1} more lines ..."
        lines = [lines[0], left_out, *lines[-(MOST_FRAMES - 2) :]]
    while lines and len(message) + sum(len(line) + 3 for line in lines) > MOST_MESSAGE:
        lines.pop(0)  # the innermost says most
    return "".join([message, *(f"\n  {line}" for line in lines)])


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
        super().__init__(shortened(message, MOST_MESSAGE, MOST_MESSAGE))
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
    """Let a notebook show a ValueError or a TypeError of ours as its one sentence, without the
    library's frames.

    One that comes from the caller's own code, such as a loader, keeps its traceback.
    """

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if source.is_relative_to(LIBRARY):
                sentence = f"{type(error).__name__}: {error}"
                error._render_traceback_ = lambda: [sentence]  # type: ignore[union-attr]
            raise

    return called


CURES = {
    errno.EMFILE: "allow more open files, such as with `ulimit -n 1024`, or take fewer workers",
    errno.ENFILE: "this machine has too many open files: end other programs",
    errno.EROFS: "it must be possible to write there",
    errno.ENOSPC: "make room there",
}


@contextmanager
def or_not_started() -> Iterator[None]:
    """RunError, in one sentence, where this system does not let workers start."""
    try:
        yield
    except (OSError, EOFError) as error:
        said = shortened(str(error), SHORT_TEXT) or type(error).__name__
        cure = CURES.get(getattr(error, "errno", None) or 0, "")
        ending = f": {cure}" if cure else ""
        raise RunError(f"the workers could not be started: {said}{ending}") from None


class RunStopped(KeyboardInterrupt):
    """The stop button, or Ctrl-C, ended the run."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class PeerLost(RuntimeError):
    """The other end of a message is gone; why is for the controller to find out."""


def lost_connection(error: RuntimeError) -> bool:
    """Does torch.distributed say with `error` that it has lost a connection? NCCL has types of its
    own for that, gloo has nothing but words; what says nothing at all is taken for it as well."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    words = str(error).lower()
    enforced = "enforce fail" in words  # an argument that gloo does not take, wherever it says so
    said = not words or any(word in words for word in LOST_WORDS)
    return bool(kinds & LOST_KINDS) or (type(error) is RuntimeError and said and not enforced)


def or_peer_lost(call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)``, a send or receive of ours: where it fails, the connection has."""
    try:
        return call(*args)
    except RuntimeError as error:
        if not lost_connection(error):
            raise
        raise PeerLost(str(error).partition("\n")[0]) from None
