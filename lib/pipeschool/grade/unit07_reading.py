"""Exercises of unit 07 on schedules that are there already: measure, read a figure, choose by rule.

A figure, as papers print them, is one row per worker with a cell for every unit of time. A cell is
an action such as ``2F5``, which goes on through equal cells next to it, or empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from random import Random
from typing import Any

from pipeschool.actions import Action, Schedule
from pipeschool.cost import Cost
from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part, same
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import Wrong, mistyped, require, show
from pipeschool.grade.unit01 import listed
from pipeschool.grade.unit02 import simulated
from pipeschool.greedy_schedule import Moment, greedy
from pipeschool.schedules import gpipe, interleaved_1f1b, naive, one_f_one_b, zb_h1, zb_h2, zb_v
from pipeschool.simulator import simulate
from pipeschool.trace import Trace

# --- the zero-bubble rate ------------------------------------------------------------------------


def zero_bubble_rate(trace: Trace) -> float:
    """(cost - work) / cost; cost is the longest time from a worker's first start to its last end.

    Qi et al., Zero Bubble, ICLR 2024. Work is a worker's busy time, the same for all.
    """
    rows = [[span for span in row if span.action.kind != "U"] for row in trace.rows]
    cost = max(max(s.end for s in row) - min(s.start for s in row) for row in rows)
    return (cost - max(trace.busy)) / cost


def slow_updates() -> Trace:
    """A trace whose updates take time, shown as the code that gives it."""
    trace = simulate(gpipe(2, 2), Cost(update=3))
    call = "ps.simulate(ps.gpipe(2, 2), ps.Cost(update=3))"
    object.__setattr__(trace, "__name__", call)  # a frozen dataclass
    return trace


def draw_balanced(rng: Random, size: int) -> Case:
    """A trace with equal stages, which may begin at any time, as a measured one does."""
    p = rng.randint(2, 2 + size // 2)
    build = rng.choice([gpipe, one_f_one_b, zb_h1, zb_h2])
    trace = simulate(
        build(p, rng.randint(1, 2 * p)), Cost(rng.randint(2, 8) / 2, rng.randint(2, 8) / 2)
    )
    later = rng.randint(1, 9) / 2
    spans = tuple(s._replace(start=s.start + later, end=s.end + later) for s in trace.spans)
    return (replace(trace, spans=spans),)


ZERO_BUBBLE_RATE = Exercise(
    name="zero_bubble_rate",
    arguments="trace",
    returns=plain.number,
    reference=zero_bubble_rate,
    parts=[
        Part(
            cases=[
                (simulated(gpipe, 1, 1),),
                (simulated(gpipe, 2, 1),),
                (slow_updates(),),
                (simulated(one_f_one_b, 2, 2),),
                (simulated(zb_h2, 2, 3),),
                (simulated(zb_h1, 4, 8),),
                (simulated(zb_h2, 4, 8),),
                (simulated(zb_v, 4, 8),),
            ],
            draw=draw_balanced,
            hint="for every worker by itself: the end of its last action less the start of its "
            "first; the longest of these is the cost, and the rate is a share of it, not of the "
            "work. Updates do not count",
        )
    ],
)

# --- reading a figure ----------------------------------------------------------------------------


def figure(schedule: Schedule, cost: Cost | None = None) -> list[list[str]]:
    """The figure of a schedule; its costs must be whole numbers."""
    trace = simulate(schedule, cost)
    rows = []
    for spans in trace.rows:
        cells = [""] * round(trace.makespan)
        for span in spans:
            for time in range(round(span.start), round(span.end)):
                cells[time] = str(span.action)
        rows.append(cells)
    return rows


def read_figure(rows: list[list[str]], v: int) -> tuple[float, list[float]]:
    """Count the empty cells; go along each row and count what is held."""
    cells = [cell for row in rows for cell in row]
    peaks = []
    for row in rows:
        held = peak = 0
        for text, _ in groupby(filter(None, row)):
            kind = Action.parse(text).kind
            held += Counter({"F": 1, "B": -1, "W": -1})[kind]
            peak = max(peak, held)
        peaks.append(peak / v)
    return cells.count("") / len(cells), peaks


def bubble_and_peaks(value: object) -> tuple[float, list[float]]:
    """A number, and a list of numbers."""
    wanted = "a pair (bubble, peaks): a number, and a list with one number per worker"
    pair = plain.items(value, wanted)
    if len(pair) != 2:
        raise mistyped(wanted, show(pair))
    return plain.number(pair[0]), plain.numbers(pair[1])


def judge_figure(answer: Answer, rows: list[list[str]], v: int, what: str) -> None:
    """`what`: the bubble, or the peaks."""
    right, got = read_figure(rows, v), answer(rows, v)
    name = answer.function.__name__
    case = f"{name}(rows, v={v}) with the rows " + " | ".join(
        " ".join(cell or "." for cell in row) for row in rows
    )
    if len(case) > 300:
        case = f"{name}(rows, v={v}) with {len(rows)} rows of {len(rows[0])} cells"
    index = ("bubble", "peaks").index(what)
    require(
        same(right[index], got[index]),
        f"{what} {show(right[index])}",
        f"{what} {show(got[index])}",
        case,
    )


def drawn_figure(*builders: Callable[..., Schedule]) -> Callable[[Random, int], Any]:
    def draw(rng: Random, size: int) -> Any:
        p = rng.randint(2, 2 + size // 3)
        schedule = rng.choice(builders)(p, p * rng.randint(1, 2))
        forward, backward, inputs, weights = (
            [rng.randint(1, 3) for _ in range(schedule.stages)] for _ in range(4)
        )
        return figure(schedule, Cost(forward, backward, inputs, weights)), schedule.v

    return draw


SLOW, UNEQUAL = Cost(2, 2), Cost([1, 2], [2, 3])
WHOLE = [
    (figure(schedule, cost), 1)
    for schedule, cost in (
        (gpipe(1, 1), None),
        (gpipe(1, 1), SLOW),
        (gpipe(2, 1), None),
        (naive(2, 2), None),
        (gpipe(2, 2), UNEQUAL),
        (one_f_one_b(3, 4), None),
    )
]
SPLIT = [
    (figure(zb_h1(1, 1)), 1),
    (figure(zb_h1(1, 1), SLOW), 1),
    *((figure(schedule), 1) for schedule in (zb_h1(2, 2), zb_h1(3, 4), zb_h2(2, 3))),
]
CHUNKS = [(figure(interleaved_1f1b(2, 2)), 2), (figure(zb_v(2, 3)), 2)]

draw_whole = drawn_figure(naive, gpipe, one_f_one_b)
draw_split = drawn_figure(zb_h1, zb_h2)
draw_chunks = drawn_figure(interleaved_1f1b, zb_v)

READ_FIGURE = Exercise(
    name="read_figure",
    arguments="rows v",
    returns=bubble_and_peaks,
    reference=read_figure,
    judge=judge_figure,
    parts=[
        Part(
            title="in the bubble",
            cases=[(*case, "bubble") for case in (*WHOLE, *SPLIT, *CHUNKS)],
            draw=lambda rng, size: (*draw_split(rng, size), "bubble"),
            hint="all rows are equally long; count the cells that are empty, and all cells",
        ),
        Part(
            title="in the peaks of whole backwards",
            cases=[(*case, "peaks") for case in WHOLE],
            draw=lambda rng, size: (*draw_whole(rng, size), "peaks"),
            hint="an F takes one, a B gives one back; cells that follow each other with the same "
            "text are one action, not several",
        ),
        Part(
            title="in the peaks of split ones, and of chunks",
            cases=[(*case, "peaks") for case in (*SPLIT, *CHUNKS)],
            draw=lambda rng, size: (
                *(draw_split if size % 2 else draw_chunks)(rng, size),
                "peaks",
            ),
            hint="which half is the last to need the activations? And a chunk keeps 1/v of what a "
            "worker keeps for a microbatch",
        ),
    ],
)

# --- a rule --------------------------------------------------------------------------------------


def priority(action: Action, moment: Moment) -> tuple[int, int]:
    """Forwards first until as many are held as 1F1B would hold; from then on backwards first."""
    warming_up = moment.held < moment.p - moment.worker
    kinds = "FIW" if warming_up else "IFW"
    return kinds.index(action.kind), action.microbatch


def key(value: object) -> tuple[float, ...]:
    """A number, or several to be compared one after another."""
    wanted = "a number, or a tuple of numbers such as (0, action.microbatch)"
    if isinstance(value, (list, tuple)) and not isinstance(value, Action) and value:
        return tuple(plain.number(_int(item)) for item in value)
    try:
        return (plain.number(_int(value)),)
    except Wrong as wrong:
        raise mistyped(wanted, wrong.got) from None


def _int(value: object) -> object:
    """True and False count as 1 and 0, as they do when Python sorts."""
    return int(value) if isinstance(value, bool) else value


def judge_priority(answer: Answer, p: int, m: int, slack: int) -> None:
    """Within `slack` seconds of 3m + p - 1, than which nothing is faster."""
    schedule = greedy(p, m, split=True, memory_cap=p, priority=answer)
    took, par = simulate(schedule).makespan, 3 * m + p - 1
    plus = f", which is par plus {slack}" if slack else ", which is par"
    require(
        took <= par + slack,
        f"at most {par + slack} seconds{plus}",
        f"{took:g} seconds; worker 0 does {show(listed(schedule, 0), 90)}",
        f"ps.greedy(p={p}, m={m}, split=True, memory_cap={p}, priority={answer.function.__name__})",
    )


RULE_HINT = (
    "draw the schedule of your rule, and look for the first gap that ZB-H1 does not have. Until a "
    "worker holds as many as 1F1B's warm-up and first turn would give it, what does the line need "
    "most? And after that?"
)

PRIORITY = Exercise(
    name="priority",
    arguments="action moment",
    returns=key,
    reference=priority,
    judge=judge_priority,
    parts=[
        Part(
            title="for three workers",
            cases=[(3, 4, 0), (3, 5, 0), (3, 6, 0), (3, 9, 0)],
            draw=lambda rng, size: (3, rng.choice([5, 6, 8, 9, 11, 12, 14]), 0),
            hint=RULE_HINT,
        ),
        Part(
            title="for four workers",
            cases=[(4, 6, 1), (4, 8, 1), (4, 12, 1)],
            draw=lambda rng, size: (4, rng.choice([6, 8, 10, 12, 14, 16]), 1),
            hint=RULE_HINT,
        ),
    ],
)
