"""The exercises of unit 01, the synchronous bubble."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil, isclose
from random import Random

from pipeschool import dependencies
from pipeschool.actions import Action, B, F, Schedule, U, peak_in_flight
from pipeschool.checking import check
from pipeschool.cost import Cost
from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import Wrong, require, show
from pipeschool.schedules import gpipe, naive, one_f_one_b
from pipeschool.simulator import simulate
from pipeschool.trace import Trace

# --- split a batch -------------------------------------------------------------------------------


def split_batch(samples: int, m: int) -> list[int]:
    """As even as it goes, like torch.tensor_split."""
    size, left_over = divmod(samples, m)
    return [size + 1] * left_over + [size] * (m - left_over)


def judge_split(answer: Answer, samples: int, m: int) -> None:
    """Any sizes do that are as even as the pace of the pipeline asks for, in any order."""
    sizes = answer(samples, m)
    got = show(sizes)
    require(len(sizes) == m, f"one size per microbatch, {m} in all", f"{len(sizes)}: {got}")
    require(sum(sizes) == samples, f"sizes that add up to {samples}", f"{got}: {sum(sizes)} in all")
    require(min(sizes) >= 1, "at least one sample in every microbatch", got)
    fair = ceil(samples / m)
    require(
        max(sizes) <= fair,
        f"no microbatch larger than {fair}: the largest one sets everybody's pace",
        got,
    )


def draw_split(rng: Random, size: int) -> Case:
    m = rng.randint(2, size + 2)
    return m * rng.randint(1, 3 * size) + rng.randint(1, m - 1), m


SPLIT_BATCH = Exercise(
    name="split_batch",
    arguments="samples m",
    returns=plain.whole_numbers,
    reference=split_batch,
    judge=judge_split,
    parts=[
        Part(
            title="where m divides the batch",
            cases=[(1, 1), (2, 1), (4, 2), (8, 8), (256, 8)],
            draw=lambda rng, size: (size * (m := rng.randint(1, 9)), m),
            hint="m is how many microbatches there are, not how large they are",
        ),
        Part(
            title="where it does not",
            cases=[(3, 2), (5, 3), (9, 4), (10, 4), (1797, 8)],
            draw=draw_split,
            hint="divmod(samples, m) gives the size that fits m times, and how many are left over",
        ),
    ],
)

# --- the weight of a microbatch's loss -----------------------------------------------------------


def loss_weights(sizes: list[int]) -> list[float]:
    """A mean over n samples stands for n of them."""
    return [size / sum(sizes) for size in sizes]


LOSS_WEIGHTS = Exercise(
    name="loss_weights",
    arguments="sizes",
    returns=plain.numbers,
    reference=loss_weights,
    parts=[
        Part(
            title="for equal sizes",
            cases=[([1],), ([2, 2],), ([64, 64, 64, 64],)],
            draw=lambda rng, size: ([rng.randint(1, 9)] * (size + 1),),
            hint="with one weight for all, the weighted sum of m equal losses must be that loss",
        ),
        Part(
            title="for unequal ones",
            cases=[([2, 1],), ([3, 3, 2, 2],), ([3, 3, 3, 1],)],
            draw=lambda rng, size: ([10] + [rng.randint(1, 9) for _ in range(size)],),
            hint="how many of all the samples does each microbatch's mean speak for?",
        ),
    ],
)

# --- orders --------------------------------------------------------------------------------------

SHAPES = [(1, 1), (1, 3), (2, 2), (2, 3), (4, 4), (4, 8)]  # (p, m) with m >= p
SMALL = [(2, 1), (3, 2), (4, 1), (8, 3)]  # and with m < p


def draw_shape(rng: Random, size: int) -> Case:
    p = rng.randint(2, size + 1)
    return p, p + rng.randint(0, size)


def draw_small(rng: Random, size: int) -> Case:
    p = rng.randint(2, size + 1)
    return p, rng.randint(1, p - 1)


def stage_of(worker: int) -> str:
    """What a row must keep to where each worker holds one stage."""
    return f"actions of stage {worker} only, which is the one that worker {worker} holds"


def refuse_foreign(row: list[Action], stages: list[int], expected: str, case: str = "") -> None:
    """`Wrong` where an action of `row` is not of `stages`."""
    for action in row:
        if action.stage not in stages:  # only then is a text made: a row may be very long
            raise Wrong(expected, f"{action} in {show(row)}", case)


def schedule_of(answer: Answer, p: int, m: int) -> Schedule:
    """The schedule that the learner's order gives; `Wrong` where a worker's row cannot be right."""
    rows = []
    for worker in range(p):
        row = answer(worker, p, m)
        refuse_foreign(row, [worker], stage_of(worker))
        within(row, m)
        rows.append(row)
    try:
        return check(Schedule.from_workers(lambda worker, *_: rows[worker], p, m))
    except ValueError as problem:  # IllegalSchedule among them
        worker = getattr(problem, "worker", None) or 0
        name = answer.function.__name__
        case = f"{name}(worker={worker}, p={p}, m={m})"
        raise Wrong("an order that can run", f"{show(rows[worker])}: {problem}", case) from None


def within(row: list[Action], m: int, case: str = "") -> None:
    """`Wrong` where a row has a microbatch that does not exist; the number of a U is none."""
    for action in row:
        if action.kind != "U" and not 0 <= action.microbatch < m:
            raise Wrong(f"microbatches from 0 to {m - 1}", f"{action} in {show(row)}", case)


def listed(schedule: Schedule, worker: int) -> list[Action]:
    """A worker's row without its updates, which learners need not list."""
    return [action for action in schedule.workers[worker] if action.kind != "U"]


def judge_naive(answer: Answer, p: int, m: int) -> None:
    """Legal, and never two microbatches on the way."""
    schedule = schedule_of(answer, p, m)
    for worker in range(p):
        row = listed(schedule, worker)
        require(
            peak_in_flight(row) == 1,
            "one microbatch at a time: its backward is done before the next forward begins",
            show(row),
            f"naive_order(worker={worker}, p={p}, m={m})",
        )


def judge_gpipe(answer: Answer, p: int, m: int) -> None:
    """Legal, all forwards first, and as fast as fill and drain can be; backwards in any order."""
    schedule = schedule_of(answer, p, m)
    for worker in range(p):
        row = listed(schedule, worker)
        require(
            row == sorted(row, key=lambda action: action.kind != "F"),
            "all forwards before the first backward",
            show(row),
            f"gpipe_order(worker={worker}, p={p}, m={m})",
        )
    best, got = (simulate(s).makespan for s in (gpipe(p, m), schedule))
    require(
        got <= best + 1e-9,
        f"a batch in {best:g} seconds, with forward 1 and backward 2",
        f"{got:g} seconds: neighbours take the microbatches in different orders",
        f"gpipe_order(worker, p={p}, m={m}) for worker = 0 to {p - 1}",
    )


def rows_of(build: Callable[[int, int], Schedule]) -> Callable[[int, int, int], list[Action]]:
    """``order(worker, p, m)`` out of a schedule from the library, without its updates."""

    def order(worker: int, p: int, m: int) -> list[Action]:
        return listed(build(p, m), worker)

    order.__name__ = order.__qualname__ = build.__name__ + "_order"
    return order


def order_exercise(
    name: str, reference: Callable[[int, int], Schedule], judge: Callable[..., None], hint: str
) -> Exercise:
    """An exercise that asks for one worker's order; fewer microbatches than workers count extra."""
    return Exercise(
        name=name,
        arguments="worker p m",
        returns=plain.actions,
        reference=rows_of(reference),
        judge=judge,
        parts=[
            Part(title="for m >= p", share=2, cases=SHAPES, draw=draw_shape, hint=hint),
            Part(title="for m < p", share=1, cases=SMALL, draw=draw_small, hint=hint),
        ],
    )


NAIVE_ORDER = order_exercise(
    "naive_order",
    naive,
    judge_naive,
    "follow one microbatch down the line and back up, then the next; `worker` is also the number "
    "of the stage",
)
GPIPE_ORDER = order_exercise(
    "gpipe_order",
    gpipe,
    judge_gpipe,
    "the rule at the start of section 3: all forwards, then all backwards; `worker` is also the "
    "number of the stage, and microbatches are counted from 0 to m - 1",
)

# --- dependencies and start times ----------------------------------------------------------------


@cache
def line(p: int) -> Schedule:
    """A line of `p` stages, one per worker."""
    return naive(p, 1)


def needs(action: Action, p: int) -> list[Action]:
    """The next stage's work for a backward, the one before for a forward."""
    return dependencies.needs(action, line(p))


def all_before(action: Action, p: int) -> set[Action]:
    """All that must be over before `action`, however far back."""
    found: set[Action] = set()
    waiting = [action]
    while waiting:
        new = set(needs(waiting.pop(), p)) - found
        found |= new
        waiting += new
    return found


def judge_needs(answer: Answer, action: Action, p: int) -> None:
    """Those that nothing else covers must be named; those further back may be."""
    listed = set(answer(action, p))
    allowed = all_before(action, p)
    covered = {early for late in allowed for early in all_before(late, p)}
    got = show(sorted(listed)) if listed else "nothing"
    expected = show(needs(action, p)) if allowed else "nothing: it can start at once"
    require(listed <= allowed, expected, got)
    require(allowed - covered <= listed, expected, got)


def cases_for(kind: Callable[[int, int], Action], shapes: list[tuple[int, int]]) -> list[Case]:
    return [(kind(stage, 2 * p), p) for p, stage in shapes]


NEEDS = Exercise(
    name="needs",
    arguments="action p",
    returns=plain.actions,
    reference=needs,
    judge=judge_needs,
    parts=[
        Part(
            title="for forwards",
            cases=cases_for(F, [(1, 0), (2, 0), (2, 1), (3, 1), (4, 3)]),
            draw=lambda rng, size: (F(rng.randint(0, size), rng.randint(0, 9)), size + 1),
            hint="where do a stage's input activations come from? And those of stage 0?",
        ),
        Part(
            title="for backwards",
            cases=cases_for(B, [(1, 0), (2, 1), (2, 0), (3, 1), (4, 3)]),
            draw=lambda rng, size: (B(rng.randint(0, size), rng.randint(0, 9)), size + 1),
            hint="where does the gradient come from? On the last stage there is no next stage",
        ),
    ],
)


def start_times(
    order: Callable[[int, int, int], list[Action]],
    p: int,
    m: int,
    forward: list[float],
    backward: list[float],
) -> dict[Action, float]:
    """The library's simulator, asked for the starts."""
    trace = simulate(Schedule.from_workers(order, p, m), Cost(forward, backward))
    return {span.action: span.start for span in trace.spans if span.action.kind != "U"}


def judge_start_times(
    answer: Answer,
    order: Callable[[int, int, int], list[Action]],
    p: int,
    m: int,
    forward: list[float],
    backward: list[float],
) -> None:
    """Name the earliest action whose start is wrong: the others may follow from it."""
    expected = start_times(order, p, m, forward, backward)
    got = answer(order, p, m, forward, backward)
    rows = "; ".join(f"worker {w}: {' '.join(map(str, order(w, p, m)))}" for w in range(p))
    case = f"{answer.latest}, where the order is {rows}" if p * m <= 6 else answer.latest
    require(len(expected) == len(got), f"{len(expected)} actions", f"{len(got)}: {show(got)}", case)
    for action, start in sorted(expected.items(), key=lambda item: item[1]):
        require(action in got, f"{action} among the actions", show(got), case)
        require(
            isclose(got[action], start, rel_tol=1e-6, abs_tol=1e-9),
            f"{action} starts at {start:g}",
            f"{action} starts at {got[action]:g}",
            case,
        )


def random_order(rng: Random, p: int, m: int) -> Callable[[int, int, int], list[Action]]:
    """Some order that can run: again and again, somebody does any one thing that can be done."""
    rows: list[list[Action]] = [[] for _ in range(p)]
    todo = {kind(stage, k) for kind in (F, B) for stage in range(p) for k in range(m)}
    done: set[Action] = set()
    while todo:
        ready = sorted(action for action in todo if done.issuperset(needs(action, p)))
        action = rng.choice(ready)
        todo.remove(action)
        done.add(action)
        rows[action.stage].append(action)

    def some_order(worker: int, p: int, m: int) -> list[Action]:
        return list(rows[worker])

    return some_order


def draw_times(rng: Random, p: int) -> list[float]:
    return [rng.randint(1, 8) / 2 for _ in range(p)]


def draw_random_order(rng: Random, size: int) -> Case:
    p, m = rng.randint(2, 2 + size // 2), rng.randint(2, 2 + size)
    return random_order(rng, p, m), p, m, draw_times(rng, p), draw_times(rng, p)


def equal(order: Callable[..., list[Action]], p: int, m: int) -> Case:
    return order, p, m, [1.0] * p, [2.0] * p


def unequal(order: Callable[..., list[Action]], p: int, m: int, rng: Random) -> Case:
    return order, p, m, draw_times(rng, p), draw_times(rng, p)


_GPIPE, _NAIVE, _1F1B = (rows_of(build) for build in (gpipe, naive, one_f_one_b))

START_TIMES = Exercise(
    name="start_times",
    arguments="order p m forward backward",
    returns=plain.times,
    reference=start_times,
    judge=judge_start_times,
    parts=[
        Part(
            title="for GPipe with equal stages",
            share=2,
            cases=[equal(_GPIPE, *shape) for shape in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 8)]],
            draw=lambda rng, size: equal(_GPIPE, rng.randint(1, size), rng.randint(1, size)),
            hint="an action starts when its worker is free and all that it needs has ended: "
            "the later of the two",
        ),
        Part(
            title="for unequal stages",
            share=2,
            cases=[
                (_GPIPE, 2, 1, [1.0, 2.0], [2.0, 4.0]),
                (_GPIPE, 2, 2, [2.0, 1.0], [1.0, 3.0]),
                (_GPIPE, 3, 4, [1.0, 3.0, 1.0], [2.0, 6.0, 2.0]),
            ],
            draw=lambda rng, size: unequal(_GPIPE, rng.randint(2, 5), rng.randint(1, size), rng),
            hint="forward[s] and backward[s] belong to stage s",
        ),
        Part(
            title="for other orders",
            share=1,
            cases=[
                equal(_NAIVE, 2, 2),
                equal(_1F1B, 2, 2),
                equal(_1F1B, 4, 8),
                (_1F1B, 3, 5, [1.0, 2.5, 1.0], [2.0, 1.0, 4.0]),
            ],
            draw=draw_random_order,
            hint="take each worker's actions as `order` lists them; if the next one cannot start "
            "yet, look at another worker and come back",
        ),
    ],
)

# --- the bubble ----------------------------------------------------------------------------------


def gpipe_trace(p: int, m: int) -> Trace:
    return simulate(gpipe(p, m))


def bubble_exercise(name: str, reference: Callable[[int, int], float], hint: str) -> Exercise:
    return Exercise(
        name=name,
        arguments="p m",
        returns=plain.number,
        reference=reference,
        parts=[
            Part(
                cases=[(1, 1), (2, 1), (2, 2), (3, 2), (4, 4), (4, 8), (8, 32)],
                draw=lambda rng, size: (rng.randint(1, size + 1), rng.randint(1, 3 * size)),
                hint=hint,
            )
        ],
    )


BUBBLE_OF_TOTAL = bubble_exercise(
    "bubble_of_total",
    lambda p, m: gpipe_trace(p, m).bubble_of_total,
    "count in slots of one forward and one backward: how many does a worker wait, and how many "
    "does the whole batch take?",
)
BUBBLE_OF_IDEAL = bubble_exercise(
    "bubble_of_ideal",
    lambda p, m: gpipe_trace(p, m).bubble_of_ideal,
    "the same waiting as for the other bubble, now over the slots in which a worker works",
)

# --- memory --------------------------------------------------------------------------------------


def random_row(rng: Random, size: int) -> list[Action]:
    """Two batches of one worker, an update after each; backwards somewhere after their forwards."""
    row: list[Action] = []
    for batch in (0, 1):
        for kind, stage, k in random_order(rng, 1, size)(0, 1, size):
            row.append(Action(kind, stage, k + batch * size))
        row.append(U(0, batch))
    return row


PEAK_ACTIVATIONS = Exercise(
    name="peak_activations",
    arguments="actions",
    returns=plain.whole_number,
    reference=peak_in_flight,
    parts=[
        Part(
            cases=[
                ([F(0, 0), B(0, 0)],),
                ([F(0, 0), B(0, 0), F(0, 1), B(0, 1)],),
                ([F(0, 0), F(0, 1), B(0, 0), B(0, 1)],),
                ([F(0, 0), F(0, 1), B(0, 1), F(0, 2), B(0, 0), B(0, 2)],),
                ([F(0, 0), B(0, 0), U(0, 0), F(0, 1), F(0, 2), B(0, 1), B(0, 2), U(0, 1)],),
                ([F(0, 0), F(0, 1), B(0, 0), F(0, 2), F(0, 3), *(B(0, k) for k in (1, 2, 3))],),
                (_NAIVE(1, 4, 8),),
                (_1F1B(1, 4, 8),),
                (_GPIPE(2, 4, 8),),
            ],
            draw=lambda rng, size: (random_row(rng, size + 1),),
            hint="walk along the row with a counter: what does an F add, what does a B take away, "
            "and when was the counter highest? An update U changes nothing",
        )
    ],
)

# --- the smallest m ------------------------------------------------------------------------------


def smallest_m(p: int, target: float) -> int:
    """Try one after the other; (p-1)/(m+p-1) falls as m grows."""
    m = 1
    while (p - 1) / (m + p - 1) > target:
        m += 1
    return m


def judge_smallest_m(answer: Answer, p: int, target: float) -> None:
    m, right = answer(p, target), smallest_m(p, target)
    if m == right:
        return
    got = f"m = {m}"
    if m >= 1:
        got += f", whose bubble is {(p - 1) / (m + p - 1):.4f} of total"
        got += ", but a smaller m does as well" if m > right else ", more than the target"
    raise Wrong(f"m = {right}", got)


def draw_target(rng: Random, size: int) -> Case:
    """A target between the bubbles of two neighbouring m, so that rounding decides nothing."""
    p = rng.randint(2, size + 2)
    return p, round((p - 1) / (rng.randint(1, 5 * size) + 0.5 + p - 1), 6)


# A bubble that is exactly a fifth; but (p - 1) * (1 - 0.2) / 0.2 is a little more than 4 (p - 1).
EXACT = [(4, 0.2), (7, 0.2), (13, 0.2)]

SMALLEST_M = Exercise(
    name="smallest_m",
    arguments="p target",
    returns=plain.whole_number,
    reference=smallest_m,
    judge=judge_smallest_m,
    parts=[
        Part(
            title="in general",
            share=2,
            cases=[(2, 0.4), (4, 0.7), (4, 0.31), (4, 0.11), (8, 0.21), (8, 0.06)],
            draw=draw_target,
            hint="of total, not of ideal; with one microbatch less than the answer, the bubble is "
            "larger than the target",
        ),
        Part(
            title="at the edges",
            share=1,
            cases=[(1, 0.5), (2, 0.5), (4, 0.75), (4, 0.25), (5, 0.125), *EXACT],
            draw=lambda rng, size: (1, 1 / (size + 1)),
            hint="a bubble that equals the target is small enough; a batch has at least one "
            "microbatch, even where there is no bubble at all. And floats are rounded: "
            "3 * 0.8 / 0.2 is not 12 in Python. It is safer to compare the bubble itself",
        ),
    ],
)

EXERCISES = [
    SPLIT_BATCH,
    LOSS_WEIGHTS,
    NAIVE_ORDER,
    GPIPE_ORDER,
    NEEDS,
    START_TIMES,
    BUBBLE_OF_TOTAL,
    BUBBLE_OF_IDEAL,
    PEAK_ACTIVATIONS,
    SMALLEST_M,
]

# What the claims lab says about each claim.
CLAIMS = {1: "wrong", 2: "right", 3: "half", 4: "half", 5: "half", 6: "wrong", 7: "right"}
