"""What a worker has in memory over time, by kind: predicted areas under a measured line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from pipeschool.draw.gantt_chart import (
    add_panels,
    begin_of,
    draw_boxes,
    row_height,
    stretch_of,
)
from pipeschool.draw.style import (
    BOTTOM,
    COLOURS,
    LEFT,
    NAMES,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    house_style,
)
from pipeschool.memory import MemorySample
from pipeschool.text import time_unit, title
from pipeschool.trace import Trace

MB = 1e6  # bytes
KINDS = {  # from the bottom up: how they look. What stays is below, what comes and goes above
    "weights": {"facecolor": "#4d4d4d"},
    "versions": {"facecolor": "#a6a6a6", "hatch": "\\\\\\"},
    "optimizer": {"facecolor": "#5fa04e"},
    "gradients": {"facecolor": "#a23b00"},
    "buffers": {"facecolor": "#ffe08a", "hatch": "///"},
    "activations": {"facecolor": "#93c9f0"},
    "working": {"facecolor": "white", "hatch": "...."},
}
HEADING = 0.28  # inches above each panel
LEGEND = 0.3  # inches for its second line


def live_bytes(predicted: Trace, measured: Trace | None = None) -> Chart:
    """The bytes in each worker's memory over time, by kind, below the Gantt chart of `predicted`.

    Areas are those of `predicted`, which may itself be a run with ``memory=True``. The total of
    `measured`, such a run, is the line over them. All workers have the same axis, in MB (millions
    of bytes). A prediction in other units than seconds is stretched as `compare` does it.

    Raises ValueError where a trace knows no bytes, or where p or m differ.
    """
    traces = [predicted] if measured is None else [predicted, measured]
    for trace in traces:
        if not any(trace.peak_bytes):
            raise ValueError(
                f"{title(trace)} knows no bytes: give ps.Cost activation_bytes= and the like, or "
                "ps.run memory=True"
            )
    if measured and (predicted.p, predicted.m) != (measured.p, measured.m):
        raise ValueError(
            f"live_bytes needs two traces of the same p and m, not p={predicted.p}, "
            f"m={predicted.m} and p={measured.p}, m={measured.m}"
        )
    factor, unit = time_unit(measured or predicted)
    scales = [factor * (stretch_of(predicted, measured) if measured else 1), factor]
    longest = max(t.makespan * scale for t, scale in zip(traces, scales, strict=False))
    highest = max(peak for trace in traces for peak in trace.peak_bytes) / MB
    peaks = [[f"{peak / MB:.3g}" for peak in trace.peak_bytes] for trace in traces]

    p = predicted.p
    tall = max(0.4, min(0.9, 5 / p))  # inches of one worker's panel
    rows = p * row_height(p)
    height = TOP + rows + p * (HEADING + tall) + BOTTOM + LEGEND
    chart = Chart(_alt(traces, peaks), height)
    with house_style():
        (gantt,) = add_panels(chart, [predicted], scales[0], unit)
        gantt.set_xlabel("")  # the panels below share its axis
        gantt.tick_params(labelbottom=False)
        gantt.set_xlim(0, longest)
        gantt.set_title(f"{title(predicted)}\nbytes over time, by kind", loc="left", fontsize=9)
        draw_boxes(gantt, predicted, scales[0])
        top = height - TOP - rows
        for worker in range(p):
            top -= HEADING + tall
            width = WIDTH - LEFT - RIGHT - 0.25
            axes = chart.add_axes((LEFT / WIDTH, top / height, width / WIDTH, tall / height))
            axes.set(xlim=(0, longest), ylim=(0, highest * 1.05))
            axes.set_ylabel("MB", fontsize=8)
            axes.tick_params(labelsize=8, labelbottom=worker == p - 1)
            axes.spines[["top", "right"]].set_visible(False)
            said = [f"{row[worker]} MB {t.label}" for t, row in zip(traces, peaks, strict=True)]
            axes.set_title(f"worker {worker}: peak {', '.join(said)}", loc="left", fontsize=8)
            _areas(axes, predicted, worker, scales[0])
            if measured:
                _line(axes, measured, worker, scales[1])
        axes.set_xlabel(f"time ({unit})", fontsize=8, loc="left")
        _legend(chart, predicted, measured)
    return chart


def _areas(axes: Axes, trace: Trace, worker: int, scale: float) -> None:
    """The kinds above each other."""
    levels = trace.memory[worker]
    times = _times(trace, levels, scale)
    below = [0.0] * len(levels)
    for kind in _kinds(trace):
        above = [b + getattr(level, kind) / MB for b, level in zip(below, levels, strict=True)]
        axes.fill_between(
            times,
            below,
            above,
            step="post",
            edgecolor="black",
            lw=0.3,
            label=kind,
            **KINDS[kind],  # type: ignore[arg-type]
        )
        below = above


def _line(axes: Axes, trace: Trace, worker: int, scale: float) -> None:
    """The total, black on a white edge, to be seen on every area."""
    levels = trace.memory[worker]
    axes.plot(
        _times(trace, levels, scale),
        [level.total / MB for level in levels],
        drawstyle="steps-post",
        color="black",
        lw=1.1,
        label=trace.label,
        path_effects=[withStroke(linewidth=2.6, foreground="white")],
    )


def _times(trace: Trace, levels: Sequence[MemorySample], scale: float) -> list[float]:
    """Where the levels begin, counted from the start of the run, and never backwards."""
    begin = begin_of(trace)
    return list(accumulate((max(0.0, level.time - begin) * scale for level in levels), max))


def _kinds(trace: Trace) -> list[str]:
    """The kinds that somebody has any bytes of."""
    return [
        kind for kind in KINDS if any(getattr(level, kind) for row in trace.memory for level in row)
    ]


def _legend(chart: Chart, predicted: Trace, measured: Trace | None) -> None:
    boxes = {span.action.kind for span in predicted.spans} - {"U"}
    keys: list[Patch | Line2D] = [
        Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in NAMES if kind in boxes
    ]
    keys += [
        Patch(edgecolor="black", lw=0.3, label=kind, **KINDS[kind])  # type: ignore[arg-type]
        for kind in _kinds(predicted)
    ]
    if measured:
        keys.append(Line2D([], [], color="black", lw=1.1, label=f"total, {measured.label}"))
    chart.legend(
        handles=keys, loc="lower right", ncols=6, frameon=False, fontsize=8, handlelength=1.2
    )


def _alt(traces: Sequence[Trace], peaks: Sequence[Sequence[str]]) -> str:
    """The chart in words."""
    first = traces[0]
    said = "; ".join(
        f"{trace.label}, from worker 0 on: {', '.join(row)} MB"
        for trace, row in zip(traces, peaks, strict=True)
    )
    worker = max(range(first.p), key=first.peak_bytes.__getitem__)
    peak = max(first.memory[worker], key=lambda level: level.total)
    shares = ", ".join(
        f"{kind} {getattr(peak, kind) / MB:.3g}" for kind in KINDS if getattr(peak, kind)
    )
    return (
        f"Gantt chart of {title(first)}, and below it the bytes in each worker's memory over "
        f"time, by kind. Peaks {said}. Worker {worker} at its peak holds, in MB: {shares}."
    )
