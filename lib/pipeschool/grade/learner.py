"""Small helpers for the cells around an exercise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeschool.grade.core import exercise_of, passes

WORDS = ("right", "wrong", "half")  # verdicts on a claim


def yours(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` itself once it passes its visible checks; until then pipeschool's own answer.

    So a cell that builds on an exercise can be run before the exercise is solved.
    """
    exercise = exercise_of(function)
    if passes(function):
        print(f"This is your {exercise.name} at work.")
        return function
    print(f"Your {exercise.name} does not pass its checks yet: this is pipeschool's own at work.")
    return exercise.reference


def reveal(guess: float | None, truth: float, unit: str = "") -> None:
    """Print a prediction beside what was computed. Being wrong costs nothing here."""
    shown = f"{truth:g} {unit}".strip()
    if guess is None:
        print(f"Computed: {shown}. (You wrote down no guess. Even a wrong one helps.)")
    else:
        print(f"You predicted {guess}. Computed: {shown}.")


def tally(verdicts: Mapping[int, str], ours: Mapping[int, str]) -> None:
    """Print the learner's verdicts on the claims of a unit beside pipeschool's own."""
    print("claim   you     pipeschool")
    for claim, verdict in ours.items():
        said = verdicts.get(claim, "?")
        print(f"{claim:>5}   {said:<7} {verdict if said in WORDS else '(judge first)'}")
    agreed = sum(verdicts.get(claim) == verdict for claim, verdict in ours.items())
    print(f"You agree on {agreed} of {len(ours)}. A verdict is one of: {', '.join(WORDS)}.")
