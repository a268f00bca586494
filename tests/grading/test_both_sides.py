"""Every exercise from unit 03 on is graded from both sides: every right answer earns all points,
every wrong one loses some and is told why."""

from __future__ import annotations

import answers03
import answers04
import answers05
import answers06
import answers07
import pytest
from pipeschool.grade import unit03, unit04, unit05, unit06, unit07
from test_unit01 import SEEDS, cases, points, told

ANSWERS = (answers03, answers04, answers05, answers06, answers07)
RIGHT = {name: functions for unit in ANSWERS for name, functions in unit.RIGHT.items()}
WRONG = {name: functions for unit in ANSWERS for name, functions in unit.WRONG.items()}
EXERCISES = [e for unit in (unit03, unit04, unit05, unit06, unit07) for e in unit.EXERCISES]
SLOW = {"replay", "priority"}  # a replay takes long, and a rule is asked thousands of times


def seeds(name):
    return SEEDS[:3] if name in SLOW else SEEDS


def earns_part(name, mutant, earned, capsys):
    """The wrong answer `mutant` earns just `earned` of 4 points, and hears what is right in it."""
    function = next(f for f in WRONG[name] if f.__name__ == mutant)
    for seed in seeds(name):
        assert points(name, function, seed) == earned
    said = capsys.readouterr()
    if earned:
        assert f"{name}: {earned:.3g} of 4 points" in said.out and ". Right " in said.out
        assert "not yet " in said.out
        assert "smallest failing case:" in said.out and "where to look:" in said.out
    assert said.err == ""


def test_no_two_units_have_an_exercise_of_the_same_name():
    assert len(RIGHT) == sum(len(unit.RIGHT) for unit in ANSWERS)
    assert RIGHT.keys() == WRONG.keys() == {exercise.name for exercise in EXERCISES}


@pytest.mark.parametrize("name, function", cases(RIGHT))
def test_right_answers_earn_all_points(name, function):
    for seed in seeds(name):
        assert points(name, function, seed) == 4


@pytest.mark.parametrize("name, function", cases(WRONG))
def test_wrong_answers_lose_points(name, function):
    for seed in seeds(name):
        assert points(name, function, seed) < 4, f"full marks with seed {seed}"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_each_exercise_is_tried_from_both_sides(exercise):
    assert len(RIGHT[exercise.name]) >= 2
    assert len(WRONG[exercise.name]) >= 5
    for seed in seeds(exercise.name):
        assert points(exercise.name, exercise.reference, seed) == 4


@pytest.mark.parametrize("name, function", cases(WRONG))
def test_messages_hold_case_expected_got_and_hint(name, function, capsys):
    # Unit 07 has orders of many chunks to show, and judges some of them by what they are made into.
    called, widest = (name, 360) if name in answers07.WRONG else (f"{name}(", 330)
    assert called in told(name, function, capsys, widest)
