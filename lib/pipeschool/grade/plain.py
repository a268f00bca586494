"""Turn what a learner's function returned into plain data, or say what it should have been.

Answers are compared only after this step. Right answers may then come in any reasonable form (a
list, a tuple, a generator, numbers of numpy or torch), and an object that calls itself equal to
everything gets nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import isfinite, nan
from operator import index
from typing import Any

from pipeschool.actions import KINDS, Action
from pipeschool.trace import Trace

MOST_ITEMS = 100_000  # no answer is longer; an endless generator stops here


class Wrong(Exception):
    """One case that failed: what was expected, and what came."""

    def __init__(self, expected: str, got: str, case: str = "", line: str = "", hint: str = ""):
        super().__init__(expected, got)
        self.expected = expected
        self.got = got
        self.case = case  # empty: the latest call of the learner's function
        self.line = line  # the learner's own line, where their code raised
        self.hint = hint  # where to look, if that of the part does not fit
        self.smallest = False  # is it the smallest case that fails, or only the first?
        self.printed = ""  # what their code printed meanwhile


def mistyped(wanted: str, got: str) -> Wrong:
    """For an answer of another type, which has nothing to do with the exercise's own pitfalls."""
    return Wrong(wanted, got, hint="what you return: the stub's docstring says what it should be")


def require(right: bool, expected: str, got: str, case: str = "") -> None:
    """Raise `Wrong` unless `right`."""
    if not right:
        raise Wrong(expected, got, case)


def show(value: object, limit: int = 160) -> str:
    """A short text for a value that may be anything; actions as they stand in a chart. Judges ask
    for it at every step, so it does not look at more of a long list than it shows."""
    text = _text(value, limit)
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def _text(value: object, limit: int) -> str:
    """The text, or as much of it as `limit` needs, and then some."""
    if limit <= 0:
        return "..."  # also where a list holds itself
    if isinstance(value, Action) and len(value) == 3:
        return str(value)
    if isinstance(value, Trace):
        return f"<trace of {value.name}, p={value.p}, m={value.m}>"
    if type(value) is float:
        return f"{value:.6g}"
    if type(value) is list:
        return f"[{_joined((_text(item, limit - 1) for item in value), limit)}]"
    if type(value) is dict:
        pairs = (f"{_text(k, limit - 1)}: {_text(v, limit - 1)}" for k, v in value.items())
        return f"{{{_joined(pairs, limit)}}}"
    try:
        return repr(value)
    except Exception:
        return f"an object of type {type(value).__name__}"


def _joined(texts: Iterable[str], limit: int) -> str:
    parts: list[str] = []
    length = 0
    for text in texts:
        parts.append(text)
        length += len(text) + 2
        if length > limit + 2:
            break
    return ", ".join(parts)


def code(value: object) -> str:
    """A value as code to paste into a cell; where it would be long, or is no plain data, `show`."""
    text = _code(value)
    return text if text and len(text) <= 200 else show(value)


def _code(value: object) -> str:
    if isinstance(value, Action) and len(value) == 3 and value.kind in ("F", "B", "I", "W", "U"):
        return f"ps.{value.kind}({value.stage!r}, {value.microbatch!r})"
    if type(value) is list:
        parts = [_code(item) for item in value]
        return f"[{', '.join(parts)}]" if all(parts) else ""
    return repr(value) if type(value) in (int, float, str, bool) else ""


def whole_number(value: object) -> int:
    """An int; a float that is whole will do."""
    try:
        if not isinstance(value, (bool, str)):
            exact = float(value)  # type: ignore[arg-type]
            return int(exact) if exact.is_integer() else int(index(value))  # type: ignore
    except (TypeError, ValueError, OverflowError):
        pass
    if isinstance(value, float):
        raise Wrong("a whole number", described(value))
    raise mistyped("a whole number", described(value))


def number(value: object) -> float:
    """A float that is neither NaN nor infinite."""
    try:
        exact = nan if isinstance(value, (bool, str)) else float(value)  # type: ignore
    except (TypeError, ValueError, OverflowError):
        exact = nan
    if isfinite(exact):
        return exact
    if isinstance(value, float):  # inf / inf, say: a pitfall of the exercise, and no wrong type
        raise Wrong("a finite number", described(value))
    raise mistyped("a number", described(value))


def whole_numbers(value: object) -> list[int]:
    """A list of ints."""
    return _each(whole_number, value, "a list of whole numbers")


def numbers(value: object) -> list[float]:
    """A list of floats."""
    return _each(number, value, "a list of numbers")


def action(value: object) -> Action:
    """An `Action`, made afresh from its three parts."""
    if isinstance(value, Action):
        kind, stage, microbatch = tuple(value)
        if type(kind) is str and kind in KINDS:
            return Action(kind, whole_number(stage), whole_number(microbatch))
    raise mistyped("an action, such as ps.F(0, 0) or ps.B(0, 0)", described(value))


def actions(value: object) -> list[Action]:
    """A list of actions."""
    return _each(action, value, "a list of actions, such as [ps.F(0, 0), ps.B(0, 0)]")


def times(value: object) -> dict[Action, float]:
    """A dictionary from actions to seconds."""
    wanted = "a dictionary {action: seconds}, such as {ps.F(0, 0): 0.0}"
    if not isinstance(value, Mapping):
        raise mistyped(wanted, described(value))
    return {action(key): number(value[key]) for key in items(value.keys(), wanted)}


def items(value: object, wanted: str) -> list[Any]:
    """The items of a list or of anything like it."""
    if isinstance(value, (str, bytes, Mapping, Action)) or not isinstance(value, Iterable):
        raise mistyped(wanted, described(value))
    found = list(islice(value, MOST_ITEMS + 1))
    if len(found) > MOST_ITEMS:
        raise Wrong(wanted, f"more than {MOST_ITEMS} items: does it ever end?")
    return found


def _each(reader: Callable[[object], Any], value: object, wanted: str) -> list[Any]:
    found: list[Any] = []
    for item in items(value, wanted):
        try:
            found.append(reader(item))
        except Wrong as wrong:
            got = f"{show(item)}, of type {type(item).__name__}"
            expected = f"{wrong.expected} as item {len(found)} of the list"
            raise Wrong(expected, got, hint=wrong.hint) from None
    return found


def described(value: object) -> str:
    """A value with its type, for somebody who expected another type."""
    if value is None:
        return "None (is there a `return`?)"
    return f"{show(value)}, of type {type(value).__name__}"
