"""What `bench` measured, for people: a table, a chart, a page."""

from __future__ import annotations

from pipeschool.bench import (
    BATCHES,
    CLASS,
    DRAWN,
    OURS,
    RUNTIME,
    SIMULATED,
    YARDSTICK,
    Benchmark,
    Case,
)
from pipeschool.draw.style import COLOURS, WIDTH, Chart, house_style

HATCHES = {OURS: "", CLASS: "", RUNTIME: "///", YARDSTICK: ""}
FILLS = {OURS: COLOURS["F"], CLASS: COLOURS["B"], RUNTIME: "white", YARDSTICK: "0.8"}


def lines(benchmark: Benchmark) -> list[list[str]]:
    """The table: a head, then one line per case with medians and, in brackets, ratios."""
    rows = [["", OURS, CLASS, RUNTIME, YARDSTICK, "unit", "aim"]]
    for case in benchmark.cases:
        cells = [case.title, number(case.medians[OURS])]
        for name in (CLASS, RUNTIME, YARDSTICK):
            known = name in case.medians
            cells.append(f"{number(case.medians[name])} ({case.ratios[name]:.2f})" if known else "")
        rows.append([*cells, case.unit, case.target])
    return rows


def number(value: float) -> str:
    """Four digits, none of them in powers of ten."""
    return (
        f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 0.001 else f"{value:.6f}"
    )


def text(benchmark: Benchmark) -> str:
    """The table for a terminal."""
    rows = lines(benchmark)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def page(benchmark: Benchmark) -> str:
    """The report in Markdown."""
    about = benchmark.machine
    loads = [x[0] for x in (about["load"], about["load_after"]) if isinstance(x, list)]
    busy = f"; load average {' before and '.join(map(str, loads))} after" if loads else ""
    forward, backward = (f"{1000 * seconds:g}" for seconds in benchmark.pace)
    p, m = benchmark.p, benchmark.m
    rounds = len(benchmark.cases[0].rounds[OURS])
    head, *rows = lines(benchmark)
    newline = "\n"
    table = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return f"""# Benchmark

Side by side with `torch.distributed.pipelining`, written by `pipeschool bench --out BENCHMARK.md`.

{about["cpu"]}, {about["cores"]} cores ({about["threads"]} threads), {about["os"]};
Python {about["python"]}, torch {about["torch"]}; {about["date"]}{busy}.
p={p} workers, m={m} microbatches, medians of {rounds} rounds.

{newline.join(table)}

In brackets: our number over PyTorch's. For all but the simulator, smaller is better.

**Who takes part.** *{CLASS}*: the classes `Schedule1F1B` and `ScheduleGPipe`, with their own
loops. *{RUNTIME}*: PyTorch's runtime, which has read our schedule file and added the messages
itself; this is what `ps.run(..., engine="torch")` does. All three run in the same worker processes,
with the same stages, data and clock, one after the other, in another order each round. PyTorch's
messages go over gloo, ours over sockets and shared memory of this machine.

**What is timed.** A run does {BATCHES} batches. The first is left out for everybody; of the others
the median counts, from the first start to the last end of an action. PyTorch learns the shapes of
its messages before the first batch: that is part of its start-up, not of these times.

**Paced.** Every stage declares so many ms for a forward and for a backward ({forward} and
{backward}, then four times as long). It does its tiny work, and ends no earlier than this time
after its input was in hand; the same rule, and the same observer in our workers, for all engines.
Ideal is (m + p - 1)(forward + backward). What comes on top is messages, late wake-ups, and what an
engine does between two actions. All times are read from the host's clock.

**Stages that sleep.** The stage itself sleeps for {forward} and {backward} ms, in its forward and
in its backward, and no engine knows.

**Messages.** From the end of an action to the start of the one, on another worker, that waited for
what it made: the median over all such pairs of a paced run. The *yardstick* of a small message is a
bare gloo send of one number to a receiver that has waited for 5 ms; that of 4 MB is twice a copy of
4 MB in memory, and 0.3 ms.

**Overhead.** Stages with next to nothing to do, unpaced: the time of a batch over its number of
forwards and backwards, those of all workers together.

**Start-up.** From the call to the first action, when everything has run before. The 25 batches of
64 rows are cut from a tensor of 20 MB; *yardstick*: each has been copied, and is a tensor of its
own.

**Simulator.** 1F1B, p={SIMULATED[0]}, m={SIMULATED[1]}; actions of all workers, updates included.
**Chart.** `ps.draw.gantt` of 1F1B, p={DRAWN[0]}, m={DRAWN[1]}, into a PNG. Both with Python's
`timeit`, which keeps the garbage collector out.
"""


def chart(benchmark: Benchmark) -> Chart:
    """Bars of medians, a dot for every round; one panel per unit in which engines compete."""
    units: dict[str, list[Case]] = {}
    for case in benchmark.cases:
        if len(case.contestants) > 1:
            units.setdefault(case.unit, []).append(case)
    said = "; ".join(
        f"{case.title}: " + ", ".join(f"{name} {number(x)}" for name, x in case.medians.items())
        for cases in units.values()
        for case in cases
    )
    height = 1.2 + sum(0.5 + 0.75 * len(cases) for cases in units.values())
    picture = Chart(f"Bar charts of medians, smaller is better. {said}.", height)
    with house_style():
        panels = picture.subplots(
            len(units), 1, squeeze=False, height_ratios=[0.5 + len(c) for c in units.values()]
        )[:, 0]
        for axes, (unit, cases) in zip(panels, units.items(), strict=True):
            for place, case in enumerate(cases):
                for lane, name in enumerate(case.contestants):
                    at = place + 0.27 * (lane - 1)
                    axes.barh(
                        at,
                        case.medians[name],
                        height=0.25,
                        facecolor=FILLS[name],
                        edgecolor="black",
                        hatch=HATCHES[name],
                        label=name if place == 0 else None,
                    )
                    dots = case.rounds[name]
                    axes.plot(dots, [at] * len(dots), "o", ms=3, mfc="white", mec="black", mew=0.7)
            axes.set_yticks(range(len(cases)), [case.title for case in cases], fontsize=8)
            axes.set_ylim(len(cases) - 0.5, -0.5)
            axes.set_xlabel(unit, fontsize=8, loc="left")
            axes.tick_params(axis="x", labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            if unit == "time / ideal":
                axes.axvline(1, color="black", lw=0.8, ls=":")
        panels[0].set_title(
            f"p={benchmark.p}, m={benchmark.m}: medians, and a dot for every round; smaller is "
            "better",
            loc="left",
            fontsize=9,
        )
        picture.legend(
            *panels[0].get_legend_handles_labels(),
            loc="lower right",
            ncols=3,
            frameon=False,
            fontsize=8,
        )
        picture.subplots_adjust(
            left=2.0 / WIDTH, right=0.98, top=1 - 0.4 / height, bottom=0.75 / height, hspace=0.55
        )
    return picture
