"""Charts of traces: who did what when, prediction above measurement, memory over time.

Every chart is a matplotlib figure that knows its alternative text, looks the same whatever style
the caller has set, and can be told apart in grey print: forwards are light, backwards dark.
"""

from __future__ import annotations

import base64
import html
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby
from statistics import median
from typing import Any

# A first import on a slow machine logs that fonts are being indexed. On stderr that would cost a
# learner the points of a graded cell.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

import matplotlib  # noqa: E402
from matplotlib import font_manager  # noqa: E402
from matplotlib.artist import Artist  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.collections import PolyCollection  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

from pipeschool.text import summary, time_unit, title  # noqa: E402
from pipeschool.trace import Span, Trace  # noqa: E402

# Blue against orange survives every common colour blindness, light against dark a grey print. The
# halves of a split backward are as dark as the whole, and half-way.
COLOURS = {"F": "#93c9f0", "B": "#a23b00", "I": "#a23b00", "W": "#5fa04e", "U": "black"}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "U": "update",
}
INK = {"F": "black", "B": "white", "I": "white", "W": "black", "U": "black"}  # on these colours
IDLE = "#f4f4f4"
HATCH = "#c4c4c4"  # strokes over idle time, so that it shows on white paper
# Neighbouring versions differ in hue and lightness; all are light enough for black numbers.
VERSIONS = ("#8fc4ec", "#ffe08a", "#c4a6dc", "#c8efcf", "#ef9a86", "#efe9a0")
LANES = 1.4  # how much taller a row with two lanes is
BOX = 0.8  # height of a box; a row is 1
LINE = 3.0  # points: an update that is narrower is drawn as a line
BAR = 0.12  # and of the bar at the foot of a worker's last chunk

WIDTH = 10.0  # all lengths in inches
LEFT, RIGHT, BOTTOM, TOP = 0.85, 0.15, 0.6, 0.6
GAP = 0.75  # between two charts
POINTS = 72  # per inch
SMALLEST = 5.0  # points; numbers that would have to be smaller are left out

CJK = ("Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", "WenQuanYi Zen Hei", "SimHei")


class Chart(Figure):
    """A matplotlib figure with alternative text, `alt`. Notebooks show it as an image with it."""

    def __init__(self, alt: str, height: float):
        with house_style():
            super().__init__(figsize=(WIDTH, height), dpi=144)
            FigureCanvasAgg(self)
        self.alt = alt

    def draw(self, renderer: Any) -> None:
        """Draw; a glyph that no font has becomes a box, without a warning."""
        with house_style():
            super().draw(renderer)

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """Write to a file or file object, as any matplotlib figure does."""
        with house_style():
            super().savefig(fname, **kwargs)

    def to_html(self) -> str:
        """An <img> element with the picture inside it and the alternative text."""
        png = io.BytesIO()
        self.savefig(png, format="png", metadata={"Description": self.alt})
        data = base64.b64encode(png.getvalue()).decode()
        return (
            f'<img alt="{html.escape(self.alt)}" width="{self.get_figwidth() * 96:.0f}" '
            f'style="max-width: 100%" src="data:image/png;base64,{data}">'
        )

    def _ipython_display_(self) -> None:
        # As text/html because front ends show image/png without any alternative text.
        from IPython.display import display

        display({"text/html": self.to_html(), "text/plain": self.alt}, raw=True)


def gantt(*traces: Trace) -> Chart:
    """Who does what when: one row per worker, the microbatch in each box.

    Several traces come below each other on one time axis.
    """
    lines = [f"{title(trace)}\n{summary(trace)}" for trace in traces]
    return _stack(traces, lines, time_unit(traces[0]), " ".join(map(describe, traces)))


def compare(predicted: Trace, measured: Trace) -> Chart:
    """Prediction above measurement, on one time axis; ValueError where p or m differ.

    A prediction in other units than seconds is stretched until both have the same work to do. Then
    only the shapes can be compared, and the title says how long one unit is drawn.
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
    if stretch == 1:  # seconds, as they should be
        gap = round(measured.makespan - predicted.makespan, 9) + 0.0  # never -0.0
        share = f" ({gap / predicted.makespan:+.1%})" if predicted.makespan else ""
        first = f"makespan {predicted.makespan * factor:.4g} {unit}"
        second += f", {gap * factor:+.3g} {unit}{share} against the prediction"
    predicted = _stretched(predicted, stretch)
    titles = [f"{title(predicted)}\n{first}", f"{title(measured)}\n{second}"]
    said = "; ".join(line.replace("\n", ": ") for line in titles)
    alt = f"Two Gantt charts on one time axis. {said}."
    return _stack((predicted, measured), titles, (factor, unit), alt)


def stretch_of(predicted: Trace, measured: Trace) -> float:
    """Seconds per unit of the prediction, such that both have the same work to do; 1 where the
    prediction is in seconds already, as it should be."""
    work = sum(predicted.busy)
    stretch = sum(measured.busy) / work if work else 1.0
    return 1.0 if 1 / 3 < stretch < 3 else stretch


def memory(trace: Trace) -> Chart:
    """Activations that each worker holds over time, in units of A (one microbatch, one worker)."""
    factor, unit = time_unit(trace)
    peaks = trace.peak_activations
    highest = max(peaks, default=0) or 1
    listed = ", ".join(f"{peak:g}" for peak in peaks)
    alt = (
        f"Activations held over time by each worker of {title(trace)}; peaks from worker 0 on: "
        f"{listed} A, where A is what one worker keeps for one microbatch."
    )
    chart = Chart(alt, TOP + trace.p * row_height(trace.p) + BOTTOM)
    with house_style():
        (axes,) = add_panels(chart, [trace], factor, unit)
        axes.set_title(
            f"{title(trace)}\nactivations held, in A (one microbatch on one worker)",
            loc="left",
            fontsize=9,
        )
        begin = begin_of(trace)
        scale = BOX / highest
        strips = []
        for worker, row in enumerate(trace.rows):
            floor = worker + BOX / 2
            strip = [(0.0, floor)]
            for time, held in _held(row, trace.v):
                x = (time - begin) * factor
                strip += [(x, strip[-1][1]), (x, floor - held * scale)]
            strips.append([*strip, (trace.makespan * factor, floor)])
            axes.text(
                1.005,
                worker,
                f"{peaks[worker]:g} A",
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize=8,
            )
        axes.add_collection(PolyCollection(strips, facecolor=COLOURS["F"], edgecolor="black", lw=1))
        axes.text(1.005, -0.6, "peak", transform=axes.get_yaxis_transform(), fontsize=8)
    return chart


def versions(trace: Trace) -> Chart:
    """Which weight version every forward and backward used: its colour, and ``v`` with its number.

    Forwards are in the upper half of a worker's row, backwards in the lower one. A backward that
    met other weights than its forward has a thick black edge.
    """
    factor, unit = time_unit(trace)
    torn = trace.mismatched
    alt = (
        f"Version timeline of {title(trace)}. Weight versions held at most, from worker 0 on: "
        f"{', '.join(map(str, trace.weight_versions))}. Staleness in updates: "
        f"{', '.join(map(str, trace.staleness))}. Microbatches whose forward and backward used "
        f"different weights: {', '.join(str(len(row)) for row in torn)}."
    )
    chart = Chart(alt, TOP + trace.p * LANES * row_height(trace.p) + BOTTOM)
    with house_style():
        (axes,) = add_panels(chart, [trace], factor, unit, LANES)
        axes.set_title(
            f"{title(trace)}\nmicrobatch and weight version; upper lane forward, lower lane "
            "backward" + ("; thick edge: other weights than in the forward" if any(torn) else ""),
            loc="left",
            fontsize=9,
        )
        begin = begin_of(trace)
        points = axes.get_position().width * WIDTH * POINTS / axes.get_xlim()[1]
        for span in trace.spans:
            kind, _, microbatch = span.action
            if kind == "U":
                continue
            lane = span.worker + (-BOX / 4 if kind == "F" else BOX / 4)
            left, right = (span.start - begin) * factor, (span.end - begin) * factor
            wrong = kind != "F" and (span.action.stage, microbatch) in torn[span.worker]
            axes.add_patch(
                Rectangle(
                    (left, lane - BOX / 4),
                    right - left,
                    BOX / 2,
                    facecolor=VERSIONS[span.version % len(VERSIONS)],
                    edgecolor="black" if wrong else "white",
                    lw=1.6 if wrong else 0.8,
                    zorder=2 if wrong else 1,
                )
            )
            for text in (f"{microbatch} v{span.version}", f"v{span.version}"):
                size = min(8, (right - left) * points / (0.62 * len(text)))
                if size >= SMALLEST:
                    centre = (left + right) / 2
                    axes.text(centre, lane, text, size=size, ha="center", va="center_baseline")
                    break
        axes.text(1.005, -0.62, "held", transform=axes.get_yaxis_transform(), fontsize=8)
        for worker, most in enumerate(trace.weight_versions):
            axes.text(
                1.005,
                worker,
                str(most),
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize=8,
            )
    return chart


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
    traces: Sequence[Trace], titles: Sequence[str], unit: tuple[float, str], alt: str
) -> Chart:
    """Gantt charts below each other, on one time axis."""
    rows = sum(trace.p * row_height(trace.p) for trace in traces)
    chart = Chart(alt, TOP + rows + GAP * (len(traces) - 1) + BOTTOM)
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
            ncols=7,
            frameon=False,
            fontsize=8,
            handlelength=1.2,
        )
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

    In a paced run, which declares no time for updates, the clock of a forward may start while
    gradients are still added up. So an update that takes longer than `line` seconds lies below the
    other boxes, and a short one, which is a line, above them.
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


def _held(row: Sequence[Span], chunks: int) -> Iterator[tuple[float, float]]:
    """(time, activations held from then on), in units of A."""
    held = 0
    for span in row:
        if span.action.kind == "F":
            held += 1
            yield span.start, held / chunks
        elif span.action.kind in ("B", "W"):
            held -= 1
            yield span.end, held / chunks


def _stretched(trace: Trace, factor: float) -> Trace:
    spans = tuple(s._replace(start=s.start * factor, end=s.end * factor) for s in trace.spans)
    return replace(trace, spans=spans)


@contextmanager
def house_style() -> Iterator[None]:
    """Our own fonts and colours whatever the caller has set, and no warning about glyphs."""
    style: Any = {  # Any, because matplotlib 3.11 wants the literal names of all its settings
        "font.family": _fonts(),
        "text.usetex": False,
        "text.parse_math": False,  # a name may hold a dollar sign
        "text.color": "black",
        "axes.labelcolor": "black",
        "axes.titlecolor": "black",
        "axes.edgecolor": "black",
        "axes.facecolor": "white",
        "axes.grid": False,
        "hatch.linewidth": 0.6,
        "figure.facecolor": "white",
        "xtick.color": "black",
        "ytick.color": "black",
        "xtick.labelcolor": "black",
        "ytick.labelcolor": "black",
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


@cache
def _fonts() -> list[str]:
    available = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in CJK if name in available)]
