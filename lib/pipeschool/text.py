"""Plain text: the Gantt chart for a terminal, the words that all charts share, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

from pipeschool.trace import Span, Trace

FILL = {"F": "-", "B": "=", "I": "=", "W": "+", "U": "!"}
IDLE = "."
LONGEST = 10_000  # characters of a row, before lines are broken


def text_gantt(trace: Trace, width: int | None = None) -> str:
    """A Gantt chart to print: one row per worker, time from left to right.

    ``F3-`` is the forward, ``B3==`` the backward of microbatch 3, ``.`` is idle time. Where all
    times are whole numbers, every column of characters stands for the same whole time; otherwise
    boxes are drawn to scale, rounded to a character, without their number where it does not fit.
    width: characters per line; a longer chart goes on below. Default: no limit.
    """
    label = 1 + len(str(max((span.action.microbatch for span in trace.spans), default=0)))
    per_second, label = _scale(trace, label)
    begin = min((span.start for span in trace.spans), default=0.0)
    length = max(1, round(trace.makespan * per_second))
    names = [f"worker {w} " for w in range(trace.p)]
    margin = max(map(len, names))
    room = max(label, (width - margin) // label * label) if width else length
    bars = [_bar(row, begin, per_second, length) for row in trace.rows]
    ruler = _ruler(trace, per_second, length)
    lines = [f"{title(trace)}, time in {time_unit(trace)[1]}"]
    for left in range(0, length, room):
        part = slice(left, left + room)
        lines.append("time".ljust(margin) + ruler[part].rstrip())
        lines += [name.ljust(margin) + bar[part] for name, bar in zip(names, bars, strict=True)]
    lines.append(summary(trace))
    lines.append("F3- forward and B3= backward of microbatch 3, . idle")
    return "\n".join(lines)


def title(trace: Trace) -> str:
    """Whose trace this is: ``gpipe, p=4, m=8 (predicted)``."""
    return f"{trace.name}, p={trace.p}, m={trace.m} ({trace.label})"


def time_unit(trace: Trace) -> tuple[float, str]:
    """Factor and unit in which the times of `trace` read well: (1000, "ms") below a second.

    Costs of a prediction are whatever unit they were given in, so they stay as they are.
    """
    if trace.label == "predicted":
        return 1.0, "units of cost"
    return (1.0, "s") if trace.makespan >= 1 else (1000.0, "ms")


def summary(trace: Trace) -> str:
    """Makespan and both bubbles, each with what it is divided by."""
    factor, unit = time_unit(trace)
    ending = "" if trace.label == "predicted" else f" {unit}"
    return (
        f"makespan {trace.makespan * factor:.4g}{ending}; "
        f"bubble of total {trace.bubble_of_total:.4g} = idle / (p * makespan); "
        f"bubble of ideal {trace.bubble_of_ideal:.4g} = idle / busy"
    )


def columns(rows: Sequence[Sequence[str]], align: str = "<") -> str:
    """A table: one line per row, every column as wide as its widest cell.

    align: ``<`` for text or ``>`` for numbers, one character for all columns, or one for each.

    >>> print(columns([["m", "note"], ["16", "best"]], "><"))
     m  note
    16  best
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align * len(widths) if len(align) == 1 else align
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def _scale(trace: Trace, label: int) -> tuple[float, int]:
    """Characters per second, and the characters of a column."""
    times = [time for span in trace.spans for time in (span.start, span.end)]
    if all(time == int(time) for time in times):
        unit = math.gcd(*(int(time) for time in times)) or 1
        if trace.makespan / unit * label <= LONGEST:
            return label / unit, label
    work = [span.seconds for span in trace.spans if span.action.kind != "U"]
    typical = median_low(work) or trace.makespan
    # One character more than the label needs, because boxes are rounded to characters.
    return min((label + 1) / typical, LONGEST / trace.makespan), 1


def _bar(row: list[Span], begin: float, per_second: float, length: int) -> str:
    bar = IDLE * length
    for span in row:
        left = round((span.start - begin) * per_second)
        size = round((span.end - begin) * per_second) - left
        kind = span.action.kind
        text = f"{kind}{span.action.microbatch}"
        box = (text if len(text) <= size else kind[:size]).ljust(size, FILL[kind])
        bar = bar[:left] + box + bar[left + size :]
    return bar


def _ruler(trace: Trace, per_second: float, length: int) -> str:
    """Round times, written at their place."""
    factor, _ = time_unit(trace)
    apart = 9 / per_second * factor  # time of nine characters: room for a number
    power = 10.0 ** math.floor(math.log10(apart))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= apart)
    ruler = ""
    tick = 0
    while (place := round(tick * step / factor * per_second)) < length:
        ruler = ruler.ljust(place) + f"{tick * step:g}"
        tick += 1
    return ruler
