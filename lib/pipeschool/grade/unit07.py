"""The exercises of unit 07, beyond: chunks, the split backward, zero-bubble orders, the V."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pipeschool.actions import Action, Schedule, peak_in_flight
from pipeschool.checking import check
from pipeschool.cost import Cost
from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part, same
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import Wrong, described, mistyped, require, show
from pipeschool.grade.unit01 import (
    SHAPES,
    SMALL,
    draw_shape,
    draw_small,
    listed,
    refuse_foreign,
    schedule_of,
    within,
)
from pipeschool.grade.unit07_reading import PRIORITY, READ_FIGURE, ZERO_BUBBLE_RATE
from pipeschool.schedules import interleaved_1f1b, zb_h1
from pipeschool.simulator import simulate

# --- interleaving --------------------------------------------------------------------------------


def interleaved_warm_up(worker: int, p: int, v: int) -> int:
    """Narayanan et al., SC 2021: a round through the other chunks, and a way there and back."""
    return (v - 1) * p + 2 * (p - 1 - worker)


INTERLEAVED_WARM_UP = Exercise(
    name="interleaved_warm_up",
    arguments="worker p v",
    returns=plain.whole_number,
    reference=interleaved_warm_up,
    parts=[
        Part(
            title="on the last worker",
            cases=[(0, 1, 2), (1, 2, 2), (1, 2, 3), (3, 4, 2), (7, 8, 4)],
            draw=lambda rng, size: (size, size + 1, rng.randint(2, 4)),
            hint="the last worker's first backward is that of its last chunk: how many chunks "
            "come before that one, and how many microbatches go through each of them in a group?",
        ),
        Part(
            title="on the workers before it",
            cases=[(0, 2, 2), (1, 3, 2), (0, 3, 2), (0, 2, 3), (1, 4, 2), (0, 8, 4)],
            draw=lambda rng, size: (rng.randint(0, size - 1), size + 1, rng.randint(2, 4)),
            hint="what the last worker does, and two forwards more for each worker further down",
        ),
    ],
)


def interleaved_order(worker: int, p: int, m: int, v: int) -> list[Action]:
    """One worker's row of the library's schedule, updates left out."""
    return listed(interleaved_1f1b(p, m, v), worker)


def judge_interleaved(answer: Answer, p: int, m: int, v: int, what: str) -> None:
    """`what`: the order of the forwards, that of the backwards, or everything.

    Everything is right where it can run, is as fast as it should be, and keeps no more than it
    needs. A shorter warm-up is right, too: without messages it costs no time.
    """
    name = answer.function.__name__
    rows = [answer(worker, p, m, v) for worker in range(p)]
    cases = [f"{name}(worker={worker}, p={p}, m={m}, v={v})" for worker in range(p)]
    for worker, row in enumerate(rows):
        own = list(range(worker, v * p, p))
        expected = f"actions of the stages {show(own)}, which are those of worker {worker}"
        refuse_foreign(row, own, expected, cases[worker])
        within(row, m, cases[worker])
        if what != "everything":
            kind = "F" if what == "forwards" else "B"
            right = [a for a in interleaved_order(worker, p, m, v) if a.kind == kind]
            got = [a for a in row if a.kind == kind]
            require(got == right, f"{what} {show(right)}", f"{what} {show(got)}", cases[worker])
    if what == "everything":
        schedule = _legal(rows, p, m, cases)
        for worker, row in enumerate(rows):
            most = min(v * m, interleaved_warm_up(worker, p, v) + 1)
            require(
                peak_in_flight(row) <= most,
                f"at most {most} chunks in flight, forward done and backward not",
                f"{peak_in_flight(row)} in {show(row)}",
                cases[worker],
            )
        for forward, backward in ((1, 2), (2, 1)):
            best = (v * m + p - 1) * (forward + backward)
            took = simulate(schedule, Cost(forward, backward)).makespan
            require(
                took <= best + 1e-9,
                f"a batch in {best:g} seconds, with forward {forward} and backward {backward} for "
                "each chunk",
                f"{took:g} seconds; worker 0 does {show(rows[0], 90)}",
                f"{name}(worker, p={p}, m={m}, v={v}) for worker = 0 to {p - 1}",
            )


def _legal(rows: list[list[Action]], p: int, m: int, cases: list[str]) -> Schedule:
    try:
        return check(Schedule.from_workers(lambda worker, *_: rows[worker], p, m))
    except ValueError as problem:  # IllegalSchedule among them
        worker = getattr(problem, "worker", None) or 0
        got = f"{show(rows[worker])}: {problem}"
        raise Wrong("an order that can run", got, cases[worker]) from None


ROUNDS = [(1, 1, 2), (1, 2, 2), (2, 4, 2), (2, 4, 3), (3, 6, 2), (4, 8, 2)]  # (p, m, v)
ONE_ROUND = [(2, 2, 2), (3, 3, 2), (4, 4, 2), (4, 4, 4)]


def draw_rounds(rng: Random, size: int) -> tuple[int, int, int]:
    p = rng.randint(2, 2 + size // 3)
    return p, p * rng.randint(2, 3), rng.randint(2, 2 + size // 3)


def draw_one_round(rng: Random, size: int) -> tuple[int, int, int]:
    p = rng.randint(2, size // 2 + 2)
    return p, p, rng.randint(2, 4)


INTERLEAVED_ORDER = Exercise(
    name="interleaved_order",
    arguments="worker p m v",
    returns=plain.actions,
    reference=interleaved_order,
    judge=judge_interleaved,
    parts=[
        Part(
            title="in the order of its forwards",
            cases=[(*shape, "forwards") for shape in ROUNDS],
            draw=lambda rng, size: (*draw_rounds(rng, size), "forwards"),
            hint="three loops, from outside: over the groups of p microbatches, over the worker's "
            "stages (worker, worker + p, ...), over the microbatches of the group",
        ),
        Part(
            title="in the order of its backwards",
            cases=[(*shape, "backwards") for shape in ROUNDS],
            draw=lambda rng, size: (*draw_rounds(rng, size), "backwards"),
            hint="a cup comes back through the last stage first; the groups, and the microbatches "
            "in a group, come in the order in which they went forward",
        ),
        Part(
            title="in taking turns",
            share=2,
            cases=[(*shape, "everything") for shape in ROUNDS],
            draw=lambda rng, size: (*draw_rounds(rng, size), "everything"),
            hint="warm-up, turns of one forward and one backward, drain: as in 1F1B, with the two "
            "longer lists and your interleaved_warm_up",
        ),
        Part(
            title="where m = p",
            cases=[(*shape, "everything") for shape in ONE_ROUND],
            draw=lambda rng, size: (*draw_one_round(rng, size), "everything"),
            hint="a worker cannot do more forwards in its warm-up than it has at all: v * m",
        ),
    ],
)


def messages_per_batch(p: int, m: int, v: int) -> int:
    """Every microbatch crosses each of the vp - 1 boundaries there and back."""
    return 2 * m * (v * p - 1)


MESSAGES_PER_BATCH = Exercise(
    name="messages_per_batch",
    arguments="p m v",
    returns=plain.whole_number,
    reference=messages_per_batch,
    parts=[
        Part(
            title="with one chunk per worker",
            cases=[(2, 1, 1), (2, 3, 1), (3, 1, 1), (4, 8, 1)],
            draw=lambda rng, size: (rng.randint(2, size + 2), rng.randint(1, 4 * size), 1),
            hint="how many boundaries are there between p stages? Both activations and gradients "
            "travel",
        ),
        Part(
            title="with several chunks per worker",
            cases=[(2, 1, 2), (2, 3, 2), (3, 1, 2), (4, 8, 2), (4, 8, 4)],
            draw=lambda rng, size: (
                rng.randint(2, size + 2),
                rng.randint(1, 4 * size),
                rng.randint(2, 4),
            ),
            hint="how many stages has the model now, and how many boundaries? With the loop "
            "placement, neighbouring stages are never on one worker",
        ),
    ],
)

# --- the two halves of a linear layer's backward -------------------------------------------------
# Cases are lists of whole numbers, which stay exact; torch is imported only where it is needed.


def input_half(gradient: Any, weight: Any) -> Any:
    """dX = dY W."""
    return gradient @ weight


def weight_half(gradient: Any, inputs: Any) -> tuple[Any, Any]:
    """dW = dY^T X and db, the sum of dY, over all samples."""
    rows, features = gradient.flatten(0, -2), inputs.flatten(0, -2)
    return rows.mT @ features, rows.sum(0)


class Numbers(tuple[Any, ...]):
    """The shape of a tensor and its numbers, as plain data; shown as nested lists."""

    def __repr__(self) -> str:
        return show(self[2])


def tensor(value: object) -> Numbers:
    """The numbers of a tensor, or of anything that torch makes one of."""
    import torch

    try:
        found = torch.as_tensor(value, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        raise mistyped("a tensor", described(value)) from None
    if found.numel() > plain.MOST_ITEMS:
        raise Wrong("a tensor of a few numbers", f"one of {found.numel()} numbers")
    return Numbers((list(found.shape), found.flatten().tolist(), found.tolist()))


def two_tensors(value: object) -> list[Numbers]:
    """The pair (dW, db)."""
    import torch

    wanted = "two tensors, (dW, db)"
    if isinstance(value, torch.Tensor):
        raise mistyped(wanted, f"one tensor: {show(value.tolist())}")
    found = plain.items(value, wanted)
    if len(found) != 2:
        raise mistyped(wanted, f"{len(found)} of them: {show(value)}")
    return [tensor(item) for item in found]


def _require_equal(what: str, right: Numbers, got: Numbers) -> None:
    shapes = [" x ".join(map(str, numbers[0])) or "one number" for numbers in (right, got)]
    require(right[0] == got[0], f"{what} of shape {shapes[0]}", f"shape {shapes[1]}: {got!r}")
    require(same(right[1], got[1]), f"{what} = {right!r}", f"{what} = {got!r}")


def _as_tensor(values: list[Any]) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.float32)


def _ask(answer: Answer, *given: Any) -> Any:
    """The learner's answer for tensors, which a message names in one line."""
    values = [f"{name}={show(x.tolist())}" for name, x in zip(answer.names, given, strict=True)]
    case = f"{answer.function.__name__}({', '.join(values)}), as tensors"
    try:
        return answer(*given)
    except Wrong as wrong:
        wrong.case = case
        raise
    finally:
        answer.latest = case


def judge_input_half(answer: Answer, gradient: list[Any], weight: list[Any]) -> None:
    given = _as_tensor(gradient), _as_tensor(weight)
    _require_equal("dX", tensor(input_half(*given)), _ask(answer, *given))


def judge_weight_half(
    answer: Answer, gradient: list[Any], inputs: list[Any], which: Sequence[int]
) -> None:
    """`which` of (dW, db) are looked at."""
    given = _as_tensor(gradient), _as_tensor(inputs)
    right, got = two_tensors(weight_half(*given)), _ask(answer, *given)
    for index in which:
        _require_equal(("dW", "db")[index], right[index], got[index])


def draw_numbers(rng: Random, *shape: int) -> Any:
    """Nested lists of small whole numbers."""
    if not shape:
        return rng.randint(-3, 3)
    return [draw_numbers(rng, *shape[1:]) for _ in range(shape[0])]


def draw_weight_half(rng: Random, size: int) -> tuple[Any, Any]:
    samples, outputs, features = (rng.randint(1, 2 + size // 3) for _ in range(3))
    return draw_numbers(rng, samples, outputs), draw_numbers(rng, samples, features)


def draw_words(rng: Random, size: int) -> tuple[Any, Any]:
    samples, words, outputs, features = (rng.randint(2, 3) for _ in range(4))
    return draw_numbers(rng, samples, words, outputs), draw_numbers(rng, samples, words, features)


def draw_input_half(rng: Random, size: int) -> tuple[Any, Any]:
    samples, outputs, features = (rng.randint(1, 2 + size // 3) for _ in range(3))
    return draw_numbers(rng, samples, outputs), draw_numbers(rng, outputs, features)


INPUT_HALF = Exercise(
    name="input_half",
    arguments="gradient weight",
    returns=tensor,
    reference=input_half,
    judge=judge_input_half,
    as_is=True,  # later cells go on with the tensor
    parts=[
        Part(
            cases=[
                ([[2]], [[3]]),
                ([[1, 0]], [[1, 2], [3, 4]]),
                ([[1, 0], [1, 1]], [[1, 2, 0], [0, 3, 4]]),
                ([[[1, 0], [1, 1]], [[2, 0], [0, 2]]], [[1, 2, 0], [0, 3, 4]]),
            ],
            draw=draw_input_half,
            hint="y = x W^T + b: feature j of a sample reaches output i with the factor W[i, j]. "
            "Add up over the outputs; dX has the shape of X",
        )
    ],
)
ONE_SAMPLE = ([[2]], [[3]])
TWO_SAMPLES = ([[1, 0], [0, 2]], [[1, 2], [3, 4]])
THREE_FEATURES = ([[1, 0], [2, 1]], [[1, 2, 3], [0, 1, 0]])
WORDS = ([[[1, 0], [0, 1]], [[2, 0], [0, 1]]], [[[1, 2], [3, 4]], [[1, 0], [0, 1]]])

WEIGHT_HALF = Exercise(
    name="weight_half",
    arguments="gradient inputs",
    returns=two_tensors,
    reference=weight_half,
    judge=judge_weight_half,
    as_is=True,
    parts=[
        Part(
            title="in dW",
            cases=[(*case, [0]) for case in (ONE_SAMPLE, TWO_SAMPLES, THREE_FEATURES)],
            draw=lambda rng, size: (*draw_weight_half(rng, size), [0]),
            hint="W[i, j] is used once for every sample, with feature j of that sample: add up "
            "over the samples. dW has the shape of W, outputs x features",
        ),
        Part(
            title="in db",
            cases=[(*case, [1]) for case in (ONE_SAMPLE, TWO_SAMPLES, THREE_FEATURES)],
            draw=lambda rng, size: (*draw_weight_half(rng, size), [1]),
            hint="b[i] is added to output i of every sample, so its gradient is a sum over the "
            "samples, one number per output",
        ),
        Part(
            title="for samples of several words",
            cases=[(*WORDS, [0, 1])],
            draw=lambda rng, size: (*draw_words(rng, size), [0, 1]),
            hint="all dimensions but the last count samples: flatten them into one first, in the "
            "gradient and in the inputs",
        ),
    ],
)

# --- zero bubble ---------------------------------------------------------------------------------


def zb_h1_order(worker: int, p: int, m: int) -> list[Action]:
    """One worker's row of the library's schedule, updates left out."""
    return listed(zb_h1(p, m), worker)


def judge_zb_h1(answer: Answer, p: int, m: int) -> None:
    """Legal, split, as fast as ZB-H1 where all three kinds take 1, in the memory of 1F1B."""
    schedule = schedule_of(answer, p, m)
    name = answer.function.__name__
    for worker in range(p):
        row = listed(schedule, worker)
        case = f"{name}(worker={worker}, p={p}, m={m})"
        require(
            not any(action.kind == "B" for action in row),
            "backwards in two halves, ps.I and ps.W",
            f"whole backwards: {show(row)}",
            case,
        )
        require(
            peak_in_flight(row) <= min(m, p),
            f"at most {min(m, p)} in flight, forward done and weight half not",
            f"{peak_in_flight(row)} in {show(row)}",
            case,
        )
    best, got = (simulate(s).makespan for s in (zb_h1(p, m), schedule))
    require(
        got <= best + 1e-9,
        f"a batch in {best:g} seconds, where F, I and W take one second each",
        f"{got:g} seconds; worker {p - 1} does {show(listed(schedule, p - 1), 90)}",
        f"{name}(worker, p={p}, m={m}) for worker = 0 to {p - 1}",
    )


ZB_H1_ORDER = Exercise(
    name="zb_h1_order",
    arguments="worker p m",
    returns=plain.actions,
    reference=zb_h1_order,
    judge=judge_zb_h1,
    parts=[
        Part(
            title="for m >= p",
            share=4,
            cases=SHAPES,
            draw=draw_shape,
            hint="the order of F and I is that of F and B in 1F1B. Then place the weight halves: "
            "how many microbatches behind its I does each worker's W come, and which are left when "
            "the last I is done?",
        ),
        Part(
            title="for m < p",
            share=1,
            cases=SMALL,
            draw=draw_small,
            hint="the rule is the same, but a worker may have fewer than `worker` weight halves in "
            "all: which of them are left for the end?",
        ),
    ],
)

# --- the V ---------------------------------------------------------------------------------------


def v_placement(stage: int, p: int) -> int:
    """Down the line, and back up."""
    return min(stage, 2 * p - 1 - stage)


def draw_stage(rng: Random, size: int) -> Case:
    p = rng.randint(2, size + 2)
    return rng.randint(0, 2 * p - 1), p


V_PLACEMENT = Exercise(
    name="v_placement",
    arguments="stage p",
    returns=plain.whole_number,
    reference=v_placement,
    parts=[
        Part(
            cases=[(0, 1), (1, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 4), (4, 4), (7, 4)],
            draw=draw_stage,
            hint="write down the workers of stage 0 to 2p - 1 for p = 2: the two stages in the "
            "middle are on the same worker, and so are the first and the last",
        )
    ],
)

EXERCISES = [
    INTERLEAVED_WARM_UP,
    INTERLEAVED_ORDER,
    MESSAGES_PER_BATCH,
    INPUT_HALF,
    WEIGHT_HALF,
    ZB_H1_ORDER,
    ZERO_BUBBLE_RATE,
    V_PLACEMENT,
    READ_FIGURE,
    PRIORITY,
]

# What the claims lab says about each claim.
CLAIMS = {1: "right", 2: "wrong", 3: "wrong", 4: "half", 5: "wrong", 6: "wrong", 7: "right"}
