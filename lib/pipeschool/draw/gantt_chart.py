"""Gantt charts: who did what when, and prediction above measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from statistics import median

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pipeschool.draw.style import (
    BAR,
    BOTTOM,
    BOX,
    COLOURS,
    FOOTER,
    GAP,
    HATCH,
    IDLE,
    INK,
    LEFT,
    LINE,
    NAMES,
    POINTS,
    RIGHT,
    SMALLEST,
    TOP,
    WIDTH,
    Chart,
    house_style,
)
from pipeschool.lateness import same_actions, why_late
from pipeschool.text import summary, time_unit, title
from pipeschool.trace import Span, Trace


def gantt(*traces: Trace) -> Chart:
    """Who does what when: one row per worker, the microbatch in each box.

    Several traces come below each other on one time axis.
    """
    lines = [f"{title(trace)}\n{summary(trace)}" for trace in traces]
    return _stack(traces, lines, time_unit(traces[0]), " ".join(map(describe, traces)))


def compare(predicted: Trace, measured: Trace) -> Chart:
    """Prediction above measurement, on one time axis; ValueError where p or m differ.

    Below a measured one of the same actions stands by how much it missed the prediction, and why:
    see `why_late`. A prediction in other units than seconds is stretched until both have the same
    work to do. Then only the shapes can be compared, and the title says how long one unit is drawn.
    """
    if (predicted.p, predicted.m) != (measured.p, measured.m):
        raise ValueError(
            f"compare needs two traces of the same p and m, not p={predicted.p}, m={predicted.m} "
            f"and p={measured.p}, m={measured.m}"
        )
    factor, unit = time_unit(measured)
    stretch = stretch_of(predicted, measured)
    first = (
        f"makespan {predicted.makespan:.4g} units, one unit drawn as {stretch * factor:.3g} {unit}"
    )
    second = f"makespan {measured.makespan * factor:.4g} {unit}"
    why = ""
    if stretch == 1:  # seconds, as they should be
        first = f"makespan {predicted.makespan * factor:.4g} {unit}"
        second += _against(predicted, measured)
        if measured.label.startswith("measured") and predicted.makespan:
            why = str(why_late(predicted, measured)) if same_actions(predicted, measured) else ""
    predicted = _stretched(predicted, stretch)
    titles = [f"{title(predicted)}\n{first}", f"{title(measured)}\n{second}"]
    said = "; ".join(line.replace("\n", ": ") for line in titles)
    alt = f"Two Gantt charts on one time axis. {said}." + (f" Below them: {why}." if why else "")
    return _stack((predicted, measured), titles, (factor, unit), alt, why)


def _against(predicted: Trace, measured: Trace) -> str:
    """By how much the second took longer, as the end of a line."""
    if not predicted.makespan:
        return ""
    gap = measured.makespan - predicted.makespan
    share = f"{gap / predicted.makespan:+.1%}"
    if share in ("+0.0%", "-0.0%"):
        return ", as predicted"
    said = f"{gap:+.3g} s" if abs(gap) >= 1 else f"{gap * 1000:+.3g} ms"
    return f", {said} ({share}) against the prediction"


def stretch_of(predicted: Trace, measured: Trace) -> float:
    """Seconds per unit of the prediction, such that both have the same work to do; 1 where the
    prediction is in seconds already, as it should be.

    It is where the two are not far apart. Without a pace they may be: work of some milliseconds
    takes many times as long on a busy machine.
    """
    work = sum(predicted.busy)
    stretch = sum(measured.busy) / work if work else 1.0
    far = 3 if "paced" in measured.label else 30
    return 1.0 if 1 / far < stretch < far else stretch


def describe(trace: Trace) -> str:
    """The chart of `trace` in words."""
    parts = []
    steps = [span.action for span in trace.rows[0] if span.action.kind != "U"]
    for kind, group in groupby(steps, key=lambda action: action.kind):
        numbers = [action.microbatch for action in group]
        parts.append(f"{kind}{numbers[0]}" + (f" to {kind}{numbers[-1]}" if numbers[1:] else ""))
    order = ", ".join(parts[:12]) + (", and so on" if parts[12:] else "")
    return (
        f"Gantt chart of {title(trace)}: {summary(trace)}. "
        f"Worker 0 of {trace.p} does {order or 'nothing'}."
    )


def _stack(
    traces: Sequence[Trace],
    titles: Sequence[str],
    unit: tuple[float, str],
    alt: str,
    footer: str = "",
) -> Chart:
    """Gantt charts below each other, on one time axis, and a line of text below them."""
    rows = sum(trace.p * row_height(trace.p) for trace in traces)
    foot = FOOTER if footer else 0.0
    chart = Chart(alt, TOP + rows + GAP * (len(traces) - 1) + BOTTOM + foot)
    with house_style():
        panels = add_panels(chart, traces, *unit)
        for axes, trace, line in zip(panels, traces, titles, strict=True):
            axes.set_title(line, loc="left", fontsize=9)
            draw_boxes(axes, trace, unit[0])
        kinds = {span.action.kind for trace in traces for span in trace.spans}
        keys: list[Artist] = [
            Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in NAMES if kind in kinds
        ]
        if any(any(chunks_of(trace).values()) for trace in traces):
            keys.append(Line2D([], [], color="black", lw=3, label="a later stage of its worker"))
        chart.legend(
            handles=[*keys, Patch(facecolor=IDLE, edgecolor=HATCH, hatch="////", label="idle")],
            loc="lower right",
            bbox_to_anchor=(0, foot / chart.get_figheight(), 1, 1),
            ncols=7,
            frameon=False,
            fontsize=8,
            handlelength=1.2,
        )
        if footer:
            chart.text(LEFT / WIDTH, FOOTER / 3 / chart.get_figheight(), footer, fontsize=9)
    return chart


def add_panels(
    chart: Chart, traces: Sequence[Trace], factor: float, unit: str, taller: float = 1.0
) -> list[Axes]:
    """One pair of axes per trace: workers down from 0, a grey band where they could work."""
    height = chart.get_figheight()
    longest = max(trace.makespan for trace in traces) * factor or 1.0
    top = height - TOP
    panels = []
    for trace in traces:
        row = taller * row_height(trace.p)
        top -= trace.p * row
        width = WIDTH - LEFT - RIGHT - 0.25
        axes = chart.add_axes((LEFT / WIDTH, top / height, width / WIDTH, trace.p * row / height))
        top -= GAP
        axes.set_xlim(0, longest)
        axes.set_ylim(trace.p - 0.5, -0.5)
        labels = [f"worker {worker}" for worker in range(trace.p)]
        axes.set_yticks(range(trace.p), labels, fontsize=min(9, row * POINTS * 0.7))
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        idle = [_box(0, trace.makespan * factor, worker) for worker in range(trace.p)]
        axes.add_collection(
            PolyCollection(idle, facecolor=IDLE, edgecolor=HATCH, hatch="////", lw=0.0)
        )
        panels.append(axes)
    panels[-1].set_xlabel(f"time ({unit})", fontsize=8, loc="left")
    return panels


def draw_boxes(axes: Axes, trace: Trace, factor: float) -> None:
    begin = begin_of(trace)
    points = axes.get_position().width * WIDTH * POINTS / axes.get_xlim()[1]  # per unit of time
    tallest = row_height(trace.p) * BOX * POINTS * 0.75
    chunks = chunks_of(trace)
    for kind, spans in _layers(trace, LINE / (factor * points)):
        if not spans:
            continue
        colour = COLOURS[kind]
        ends = [((s.start - begin) * factor, (s.end - begin) * factor) for s in spans]
        boxes = [_box(*ends[i], span.worker) for i, span in enumerate(spans)]
        typical = median(right - left for left, right in ends) * points
        if kind == "U":  # takes next to no time: its edge is the marker
            edge, line = colour, 1.2 if len(spans) <= 50 * trace.p else 0.3
        else:
            edge, line = "white", min(0.8, typical / 10)
        axes.add_collection(
            PolyCollection(boxes, facecolor=colour, edgecolor=edge, lw=line, clip_on=False)
        )
        bars = [
            _bar(*ends[i], span.worker, chunks[span.worker, span.action.stage])
            for i, span in enumerate(spans)
            if kind != "U" and chunks[span.worker, span.action.stage]
        ]
        axes.add_collection(PolyCollection(bars, facecolor=INK[kind], lw=0))
        digits = max(len(str(span.action.microbatch)) for span in spans)
        size = min(9, tallest, typical / (0.85 * digits))
        if kind == "U" or size < SMALLEST:
            continue
        ink = INK[kind]
        for (left, right), span in zip(ends, spans, strict=True):
            number = str(span.action.microbatch)
            if (right - left) * points >= 0.62 * size * len(number):
                axes.text(
                    (left + right) / 2,
                    span.worker,
                    number,
                    color=ink,
                    size=size,
                    ha="center",
                    va="center_baseline",
                )


def _layers(trace: Trace, line: float) -> list[tuple[str, list[Span]]]:
    """The spans by kind, in the order in which they are drawn.

    An update that takes longer than `line` seconds is a box like the others, and lies below them.
    A short one is a line, wider than its time, so it lies above them.
    """
    kinds: dict[str, list[Span]] = {kind: [] for kind in COLOURS}
    below: list[Span] = []
    for span in trace.spans:
        kind = span.action.kind
        (below if kind == "U" and span.seconds > line else kinds[kind]).append(span)
    return [("U", below), *kinds.items()]


def _box(left: float, right: float, worker: int) -> list[tuple[float, float]]:
    top, bottom = worker - BOX / 2, worker + BOX / 2
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _bar(left: float, right: float, worker: int, share: float) -> list[tuple[float, float]]:
    """At the foot of a box; the higher, the later the chunk."""
    inset, bottom = 0.1 * (right - left), worker + BOX / 2 - 0.05
    left, right, top = left + inset, right - inset, bottom - share * BAR
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def chunks_of(trace: Trace) -> dict[tuple[int, int], float]:
    """For (worker, stage), whether it is the worker's first stage (0), its last (1), or between."""
    places: dict[tuple[int, int], float] = {}
    for worker, row in enumerate(trace.rows):
        stages = sorted({span.action.stage for span in row})
        for place, stage in enumerate(stages):
            places[worker, stage] = place / max(1, len(stages) - 1)
    return places


def row_height(workers: int) -> float:
    """Inches of a row: lower where there are many, so that the chart still fits on a screen."""
    return max(0.15, min(0.4, 4.0 / workers))


def begin_of(trace: Trace) -> float:
    return min((span.start for span in trace.spans), default=0.0)


def _stretched(trace: Trace, factor: float) -> Trace:
    spans = tuple(s._replace(start=s.start * factor, end=s.end * factor) for s in trace.spans)
    return replace(trace, spans=spans)
