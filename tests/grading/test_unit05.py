"""The exercises of unit 05: every right answer earns all points, every wrong one loses some."""

from __future__ import annotations

import re
from itertools import combinations, product
from pathlib import Path
from random import Random

import pipeschool as ps
import pytest
import torch
from pipeschool import stability
from pipeschool.grade import unit05, unit05_training
from test_both_sides import earns_part

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name, mutant, earned",
    [
        ("message_seconds", "message_rounded_down", 2.0),
        ("message_seconds", "message_without_latency", 0.0),
        ("gpipe_seconds", "gpipe_links_never_slow", 2.67),
        ("gpipe_seconds", "gpipe_last_worker_sends_too", 2.67),
        ("gpipe_seconds", "gpipe_without_messages", 0.0),
        ("typical_seconds", "typical_mean", 0.0),
        pytest.param("best_cuts", "cuts_of_all_ways", 2.4, marks=pytest.mark.exhaustive),
        ("best_cuts", "cuts_with_the_last_end", 0.0),
        ("worker_of", "turn_stage_is_worker", 1.0),
        ("spread_workers", "spread_all_to_the_slowest", 1.33),
        ("best_m", "m_never_smaller_than_the_start", 1.6),
        ("best_m", "m_of_a_sweep", 0.0),
        ("scale_of", "scale_of_lengths_with_a_check", 2.0),
        ("clip_factor", "clip_always", 2.0),
        ("late_descent", "late_without_a_delay", 1.33),
    ],
)
def test_partly_right_answers_earn_part_of_the_points(name, mutant, earned, capsys):
    earns_part(name, mutant, earned, capsys)


def test_new_cases_depend_on_the_seed_alone():
    for exercise in unit05.EXERCISES:
        for part in exercise.parts:
            drawn = [
                [part.draw(rng, size) for size in range(1, 9)]
                for rng in (Random(f"{seed}/{part.title}") for seed in ("a", "a", "b"))
            ]
            assert drawn[0] == drawn[1] != drawn[2]


def test_claims_and_verdicts_in_the_notebook_agree():
    source = (ROOT / "solutions/05_engineering/engineering.py").read_text("utf-8")
    verdicts = re.findall(r"<summary>Verdict</summary>\n#\n# \*\*(\w+)\.?\*\*", source)
    assert [word.lower() for word in verdicts] == list(unit05.CLAIMS.values())


# --- what the checks take for right, against formulas, brute force and the library


@pytest.mark.parametrize("p, m", [(1, 1), (1, 5), (2, 1), (3, 4), (4, 8), (5, 2)])
def test_closed_forms_of_gpipe_with_messages(p, m):
    for forward, backward, message in product((1, 2, 3), (1, 2, 5), (1, 4, 9)):
        seen = unit05.gpipe_seconds(p, m, forward, backward, message, True)
        by_hand = unit05.gpipe_seconds(p, m, forward, backward, message, False)
        free = (m + p - 1) * (forward + backward)
        link = message if p > 1 else 0
        slow = max(forward, link) + max(backward, link) - forward - backward
        assert seen == free + 2 * (p - 1) * link + (m - 1) * slow
        assert by_hand == free + 2 * (m + p - 2) * link


def test_cuts_are_the_best_of_all():
    for seed in range(60):
        rng = Random(seed)
        times = [float(rng.randint(1, 9)) for _ in range(rng.randint(1, 9))]
        p = rng.randint(1, len(times))
        every = combinations(range(1, len(times)), p - 1)
        least = min(unit05.slowest_stage(times, list(cuts)) for cuts in every)
        assert unit05.slowest_stage(times, unit05.best_cuts(times, p)) == least
        plan = ps.partition.balanced(
            ps.partition.Profile([ps.partition.Layer(t, 0) for t in times]), p
        )
        assert plan.bottleneck == least


def test_workers_are_spread_as_well_as_can_be():
    for seed in range(60):
        rng = Random(seed)
        seconds = [float(rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
        workers = len(seconds) + rng.randint(0, 4)
        ways = product(range(1, workers + 1), repeat=len(seconds))
        paces = [unit05.pace_of(seconds, list(way)) for way in ways if sum(way) == workers]
        spread = unit05.spread_workers(seconds, workers)
        assert sum(spread) == workers
        assert unit05.pace_of(seconds, spread) == min(paces)


def test_turns_are_those_of_round_robin():
    for replicas in ([1], [3], [1, 2, 1], [2, 3, 1, 2]):
        for worker, row in enumerate(ps.round_robin(replicas, m=12).workers):
            for kind, stage, k in row:
                if kind != "U":
                    assert unit05.worker_of(replicas, stage, k) == worker


def test_a_line_to_tune_is_what_the_simulator_says():
    line = unit05_training.Line(4, 64, 0.5, 0.25)
    for m in (1, 2, 8, 64):
        each = 0.5 + 0.25 * 64 / m
        trace = ps.simulate(ps.gpipe(4, m), ps.Cost(each / 3, 2 * each / 3))
        assert line(m) == pytest.approx(64 / trace.makespan)
    assert line.asked == {1, 2, 8, 64}
    with pytest.raises(ValueError, match="m must be from 1 to 64"):
        line(65)


def test_clipping_together_is_what_the_library_shows():
    gradients = [{"w": torch.full((n,), 0.5)} for n in (1, 4, 9)]
    norms = [0.5, 1.0, 1.5]
    for limit in (0.3, 1.0, 5.0):
        rows = stability.clip_factors(gradients, limit)
        assert rows[0].together == pytest.approx(unit05_training.clip_factor(norms, limit))


def test_late_weights_end_where_the_library_says():
    for rate, delay in ((0.5, 0), (0.5, 1), (0.2, 3), (1.5, 2)):
        weights = unit05_training.late_descent(rate, delay, 30)
        assert max(map(abs, weights[-delay - 1 :])) == pytest.approx(
            stability.final_distance(rate, delay, 30)
        )
