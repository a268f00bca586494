"""Call a learner's function with care: in time, with copies, and with nothing on stderr."""

from __future__ import annotations

import builtins
import copy
import ctypes
import io
import signal
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from pipeschool.actions import KINDS
from pipeschool.grade.plain import Wrong, code, show

SECONDS = 2.0  # for one call; the calls here need milliseconds
SECONDS_IN_ALL = 20.0  # for all calls of one check
AGAIN = 0.2  # seconds until code that caught a `TimeUp`, with a bare `except:`, gets another

_NOT_THE_LEARNERS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
    "<string>",  # the __init__ that a dataclass has made
)


class NotWritten(Exception):
    """The stub still stands. `str()` of it names the function."""


class TimeUp(BaseException):
    """Raised inside code that runs too long. No Exception: the code must not catch it by chance."""


class Answer:
    """The learner's function, which gives back plain data or raises `Wrong`.

    returns: a reader out of `plain`, which turns what the function returned into plain data.
    """

    def __init__(
        self, function: Callable[..., Any], names: list[str], returns: Callable[[object], Any]
    ):
        self.function = function
        self.names = names  # of the arguments, for messages
        self.returns = returns
        self.latest = ""  # the latest call, as text
        self.printed = Output()  # of the latest call
        self.printed_lines = 0  # in all calls
        self.left = SECONDS_IN_ALL

    def __call__(self, *args: Any) -> Any:
        self.latest = f"{self.function.__name__}({call_text(self.names, args)})"
        given = copy.deepcopy(args)
        output = self.printed = Output()
        limit = max(min(SECONDS, self.left), 0.001)
        begin = time.monotonic()
        try:
            with (
                redirect_stdout(output),
                redirect_stderr(output),
                short_warnings(),
                no_input(),
                time_limit(limit),
            ):
                value = self.returns(self.function(*given))
        except (Wrong, KeyboardInterrupt):
            raise
        except TimeUp:
            if limit < SECONDS:
                wanted = f"all answers of this exercise within {SECONDS_IN_ALL:g} seconds"
                raise Wrong(wanted, "slower ones: this call was not done by then") from None
            got = "still no end: is there a loop whose condition never changes?"
            raise Wrong(f"an answer within {SECONDS:g} seconds", got) from None
        except NotImplementedError as error:
            frame = own_frame(error)
            raise NotWritten(frame.name if frame else self.function.__name__) from None
        except BaseException as error:  # also exit()
            line = _line_text(error)
            hint = "that line: which values do its variables have in this case?" if line else ""
            raise Wrong("no error", _error_text(error), line=line, hint=hint) from None
        finally:
            self.printed_lines += output.lines
            self.left -= time.monotonic() - begin
        for name, before, after in zip(self.names, args, given, strict=True):
            if repr(before) != repr(after):
                texts = show(before), show(after)
                if texts[0] == texts[1]:  # such as 1 and 1.0
                    texts = repr(before)[:160], repr(after)[:160]
                got = f"the call changed it to {texts[1]}"
                hint = f"where `{name}` is changed: work on a copy, such as {copied(name, before)}"
                raise Wrong(f"`{name}` left as it was: {texts[0]}", got, hint=hint)
        return value


def copied(name: str, value: object) -> str:
    """The code that makes a copy of an argument, to its last nested list."""
    if isinstance(value, (list, dict, set)):
        items = value.values() if isinstance(value, dict) else value
        if not any(isinstance(item, (list, dict, set)) for item in items):
            return f"{type(value).__name__}({name})"
    return f"copy.deepcopy({name})"


class Output(io.StringIO):
    """What a call prints: its first few hundred letters, and how many lines there were."""

    lines = 0

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        if self.tell() < 400:
            super().write(text)
        return len(text)


def call_text(names: list[str], args: tuple[Any, ...]) -> str:
    """Arguments as they would be written in a call, to be pasted into a cell."""
    parts = []
    for name, value in zip(names, args, strict=True):
        text = getattr(value, "__name__", None) or code(value)
        parts.append(f"{name}={text}")
    return ", ".join(parts)


@contextmanager
def no_input() -> Iterator[None]:
    """Let a call of `input()` inside fail at once: there is nobody to answer."""

    def refuse(*_: object) -> str:
        raise EOFError("input() is not for answers: all that you need is in the arguments")

    before = builtins.input
    builtins.input = refuse
    try:
        yield
    finally:
        builtins.input = before


@contextmanager
def short_warnings() -> Iterator[None]:
    """Write warnings as one line each, without the name of a temporary file or torch's innards."""

    def short(message: Warning | str, category: type[Warning], *_: object, **__: object) -> str:
        return f"{category.__name__}: {str(message).partition(' (Triggered internally')[0]}\n"

    before = warnings.formatwarning
    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` in the code inside once `seconds` are over.

    With a signal where there are any, because that also ends a sleep. Otherwise (Windows, or not
    in the main thread) another thread raises it between two steps of Python code.
    """
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():

        def stop(*_: object) -> None:
            raise TimeUp

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    else:
        this_thread = ctypes.c_ulong(threading.get_ident())
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        timer = threading.Timer(seconds, raise_in, (this_thread, ctypes.py_object(TimeUp)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost place in the learner's own code that `error` came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_LEARNERS)]
    return own[-1] if own else None


def _line_text(error: BaseException) -> str:
    frame = own_frame(error)
    if frame is None:
        return ""
    where = f"line {frame.lineno} of its cell, in {frame.name}"
    return f"{where}: {frame.line}" if frame.line else where


def _error_text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, NameError):
        if error.name in (*KINDS, "Action"):
            text += f" (write ps.{error.name})"
        else:
            text += " (have you run the cells above?)"
    if isinstance(error, SystemExit):
        text = "a call of exit(), which would end the notebook's kernel"
    return text
