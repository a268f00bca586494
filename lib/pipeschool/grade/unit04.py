"""The exercises of unit 04, one forward, one backward."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from pipeschool.actions import peak_in_flight
from pipeschool.cost import Cost
from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import Wrong, described, mistyped, require, show
from pipeschool.grade.unit01 import (
    draw_shape,
    draw_small,
    listed,
    order_exercise,
    schedule_of,
)
from pipeschool.grade.unit04_messages import MEND_ROW, WAITING_CIRCLE
from pipeschool.schedules import gpipe, one_f_one_b
from pipeschool.simulator import simulate

# --- warm-up, order, in flight -------------------------------------------------------------------

# (worker, p, m) with m >= p, and with m < p.
SOME = [(0, 2, 2), (1, 2, 2), (1, 3, 4), (0, 4, 8), (2, 4, 8), (3, 4, 8), (1, 8, 32)]
FEW = [(0, 2, 1), (1, 3, 1), (0, 3, 2), (2, 3, 2), (0, 4, 2), (1, 4, 1), (0, 8, 3), (7, 8, 3)]


def draw_worker(rng: Random, size: int) -> Case:
    """(worker, p, m) with m >= p."""
    p, m = draw_shape(rng, size)
    return rng.randint(0, p - 1), p, m


def draw_worker_of_few(rng: Random, size: int) -> Case:
    """(worker, p, m) with m < p."""
    p, m = draw_small(rng, size)
    return rng.randint(0, p - 1), p, m


def warm_up(worker: int, p: int, m: int) -> int:
    """One forward for each worker further down, as long as there are microbatches."""
    return min(p - 1 - worker, m)


def judge_warm_up(answer: Answer, worker: int, p: int, m: int) -> None:
    """Where all forwards are warm-up, the last of them may also count as part of a first turn."""
    right, got = warm_up(worker, p, m), answer(worker, p, m)
    require(got == right or (right == m and got == m - 1), str(right), str(got))


WARM_UP = Exercise(
    name="warm_up",
    arguments="worker p m",
    returns=plain.whole_number,
    reference=warm_up,
    judge=judge_warm_up,
    parts=[
        Part(
            title="for m >= p",
            cases=SOME,
            draw=draw_worker,
            hint="which workers must have done the forward of microbatch 0 before its backward can "
            "reach this one? The forward of the first turn is not part of the warm-up",
        ),
        Part(
            title="for m < p",
            cases=FEW,
            draw=draw_worker_of_few,
            hint="how many forwards are there at all?",
        ),
    ],
)


def in_flight(worker: int, p: int, m: int) -> int:
    """What the library's schedule holds."""
    return peak_in_flight(one_f_one_b(p, m).workers[worker])


IN_FLIGHT = Exercise(
    name="in_flight",
    arguments="worker p m",
    returns=plain.whole_number,
    reference=in_flight,
    parts=[
        Part(
            title="for m >= p",
            cases=SOME,
            draw=draw_worker,
            hint="the warm-up, and what the forward of a turn adds to it before the backward of "
            "that turn takes one away",
        ),
        Part(
            title="for m < p",
            cases=FEW,
            draw=draw_worker_of_few,
            hint="no worker can hold more microbatches than there are",
        ),
    ],
)


def judge_one_f_one_b(answer: Answer, p: int, m: int) -> None:
    """Legal, no fuller a counter than needed, and as fast as GPipe whatever the times are."""
    schedule = schedule_of(answer, p, m)
    name = answer.function.__name__
    for worker in range(p):
        row = listed(schedule, worker)
        most = in_flight(worker, p, m)
        require(
            peak_in_flight(row) <= most,
            f"at most {most} in flight, forward done and backward not",
            f"{peak_in_flight(row)} in {show(row)}",
            f"{name}(worker={worker}, p={p}, m={m})",
        )
    for cost in (Cost(1, 2), Cost(2, 1)):
        best, got = (simulate(s, cost).makespan for s in (gpipe(p, m), schedule))
        require(
            got <= best + 1e-9,
            f"a batch in {best:g} seconds, as under GPipe, with forward {cost.forward:g} and "
            f"backward {cost.backward:g}",
            f"{got:g} seconds; worker 0 does {show(listed(schedule, 0), 90)}",
            f"{name}(worker, p={p}, m={m}) for worker = 0 to {p - 1}",
        )


ONE_F_ONE_B_ORDER = order_exercise(
    "one_f_one_b_order",
    one_f_one_b,
    judge_one_f_one_b,
    "three pieces: the warm-up; turns of one forward and one backward, as long as there are "
    "forwards left; then the backwards that are left",
)

# --- recomputation -------------------------------------------------------------------------------


def bytes_saved(worker: int, p: int, m: int, activations: int) -> int:
    """All but the one that its own backward has just computed again."""
    return (in_flight(worker, p, m) - 1) * activations


def seconds_paid(p: int, m: int, forward: float, backward: float) -> float:
    """What the simulator says if every backward does the forward first."""
    costs = Cost(forward, forward + backward), Cost(forward, backward)
    longer, plain_one = (simulate(one_f_one_b(p, m), cost).makespan for cost in costs)
    return longer - plain_one


BYTES_SAVED = Exercise(
    name="bytes_saved",
    arguments="worker p m activations",
    returns=plain.whole_number,
    reference=bytes_saved,
    parts=[
        Part(
            title="where several are in flight",
            cases=[(0, 2, 2, 100), (0, 2, 8, 7), (0, 3, 2, 10), (0, 4, 8, 100), (2, 4, 8, 100)],
            draw=lambda rng, size: (
                rng.randint(0, size - 1),
                size + 1,
                rng.randint(2, 3 * size),
                10 * rng.randint(1, 99),
            ),
            hint="how many of them lie there at the worst moment without recomputation (your "
            "in_flight knows, also for m < p)? And with it, while a backward works?",
        ),
        Part(
            title="where only one is",
            cases=[(0, 1, 1, 100), (1, 2, 2, 100), (0, 4, 1, 100), (3, 4, 8, 100)],
            draw=lambda rng, size: (size, size + 1, rng.randint(1, 9), 10 * rng.randint(1, 99)),
            hint="the backward needs the activations of its own microbatch, kept or computed again",
        ),
    ],
)
SECONDS_PAID = Exercise(
    name="seconds_paid",
    arguments="p m forward backward",
    returns=plain.number,
    reference=seconds_paid,
    parts=[
        Part(
            cases=[
                (1, 1, 1, 2),
                (1, 3, 2, 5),
                (2, 1, 1, 2),
                (4, 8, 1, 2),
                (4, 8, 2, 2),
                (8, 4, 1, 3),
            ],
            draw=lambda rng, size: (
                rng.randint(1, size + 1),
                rng.randint(1, 3 * size),
                rng.randint(1, 9),
                rng.randint(1, 9),
            ),
            hint="a backward now takes forward + backward seconds: put that in place of the "
            "backward in (m + p - 1)(tF + tB), and subtract",
        )
    ],
)

# --- the bytes of a worker -----------------------------------------------------------------------

BYTE_KINDS = ("weights", "versions", "gradients", "optimizer", "activations", "buffers")
COPIES = {"sgd": 0, "momentum": 1, "adam": 2}  # numbers that an optimizer keeps for every weight


def worker_bytes(
    schedule: str,
    worker: int,
    p: int,
    m: int,
    optimizer: str,
    weights: int,
    activations: int,
    message: int,
) -> dict[str, int]:
    """The most bytes of each kind."""
    held = m if schedule == "gpipe" else in_flight(worker, p, m)
    older = in_flight(worker, p, m) - 1 if schedule == "pipedream" else 0
    return {
        "weights": weights,
        "versions": older * weights,
        "gradients": weights,
        "optimizer": COPIES[optimizer] * weights,
        "activations": held * activations,
        "buffers": held * message if worker > 0 else 0,
    }


def bytes_by_kind(value: object) -> dict[str, int]:
    """A dictionary from the names of kinds to bytes; a kind that is left out counts 0."""
    wanted = f"a dictionary with the keys {', '.join(BYTE_KINDS)}"
    if not isinstance(value, Mapping):
        raise mistyped(wanted, described(value))
    for key in value:
        if key not in BYTE_KINDS:
            raise mistyped(wanted, f"the key {show(key)}")
    return {kind: plain.whole_number(value.get(kind, 0)) for kind in BYTE_KINDS}


WHERE_TO_LOOK = {
    "weights": "the newest copy only; older ones count under `versions`",
    "versions": "only an asynchronous schedule keeps copies that are older than the newest; unit "
    "03 says how many copies there are in all",
    "gradients": "one number for each weight: those of all microbatches are added up in one place",
    "optimizer": "plain SGD keeps nothing, momentum one number for each weight, Adam two; however "
    "many versions of the weights there are, the optimizer has these once",
    "activations": "how many microbatches are in flight at most? Under GPipe all of them; "
    "otherwise your in_flight knows",
    "buffers": "each microbatch in flight keeps its input, one message; only worker 0 gets none",
}


def judge_worker_bytes(answer: Answer, *case: object) -> None:
    """Name the first kind that is wrong."""
    right, got = worker_bytes(*case), answer(*case)  # type: ignore[arg-type]
    for kind, hint in WHERE_TO_LOOK.items():
        if got[kind] != right[kind]:
            raise Wrong(f"{right[kind]} bytes of {kind}", f"{got[kind]} bytes of {kind}", hint=hint)


def bytes_part(schedule: str) -> Part:
    return Part(
        title=f"for {schedule}",
        cases=[
            (schedule, *shape, "sgd", 400, 100, 20)
            for shape in ((0, 1, 1), (0, 2, 2), (1, 2, 2), (0, 4, 8), (2, 4, 8), (3, 4, 8))
        ],
        draw=lambda rng, size: (schedule, *draw_worker(rng, size), "sgd", *draw_sizes(rng)),
        hint="the table above the exercise says what counts under which kind",
    )


def draw_sizes(rng: Random) -> tuple[int, int, int]:
    """Bytes of the weights, of the activations and of a message."""
    return 40 * rng.randint(10, 99), 10 * rng.randint(10, 99), rng.randint(10, 99)


WORKER_BYTES = Exercise(
    name="worker_bytes",
    arguments="schedule worker p m optimizer weights activations message",
    returns=bytes_by_kind,
    reference=worker_bytes,
    judge=judge_worker_bytes,
    parts=[
        bytes_part("gpipe"),
        bytes_part("1f1b"),
        bytes_part("pipedream"),
        Part(
            title="with momentum and Adam",
            cases=[
                ("1f1b", 1, 2, 2, "momentum", 400, 100, 20),
                ("1f1b", 0, 4, 8, "adam", 400, 100, 20),
                ("gpipe", 3, 4, 8, "momentum", 400, 100, 20),
                ("gpipe", 1, 4, 8, "adam", 400, 100, 20),
                ("pipedream", 0, 4, 8, "adam", 400, 100, 20),
            ],
            draw=lambda rng, size: (
                rng.choice(["gpipe", "1f1b", "pipedream"]),
                *draw_worker(rng, size),
                rng.choice(["momentum", "adam"]),
                *draw_sizes(rng),
            ),
            hint="the table above the exercise says what counts under which kind",
        ),
    ],
)

# --- a plan that fits ----------------------------------------------------------------------------


def peak_with(
    worker: int, p: int, m: int, fixed: int, activations: int, message: int, recompute: bool
) -> int:
    """The most bytes of a worker under 1F1B."""
    held = in_flight(worker, p, m)
    inputs = held * message if worker > 0 else 0
    return fixed + inputs + (activations if recompute else held * activations)


def recompute_plan(
    p: int, m: int, fixed: list[int], activations: int, message: int, cap: int
) -> list[bool]:
    """Recompute where it does not fit otherwise."""
    return [
        peak_with(w, p, m, fixed[w], activations, message, recompute=False) > cap for w in range(p)
    ]


def yes_or_no(value: object) -> list[bool]:
    """A list of bools, Python's or numpy's."""
    wanted = "a list of True and False, one per worker"
    found = []
    for item in plain.items(value, wanted):
        if type(item).__name__ not in ("bool", "bool_"):
            raise mistyped(wanted, f"{described(item)}, in {show(value)}")
        found.append(bool(item))
    return found


def judge_recompute_plan(
    answer: Answer, p: int, m: int, fixed: list[int], activations: int, message: int, cap: int
) -> None:
    """Every worker fits, and nobody computes twice for nothing."""
    plan = answer(p, m, fixed, activations, message, cap)
    require(len(plan) == p, f"one of True and False per worker, {p} in all", show(plan))
    for worker, again in enumerate(plan):
        peaks = [
            peak_with(worker, p, m, fixed[worker], activations, message, recompute)
            for recompute in (False, True)
        ]
        require(
            peaks[again] <= cap,
            f"at most {cap} bytes on worker {worker}",
            f"{peaks[again]} bytes without recomputation, in {plan}",
        )
        require(
            not again or peaks[0] > cap,
            f"no recomputation where it is not needed: worker {worker} fits with {peaks[0]} bytes",
            show(plan),
        )


def draw_plan(rng: Random, size: int, exact: bool) -> Case:
    """A cap under which all fit with recomputation and, where there is a choice, not all without.

    exact: one of the workers needs just the cap without recomputation.
    """
    p, m = size + 1, rng.randint(2, 3 * size)
    activations, message = 10 * rng.randint(20, 99), rng.randint(1, 99)
    fixed = [100 * rng.randint(1, 9) for _ in range(p)]
    low, high = (
        [peak_with(w, p, m, fixed[w], activations, message, again) for w in range(p)]
        for again in (True, False)
    )
    caps = [peak + (0 if exact else 1) for peak in high if peak >= max(low)]
    return p, m, fixed, activations, message, rng.choice(caps)


RECOMPUTE_PLAN = Exercise(
    name="recompute_plan",
    arguments="p m fixed activations message cap",
    returns=yes_or_no,
    reference=recompute_plan,
    judge=judge_recompute_plan,
    parts=[
        Part(
            title="in general",
            share=2,
            cases=[
                (1, 1, [50], 100, 10, 200),
                (2, 4, [50, 50], 100, 10, 200),
                (2, 4, [50, 50], 100, 10, 300),
                (4, 8, [50, 50, 50, 50], 100, 10, 275),
                (4, 8, [50, 50, 150, 250], 100, 10, 375),
                (2, 4, [50, 50], 100, 10, 255),  # worker 0 fits, as it has no buffers
                (4, 2, [50, 50, 50, 50], 100, 10, 200),
                (4, 2, [50, 50, 50, 50], 100, 10, 275),  # all fit, with two in flight at most
            ],
            draw=lambda rng, size: draw_plan(rng, size, exact=False),
            hint="work out each worker's bytes without recomputation: what is fixed, and for each "
            "microbatch in flight its activations and (except on worker 0) its input",
        ),
        Part(
            title="where one fits exactly",
            share=1,
            cases=[
                (1, 1, [50], 100, 10, 150),
                (3, 4, [50, 50, 50], 100, 10, 270),
                (3, 4, [50, 50, 50], 100, 10, 350),
            ],
            draw=lambda rng, size: draw_plan(rng, size, exact=True),
            hint="a worker that needs just as many bytes as there are does fit",
        ),
    ],
)

EXERCISES = [
    WARM_UP,
    ONE_F_ONE_B_ORDER,
    IN_FLIGHT,
    WAITING_CIRCLE,
    MEND_ROW,
    BYTES_SAVED,
    SECONDS_PAID,
    WORKER_BYTES,
    RECOMPUTE_PLAN,
]

# What the claims lab says about each claim.
CLAIMS = {1: "wrong", 2: "half", 3: "wrong", 4: "right", 5: "half", 6: "half", 7: "wrong"}
