"""Predicted bytes: of every kind, by hand."""

from __future__ import annotations

import pipeschool as ps
import pytest

KINDS = ("weights", "versions", "gradients", "optimizer", "activations", "buffers", "working")


def most(row: list, kind: str) -> float:
    return max(getattr(level, kind) for level in row)


@pytest.mark.parametrize("p", range(1, 9))
def test_peak_activations_in_bytes_are_those_in_microbatches(p):
    cost = ps.Cost(activation_bytes=100)
    for m in (1, 3, 8, 16):
        gpipe = ps.simulate(ps.gpipe(p, m), cost)
        flush = ps.simulate(ps.one_f_one_b(p, m), cost)
        assert gpipe.peak_bytes == [100 * m] * p
        assert flush.peak_bytes == [100 * min(m, p - s) for s in range(p)]


def test_every_kind_over_time_on_one_worker():
    """F0 F1 B0 B1 U, one second each, forwards of stage 1 of 2 with everything at work."""
    cost = ps.Cost(
        forward=1,
        backward=1,
        update=1,
        parameter_bytes=[0, 1000],
        gradient_bytes=[0, 500],
        optimizer_bytes=[0, 2000],
        activation_bytes=[0, 30],
        message_bytes=[7, 0],
        working_bytes=[0, 90],
    )
    row = ps.simulate(ps.gpipe(2, 2), cost).memory[1]
    assert [(level.time, *level[1:]) for level in row] == [
        (0, 1000, 0, 0, 0, 0, 0, 0),
        (1, 1000, 0, 0, 0, 30, 7, 0),  # F0
        (2, 1000, 0, 0, 0, 30, 7, 0),
        (2, 1000, 0, 0, 0, 60, 14, 0),  # F1
        (3, 1000, 0, 0, 0, 60, 14, 0),
        (3, 1000, 0, 0, 0, 60, 14, 90),  # B0
        (4, 1000, 0, 500, 0, 30, 7, 0),
        (4, 1000, 0, 500, 0, 30, 7, 90),  # B1
        (5, 1000, 0, 500, 0, 0, 0, 0),
        (5, 1000, 0, 500, 0, 0, 0, 0),  # U0
        (6, 1000, 0, 0, 2000, 0, 0, 0),
    ]
    assert row[5].total == 1000 + 60 + 14 + 90


def test_recompute_keeps_the_inputs_alone_and_takes_one_more_forward():
    plain = ps.Cost(activation_bytes=100, message_bytes=10)
    again = ps.Cost(activation_bytes=100, message_bytes=10, recompute=True)
    schedule = ps.gpipe(p=4, m=8)
    kept, redone = ps.simulate(schedule, plain), ps.simulate(schedule, again)
    # Stage 0 has its inputs anyway. In a backward one microbatch is whole again.
    assert kept.peak_bytes == [800, 880, 880, 880]
    assert redone.peak_bytes == [100, 180, 180, 180]
    assert (kept.makespan, redone.makespan) == (11 * 3, 11 * 4)


def test_recompute_on_some_stages_and_with_a_split_backward():
    cost = ps.Cost(activation_bytes=100, recompute=[True, False])
    schedule = ps.Schedule.from_workers(
        lambda w, p, m: [make(w, k) for make in (ps.F, ps.I, ps.W) for k in range(m)], p=2, m=3
    )
    trace = ps.simulate(schedule, cost)
    assert trace.peak_bytes == [300, 300]  # from I to W all is there again
    assert [span.seconds for span in trace.rows[0]] == [1, 1, 1, 2, 2, 2, 1, 1, 1, 0]
    assert [span.seconds for span in trace.rows[1]] == [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]


def test_versions_count_in_bytes():
    trace = ps.simulate(ps.pipedream(p=4, m=16), ps.Cost(parameter_bytes=10))
    assert [most(row, "weights") for row in trace.memory] == [10] * 4
    assert [most(row, "versions") for row in trace.memory] == [30, 20, 10, 0]


def test_two_copies_of_a_model_take_twice_the_weights():
    trace = ps.simulate(ps.chimera(p=4, m=8), ps.Cost(parameter_bytes=[1, 2, 3, 4]))
    assert [most(row, "weights") for row in trace.memory] == [1 + 4, 2 + 3, 3 + 2, 4 + 1]


def test_without_sizes_all_is_zero():
    assert ps.simulate(ps.gpipe(2, 2)).peak_bytes == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"activation_bytes": -1}, "activation_bytes must be a number, 0 or more, not -1"),
        ({"gradient_bytes": [1, 2]}, "gradient_bytes needs one number, or one per stage: 4, not 2"),
        ({"recompute": [True]}, "recompute must be True, False or a list with one of them per"),
        ({"recompute": 3}, "recompute must be True, False or a list with one of them per stage: 4"),
        ({"recompute": "yes"}, "recompute must be True, False or a list"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ps.simulate(ps.gpipe(4, 2), ps.Cost(**wrong))
