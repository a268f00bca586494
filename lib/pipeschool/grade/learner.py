"""Small helpers for the cells around an exercise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from pipeschool.grade.core import CheckFailed, exercise_of, passes
from pipeschool.grade.plain import Wrong, code

WORDS = ("right", "wrong", "half")  # verdicts on a claim


def yours(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` once it passes its visible checks; until then pipeschool's own answer.

    So a cell that builds on an exercise can be run before the exercise is solved. What `function`
    returns is handed on in the form that the checks read it in: a list where it was a generator, a
    whole number where it was 8.0.
    """
    exercise = exercise_of(function)
    if passes(function):
        print(f"This is your {exercise.name} at work.")
        return function if exercise.as_is else _tidied(function, exercise.returns)
    print(f"Your {exercise.name} does not pass its checks yet: this is pipeschool's own at work.")
    return exercise.reference


def _tidied(function: Callable[..., Any], returns: Callable[[object], Any]) -> Callable[..., Any]:
    @wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        try:
            return returns(value)
        except Wrong as wrong:
            call = f"{function.__name__}({', '.join(map(code, args))})"
            raise CheckFailed(f"{call} gave {wrong.got}; expected: {wrong.expected}.") from None

    return answer


def reveal(guess: float | None, truth: float, unit: str = "") -> None:
    """Print a prediction beside what was computed. Being wrong costs nothing here."""
    shown = f"{truth:g} {unit}".strip()
    if guess is None:
        print(f"Computed: {shown}. (You wrote down no guess. Even a wrong one helps.)")
    else:
        print(f"You predicted {guess}. Computed: {shown}.")


def tally(verdicts: Mapping[int, str], ours: Mapping[int, str]) -> None:
    """Print the learner's verdicts on the claims of a unit beside pipeschool's own."""
    said = {claim: str(verdict).strip().lower() for claim, verdict in verdicts.items()}
    print("claim   you     pipeschool")
    for claim, verdict in ours.items():
        word = said.get(claim, "?")
        print(f"{claim:>5}   {word:<7} {verdict if word in WORDS else '(judge first)'}")
    agreed = sum(said.get(claim) == verdict for claim, verdict in ours.items())
    print(f"You agree on {agreed} of {len(ours)}. A verdict is one of: {', '.join(WORDS)}.")
