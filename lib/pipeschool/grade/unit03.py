"""The exercises of unit 03, weight versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any

from pipeschool.actions import Action, B, F, U
from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part, same
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import Wrong, described, items, require, show
from pipeschool.schedules import pipedream, pipedream_2bw
from pipeschool.simulator import simulate
from pipeschool.trace import Trace
from pipeschool.versions import DoubleBuffer, VerticalSync

# --- use, keep, drop -----------------------------------------------------------------------------


def stash_step(action: Action, newest: int, in_flight: dict[int, int]) -> tuple[int, list[int]]:
    """A backward comes back to what its forward used; kept is what anybody may still ask for."""
    flying = dict(in_flight)
    if action.kind == "F":
        version = flying[action.microbatch] = newest
    elif action.kind == "B":
        version = flying.pop(action.microbatch)
    else:
        version = newest = newest + 1
    return version, sorted({newest, *flying.values()})


def version_and_kept(value: object) -> tuple[int, list[int]]:
    """A version and a list of versions, in any order."""
    wanted = "a pair (version, kept), such as (2, [1, 2])"
    pair = items(value, wanted)
    if len(pair) != 2:
        raise Wrong(wanted, described(value))
    return plain.whole_number(pair[0]), sorted(plain.whole_numbers(pair[1]))


def draw_flying(rng: Random, size: int) -> tuple[int, dict[int, int]]:
    """The newest version, and microbatches in flight on it or on older ones."""
    newest = rng.randint(1, 2 * size)
    first, count = rng.randint(1, 9), rng.randint(1, size)
    used = sorted(rng.randint(max(0, newest - size), newest) for _ in range(count))
    return newest, dict(zip(range(first, first + count), used, strict=True))


def draw_forward(rng: Random, size: int) -> Case:
    newest, flying = draw_flying(rng, size)
    return F(rng.randint(0, 3), max(flying) + 1), newest, flying


def draw_backward(rng: Random, size: int) -> Case:
    newest, flying = draw_flying(rng, size)
    return B(rng.randint(0, 3), min(flying)), newest, flying


def draw_update(rng: Random, size: int) -> Case:
    newest, flying = draw_flying(rng, size)
    return U(rng.randint(0, 3), newest), newest, flying


STASH_STEP = Exercise(
    name="stash_step",
    arguments="action newest in_flight",
    returns=version_and_kept,
    reference=stash_step,
    parts=[
        Part(
            title="for forwards",
            share=1,
            cases=[
                (F(0, 0), 0, {}),
                (F(0, 1), 0, {0: 0}),
                (F(0, 4), 1, {1: 0, 2: 0, 3: 0}),
                (F(0, 6), 3, {3: 0, 4: 1, 5: 2}),
            ],
            draw=draw_forward,
            hint="a forward uses the newest version; each microbatch in flight still needs the one "
            "that `in_flight` names",
        ),
        Part(
            title="for backwards",
            share=2,
            cases=[
                (B(0, 0), 0, {0: 0}),
                (B(0, 1), 2, {1: 0}),
                (B(0, 1), 1, {1: 0, 2: 0}),
                (B(0, 3), 3, {3: 0, 4: 1, 5: 2, 6: 3}),
            ],
            draw=draw_backward,
            hint="a backward uses what its own forward used; once it is over, its microbatch is no "
            "longer in flight, but another one may use the same version",
        ),
        Part(
            title="for updates",
            share=1,
            cases=[(U(0, 0), 0, {}), (U(0, 0), 0, {1: 0, 2: 0}), (U(0, 3), 3, {4: 1, 5: 2, 6: 3})],
            draw=draw_update,
            hint="an update makes version newest + 1; the one before is kept only where a "
            "microbatch in flight needs it",
        ),
    ],
)

# --- how many, and how late ----------------------------------------------------------------------


@cache
def stream(policy: str, p: int) -> Trace:
    """A stream under `policy`, long enough for a steady state."""
    if policy == "double_buffer":
        return simulate(pipedream_2bw(p, m=p, batches=4))
    return simulate(pipedream(p, m=1, batches=4 * p), weights=policy)


def stage_exercise(name: str, reference: Callable[[int, int], int], hint: str) -> Exercise:
    return Exercise(
        name=name,
        arguments="stage p",
        returns=plain.whole_number,
        reference=reference,
        parts=[
            Part(
                cases=[(0, 1), (1, 2), (0, 2), (2, 3), (1, 4), (0, 4), (5, 8)],
                draw=lambda rng, size: (rng.randint(0, size), size + 1),
                hint=hint,
            )
        ],
    )


VERSIONS_NEEDED = stage_exercise(
    "versions_needed",
    lambda stage, p: stream("stash", p).weight_versions[stage],
    "how many microbatches are in flight on this stage, each with a version of its own? The last "
    "stage sends its microbatch back at once",
)
STALENESS = stage_exercise(
    "staleness",
    lambda stage, p: stream("stash", p).staleness[stage],
    "how many updates does this stage make between the forward of a microbatch and its backward?",
)

# --- old gradients on new weights ----------------------------------------------------------------


def delayed_descent(
    gradient: Callable[[float], float], start: float, delay: int, lr: float, updates: int
) -> list[float]:
    """w(t+1) = w(t) - lr * gradient(w(t - delay))."""
    weights = [start]
    for t in range(updates):
        weights.append(weights[t] - lr * gradient(weights[max(t - delay, 0)]))
    return weights


def bowl(w: float) -> float:
    """Slope of w * w / 2."""
    return w


def towards_3(w: float) -> float:
    """Slope of (w - 3) ** 2."""
    return 2 * (w - 3)


DELAYED_DESCENT = Exercise(
    name="delayed_descent",
    arguments="gradient start delay lr updates",
    returns=plain.numbers,
    reference=delayed_descent,
    parts=[
        Part(
            title="without delay",
            share=1,
            cases=[(bowl, 1.0, 0, 0.5, 0), (bowl, 1.0, 0, 0.5, 1), (towards_3, 1.0, 0, 0.25, 4)],
            draw=lambda rng, size: (towards_3, rng.randint(-9, 9) / 2, 0, 0.1, size),
            hint="the list begins with the start, and each update adds one weight to it",
        ),
        Part(
            title="with delay",
            share=2,
            cases=[
                (bowl, 1.0, 1, 0.5, 1),
                (bowl, 1.0, 1, 0.5, 2),
                (bowl, 1.0, 1, 0.5, 3),
                (bowl, 1.0, 3, 0.25, 8),
                (towards_3, 1.0, 2, 0.1, 6),
            ],
            draw=lambda rng, size: (
                towards_3,
                rng.randint(7, 19) / 2,
                rng.randint(1, 4),
                0.1,
                size + 5,
            ),
            hint="the slope at an old weight is taken off the newest weight; there is none older "
            "than the start",
        ),
    ],
)

# --- which version a microbatch uses -------------------------------------------------------------


def vertical_sync_version(microbatch: int, p: int) -> int:
    """The library's policy, with an update after every microbatch."""
    return VerticalSync(0, p, 1).forward(microbatch, newest=0)


def double_buffer_version(microbatch: int, m: int) -> int:
    """The library's policy."""
    return DoubleBuffer(0, 1, m).forward(microbatch, newest=0)


def last_user(version: int, m: int) -> int:
    """The end of the batch after the one at whose end `version` was made."""
    return (version + 2) * m - 1


VERTICAL_SYNC_VERSION = Exercise(
    name="vertical_sync_version",
    arguments="microbatch p",
    returns=plain.whole_number,
    reference=vertical_sync_version,
    parts=[
        Part(
            title="once the line is full",
            share=2,
            cases=[(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (20, 8)],
            draw=lambda rng, size: (rng.randint(size + 1, 5 * size + 1), size + 1),
            hint="when a microbatch enters stage 0, how many have come back there, if p - 1 are "
            "still on their way?",
        ),
        Part(
            title="while it fills",
            share=1,
            cases=[(0, 1), (0, 2), (1, 2), (0, 4), (2, 4), (3, 4)],
            draw=lambda rng, size: (rng.randint(0, size), size + 1),
            hint="the first p microbatches enter before any has come back",
        ),
    ],
)
DOUBLE_BUFFER_VERSION = Exercise(
    name="double_buffer_version",
    arguments="microbatch m",
    returns=plain.whole_number,
    reference=double_buffer_version,
    parts=[
        Part(
            title="from the third batch on",
            share=2,
            cases=[(2, 1), (4, 2), (5, 2), (6, 2), (8, 4), (11, 4), (12, 4), (40, 8)],
            draw=lambda rng, size: ((m := rng.randint(2, size + 3)) * 2 + rng.randint(0, 4 * m), m),
            hint="which batch is the microbatch in, counted from 0? Its version is one behind",
        ),
        Part(
            title="for the first two batches",
            share=1,
            cases=[(0, 1), (1, 1), (0, 4), (3, 4), (4, 4), (7, 4)],
            draw=lambda rng, size: (rng.randint(0, 2 * size + 1), size + 1),
            hint="there is no version before version 0, so the first two batches share it",
        ),
    ],
)
LAST_USER = Exercise(
    name="last_user",
    arguments="version m",
    returns=plain.whole_number,
    reference=last_user,
    parts=[
        Part(
            cases=[(0, 1), (1, 1), (0, 2), (1, 2), (0, 4), (1, 4), (5, 8)],
            draw=lambda rng, size: (rng.randint(0, size), rng.randint(1, size + 2)),
            hint="list the microbatches with their versions for m = 2, and look where the version "
            "changes; microbatches are counted from 0",
        )
    ],
)

# --- bytes ---------------------------------------------------------------------------------------


def version_bytes(policy: str, sizes: list[int]) -> list[int]:
    """What the simulator counts, times the size."""
    versions = stream(policy, len(sizes)).weight_versions
    return [count * size for count, size in zip(versions, sizes, strict=True)]


def bytes_part(policy: str, hint: str) -> Part:
    return Part(
        title=f"for {policy}",
        cases=[(policy, sizes) for sizes in ([8], [4, 4], [100, 100, 100, 100], [9, 5, 7])],
        draw=lambda rng, size: (policy, [8 * rng.randint(1, 99) for _ in range(size)]),
        hint=hint,
    )


VERSION_BYTES = Exercise(
    name="version_bytes",
    arguments="policy sizes",
    returns=plain.whole_numbers,
    reference=version_bytes,
    parts=[
        bytes_part("latest", "an update overwrites the only copy there is"),
        bytes_part("stash", "your versions_needed says how many copies stage s keeps"),
        bytes_part(
            "vertical_sync", "under stashing one stage keeps the most; here all do as it does"
        ),
        bytes_part("double_buffer", "two buffers, whatever the stage and however many stages"),
    ],
)

# --- the replay ----------------------------------------------------------------------------------


@cache
def affine() -> Any:
    """A stage of two numbers that shows them; torch is imported only here, where it is needed."""
    import torch
    from torch import nn

    class Affine(nn.Module):
        def __init__(self, scale: float, shift: float):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([scale], dtype=torch.float64))
            self.shift = nn.Parameter(torch.tensor([shift], dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            return x * self.scale + self.shift

        def __repr__(self) -> str:
            return f"Affine({self.scale.item():.6g}, {self.shift.item():.6g})"

    return Affine


def replay(
    stages: Any, batches: Any, loss: Any, optimizer: Any, version: Any, m: int, overwrite: bool
) -> list[list[dict[str, Any]]]:
    """Gradients at the versions asked for, applied to the newest weights by the optimizer."""
    import copy

    from torch.func import functional_call

    newest = [dict(copy.deepcopy(stage).named_parameters()) for stage in stages]
    steppers = [optimizer(list(weights.values())) for weights in newest]

    def snapshot() -> list[dict[str, Any]]:
        return [{name: w.detach().clone() for name, w in stage.items()} for stage in newest]

    history = [snapshot()]
    for k, (x, targets) in enumerate(batches):
        used = [
            {name: w.clone().requires_grad_() for name, w in history[version(s, k)][s].items()}
            for s in range(len(stages))
        ]
        for stage, weights in zip(stages, used, strict=True):
            x = functional_call(stage, weights, (x,))
        value = loss(x, targets) / m
        if overwrite:
            for weights, now in zip(used, history[-1], strict=True):
                for name in weights:
                    weights[name].data.copy_(now[name])
        value.backward()
        for weights, leaves in zip(newest, used, strict=True):
            for name, w in weights.items():
                gradient = leaves[name].grad
                w.grad = gradient if w.grad is None else w.grad + gradient
        if (k + 1) % m == 0:
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
            history.append(snapshot())
    return history


def mean_square(outputs: Any, targets: Any) -> Any:
    """The mean over the samples."""
    return (outputs - targets).square().mean()


def weight_history(value: object) -> list[list[dict[str, list[float]]]]:
    """history[t][s] as a dictionary from names to lists of floats."""
    wanted = "history, where history[t][s] is a dictionary {name: tensor}"
    found: list[list[dict[str, list[float]]]] = []
    for version in items(value, wanted):
        stages: list[dict[str, list[float]]] = []
        for weights in items(version, wanted):
            if not isinstance(weights, Mapping):
                raise Wrong(wanted, f"history[{len(found)}][{len(stages)}] is {described(weights)}")
            stages.append({str(name): tensor_values(weights[name]) for name in weights})
        found.append(stages)
    return found


def tensor_values(value: object) -> list[float]:
    """The numbers in a tensor."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise Wrong("a tensor for every name", described(value))
    return [float(x) for x in value.detach().double().flatten().tolist()]


def judge_replay(
    answer: Answer,
    weights: list[tuple[float, float]],
    batches: list[tuple[list[float], list[float]]],
    versions: list[list[int]],
    momentum: float,
    m: int,
    overwrite: bool,
) -> None:
    """Compare every weight after every update, the first difference first."""
    import torch

    def version(stage: int, k: int) -> int:
        return versions[stage][k]

    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)

    def column(values: list[float]) -> Any:
        return torch.tensor(values, dtype=torch.float64)[:, None]

    stages = [affine()(*pair) for pair in weights]
    pairs = [(column(x), column(y)) for x, y in batches]
    given = stages, pairs, mean_square, sgd, version, m, overwrite
    expected = weight_history(replay(*given))  # first: it also imports what optimizers need
    case = f"stages {show(stages)}, {len(pairs)} microbatches, m={m}, overwrite={overwrite}, "
    case += f"momentum {momentum:g}, version(s, k) = {show(versions)}[s][k]"
    case = f"{answer.function.__name__}(...) with {case}"
    try:
        got = answer(*given)
    except Wrong as wrong:
        wrong.case = case
        raise
    count = f"{len(expected)} entries, history[0] to history[{len(expected) - 1}]"
    require(len(got) == len(expected), count, f"{len(got)} of them", case)
    for t, (ours, theirs) in enumerate(zip(expected, got, strict=True)):
        require(
            len(theirs) == len(ours),
            f"one dictionary per stage, {len(ours)} in all",
            f"{len(theirs)} in history[{t}]",
            case,
        )
        for s, (right, found) in enumerate(zip(ours, theirs, strict=True)):
            require(
                found.keys() == right.keys(),
                f"the names {', '.join(right)}",
                f"{', '.join(found) or 'none'} in history[{t}][{s}]",
                case,
            )
            for name in right:
                where = f"{name} of stage {s} after {t} update{'s' * (t != 1)}"
                require(
                    same(right[name], found[name]),
                    f"{where}: {show(right[name])}",
                    f"{where}: {show(found[name])}",
                    case,
                )


def draw_replay(rng: Random, size: int, m: int, overwrite: bool) -> Case:
    """Stages, data and versions at random; no stage uses a version that is not there yet."""
    p = rng.randint(2, 2 + size // 3)
    n = m * rng.randint(2, 2 + size // 2)
    weights = [(rng.randint(5, 12) / 10, rng.randint(-3, 3) / 10) for _ in range(p)]
    batches = [
        ([rng.randint(-4, 4) / 4 for _ in range(2)], [rng.randint(-4, 4) / 4 for _ in range(2)])
        for _ in range(n)
    ]
    late = 2 if overwrite else rng.randint(0, 2)
    versions = [[max(k // m - rng.randint(late // 2, late), 0) for k in range(n)] for _ in range(p)]
    return weights, batches, versions, rng.choice([0.0, 0.9]), m, overwrite


ONE = [([1.0, 2.0], [0.0, 1.0])]
THREE = [([1.0, 0.5], [0.5, 1.0]), ([-0.5, 1.0], [1.0, 0.0]), ([0.25, -1.0], [0.0, 0.5])]
SIX = [*THREE, *THREE[::-1]]
PAIR = [(0.5, 0.0), (0.8, 0.1)]
TRIPLE = [(0.5, 0.0), (0.8, 0.1), (1.1, 0.0)]

REPLAY = Exercise(
    name="replay",
    arguments="stages batches loss optimizer version m overwrite",
    returns=weight_history,
    reference=replay,
    judge=judge_replay,
    as_is=True,  # later cells go on with its tensors
    parts=[
        Part(
            title="with an update after every microbatch",
            share=3,
            cases=[
                ([(0.5, 0.0)], [], [[]], 0.0, 1, False),
                ([(0.5, 0.0)], ONE, [[0]], 0.0, 1, False),
                (PAIR, THREE, [[0, 1, 2], [0, 1, 2]], 0.0, 1, False),
                (PAIR, THREE, [[0, 0, 1], [0, 1, 2]], 0.0, 1, False),
                (PAIR, THREE, [[0, 0, 1], [0, 0, 1]], 0.9, 1, False),
            ],
            draw=lambda rng, size: draw_replay(rng, size, 1, False),
            hint="the gradient is taken at the versions that `version` names, and the optimizer "
            "steps on the newest weights; history needs copies, and the stages stay as they were "
            "(copy.deepcopy)",
        ),
        Part(
            title="with an update after every m",
            share=1,
            cases=[
                (PAIR, SIX[:4], [[0, 0, 0, 0], [0, 0, 0, 0]], 0.0, 2, False),
                (PAIR, SIX, [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]], 0.9, 2, False),
            ],
            draw=lambda rng, size: draw_replay(rng, size, rng.randint(2, 3), False),
            hint="add up m gradients, each of loss / m, then step once and begin again from none",
        ),
        Part(
            title="with overwriting",
            share=1,
            cases=[
                (PAIR, THREE, [[0, 0, 0], [0, 0, 1]], 0.0, 1, True),
                (TRIPLE, THREE, [[0, 0, 0], [0, 0, 1], [0, 1, 2]], 0.9, 1, True),
            ],
            draw=lambda rng, size: draw_replay(rng, size, 1, True),
            hint="between forward and backward, .data.copy_ the newest values into the tensors "
            "that the forward used, at every stage",
        ),
    ],
)

EXERCISES = [
    STASH_STEP,
    VERSIONS_NEEDED,
    STALENESS,
    DELAYED_DESCENT,
    VERTICAL_SYNC_VERSION,
    DOUBLE_BUFFER_VERSION,
    LAST_USER,
    VERSION_BYTES,
    REPLAY,
]

# What the claims lab says about each claim.
CLAIMS = {1: "wrong", 2: "wrong", 3: "wrong", 4: "wrong", 5: "wrong", 6: "half", 7: "right"}
