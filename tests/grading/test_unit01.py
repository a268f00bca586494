"""Unit 01's checks: every right answer earns all points, every wrong one loses some."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from answers01 import RIGHT, WRONG
from pipeschool import grade
from pipeschool.grade.core import EXERCISES
from pipeschool.grade.unit01 import CLAIMS
from pipeschool.grade.unit01 import EXERCISES as UNIT

ROOT = Path(__file__).resolve().parents[2]

SEEDS = [None, grade.seed(), 0, 1, 2]


def as_answer(name, function):
    """`function` under the name of the exercise, as a learner would have written it."""

    def answer(*args):
        return function(*args)

    answer.__name__ = name
    return answer


def points(name, function, seed):
    try:
        return grade.check(as_answer(name, function), points=4, seed=seed)
    except grade.CheckFailed:
        return 0.0


def told(name, function, capsys, width):
    """What a learner reads about a wrong answer: always a case, both values, and a hint, in lines
    that are narrower than `width`."""
    try:
        grade.check(as_answer(name, function), points=4)
        said = capsys.readouterr().out
    except grade.CheckFailed as failed:
        said = str(failed)
    lines = [line.partition(":")[0].strip() for line in said.split("\n")]
    for wanted in ("smallest failing case", "expected", "got", "where to look"):
        assert wanted in lines, said
    assert "lambda" not in said and "object at 0x" not in said
    assert all(len(line) < width for line in said.split("\n")), "a line nobody reads to its end"
    return said


# Answers that search or simulate for seconds; others of their exercises stay in the first tier.
SEARCH_LONG = {
    "as_in_zb_h1",
    "choose_by_asking",
    "cuts_of_all_ways",
    "cuts_of_all_ways_by_recursion_without_a_table",
    "slowest_simulated",
}


def tier(function):
    return pytest.mark.exhaustive if function.__name__ in SEARCH_LONG else ()


def cases(answers):
    return [
        pytest.param(name, function, id=f"{name}-{function.__name__}", marks=tier(function))
        for name, functions in answers.items()
        for function in functions
    ]


@pytest.mark.parametrize("name, function", cases(RIGHT))
def test_right_answers_earn_all_points(name, function):
    assert [points(name, function, seed) for seed in SEEDS] == [4.0] * len(SEEDS)


@pytest.mark.parametrize("name, function", cases(WRONG))
def test_wrong_answers_lose_points(name, function):
    for seed in SEEDS:
        assert points(name, function, seed) < 4, f"full marks with seed {seed}"


@pytest.mark.parametrize("exercise", UNIT, ids=lambda e: e.name)
def test_each_exercise_is_tried_from_both_sides(exercise):
    assert len(RIGHT[exercise.name]) >= 2
    assert len(WRONG[exercise.name]) >= 3
    for seed in SEEDS:
        assert points(exercise.name, exercise.reference, seed) == 4


@pytest.mark.parametrize(
    "name, mutant, earned",
    [
        ("split_batch", "drops_what_is_left", 2.0),
        ("loss_weights", "one_over_m", 2.0),
        ("gpipe_order", "never_fewer_than_workers", 2.67),
        ("needs", "nothing_on_the_last_stage", 2.0),
        ("start_times", "gpipe_formula_whatever_the_order", 1.6),
        ("smallest_m", "no_microbatch_for_one_worker", 2.67),
        ("smallest_m", "solved_in_floats", 2.67),
    ],
)
def test_partly_right_answers_earn_part_of_the_points(name, mutant, earned, capsys):
    function = next(f for f in WRONG[name] if f.__name__ == mutant)
    for seed in SEEDS:
        assert points(name, function, seed) == earned
    said = capsys.readouterr()
    assert f"{name}: {earned:.3g} of 4 points. Right " in said.out and "not yet " in said.out
    assert "smallest failing case:" in said.out and "where to look:" in said.out
    assert said.err == ""


@pytest.mark.parametrize("name, function", cases(WRONG))
def test_messages_hold_case_expected_got_and_hint(name, function, capsys):
    said = told(name, function, capsys, 260)
    assert f"{name}(" in said


def test_the_smallest_failing_case_comes_first():
    """An answer that is wrong only from four workers on is shown with four, not with eight."""

    def bubble_of_ideal(p, m):
        return (p - 1) / m if p < 4 else 0

    with pytest.raises(grade.CheckFailed, match=r"bubble_of_ideal\(p=4, m=4\)"):
        grade.check(bubble_of_ideal, points=1)


def test_new_cases_depend_on_the_seed_alone():
    for exercise in UNIT:
        for part in exercise.parts:
            drawn = []
            for seed in ("a", "a", "b"):
                from random import Random

                rng = Random(f"{seed}/{exercise.name}/{part.title}")
                cases = [part.draw(rng, size) for size in range(1, 9)]
                drawn.append([[x for x in case if not callable(x)] for case in cases])
            assert drawn[0] == drawn[1]
            assert drawn[0] != drawn[2] or part.title == "at the edges"


def test_claims_and_verdicts_in_the_notebook_agree():
    source = (ROOT / "solutions/01_synchronous_bubble/synchronous_bubble.py").read_text("utf-8")
    verdicts = re.findall(r"<summary>Verdict</summary>\n#\n# \*\*(\w+)\.?\*\*", source)
    assert [word.lower() for word in verdicts] == list(CLAIMS.values())


def test_exercises_are_known_by_name():
    assert set(EXERCISES) >= {exercise.name for exercise in UNIT}
