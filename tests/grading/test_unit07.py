"""The exercises of unit 07: every right answer earns all points, every wrong one loses some."""

from __future__ import annotations

import re
from random import Random

import pipeschool as ps
import pytest
import torch
from pipeschool.grade import unit07, unit07_reading
from test_both_sides import earns_part
from test_unit01 import ROOT


@pytest.mark.parametrize(
    "name, mutant, earned",
    [
        ("interleaved_warm_up", "warm_up_one_forward_per_worker_below", 2.0),
        ("interleaved_order", "interleaved_with_the_warm_up_of_1f1b", 1.6),
        ("interleaved_order", "interleaved_all_forwards_first", 1.6),
        ("interleaved_order", "interleaved_runs_out_in_one_round", 3.2),
        ("interleaved_order", "interleaved_backwards_through_the_first_chunk_first", 0.8),
        ("messages_per_batch", "messages_times_v", 2.0),
        ("weight_half", "weight_transposed", 1.33),
        ("weight_half", "matrices_only", 2.67),
        ("zb_h1_order", "zb_needs_m_of_p", 3.2),
        ("zb_h1_order", "zb_at_once", 0.0),
        ("read_figure", "read_counts_cells", 1.33),
        ("read_figure", "read_gives_back_at_the_input_half", 2.67),
        ("read_figure", "read_bubble_of_ideal", 2.67),
        ("priority", "backwards_first", 0.0),
    ],
)
def test_partly_right_answers_earn_part_of_the_points(name, mutant, earned, capsys):
    earns_part(name, mutant, earned, capsys)


def test_new_cases_depend_on_the_seed_alone():
    for exercise in unit07.EXERCISES:
        for part in exercise.parts:
            drawn = [
                [part.draw(rng, size) for size in range(1, 9)]
                for rng in (Random(f"{seed}/{part.title}") for seed in ("a", "a", "b"))
            ]
            assert drawn[0] == drawn[1] != drawn[2]


def test_claims_and_verdicts_in_the_notebook_agree():
    source = (ROOT / "solutions/07_beyond/beyond.py").read_text("utf-8")
    verdicts = re.findall(r"<summary>Verdict</summary>\n#\n# \*\*(\w+)\.?\*\*", source)
    assert [word.lower() for word in verdicts] == list(unit07.CLAIMS.values())


# --- what the checks take for right, against the simulator, autograd and the solver


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [2, 3])
def test_the_warm_up_is_that_of_the_library(p, v):
    for worker, row in enumerate(ps.interleaved_1f1b(p, 4 * p, v).workers):
        before = [action.kind for action in row].index("B")
        assert unit07.interleaved_warm_up(worker, p, v) + 1 == before


@pytest.mark.parametrize("p, m, v", [(2, 1, 1), (2, 3, 2), (3, 6, 1), (3, 3, 4), (4, 8, 2)])
def test_messages_are_those_that_are_sent(p, m, v):
    rows = ps.lower(ps.interleaved_1f1b(p, m, v)).workers
    sent = sum(action.kind.startswith("SEND") for row in rows for action in row)
    assert unit07.messages_per_batch(p, m, v) == sent


@pytest.mark.parametrize("shape", [(5,), (3, 4)], ids=["samples", "samples of words"])
def test_the_halves_are_the_gradients_of_autograd(shape):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    x = torch.randn(*shape, 3, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(*shape, 2, dtype=torch.float64)
    layer(x).backward(gradient)
    dX = unit07.input_half(gradient, layer.weight.detach())
    dW, db = unit07.weight_half(gradient, x.detach())
    for ours, theirs in ((dX, x.grad), (dW, layer.weight.grad), (db, layer.bias.grad)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_the_zero_bubble_rate_of_known_schedules(p):
    rate, m = unit07_reading.zero_bubble_rate, 2 * p
    assert rate(ps.simulate(ps.gpipe(p, m))) == pytest.approx((p - 1) / (m + p - 1))
    assert rate(ps.simulate(ps.zb_h1(p, m))) == pytest.approx((p - 1) / (3 * m + p - 1))
    assert rate(ps.simulate(ps.zb_h2(p, m))) == rate(ps.simulate(ps.zb_v(p, m))) == 0


@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_v_is_that_of_the_library(p):
    placed = tuple(unit07.v_placement(stage, p) for stage in range(2 * p))
    assert placed == ps.zb_v(p, 2 * p).placement == ps.dualpipe_v(p, 2 * p).placement


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v"])
def test_a_figure_says_what_the_trace_says(name):
    schedule = ps.build(name, 3, 6)
    bubble, peaks = unit07_reading.read_figure(unit07_reading.figure(schedule), schedule.v)
    trace = ps.simulate(schedule)
    assert bubble == pytest.approx(trace.bubble_of_total)
    assert peaks == pytest.approx(trace.peak_activations)


@pytest.mark.parametrize("p, m", [(3, 4), (3, 6), (4, 6), (4, 8)])
def test_par_is_what_the_solver_proves(p, m):
    found = ps.par(p, m, split=True, memory_cap=p)
    assert found.proven
    assert ps.simulate(found.schedule).makespan == 3 * m + p - 1


def test_ready_made_rules_are_not_good_enough():
    """Otherwise the exercise would ask for nothing."""
    for p, m, slack in ((3, 6, 0), (4, 8, 1)):
        for kinds in ("BFW", "BWF", "FBW", "FWB", "WBF", "WFB"):
            schedule = ps.greedy(p, m, split=True, memory_cap=p, priority=kinds)
            assert ps.simulate(schedule).makespan > 3 * m + p - 1 + slack
