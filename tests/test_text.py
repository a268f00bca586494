"""The chart for the terminal."""

from __future__ import annotations

import pipeschool as ps
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeschool.text import columns, summary, text_gantt, time_unit, title

GPIPE_2_2 = """\
gpipe, p=2, m=2 (predicted), time in units of cost
time     0         5
worker 0 F0F1......B0==B1==
worker 1 ..F0F1B0==B1==....
makespan 9; bubble of total 0.3333 = idle / (p * makespan); bubble of ideal 0.5 = idle / busy
F3- forward and B3= backward of microbatch 3, . idle"""


def rows(chart: str) -> list[str]:
    return [line for line in chart.splitlines() if line.startswith("worker")]


def measured(seconds: float) -> ps.Trace:
    """A trace that claims to be measured: gpipe with the same forward and backward time."""
    trace = ps.simulate(ps.gpipe(p=2, m=1), ps.Cost(seconds, seconds))
    return ps.Trace(trace.name, 2, 1, 1, trace.spans, label="measured, paced")


def test_every_character_of_a_small_chart() -> None:
    assert text_gantt(ps.simulate(ps.gpipe(p=2, m=2))) == GPIPE_2_2


def test_one_column_stands_for_the_largest_whole_unit() -> None:
    unit_1 = text_gantt(ps.simulate(ps.gpipe(p=2, m=2), ps.Cost(1, 2)))
    unit_500 = text_gantt(ps.simulate(ps.gpipe(p=2, m=2), ps.Cost(500, 1000)))
    assert rows(unit_500) == rows(unit_1)
    assert "makespan 4500;" in unit_500


def test_other_times_are_drawn_to_scale() -> None:
    chart = text_gantt(ps.simulate(ps.gpipe(p=2, m=1), ps.Cost(0.5, [1.0, 2.25])))
    assert rows(chart) == [
        "worker 0 F0-.................B0====",
        "worker 1 ...F0-B0============......",
    ]


def test_boxes_too_small_for_a_number_keep_their_letter() -> None:
    cost = ps.Cost(forward=[1.5, 0.5], backward=1.5)
    assert rows(text_gantt(ps.simulate(ps.gpipe(p=2, m=2), cost))) == [
        "worker 0 F0-F1-....B0=B1=",
        "worker 1 ...F..FB0=B1=...",
    ]


def test_a_long_chart_goes_on_below() -> None:
    whole = rows(text_gantt(ps.simulate(ps.naive(p=2, m=4))))
    parts = rows(text_gantt(ps.simulate(ps.naive(p=2, m=4)), width=29))
    for worker in (0, 1):
        mine = [part.removeprefix(f"worker {worker} ") for part in parts[worker::2]]
        assert {len(part) for part in mine[:-1]} == {20}
        assert f"worker {worker} " + "".join(mine) == whole[worker]


@settings(deadline=None)
@given(
    p=st.integers(1, 12),
    m=st.integers(1, 30),
    forward=st.sampled_from([0, 1, 2, 0.3, 1e-5, 1000]),
    backward=st.sampled_from([0, 2, 5, 0.7, 1e-5, 12345]),
    width=st.one_of(st.none(), st.integers(1, 200)),
)
def test_any_trace_can_be_printed_in_rows_of_equal_length(
    p: int, m: int, forward: float, backward: float, width: int | None
) -> None:
    chart = text_gantt(ps.simulate(ps.pipedream(p, m), ps.Cost(forward, backward)), width)
    lengths = [len(row) for row in rows(chart)]
    blocks = [lengths[i : i + p] for i in range(0, len(lengths), p)]
    assert all(len(set(block)) == 1 for block in blocks)
    assert max(lengths) <= 10_020


def test_units_come_from_the_label() -> None:
    assert time_unit(ps.simulate(ps.gpipe(2, 2))) == (1.0, "units of cost")
    assert time_unit(measured(0.010)) == (1000.0, "ms")
    assert time_unit(measured(2.0)) == (1.0, "s")


def test_words_name_makespan_and_both_denominators() -> None:
    trace = ps.simulate(ps.one_f_one_b(p=4, m=8))
    assert title(trace) == "one_f_one_b, p=4, m=8 (predicted)"
    assert summary(trace) == (
        "makespan 33; bubble of total 0.2727 = idle / (p * makespan); "
        "bubble of ideal 0.375 = idle / busy"
    )
    assert summary(measured(0.010)).startswith("makespan 40 ms; bubble of total 0.5 ")


def test_names_of_workers_are_padded_to_the_longest() -> None:
    chart = rows(text_gantt(ps.simulate(ps.gpipe(p=11, m=1))))
    assert chart[0].startswith("worker 0  F0")
    assert chart[10].startswith("worker 10 ....................F0B0==")


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["", "one", "and more"], ["a name", "1", ""], ["b", "22222", "x"]]
    assert columns(rows, "<>>").split("\n") == [
        "          one  and more",
        "a name      1",
        "b       22222         x",
    ]
    assert columns([["a", "b"], ["cc", "d"]]) == "a   b\ncc  d"
