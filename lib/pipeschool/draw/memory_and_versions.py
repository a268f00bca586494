"""Charts of what a worker holds: activations over time, and weight versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from pipeschool.draw.gantt_chart import add_panels, begin_of, row_height
from pipeschool.draw.style import (
    BOTTOM,
    BOX,
    COLOURS,
    LANES,
    POINTS,
    SMALLEST,
    TOP,
    VERSIONS,
    WIDTH,
    Chart,
    house_style,
)
from pipeschool.text import time_unit, title
from pipeschool.trace import Span, Trace


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
    mismatched = trace.mismatched
    alt = (
        f"Version timeline of {title(trace)}. Weight versions held at most, from worker 0 on: "
        f"{', '.join(map(str, trace.weight_versions))}. Staleness in updates: "
        f"{', '.join(map(str, trace.staleness))}. Microbatches whose forward and backward used "
        f"different weights: {', '.join(str(len(row)) for row in mismatched)}."
    )
    chart = Chart(alt, TOP + trace.p * LANES * row_height(trace.p) + BOTTOM)
    with house_style():
        (axes,) = add_panels(chart, [trace], factor, unit, LANES)
        axes.set_title(
            f"{title(trace)}\nmicrobatch and weight version; upper lane forward, lower lane "
            "backward"
            + ("; thick edge: other weights than in the forward" if any(mismatched) else ""),
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
            wrong = kind != "F" and (span.action.stage, microbatch) in mismatched[span.worker]
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
