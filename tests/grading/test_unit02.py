"""The exercises of unit 02: every right answer earns all points, every wrong one loses some."""

from __future__ import annotations

import math
from random import Random

import pipeschool as ps
import pytest
from answers02 import RIGHT, WRONG
from pipeschool.grade import unit02
from test_unit01 import SEEDS, cases, points, told


@pytest.mark.parametrize("name, function", cases(RIGHT))
def test_right_answers_earn_all_points(name, function):
    assert [points(name, function, seed) for seed in SEEDS] == [4.0] * len(SEEDS)


@pytest.mark.parametrize("name, function", cases(WRONG))
def test_wrong_answers_lose_points(name, function):
    for seed in SEEDS:
        assert points(name, function, seed) < 4, f"full marks with seed {seed}"


@pytest.mark.parametrize("exercise", unit02.EXERCISES, ids=lambda e: e.name)
def test_each_exercise_is_tried_from_both_sides(exercise):
    assert len(RIGHT[exercise.name]) >= 2
    assert len(WRONG[exercise.name]) >= 5
    for seed in SEEDS:
        assert points(exercise.name, exercise.reference, seed) == 4


@pytest.mark.parametrize(
    "name, mutant, earned",
    [
        ("gain", "gain_nan_in_the_limit", 2.0),
        ("gain", "gain_always_the_limit", 2.0),
        ("async_order", "updates_forgotten", 2.4),
        ("async_order", "update_after_the_own_forward", 2.4),
        ("async_order", "update_one_forward_late", 2.4),
        ("async_order", "warm_up_longer_than_the_stream", 3.2),
        ("async_order", "all_forwards_first", 0.0),
        ("latency", "updates_taken_for_microbatches", 2.0),
        ("steady_pace", "slowest_forward_and_slowest_backward", 2.0),
        ("mismatched", "by_the_formula_for_the_stream", 2.67),
        ("mismatched", "none_at_all", 0.0),
        ("versions_met", "below_version_0", 2.67),
        ("first_gradient", "of_the_old_weights", 2.0),
        ("first_gradient", "of_the_new_weights", 2.0),
    ],
)
def test_partly_right_answers_earn_part_of_the_points(name, mutant, earned, capsys):
    function = next(f for f in WRONG[name] if f.__name__ == mutant)
    for seed in SEEDS:
        assert points(name, function, seed) == earned
    said = capsys.readouterr()
    if earned:
        assert f"{name}: {earned:.3g} of 4 points" in said.out and ". Right " in said.out
        assert "not yet " in said.out
        assert "smallest failing case:" in said.out and "where to look:" in said.out
    assert said.err == ""


@pytest.mark.parametrize("name, function", cases(WRONG))
def test_messages_hold_case_expected_got_and_hint(name, function, capsys):
    said = told(name, function, capsys, 260)
    assert f"{name}(" in said
    assert "Span(" not in said


def test_new_cases_depend_on_the_seed_alone():
    for exercise in unit02.EXERCISES:
        for part in exercise.parts:
            drawn = [
                [part.draw(rng, size) for size in range(1, 9)]
                for rng in (Random(f"{seed}/{part.title}") for seed in ("a", "a", "b"))
            ]
            assert drawn[0] == drawn[1] != drawn[2]


# --- what the checks take for right, against the simulator and its ledgers


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_clocks_are_those_of_the_simulator(p, m):
    for batches, cost in ((1, ps.Cost(1, 2)), (4, ps.Cost(3, 2.5))):
        flushed = ps.simulate(ps.gpipe(p, m, batches), cost).makespan
        stream = ps.simulate(ps.pipedream(p, m, batches), cost).makespan
        times = cost.forward, cost.backward
        assert unit02.flush_time(p, m, batches, *times) == pytest.approx(flushed)
        assert unit02.stream_time(p, m * batches, *times) == pytest.approx(stream)
        assert unit02.gain(p, m, batches) == pytest.approx(flushed / stream)
    assert unit02.gain(p, m, math.inf) == pytest.approx(unit02.gain(p, m, 10**9))


def test_the_slowest_stage_sets_the_pace_of_any_line():
    rng = Random(1)
    for size in range(1, 9):
        for draw in (unit02.draw_pace, unit02.draw_slow):
            forward, backward = draw(rng, size)
            p = len(forward)
            trace = ps.simulate(ps.pipedream(p, 60 * p), ps.Cost(forward, backward))
            ends = [span.end for span in trace.rows[0] if span.action.kind == "B"]
            pace = (ends[50 * p] - ends[30 * p]) / (20 * p)
            assert unit02.steady_pace(forward, backward) == pytest.approx(pace)


@pytest.mark.parametrize("p", [1, 2, 4, 6])
@pytest.mark.parametrize("n", [1, 3, 12])
def test_versions_met_are_those_of_the_ledger(p, n):
    for span in ps.simulate(ps.pipedream(p, n), weights="latest").spans:
        kind, stage, k = span.action
        if kind != "U":
            assert span.version == unit02.versions_met(stage, k, p)["FB".index(kind)]


def test_cases_of_mismatched_hold_some_in_every_part():
    for part in unit02.MISMATCHED.parts:
        assert any(unit02.mismatched(trace) for (trace,) in part.cases[:1])
    others = [unit02.mismatched(trace) for (trace,) in unit02.MISMATCHED.parts[1].cases]
    assert others[2:] == [[], [], []]
