"""The checks behind graded cells: find the exercise, try its cases, say what is wrong, give points.

An `Exercise` has one or more `Part`s. A part has fixed cases, which every learner can see, and
draws new ones from a seed. Cases come in increasing size, so that the first that fails is small.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import getclosurevars
from math import isclose
from random import Random
from types import CodeType, FunctionType
from typing import Any

from pipeschool.grade.guard import Answer, NotWritten
from pipeschool.grade.plain import Wrong, show

Case = tuple[Any, ...]

DRAWN = 8  # new cases of each part in a seeded check, of sizes 1 to 8


class CheckFailed(AssertionError):
    """No points. Notebooks and feedback pages show the message, without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for this
        return str(self).split("\n")


@dataclass(frozen=True)
class Part:
    """Cases that earn points together.

    title: completes "right ..." and "not yet right ...", such as "where m < p".
    draw: ``draw(rng, size)`` gives a new case; `size` goes from 1 (tiny) to 8.
    share: its part of the points, relative to the other parts.
    """

    cases: Sequence[Case]
    draw: Callable[[Random, int], Case]
    hint: str
    title: str = ""
    share: float = 1.0


@dataclass(frozen=True)
class Exercise:
    """What a function called `name` should do.

    arguments: their names, in order, separated by blanks.
    returns: a reader out of `plain`.
    reference: a right answer. Later cells fall back on it until the learner's own is right.
    judge: ``judge(answer, *case)`` raises `Wrong` where the answer is not right. Without one, the
        answer must equal that of the reference.
    as_is: `yours` hands on what the function returns as it is, not as `returns` reads it.
    """

    name: str
    arguments: str
    returns: Callable[[object], Any]
    reference: Callable[..., Any]
    parts: Sequence[Part]
    judge: Callable[..., None] | None = None
    as_is: bool = False

    def try_case(self, answer: Answer, case: Case) -> None:
        """Raise `Wrong` or `NotWritten` where `answer` is not right for `case`."""
        if self.judge:
            self.judge(answer, *case)
            return
        expected, got = self.reference(*case), answer(*case)
        if not same(expected, got):
            raise Wrong(show(expected), show(got))


EXERCISES: dict[str, Exercise] = {}


def register(exercises: Iterable[Exercise]) -> None:
    """Make exercises known to `check`; their names must be new."""
    for exercise in exercises:
        if exercise.name in EXERCISES:
            raise ValueError(f"there are two exercises called {exercise.name}")
        EXERCISES[exercise.name] = exercise


def seed() -> str:
    """The seed of hidden cases: the environment's PIPESCHOOL_SEED, or a fixed one."""
    return os.environ.get("PIPESCHOOL_SEED") or "pipeschool"


def check(function: Callable[..., Any], points: float, seed: object = None) -> float:
    """Check a learner's function, print how it went, and return the points it earns.

    Without a seed, the visible cases; with one, new cases as well. Raises `CheckFailed` where
    nothing is right: a graded cell whose last expression is this call then earns 0, and otherwise
    the points returned.
    """
    exercise = exercise_of(function)
    answer = Answer(function, exercise.arguments.split(), exercise.returns)
    right: list[Part] = []
    wrong: list[tuple[Part, Wrong]] = []
    count = 0
    for part in exercise.parts:
        cases = list(part.cases)
        if seed is not None:
            rng = Random(f"{seed}/{exercise.name}/{part.title}")
            cases += [part.draw(rng, size) for size in range(1, DRAWN + 1)]
        problem = _first_problem(exercise, answer, cases, len(part.cases))
        count += len(cases)
        if problem:
            wrong.append((part, problem))
        else:
            right.append(part)
    if not right:
        raise CheckFailed(_report(exercise, [], wrong[:1], broken=broken_helpers(function)))
    if not wrong:
        kind = "visible checks" if seed is None else "checks, new cases among them,"
        print(f"{exercise.name}: all {count} {kind} passed, {points:g} of {points:g} points")
        if answer.printed_lines:
            print(f"(It also printed {answer.printed_lines} lines, which are not shown here.)")
        return float(points)
    earned = points * sum(part.share for part in right) / sum(p.share for p in exercise.parts)
    new = "" if seed is None else ", new cases included"
    score = f"{earned:.3g} of {points:g} points{new}"
    print(_report(exercise, right, wrong, score, broken_helpers(function)))
    return round(float(earned), 2)


def passes(function: Callable[..., Any]) -> bool:
    """True where `function` is right in all visible cases."""
    exercise = exercise_of(function)
    answer = Answer(function, exercise.arguments.split(), exercise.returns)
    try:
        return not any(_first_problem(exercise, answer, part.cases) for part in exercise.parts)
    except CheckFailed:
        return False


def broken_helpers(function: Callable[..., Any]) -> list[str]:
    """The answers to other exercises that `function` uses and that do not pass their checks.

    It may use them by way of other functions of its notebook: those are looked into, libraries not.
    """
    right: dict[str, bool] = {}
    notebook = [function]
    for own in notebook:  # which grows meanwhile
        for used in _functions_used(own):
            if used in notebook:
                continue
            if used.__name__ in EXERCISES:
                right[used.__name__] = passes(used)
            elif used.__globals__ is getattr(function, "__globals__", None):
                notebook.append(used)
    return sorted(name for name in right if not right[name])


def _functions_used(function: Callable[..., Any]) -> list[FunctionType]:
    """The functions that `function` names, also in comprehensions and functions inside it."""
    if not isinstance(function, FunctionType):
        return []
    values = list(getclosurevars(function).nonlocals.values())
    for code in _with_inner_code(function.__code__):
        values += [function.__globals__.get(name) for name in code.co_names]
    return [value for value in values if isinstance(value, FunctionType)]


def _with_inner_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner_code(constant)


def exercise_of(function: object) -> Exercise:
    """The exercise that `function` is named after."""
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str):
        raise CheckFailed(f"A function is needed here, not {show(function)}.")
    if name not in EXERCISES:
        near = difflib.get_close_matches(name, EXERCISES, n=1)
        raise CheckFailed(
            f"No exercise is called {name!r}: keep the name that the stub gives your function"
            + (f", such as {near[0]!r}." if near else ".")
        )
    return EXERCISES[name]


def same(expected: Any, got: Any) -> bool:
    """Are two pieces of plain data equal, floats up to rounding?"""
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, dict):
        return expected.keys() == got.keys() and all(same(expected[k], got[k]) for k in expected)
    if isinstance(expected, float) or isinstance(got, float):
        return isclose(expected, got, rel_tol=1e-6, abs_tol=1e-9)
    return bool(expected == got)


def _first_problem(
    exercise: Exercise, answer: Answer, cases: Iterable[Case], visible: int = 0
) -> Wrong | None:
    """The first case that fails. The `visible` cases come first, the smallest of them in front."""
    for number, case in enumerate(cases):
        try:
            exercise.try_case(answer, case)
        except Wrong as wrong:
            wrong.case = wrong.case or answer.latest
            wrong.smallest = number < visible
            wrong.printed = answer.printed.getvalue()
            return wrong
        except NotWritten as stub:
            needs = "" if str(stub) == exercise.name else f", and {exercise.name} needs it"
            raise CheckFailed(
                f"{stub} is not written yet{needs}: put your answer in place of the line that "
                "raises NotImplementedError."
            ) from None
    return None


def _report(
    exercise: Exercise,
    right: list[Part],
    wrong: list[tuple[Part, Wrong]],
    earned: str = "",
    broken: Sequence[str] = (),
) -> str:
    if right:
        sides = [" and ".join(part.title for part in right)]
        sides += ["not yet " + " or ".join(part.title for part, _ in wrong)]
        lines = [f"{exercise.name}: {earned}. Right {', '.join(sides)}."]
    else:
        lines = [f"{exercise.name} is not right yet."]
    for name in broken:
        lines.append(f"  {'mend this first:':<23}your {name}, which it uses, fails its own checks")
    for part, problem in wrong:
        rows = [
            (f"{'smallest' if problem.smallest else 'first'} failing case", problem.case),
            ("expected", problem.expected),
            ("got", problem.got),
            ("raised at", problem.line),
            ("it printed", " / ".join(problem.printed.split("\n")[:3]).strip(" /")),
            ("where to look", problem.hint or part.hint),
        ]
        lines += [f"  {name + ':':<23}{text}" for name, text in rows if text]
    return "\n".join(lines)
