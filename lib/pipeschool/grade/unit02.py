"""The exercises of unit 02, asynchronous execution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isinf, prod
from random import Random

from pipeschool.actions import Action, Schedule, peak_in_flight
from pipeschool.checking import check
from pipeschool.cost import Cost
from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import Wrong, described, require, show
from pipeschool.grade.unit01 import (
    draw_times,
    random_order,
    refuse_foreign,
    stage_of,
    within,
)
from pipeschool.schedules import gpipe, naive, pipedream
from pipeschool.simulator import simulate
from pipeschool.trace import Trace

# --- two clocks ----------------------------------------------------------------------------------


def flush_time(p: int, m: int, batches: int, forward: float, backward: float) -> float:
    """Every batch fills the line and lets it run empty (GPipe, 2019)."""
    return batches * (m + p - 1) * (forward + backward)


def stream_time(p: int, n: int, forward: float, backward: float) -> float:
    """The line fills once and runs empty once (PipeDream, SOSP 2019)."""
    return (n + p - 1) * (forward + backward)


FLUSH_TIME = Exercise(
    name="flush_time",
    arguments="p m batches forward backward",
    returns=plain.number,
    reference=flush_time,
    parts=[
        Part(
            cases=[
                (1, 1, 1, 1, 2),
                (2, 1, 1, 1, 2),
                (2, 1, 2, 1, 2),
                (2, 3, 2, 1, 2),
                (4, 8, 1, 2, 2),
                (4, 8, 20, 1, 2),
            ],
            draw=lambda rng, size: (
                rng.randint(2, size + 1),
                rng.randint(1, 2 * size),
                rng.randint(2, 4 * size),
                *draw_times(rng, 2),
            ),
            hint="the time of one batch is known from unit 01, and no batch begins before the one "
            "before it has ended",
        )
    ],
)
STREAM_TIME = Exercise(
    name="stream_time",
    arguments="p n forward backward",
    returns=plain.number,
    reference=stream_time,
    parts=[
        Part(
            cases=[(1, 1, 1, 2), (2, 1, 1, 2), (2, 2, 1, 2), (4, 8, 2, 2), (4, 160, 1, 2)],
            draw=lambda rng, size: (
                rng.randint(2, size + 1),
                rng.randint(1, 20 * size),
                *draw_times(rng, 2),
            ),
            hint="count in slots of one forward and one backward: how many does worker 0 work, and "
            "how many does the first microbatch, or the last, need for the rest of the line?",
        )
    ],
)


def gain(p: int, m: int, batches: float) -> float:
    """How many times as long the flushes take: a ratio of slots."""
    if isinf(batches):
        return (m + p - 1) / m
    return batches * (m + p - 1) / (batches * m + p - 1)


GAIN = Exercise(
    name="gain",
    arguments="p m batches",
    returns=plain.number,
    reference=gain,
    parts=[
        Part(
            title="for so many batches",
            cases=[(1, 1, 1), (2, 1, 2), (2, 2, 2), (4, 8, 1), (4, 8, 20), (8, 4, 3)],
            draw=lambda rng, size: (
                rng.randint(2, size + 1),
                rng.randint(1, 2 * size),
                rng.randint(2, 4 * size),
            ),
            hint="the time with flushes over the time of the stream, which has batches * m "
            "microbatches; the seconds cancel",
        ),
        Part(
            title="in the limit",
            cases=[(2, 1, inf), (2, 2, inf), (4, 8, inf), (8, 1, inf)],
            draw=lambda rng, size: (rng.randint(2, size + 2), rng.randint(1, 3 * size), inf),
            hint="in a stream without end, filling and draining no longer count: compare what one "
            "batch takes with its flush, and without",
        ),
    ],
)

# --- the asynchronous order ----------------------------------------------------------------------

SHAPES = [(1, 1), (1, 3), (2, 2), (2, 3), (4, 4), (4, 8)]  # (p, n) with n >= p
SMALL = [(2, 1), (3, 2), (4, 1), (8, 3)]  # and with n < p


def async_order(worker: int, p: int, n: int) -> list[Action]:
    """One worker's row of PipeDream, updates written out."""
    return list(pipedream(p, n).workers[worker])


def judge_async(answer: Answer, p: int, n: int, updates: bool) -> None:
    """Legal, cups in order, as fast as can be, with no more in flight than needed; with `updates`,
    each of these must be written out and come at once. Otherwise they may be anywhere."""
    name = answer.function.__name__
    cases = [f"{name}(worker={worker}, p={p}, n={n})" for worker in range(p)]
    rows = [_row(answer, worker, p, n, updates) for worker in range(p)]
    try:
        schedule = check(Schedule.from_workers(lambda w, *_: rows[w], p, n, weights="stash"))
    except ValueError as problem:  # IllegalSchedule among them
        worker = getattr(problem, "worker", None) or 0
        got = f"{show(rows[worker])}: {problem}"
        raise Wrong("an order that can run", got, cases[worker]) from None
    for worker, row in enumerate(rows):
        forwards = [action.microbatch for action in row if action.kind == "F"]
        require(
            forwards == sorted(forwards),
            "microbatches that go forward in the order of their numbers, as they come in",
            show(row),
            cases[worker],
        )
        peak = peak_in_flight(row)
        require(
            peak <= p - worker,
            f"at most p - worker = {p - worker} microbatches in flight",
            f"{peak} of them in {show(row)}",
            cases[worker],
        )
    for forward, backward in ((1, 2), (2, 1)):
        best = stream_time(p, n, forward, backward)
        took = simulate(schedule, Cost(forward, backward)).makespan
        require(
            took <= best + 1e-9,
            f"{n} microbatches in {best:g} seconds, with forward {forward} and backward {backward}",
            f"{took:g} seconds: somebody waits longer than need be",
            f"{name}(worker, p={p}, n={n}) for worker = 0 to {p - 1}",
        )
    for worker, late in enumerate(simulate(schedule).staleness if updates else []):
        require(
            late <= p - 1 - worker,
            "every update at once after its backward",
            f"another action between the two: {show(rows[worker])}",
            cases[worker],
        )


def _row(answer: Answer, worker: int, p: int, n: int, updates: bool) -> list[Action]:
    """One worker's actions, all on its own stage; without updates where these do not matter."""
    row: list[Action] = answer(worker, p, n)
    refuse_foreign(row, [worker], stage_of(worker))
    within(row, n)
    if not updates:
        return [action for action in row if action.kind != "U"]
    count = sum(action.kind == "U" for action in row)
    require(
        count == n,
        f"{n} of the updates ps.U({worker}, k), one for every microbatch",
        f"{count} of them in {show(row)}",
    )
    return row


def draw_shape(rng: Random, size: int) -> tuple[int, int]:
    p = rng.randint(2, size + 1)
    return p, p + rng.randint(0, size)


def draw_small(rng: Random, size: int) -> tuple[int, int]:
    p = rng.randint(2, size + 1)
    return p, rng.randint(1, p - 1)


ASYNC_ORDER = Exercise(
    name="async_order",
    arguments="worker p n",
    returns=plain.actions,
    reference=async_order,
    judge=judge_async,
    parts=[
        Part(
            title="in its forwards and backwards",
            share=2,
            cases=[(*shape, False) for shape in SHAPES],
            draw=lambda rng, size: (*draw_shape(rng, size), False),
            hint="p - worker forwards first; then one backward and one forward in turn, until the "
            "forwards are used up; then the backwards that are left",
        ),
        Part(
            title="where n < p",
            share=1,
            cases=[(*shape, False) for shape in SMALL],
            draw=lambda rng, size: (*draw_small(rng, size), False),
            hint="no more forwards than there are microbatches, also at the start",
        ),
        Part(
            title="in its updates",
            share=2,
            cases=[(*shape, True) for shape in SHAPES],
            draw=lambda rng, size: (*draw_shape(rng, size), True),
            hint="an update needs a gradient, and waits for nothing else",
        ),
    ],
)

# --- latency -------------------------------------------------------------------------------------


def latency(trace: Trace, microbatch: int) -> float:
    """From the first start to the last end; updates are numbered otherwise."""
    spans = [s for s in trace.spans if s.action.kind != "U" and s.action.microbatch == microbatch]
    return max(s.end for s in spans) - min(s.start for s in spans)


def simulated(build: Callable[..., Schedule], *shape: int, **options: str) -> Trace:
    """A trace that messages show as the code that gives it, to be pasted into a cell."""
    trace = simulate(build(*shape), **options)  # type: ignore[arg-type]
    call = f"ps.{build.__name__}({', '.join(map(str, shape))})"
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    object.__setattr__(trace, "__name__", f"ps.simulate({call}{more})")  # a frozen dataclass
    return trace


def draw_latency(build: Callable[..., Schedule]) -> Callable[[Random, int], Case]:
    def draw(rng: Random, size: int) -> Case:
        p, m, batches = rng.randint(2, 4), rng.randint(2, size + 1), rng.randint(1, 3)
        cost = Cost(draw_times(rng, p), draw_times(rng, p))
        return simulate(build(p, m, batches), cost), rng.randrange(m * batches)

    return draw


LATENCY = Exercise(
    name="latency",
    arguments="trace microbatch",
    returns=plain.number,
    reference=latency,
    parts=[
        Part(
            title="in a stream",
            cases=[
                (simulated(pipedream, 1, 2), 1),
                (simulated(pipedream, 2, 2), 0),
                (simulated(pipedream, 2, 3), 1),
                (simulated(pipedream, 4, 16), 9),
            ],
            draw=draw_latency(pipedream),
            hint="the clock of a microbatch starts when its own first forward starts, and stops "
            "when its last backward ends",
        ),
        Part(
            title="with a flush",
            cases=[
                (simulated(gpipe, 1, 2), 0),
                (simulated(gpipe, 2, 2), 0),
                (simulated(naive, 2, 3), 1),
                (simulated(gpipe, 4, 8), 0),
                (simulated(gpipe, 4, 4, 3), 2),
            ],
            draw=draw_latency(gpipe),
            hint="the number in a U counts updates, not microbatches",
        ),
    ],
)

# --- the slowest stage ---------------------------------------------------------------------------


def steady_pace(forward: Sequence[float], backward: Sequence[float]) -> float:
    """The slowest stage's share of one microbatch."""
    return max(f + b for f, b in zip(forward, backward, strict=True))


def draw_pace(rng: Random, size: int) -> Case:
    """Slowest forward and slowest backward on different stages."""
    while True:
        p = rng.randint(2, size + 2)
        forward, backward = draw_times(rng, p), draw_times(rng, p)
        if max(forward) + max(backward) > steady_pace(forward, backward):
            return forward, backward


def draw_slow(rng: Random, size: int) -> Case:
    """One stage is slowest at both."""
    times = draw_times(rng, size + 1)
    slow = rng.randrange(size + 1)
    times[slow] = 5.0
    return times, [2 * t for t in times]


STEADY_PACE = Exercise(
    name="steady_pace",
    arguments="forward backward",
    returns=plain.number,
    reference=steady_pace,
    parts=[
        Part(
            title="where one stage is slowest at both",
            cases=[([1], [2]), ([1, 1], [2, 2]), ([1, 2], [2, 4]), ([1, 1, 3, 1], [2, 2, 6, 2])],
            draw=draw_slow,
            hint="cups cannot leave the line faster than its slowest station can make them",
        ),
        Part(
            title="where the slowest forward and backward are on different stages",
            cases=[([2, 1], [2, 4]), ([3, 1], [1, 2]), ([1, 2, 4, 1], [5, 2, 1, 3])],
            draw=draw_pace,
            hint="every worker does one forward and one backward of each microbatch: how long does "
            "each worker need for the two?",
        ),
    ],
)

# --- which weights did they meet? ----------------------------------------------------------------


def mismatched(trace: Trace) -> list[tuple[int, int]]:
    """(stage, microbatch) whose backward met other weights than its forward."""
    return [pair for row in trace.mismatched for pair in row]


def pairs(value: object) -> list[tuple[int, int]]:
    """A reader: a list of pairs of whole numbers."""
    wanted = "a list of pairs (stage, microbatch), such as [(0, 3)]"
    found = [plain.items(item, wanted) for item in plain.items(value, wanted)]
    if any(len(item) != 2 for item in found):
        raise Wrong(wanted, described(value))
    return [(plain.whole_number(stage), plain.whole_number(k)) for stage, k in found]


def judge_mismatched(answer: Answer, trace: Trace) -> None:
    """The right pairs, in any order."""
    listed, right = set(answer(trace)), set(mismatched(trace))
    versions = {span.action: span.version for span in trace.spans}
    for stage, k in sorted(right ^ listed):
        differ = (stage, k) in right
        forward, backward = Action("F", stage, k), Action("B", stage, k)
        require(
            forward in versions and backward in versions,
            "pairs (stage, microbatch) that are in the trace",
            f"({stage}, {k}) among {show(sorted(listed))}",
        )
        require(
            False,
            f"{'' if differ else 'not '}({stage}, {k}): {forward} used version "
            f"{versions[forward]}, {backward} version {versions[backward]}",
            f"({stage}, {k}) is {'not ' if differ else ''}in {show(sorted(listed), 120)}",
        )


def stream_trace(p: int, n: int, weights: str) -> Trace:
    return simulated(pipedream, p, n, weights=weights)


def random_trace(rng: Random, size: int) -> Trace:
    """Some asynchronous order with an update after every backward, on the newest weights."""
    p, n = rng.randint(2, 2 + size // 3), rng.randint(2, 2 + size)
    order = random_order(rng, p, n)
    schedule = Schedule.from_workers(order, p, n, weights="latest", name="another order, latest")
    return simulate(schedule)


MISMATCHED = Exercise(
    name="mismatched",
    arguments="trace",
    returns=pairs,
    reference=mismatched,
    judge=judge_mismatched,
    parts=[
        Part(
            title="in your asynchronous order",
            share=2,
            cases=[(stream_trace(*shape, "latest"),) for shape in [(2, 2), (2, 3), (3, 4), (4, 8)]],
            draw=lambda rng, size: (stream_trace(rng.randint(2, 5), size + 1, "latest"),),
            hint="find the version of every F and of every B under (stage, microbatch), then "
            "compare the two",
        ),
        Part(
            title="in other orders and under other policies",
            share=1,
            cases=[
                (random_trace(Random(3), 2),),
                (random_trace(Random(5), 5),),
                (stream_trace(3, 4, "stash"),),
                (simulated(gpipe, 2, 2, 2),),
                (stream_trace(1, 3, "latest"),),
            ],
            draw=lambda rng, size: (random_trace(rng, size),),
            hint="read the versions off the spans; the order alone does not tell which they were",
        ),
    ],
)


def versions_met(stage: int, microbatch: int, p: int) -> tuple[int, int]:
    """What F and B find where one card is overwritten by every update of PipeDream's order."""
    return max(0, microbatch - (p - 1 - stage)), microbatch


def pair(value: object) -> tuple[int, int]:
    """A reader: two whole numbers."""
    wanted = "two whole numbers: (version of the forward, version of the backward)"
    found = [plain.whole_number(item) for item in plain.items(value, wanted)]
    if len(found) != 2:
        raise Wrong(wanted, described(value))
    return found[0], found[1]


def draw_full(rng: Random, size: int) -> Case:
    p = rng.randint(2, size + 1)
    return rng.randrange(p), p + rng.randint(0, 3 * size), p


def draw_filling(rng: Random, size: int) -> Case:
    p = size + 2
    stage = rng.randint(0, p - 2)
    return stage, rng.randint(0, p - 2 - stage), p


VERSIONS_MET = Exercise(
    name="versions_met",
    arguments="stage microbatch p",
    returns=pair,
    reference=versions_met,
    parts=[
        Part(
            title="once the line is full",
            share=2,
            cases=[(0, 2, 1), (0, 3, 2), (1, 3, 2), (0, 9, 4), (1, 9, 4), (3, 9, 4)],
            draw=draw_full,
            hint="how many updates has this stage made when it begins F, and how many when it "
            "begins B? Count them in one row of the chart",
        ),
        Part(
            title="while the line fills",
            share=1,
            cases=[(0, 0, 1), (0, 0, 2), (0, 1, 4), (1, 1, 4), (0, 2, 4), (2, 0, 4)],
            draw=draw_filling,
            hint="no version comes before version 0, the weights at the start",
        ),
    ],
)

# --- a gradient of nothing -----------------------------------------------------------------------


def first_gradient(x: float, target: float, down: Sequence[float], up: Sequence[float]) -> float:
    """The error of the way down, carried back through the weights of the way up."""
    return (prod(down) * x - target) * prod(up[1:]) * x


def draw_weights(rng: Random, size: int, changed: bool) -> Case:
    def some() -> list[float]:
        return [rng.choice([-3, -2, 2, 3]) / 2 for _ in range(size + 1)]

    down, up = some(), some()
    up[1:] = [a + rng.choice([0.5, 1.0]) if changed else a for a in down[1:]]
    up[0] = up[0] if changed else down[0]
    return rng.choice([-2, 1, 3]), rng.choice([7, -8.5]), down, up


FIRST_GRADIENT = Exercise(
    name="first_gradient",
    arguments="x target down up",
    returns=plain.number,
    reference=first_gradient,
    parts=[
        Part(
            title="where no weight changed on the way",
            cases=[
                (1, 0, [2], [2]),
                (1, 0, [1, 2], [1, 2]),
                (2, 1, [3, 2], [3, 2]),
                (3, 5, [1, 2, 4], [1, 2, 4]),
            ],
            draw=lambda rng, size: draw_weights(rng, size, changed=False),
            hint="the chain rule, from the loss back to the first weight; only the others' weights "
            "and x are factors of d output / d w0",
        ),
        Part(
            title="where weights changed",
            cases=[
                (1, 0, [1, 2], [1, 3]),
                (2, 1, [3, 2], [4, 2]),
                (1, 2, [1, 2, 4], [3, 5, 4]),
                (3, 5, [1, 2, 4], [1, 3, 7]),
            ],
            draw=lambda rng, size: draw_weights(rng, size, changed=True),
            hint="the output was made on the way down; each factor on the way back is read off the "
            "card as it is by then",
        ),
    ],
)

EXERCISES = [
    FLUSH_TIME,
    STREAM_TIME,
    GAIN,
    ASYNC_ORDER,
    LATENCY,
    STEADY_PACE,
    MISMATCHED,
    VERSIONS_MET,
    FIRST_GRADIENT,
]

# What the claims lab says about each claim.
CLAIMS = {1: "wrong", 2: "wrong", 3: "half", 4: "wrong", 5: "wrong", 6: "wrong"}
