"""Charts: what they say, also to a screen reader, in grey print, and in a saved notebook."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib.style
import nbformat
import pipeschool as ps
import pytest
from matplotlib.colors import to_rgb
from nbclient import NotebookClient
from pipeschool import draw


def predicted(name: str = "gpipe", p: int = 4, m: int = 8, **costs: float) -> ps.Trace:
    return ps.simulate(ps.build(name, p, m), ps.Cost(**costs))


def measured(trace: ps.Trace, slower: float = 1.0) -> ps.Trace:
    """`trace` as if it had been measured, with everything `slower` and half a second late."""
    spans = tuple(
        s._replace(start=s.start * slower + 0.5, end=s.end * slower + 0.5) for s in trace.spans
    )
    return replace(trace, spans=spans, label="measured, paced")


def numbers(chart: draw.Chart, panel: int = 0) -> list[tuple[int, float, str]]:
    """(worker, time, text) of every number in a box."""
    return [
        (text.get_position()[1], text.get_position()[0], text.get_text())
        for text in chart.axes[panel].texts
    ]


def lines(chart: draw.Chart) -> list[str]:
    return [line for axes in chart.axes for line in axes.get_title(loc="left").splitlines()]


def test_gantt_has_a_number_in_the_middle_of_every_box() -> None:
    chart = draw.gantt(predicted("gpipe", p=2, m=2))
    assert sorted(numbers(chart)) == [
        (0, 0.5, "0"),
        (0, 1.5, "1"),
        (0, 6.0, "0"),
        (0, 8.0, "1"),
        (1, 1.5, "0"),
        (1, 2.5, "1"),
        (1, 4.0, "0"),
        (1, 6.0, "1"),
    ]


def bars(chart: draw.Chart) -> list[tuple[int, float, float]]:
    """(worker, middle, height) of every bar at the foot of a box."""
    found = []
    for collection in chart.axes[0].collections:
        for path in collection.get_paths():
            left, top, right, bottom = (*path.vertices.min(0), *path.vertices.max(0))
            if bottom - top < draw.BOX / 2:
                found.append((round(bottom), (left + right) / 2, round(bottom - top, 6)))
    return sorted(found)


def test_bars_mark_the_later_stages_of_a_worker_the_higher_the_later() -> None:
    assert bars(draw.gantt(predicted("gpipe", p=2, m=2))) == []
    trace = ps.simulate(ps.interleaved_1f1b(2, 2, v=3))
    shown = bars(draw.gantt(trace))
    high = max(height for _, _, height in shown)
    later = [s for s in trace.spans if s.action.kind != "U" and s.action.stage >= 2]
    assert shown == sorted(
        (s.worker, (s.start + s.end) / 2, high if s.action.stage >= 4 else round(high / 2, 6))
        for s in later
    )
    (legend,) = draw.gantt(trace).legends
    assert "a later stage of its worker" in [text.get_text() for text in legend.get_texts()]


def order_of_drawing(chart: draw.Chart, ends: list[tuple[float, float]]) -> list[int]:
    """For each box from one time to another: the number of the layer that it is in."""
    found = {}
    for number, collection in enumerate(chart.axes[0].collections):
        for path in collection.get_paths():
            found[path.vertices[:, 0].min(), path.vertices[:, 0].max()] = number
    return [found[pair] for pair in ends]


def test_a_forward_beside_a_long_update_is_not_hidden_by_it() -> None:
    actions = (ps.F(0, 0), ps.B(0, 0), ps.U(0, 0), ps.F(0, 1), ps.B(0, 1), ps.U(0, 1))
    ends = [(0.0, 1.0), (1.0, 3.0), (3.0, 6.0), (3.5, 5.0), (6.0, 8.0), (8.0, 8.001)]
    spans = tuple(ps.Span(0, action, *pair) for action, pair in zip(actions, ends, strict=True))
    trace = replace(predicted("pipedream", p=1, m=2), spans=spans)
    forward, backward, long, beside, _, short = order_of_drawing(draw.gantt(trace), ends)
    assert long < forward == beside
    assert short > backward


def test_gantt_names_workers_from_the_top_and_says_its_units() -> None:
    (axes,) = draw.gantt(predicted(p=3)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "worker 0",
        "worker 1",
        "worker 2",
    ]
    assert axes.yaxis_inverted()
    assert axes.get_xlabel() == "time (units of cost)"
    (axes,) = draw.gantt(measured(predicted(p=3, forward=0.01, backward=0.02))).axes
    assert axes.get_xlabel() == "time (ms)"
    assert axes.get_xlim() == pytest.approx((0, 300))  # (8 + 3 - 1) * 30 ms, counted from 0
    (axes,) = draw.gantt(measured(predicted(p=3))).axes
    assert axes.get_xlabel() == "time (s)"


def test_gantt_gives_makespan_and_both_bubbles_with_their_denominators() -> None:
    assert lines(draw.gantt(predicted("one_f_one_b"))) == [
        "one_f_one_b, p=4, m=8 (predicted)",
        "makespan 33; bubble of total 0.2727 = idle / (p * makespan); "
        "bubble of ideal 0.375 = idle / busy",
    ]


def test_alternative_text_tells_the_chart() -> None:
    assert draw.gantt(predicted("one_f_one_b", p=2, m=3)).alt == (
        "Gantt chart of one_f_one_b, p=2, m=3 (predicted): makespan 12; "
        "bubble of total 0.25 = idle / (p * makespan); bubble of ideal 0.3333 = idle / busy. "
        "Worker 0 of 2 does F0 to F1, B0, F2, B1 to B2."
    )


def test_legend_names_what_is_there() -> None:
    (legend,) = draw.gantt(predicted()).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["forward", "backward", "update", "idle"]


@pytest.mark.parametrize("p", [1, 4, 8])
@pytest.mark.parametrize("m", [1, 8, 32])
@pytest.mark.parametrize("name", ["one_f_one_b", "naive"])
def test_numbers_fit_into_their_boxes(name: str, p: int, m: int) -> None:
    trace = predicted(name, p, m)
    chart = draw.gantt(trace)
    chart.canvas.draw()
    (axes,) = chart.axes
    middles = {(s.worker, (s.start + s.end) / 2): s for s in trace.spans}
    for text in axes.texts:
        span = middles[text.get_position()[1], text.get_position()[0]]
        box = axes.transData.transform([(span.start, 0), (span.end, 0)])
        extent = text.get_window_extent()
        assert box[0][0] <= extent.x0 and extent.x1 <= box[1][0]
        assert text.get_text() == str(span.action.microbatch)


def test_numbers_of_small_boxes_are_left_out() -> None:
    shown = [text for _, _, text in numbers(draw.gantt(predicted("one_f_one_b", 8, 32)))]
    assert sorted(shown, key=int) == [str(k) for k in range(32) for _ in range(8)]  # backwards
    assert numbers(draw.gantt(predicted("naive", 8, 32))) == []


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize(
    ("light", "dark", "ratio"),
    [
        (draw.COLOURS["F"], draw.COLOURS["B"], 3.0),  # WCAG's minimum for graphics
        (draw.IDLE, draw.COLOURS["B"], 3.0),
        (draw.COLOURS["F"], "black", 4.5),  # and for text
        ("white", draw.COLOURS["B"], 4.5),
        ("white", draw.COLOURS["I"], 4.5),
        (draw.COLOURS["W"], "black", 4.5),
        (draw.COLOURS["W"], draw.COLOURS["I"], 1.7),  # two halves, told apart by their place too
        (draw.COLOURS["F"], draw.COLOURS["W"], 1.7),
    ],
)
def test_contrast_is_enough_without_colour(light: str, dark: str, ratio: float) -> None:
    assert (luminance(light) + 0.05) / (luminance(dark) + 0.05) >= ratio


def test_compare_has_one_time_axis_and_says_which_is_which() -> None:
    trace = predicted(forward=0.005, backward=0.010)
    chart = draw.compare(trace, measured(trace, slower=1.02))
    assert lines(chart) == [
        "gpipe, p=4, m=8 (predicted)",
        "makespan 165 ms",
        "gpipe, p=4, m=8 (measured, paced)",
        "makespan 168.3 ms, +3.3 ms (+2.0%) against the prediction",
    ]
    above, below = chart.axes
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, 168.3))
    assert below.get_xlabel() == "time (ms)"
    assert chart.alt == (
        "Two Gantt charts on one time axis. gpipe, p=4, m=8 (predicted): makespan 165 ms; "
        "gpipe, p=4, m=8 (measured, paced): makespan 168.3 ms, +3.3 ms (+2.0%) against the "
        "prediction. Below them: measured, paced: 2.0% over the prediction (actions +2.0%, "
        "messages +0.0%, between actions +0.0%)."
    )


def test_compare_says_below_the_measured_chart_why_it_is_late() -> None:
    trace = predicted(forward=0.005, backward=0.010)
    late = measured(trace, slower=1.02)
    chart = draw.compare(trace, late)
    (line,) = chart.texts
    assert line.get_text() == str(ps.why_late(trace, late))
    lowest = min(axes.get_position().y0 for axes in chart.axes)
    room = line.get_window_extent()
    assert 0 < room.y0 and room.y1 < lowest * chart.bbox.height
    (legend,) = chart.legends
    assert not room.overlaps(legend.get_window_extent())
    assert room.x1 < chart.bbox.width


def test_compare_says_that_the_machine_disturbed_a_run() -> None:
    trace = predicted(forward=0.005, backward=0.010)
    # The last backward of worker 0 ends 33 ms late, as long as something else had its core.
    late = {
        ps.B(0, 7): lambda s: s._replace(end=s.end + 0.033, waited=0.033),
        ps.U(0, 0): lambda s: s._replace(start=s.start + 0.033, end=s.end + 0.033),
    }
    spans = tuple(late.get(s.action, lambda s: s)(s) for s in measured(trace).spans)
    chart = draw.compare(trace, replace(trace, spans=spans, label="measured, paced"))
    said = (
        "measured, paced: 20.0% over the prediction, of which 20.0% is a worker that the machine "
        "kept waiting: run it again"
    )
    assert [text.get_text() for text in chart.texts] == [said]
    assert lines(chart)[3] == "makespan 198 ms, +33 ms (+20.0%) against the prediction"
    assert chart.alt.endswith(f" against the prediction. Below them: {said}.")


def test_compare_gives_no_reason_where_there_is_none_to_give() -> None:
    trace = predicted(forward=0.005, backward=0.010)
    updates = replace(trace, spans=tuple(s for s in trace.spans if s.action.kind != "U"))
    for above, below in (
        (trace, trace),  # two predictions
        (updates, measured(trace)),  # other actions
        (predicted(), measured(trace)),  # fitted to the run
        (predicted(forward=0, backward=0), measured(predicted(forward=0, backward=0))),
    ):
        chart = draw.compare(above, below)
        assert not chart.texts and "Below them" not in chart.alt


@pytest.mark.parametrize(
    ("slower", "said"),
    [
        (1.0, "makespan 1.65 s, as predicted"),
        (1.0004, "makespan 1.651 s, as predicted"),
        (0.9, "makespan 1.485 s, -165 ms (-10.0%) against the prediction"),
        (2.0, "makespan 3.3 s, +1.65 s (+100.0%) against the prediction"),
    ],
)
def test_compare_says_by_how_much_in_digits_that_count(slower: float, said: str) -> None:
    trace = predicted(forward=0.05, backward=0.1)
    assert lines(draw.compare(trace, measured(trace, slower)))[3] == said


def test_compare_stretches_a_prediction_in_other_units_and_says_so() -> None:
    chart = draw.compare(predicted(), measured(predicted(forward=0.005, backward=0.010)))
    assert lines(chart)[1] == "makespan 33 units, one unit drawn as 5 ms"
    assert lines(chart)[3] == "makespan 165 ms"  # no gap: the prediction was fitted


def test_compare_takes_a_run_on_a_busy_machine_for_what_it_is() -> None:
    trace = predicted(forward=0.005, backward=0.010)
    late = replace(measured(trace, slower=4.0), label="measured")
    assert lines(draw.compare(trace, late))[3] == (
        "makespan 660 ms, +495 ms (+300.0%) against the prediction"
    )


def test_compare_refuses_traces_of_different_pipelines() -> None:
    with pytest.raises(ValueError, match="not p=4, m=8 and p=4, m=2"):
        draw.compare(predicted(), measured(predicted(m=2)))


def test_memory_shows_every_peak_in_units_of_a() -> None:
    chart = draw.memory(predicted("one_f_one_b"))
    (axes,) = chart.axes
    assert [text.get_text() for text in axes.texts] == ["4 A", "3 A", "2 A", "1 A", "peak"]
    assert "peaks from worker 0 on: 4, 3, 2, 1 A" in chart.alt
    assert axes.get_xlabel() == "time (units of cost)"


def test_memory_strips_are_as_high_as_what_is_held() -> None:
    chart = draw.memory(predicted("gpipe", p=1, m=2))  # F0 F1 B0 B1: held 1, 2, 1, 0
    strip = chart.axes[0].collections[-1].get_paths()[0].vertices
    floor = draw.BOX / 2
    heights = {(round(x, 6), round((floor - y) / draw.BOX * 2, 6)) for x, y in strip}
    assert heights == {(0, 0), (0, 1), (1, 1), (1, 2), (4, 2), (4, 1), (6, 1), (6, 0)}


@pytest.mark.parametrize("name", ["流水线", r"costs $\1$", "a_b^{c", '<img> & "quotes"'])
def test_any_name_can_be_drawn_without_a_warning(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = replace(predicted(), name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chart in (draw.gantt(trace), draw.memory(trace), draw.compare(trace, trace)):
            chart.to_html()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "trace",
    [
        predicted("pipedream", p=16, m=100),
        predicted(p=1, m=1),
        predicted(forward=0, backward=0),
        ps.Trace("nothing", 2, 1, 1, ()),
    ],
    ids=["many", "one", "no time", "no span"],
)
def test_any_size_can_be_drawn(trace: ps.Trace, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chart in (draw.gantt(trace), draw.memory(trace), draw.compare(trace, trace)):
            chart.savefig(tmp_path / "chart.png")
            assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
            (tmp_path / "chart.png").unlink()


def test_the_callers_style_does_not_change_a_chart() -> None:
    plain = draw.compare(predicted(), predicted()).to_html()
    with matplotlib.style.context("dark_background"):
        chart = draw.compare(predicted(), predicted())
        assert chart.to_html() == plain


def test_pyplot_is_left_alone() -> None:
    code = (
        "import sys, pipeschool as ps; ps.draw.gantt(ps.simulate(ps.gpipe(2, 2))).to_html(); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_html_escapes_the_alternative_text() -> None:
    chart = draw.gantt(replace(predicted(), name='<b> "x"'))
    (alt,) = re.findall(r'^<img alt="([^"]*)"', chart.to_html())
    assert alt.startswith("Gantt chart of &lt;b&gt; &quot;x&quot;, p=4, m=8")


def test_a_notebook_and_its_html_carry_the_alternative_text() -> None:
    from nbconvert import HTMLExporter

    cell = "import pipeschool as ps\nps.draw.gantt(ps.simulate(ps.gpipe(p=2, m=2)))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(notebook, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    alt = draw.gantt(ps.simulate(ps.gpipe(p=2, m=2))).alt
    assert output.output_type == "display_data"
    assert output.data["text/plain"] == alt
    assert f'<img alt="{alt}"' in output.data["text/html"]
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert f'<img alt="{alt}"' in page


def test_versions_shows_which_version_every_forward_and_backward_used() -> None:
    trace = ps.simulate(ps.pipedream(2, 3), ps.Cost(2, 2))
    chart = draw.versions(trace)
    held = [("held"), "2", "1"]
    shown = [(round(w, 1), t, text) for w, t, text in numbers(chart) if text not in held]
    assert sorted(shown) == [  # upper lane forward, lower lane backward
        (-0.2, 1.0, "0 v0"), (-0.2, 3.0, "1 v0"), (-0.2, 9.0, "2 v1"),
        (0.2, 7.0, "0 v0"), (0.2, 11.0, "1 v0"), (0.2, 15.0, "2 v1"),
        (0.8, 3.0, "0 v0"), (0.8, 7.0, "1 v1"), (0.8, 11.0, "2 v2"),
        (1.2, 5.0, "0 v0"), (1.2, 9.0, "1 v1"), (1.2, 13.0, "2 v2"),
    ]  # fmt: skip
    assert [text for _, _, text in numbers(chart) if text in held] == held


def test_versions_marks_a_backward_that_met_other_weights_than_its_forward() -> None:
    def thick_edges(weights: str) -> int:
        trace = ps.simulate(ps.pipedream(3, 6), weights=weights)
        (axes,) = draw.versions(trace).axes
        return sum(box.get_linewidth() > 1 for box in axes.patches)

    assert (thick_edges("stash"), thick_edges("latest")) == (0, 10)


def test_the_alternative_text_of_versions_counts_them() -> None:
    alt = draw.versions(ps.simulate(ps.pipedream(4, 32), weights="latest")).alt
    assert "Staleness in updates: 3, 2, 1, 0." in alt
    assert "forward and backward used different weights: 31, 31, 31, 0." in alt


@pytest.mark.parametrize("one", range(len(draw.VERSIONS)))
def test_neighbouring_versions_differ_and_leave_black_numbers_legible(one: int) -> None:
    colour, following = (to_rgb(draw.VERSIONS[i % len(draw.VERSIONS)]) for i in (one, one + 1))
    grey, grey_following = (0.299 * r + 0.587 * g + 0.114 * b for r, g, b in (colour, following))
    assert grey > 0.6
    assert abs(grey - grey_following) > 0.08
