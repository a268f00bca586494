"""The chart of live bytes: what it says in words, and that areas and lines are as high as bytes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pipeschool as ps
import pytest
from matplotlib.colors import to_rgb
from pipeschool import draw
from pipeschool.draw.live_memory import KINDS
from pipeschool.memory import MemorySample

MB = 1e6
SIZES = dict(
    parameter_bytes=4 * MB,
    activation_bytes=2 * MB,
    message_bytes=1 * MB,
    working_bytes=0.5 * MB,
)


def predicted(name: str = "one_f_one_b", p: int = 2, m: int = 3, **costs: float) -> ps.Trace:
    return ps.simulate(ps.build(name, p, m), ps.Cost(**{**SIZES, **costs}))


def measured(trace: ps.Trace, more: float = 1 * MB, late: float = 0.5) -> ps.Trace:
    """`trace` as if it had been measured: `late`, and with some working memory more."""
    spans = tuple(s._replace(start=s.start + late, end=s.end + late) for s in trace.spans)
    levels = tuple(
        tuple(lv._replace(time=lv.time + late, working=lv.working + more) for lv in row)
        for row in trace.memory
    )
    return replace(trace, spans=spans, label="measured, paced", measured_memory=levels)


def top_at(axes, label, time):
    """The upper edge of an area at a time between two levels."""
    (area,) = [c for c in axes.collections if c.get_label() == label]
    inside = area.get_paths()[0]
    heights = np.arange(0.005, axes.get_ylim()[1], 0.01)
    hit = [h for h in heights if inside.contains_point((time, h))]
    return round(float(max(hit)), 1) if hit else None


def test_areas_are_as_high_as_the_bytes_of_their_kind() -> None:
    # Worker 0 of 2 under 1F1B does F0 F1 B0 F2 B1 B2, in seconds 0-1, 1-2, 4-6, 6-7, 7-9, 10-12.
    chart = draw.live_bytes(predicted(forward=1, backward=2))
    axes = chart.axes[1]
    assert top_at(axes, "weights", 0.5) == 4
    assert top_at(axes, "activations", 0.5) == 6  # one microbatch, no gradients yet
    assert top_at(axes, "activations", 3) == 8  # two, while the worker waits
    assert top_at(axes, "working", 5) == 8.5
    assert top_at(axes, "gradients", 6.5) == 8
    assert top_at(axes, "activations", 6.5) == 12
    assert top_at(axes, "working", 11) == 10.5
    below = chart.axes[2]
    assert top_at(below, "buffers", 1.5) == 5  # worker 1 keeps the input that it was sent
    assert top_at(below, "activations", 1.5) == 7


def test_the_line_is_the_measured_total_on_the_same_axes() -> None:
    trace = predicted(forward=1, backward=2)
    chart = draw.live_bytes(trace, measured(trace))
    assert len(chart.axes) == 3  # the Gantt chart, and one for each worker
    for worker, axes in enumerate(chart.axes[1:]):
        (line,) = axes.lines
        x, y = line.get_data()
        assert list(y) == pytest.approx([level.total / MB + 1 for level in trace.memory[worker]])
        assert list(x) == pytest.approx([level.time for level in trace.memory[worker]])
        assert line.get_drawstyle() == "steps-post"
        assert axes.get_xlim() == chart.axes[0].get_xlim() == (0, trace.makespan)
        assert axes.get_ylim() == chart.axes[1].get_ylim()
        assert axes.get_ylim()[1] > max(y)
        assert axes.get_ylabel() == "MB"


def test_a_prediction_in_other_units_is_stretched_to_the_measurement() -> None:
    one, small = (predicted(forward=f, backward=2 * f) for f in (1, 0.01))
    chart = draw.live_bytes(one, measured(small))
    assert chart.axes[0].get_xlim() == pytest.approx((0, 1000 * small.makespan))
    assert top_at(chart.axes[1], "activations", 65) == 12  # as above, 65 ms instead of 6.5 s
    assert chart.axes[-1].get_xlabel() == "time (ms)"


def test_the_words_tell_the_peaks_of_every_worker_and_what_is_in_the_highest() -> None:
    trace = predicted(forward=1, backward=2)
    assert draw.live_bytes(trace, measured(trace)).alt == (
        "Gantt chart of one_f_one_b, p=2, m=3 (predicted), and below it the bytes in each "
        "worker's memory over time, by kind. Peaks predicted, from worker 0 on: 12.5, 11.5 MB; "
        "measured, paced, from worker 0 on: 13.5, 12.5 MB. Worker 0 at its peak holds, in MB: "
        "weights 4, gradients 4, activations 4, working 0.5."
    )
    titles = [axes.get_title(loc="left") for axes in draw.live_bytes(trace).axes[1:]]
    assert titles == [
        "worker 0: peak 12.5 MB predicted",
        "worker 1: peak 11.5 MB predicted",
    ]


def test_the_legend_names_what_is_there() -> None:
    def names(*traces: ps.Trace) -> list[str]:
        (legend,) = draw.live_bytes(*traces).legends
        return [text.get_text() for text in legend.get_texts()]

    trace = predicted()
    assert names(trace) == [
        *("forward", "backward"),
        *("weights", "gradients", "buffers", "activations", "working"),
    ]
    assert names(trace, measured(trace))[-1] == "total, measured, paced"
    stream = ps.simulate(ps.pipedream(2, 4), ps.Cost(**SIZES, optimizer_bytes=8 * MB))
    assert {"versions", "optimizer"} <= set(names(stream))


def test_traces_without_bytes_or_of_other_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gpipe, p=2, m=2 \(predicted\) knows no bytes: give ps"):
        draw.live_bytes(ps.simulate(ps.gpipe(2, 2)))
    with pytest.raises(ValueError, match="not p=2, m=3 and p=2, m=4"):
        draw.live_bytes(predicted(m=3), measured(predicted(m=4)))


def test_kinds_can_be_told_apart_in_grey() -> None:
    """Neighbours in the stack differ in lightness, or one of them is hatched."""
    stack = list(KINDS.values())
    for one, following in zip(stack, stack[1:], strict=False):
        greys = [
            sum(w * c for w, c in zip((0.299, 0.587, 0.114), to_rgb(k["facecolor"]), strict=True))
            for k in (one, following)
        ]
        assert abs(greys[0] - greys[1]) > 0.08 or one.get("hatch") != following.get("hatch")


@pytest.mark.parametrize("p", [1, 4, 16])
def test_any_size_can_be_drawn_without_a_warning(p: int, capfd: pytest.CaptureFixture[str]) -> None:
    trace = replace(predicted("pipedream", p=p, m=20), name="流水线 $a_b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw.live_bytes(trace, measured(trace)).to_html().startswith("<img alt=")
    assert capfd.readouterr() == ("", "")


def test_levels_that_a_clock_puts_before_the_first_action_are_drawn_at_0() -> None:
    trace = predicted()
    early = MemorySample(-3.0, *[MB] * 7)
    rows = tuple((early, *row) for row in trace.memory)
    chart = draw.live_bytes(trace, replace(trace, label="measured", measured_memory=rows))
    (line,) = chart.axes[1].lines
    assert min(line.get_xdata()) == 0
