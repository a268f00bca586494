"""What is read off a trace, on traces small enough to see the answer."""

from __future__ import annotations

import json

import pipeschool as ps
import pytest
from pipeschool import Action, B, Cost, F, Span, Trace, U


def trace_of(*spans: tuple[int, str, float, float], p: int = 2, v: int = 1) -> Trace:
    """A trace of (worker, action, start, end)."""
    made = [Span(w, Action.parse(text), start, end) for w, text, start, end in spans]
    return Trace("made up", p, 1, v, tuple(made))


TWO = trace_of((0, "0F0", 1, 2), (1, "1F0", 2, 5), (1, "1B0", 5, 6), (0, "0B0", 7, 11))


def test_makespan_goes_from_the_first_start_to_the_last_end() -> None:
    assert TWO.makespan == 10


def test_the_two_bubbles_have_their_own_denominators() -> None:
    assert TWO.busy == [5, 4]
    assert TWO.bubble_of_total == pytest.approx(11 / 20)
    assert TWO.bubble_of_ideal == pytest.approx(11 / 9)


def test_updates_count_as_idle_time() -> None:
    with_update = trace_of((0, "0F0", 0, 1), (0, "0B0", 1, 3), (0, "0U0", 3, 4), p=1)
    assert with_update.busy == [3]
    assert with_update.bubble_of_total == pytest.approx(1 / 4)


def test_rows_hold_the_spans_of_each_worker_in_the_order_of_its_actions() -> None:
    trace = ps.simulate(ps.gpipe(2, 2))
    assert [[str(span.action) for span in row] for row in trace.rows] == [
        ["0F0", "0F1", "0B0", "0B1", "0U0"], ["1F0", "1F1", "1B0", "1B1", "1U0"],
    ]  # fmt: skip
    assert all(span.worker == worker for worker, row in enumerate(trace.rows) for span in row)


def test_actions_that_take_no_time_stay_in_their_order() -> None:
    trace = ps.simulate(ps.one_f_one_b(3, 4), Cost(forward=0, backward=0))
    for row, expected in zip(trace.rows, ps.one_f_one_b(3, 4).workers, strict=True):
        assert tuple(span.action for span in row) == expected


def test_peak_counts_what_is_held_in_parts_of_a_worker() -> None:
    spans = [
        (0, "0F0", 0, 1),
        (0, "2F0", 1, 2),
        (0, "0F1", 2, 3),
        (0, "2B0", 3, 4),
        (0, "0B0", 4, 5),
    ]
    assert trace_of(*spans, (0, "0B1", 5, 6), p=1).peak_activations == [3]
    assert trace_of(*spans, (0, "0B1", 5, 6), p=1, v=2).peak_activations == [1.5]


def test_a_peak_of_whole_activations_is_an_int() -> None:
    assert [type(n) for n in ps.simulate(ps.gpipe(2, 4)).peak_activations] == [int, int]


def test_versions_are_the_most_that_one_stage_held() -> None:
    spans = (
        Span(0, F(0, 0), 0, 1, 0, 1),
        Span(0, U(0, 0), 1, 1, 1, 3),
        Span(0, B(0, 0), 1, 2, 0, 2),
    )
    assert Trace("made up", 2, 1, 1, spans).weight_versions == [3, 1]


def test_staleness_is_the_age_of_the_oldest_gradient_in_an_update() -> None:
    spans = (
        Span(0, B(0, 0), 0, 1, version=0),
        Span(0, U(0, 0), 1, 1, version=1),  # made of version 0: not late
        Span(0, B(0, 1), 1, 2, version=1),
        Span(0, B(0, 2), 2, 3, version=0),
        Span(0, U(0, 1), 3, 3, version=2),  # its oldest gradient is of version 0: one late
        Span(0, B(2, 0), 3, 4, version=0),
        Span(0, U(2, 0), 4, 4, version=1),  # another stage, counted for itself
    )
    assert Trace("made up", 1, 3, 2, spans).staleness == [1]


def test_an_empty_trace_has_no_time_and_no_bubble() -> None:
    empty = trace_of()
    assert empty.metrics() == {
        "makespan": 0, "bubble_of_total": 0, "bubble_of_ideal": 0,
        "peak_activations": [0, 0], "weight_versions": [1, 1], "staleness": [0, 0],
    }  # fmt: skip


def test_metrics_are_plain_data_under_the_names_of_the_command_line() -> None:
    metrics = ps.simulate(ps.one_f_one_b(4, 8)).metrics()
    assert json.loads(json.dumps(metrics)) == metrics
    assert metrics == {
        "makespan": 33,
        "bubble_of_total": pytest.approx(0.2727, abs=5e-5),
        "bubble_of_ideal": pytest.approx(0.375),
        "peak_activations": [4, 3, 2, 1],
        "weight_versions": [1, 1, 1, 1],
        "staleness": [0, 0, 0, 0],
    }


def test_chrome_trace_has_every_span_on_the_thread_of_its_worker() -> None:
    message = Span(1, Action("RECV_F", 1, 0), 1.5, 2.0)
    trace = Trace("mine", 2, 1, 1, TWO.spans, label="measured, paced", messages=(message,))
    chrome = json.loads(trace.to_chrome())
    events = chrome["traceEvents"]
    names = [(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        ("process_name", "mine, p=2, m=1 (measured, paced)"),
        ("thread_name", "worker 0"),
        ("thread_name", "worker 1"),
    ]
    boxes = [(e["tid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert boxes == [
        (0, "0F0", "F", 1e6, 1e6),
        (1, "1F0", "F", 2e6, 3e6),
        (1, "1B0", "B", 5e6, 1e6),
        (0, "0B0", "B", 7e6, 4e6),
        (1, "1RECV_F0", "RECV_F", 1.5e6, 0.5e6),
    ]


def test_chrome_trace_carries_the_versions() -> None:
    trace = ps.simulate(ps.pipedream(2, 3))
    events = [e for e in json.loads(trace.to_chrome())["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["args"]["microbatch"], e["args"]["version"]) for e in events] == [
        (str(s.action), s.action.microbatch, s.version) for s in trace.spans
    ]


def test_a_span_knows_how_long_it_took() -> None:
    assert Span(0, F(0, 0), 1.5, 4.0).seconds == 2.5


def test_a_simulated_trace_says_that_it_is_a_prediction() -> None:
    trace = ps.simulate(ps.gpipe(2, 3))
    assert (trace.label, trace.name, trace.p, trace.m, trace.v) == ("predicted", "gpipe", 2, 3, 1)
    assert trace.messages == ()


@pytest.mark.parametrize(
    ("weights", "torn"),
    [
        # Every microbatch but the first meets, on its way back, the weights of its own time.
        ("latest", [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], []]),
        ("stash", [[], [], []]),
        ("vertical_sync", [[], [], []]),
    ],
)
def test_mismatched_lists_what_met_other_weights_on_its_way_back(
    weights: str, torn: list[list[int]]
) -> None:
    trace = ps.simulate(ps.pipedream(3, 6), weights=weights)
    assert trace.mismatched == [[(worker, k) for k in row] for worker, row in enumerate(torn)]


def test_bytes_of_versions_are_copies_times_size() -> None:
    cost = Cost(parameter_bytes=[100, 10, 1, 7])
    assert ps.simulate(ps.pipedream(4, 9), cost).version_bytes == [400, 30, 2, 7]
    assert ps.simulate(ps.gpipe(4, 9), cost).version_bytes == [100, 10, 1, 7]
    assert ps.simulate(ps.pipedream(4, 9)).version_bytes == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("gpipe", [1, 1, 1, 1]),
        ("interleaved_1f1b", [1, 1, 1, 1]),
        ("zb_v", [1, 1, 1, 1]),
        ("dualpipe_v", [1, 1, 1, 1]),
        ("chimera", [2, 2, 2, 2]),
        ("pipedream", [4, 3, 2, 1]),
        ("pipedream_2bw", [2, 2, 2, 2]),
    ],
)
def test_weight_copies(name: str, copies: list[int]) -> None:
    assert ps.simulate(ps.build(name, 4, 16, batches=2)).weight_copies == copies
