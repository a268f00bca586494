"""The exercises of unit 06, choosing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import Wrong, described, mistyped, require, show
from pipeschool.mix import (
    GB,
    Machine,
    Mix,
    Recommendation,
    Transformer,
    all_reduce_bytes,
    estimate,
    gigabytes,
    reasons,
    recommend,
)

# --- traffic -------------------------------------------------------------------------------------


def boundary_bytes(microbatch: int, sequence: int, hidden: int, bytes_per_number: int) -> int:
    """One vector for each word."""
    return microbatch * sequence * hidden * bytes_per_number


BOUNDARY_BYTES = Exercise(
    name="boundary_bytes",
    arguments="microbatch sequence hidden bytes_per_number",
    returns=plain.whole_number,
    reference=boundary_bytes,
    parts=[
        Part(
            cases=[(1, 1, 1, 2), (1, 5, 1, 2), (1, 5, 10, 2), (2, 5, 10, 2), (2, 5, 10, 4)],
            draw=lambda rng, size: (
                rng.randint(1, size),
                rng.randint(2, 9 * size),
                8 * rng.randint(1, size),
                rng.choice([1, 2, 4]),
            ),
            hint="how many words are there in the microbatch, how many numbers is each, and how "
            "many bytes is a number?",
        )
    ],
)


def tensor_bytes(layers: int, tensor: int, boundary: int) -> float:
    """Four all-reduces for each layer."""
    return 4 * layers * all_reduce_bytes(boundary, tensor)


TENSOR_BYTES = Exercise(
    name="tensor_bytes",
    arguments="layers tensor boundary",
    returns=plain.number,
    reference=tensor_bytes,
    parts=[
        Part(
            title="for several devices",
            share=2,
            cases=[(1, 2, 100), (1, 3, 300), (1, 4, 100), (3, 2, 100), (3, 4, 100), (8, 8, 1000)],
            draw=lambda rng, size: (
                rng.randint(1, 3 * size),
                size + 1,
                (size + 1) * rng.randint(10, 99),
            ),
            hint="go round the ring once with pieces of 1/n, and once more: how many pieces does a "
            "device send, of which size? That is one all-reduce; a layer has four",
        ),
        Part(
            title="for one device",
            share=1,
            cases=[(1, 1, 100), (4, 1, 1000)],
            draw=lambda rng, size: (rng.randint(1, 3 * size), 1, rng.randint(10, 99)),
            hint="whom would it send anything to?",
        ),
    ],
)

# --- does it fit ---------------------------------------------------------------------------------


def plan_bytes(
    schedule: str,
    pipeline: int,
    tensor: int,
    m: int,
    parameters: int,
    layers: int,
    layer_activations: int,
) -> float:
    """Weights, gradients, optimizer; another version under 2BW; activations in flight."""
    weights = parameters / (pipeline * tensor)
    held = m if schedule == "gpipe" else min(m, pipeline)
    per_weight = 18 if schedule == "pipedream_2bw" else 16
    return per_weight * weights + held * layers / pipeline * layer_activations


def draw_plan(schedule: str, rng: Random, size: int, few: bool) -> Case:
    """Stages and weights that come out even. few: fewer microbatches than stages."""
    pipeline = rng.randint(2 if few else 1, size + 2)
    m = rng.randint(1, pipeline - 1) if few else rng.randint(pipeline, 4 * pipeline)
    tensor = rng.choice([1, 2, 4])
    weights, layers = pipeline * tensor * rng.randint(10, 999), pipeline * rng.randint(1, 4)
    return schedule, pipeline, tensor, m, weights, layers, rng.randint(10, 99)


def plan_part(title: str, schedule: str, shapes: Sequence[tuple[int, int, int]], hint: str) -> Part:
    """shapes: (pipeline, tensor, m) of the cases that everybody sees."""
    few = all(m < pipeline for pipeline, _, m in shapes)
    return Part(
        title=title,
        cases=[(schedule, *shape, 800, 4, 50) for shape in shapes],
        draw=lambda rng, size: draw_plan(schedule, rng, size, few),
        hint=hint,
    )


MANY = [(1, 1, 1), (2, 1, 2), (2, 1, 8), (4, 1, 8), (4, 2, 8)]

PLAN_BYTES = Exercise(
    name="plan_bytes",
    arguments="schedule pipeline tensor m parameters layers layer_activations",
    returns=plain.number,
    reference=plan_bytes,
    parts=[
        plan_part(
            "for one_f_one_b",
            "one_f_one_b",
            MANY,
            "16 bytes for each weight that the device has. Then: how many layers does it have, "
            "and of how many microbatches does the first stage hold the activations?",
        ),
        plan_part(
            "for gpipe",
            "gpipe",
            MANY,
            "under GPipe, how many microbatches are in flight when all are down?",
        ),
        plan_part(
            "for pipedream_2bw",
            "pipedream_2bw",
            MANY,
            "2BW keeps a second version of the weights, 2 bytes each; gradients and optimizer it "
            "has once, and in flight it has what 1F1B has",
        ),
        plan_part(
            "for m < p",
            "one_f_one_b",
            [(2, 1, 1), (4, 1, 1), (4, 2, 3)],
            "no device can hold more microbatches than there are",
        ),
    ],
)

# --- data x pipeline -----------------------------------------------------------------------------


def share_of(line: int, lines: int, m: int) -> list[int]:
    """Every `lines`-th microbatch."""
    return list(range(line, m, lines))


def judge_share_of(answer: Answer, line: int, lines: int, m: int) -> None:
    """In any order."""
    right, got = share_of(line, lines, m), answer(line, lines, m)
    require(sorted(got) == right, show(right), show(got))


SHARE_OF = Exercise(
    name="share_of",
    arguments="line lines m",
    returns=plain.whole_numbers,
    reference=share_of,
    judge=judge_share_of,
    parts=[
        Part(
            cases=[(0, 1, 3), (0, 2, 2), (1, 2, 2), (1, 2, 6), (0, 2, 5), (2, 3, 7), (3, 4, 3)],
            draw=lambda rng, size: (
                rng.randint(0, size),
                size + 1,
                rng.randint(1, 4 * size),
            ),
            hint="line n begins with microbatch n; how far is it to its next one?",
        )
    ],
)


def mean_gradient(gradients: Sequence[Sequence[float]], samples: Sequence[int]) -> list[float]:
    """Each line counts as much as it has samples."""
    total = sum(samples)
    return [
        sum(g * n for g, n in zip(column, samples, strict=True)) / total
        for column in zip(*gradients, strict=True)
    ]


def draw_gradients(rng: Random, size: int, equal: bool) -> Case:
    lines = rng.randint(2, size + 1)
    first = rng.randint(1, 9)
    samples = [first] + [first if equal else first + rng.randint(1, 9) for _ in range(lines - 1)]
    numbers = rng.randint(1, size)
    return [[float(rng.randint(-9, 9)) for _ in range(numbers)] for _ in samples], samples


MEAN_GRADIENT = Exercise(
    name="mean_gradient",
    arguments="gradients samples",
    returns=plain.numbers,
    reference=mean_gradient,
    parts=[
        Part(
            title="for equal shares",
            cases=[
                ([[3.0]], [8]),
                ([[3.0], [5.0]], [8, 8]),
                ([[3.0, 0.0], [5.0, 2.0]], [8, 8]),
                ([[1.0, 6.0], [2.0, 6.0], [6.0, 0.0]], [1, 1, 1]),
            ],
            draw=lambda rng, size: draw_gradients(rng, size, equal=True),
            hint="the mean over the lines, number by number; the sum would be a larger step",
        ),
        Part(
            title="for unequal shares",
            cases=[
                ([[3.0], [5.0]], [1, 3]),
                ([[3.0, 0.0], [5.0, 4.0]], [3, 1]),
                ([[1.0, 6.0], [2.0, 6.0], [6.0, 0.0]], [2, 1, 1]),
            ],
            draw=lambda rng, size: draw_gradients(rng, size, equal=False),
            hint="each line's gradient is a mean over its own samples; the mean over all samples "
            "is wanted. A line with three times the samples counts three times",
        ),
    ],
)

# --- choose --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A model to train, the machine that is there, and the sequences of one step."""

    about: str
    model: Transformer
    machine: Machine
    batch: int

    def __str__(self) -> str:
        model, machine = self.model, self.machine
        links = f"{machine.inside / GB:g} GB/s"
        if machine.nodes > 1:
            links = f"{links} inside a node, {machine.between / GB:g} GB/s between nodes"
        return (
            f"{self.about}\n"
            f"  model:   {model.parameters / 1e9:.3g} billion weights in {model.layers} layers\n"
            f"  devices: {machine.nodes} x {machine.devices_per_node}, "
            f"{machine.memory / GB:g} GB and {machine.flops / 1e12:g} TFLOP/s each; {links}\n"
            f"  a step:  {self.batch} sequences of {model.sequence} words"
        )


LITTLE = Transformer(layers=24, hidden=1024, sequence=1024, vocabulary=50_000)
FAST = {"memory": 80 * GB, "flops": 150e12, "inside": 200 * GB, "between": 20 * GB, "latency": 1e-5}
SLOW = {"memory": 24 * GB, "flops": 50e12, "inside": 20 * GB, "between": 1.25 * GB, "latency": 5e-5}
SITES = {
    "desk": Site("one device under a desk", LITTLE, Machine(1, 1, **SLOW), batch=32),
    "workstation": Site("eight devices in one box", LITTLE, Machine(8, 1, **FAST), batch=16),
    "server": Site(
        "the same box, a larger model",
        Transformer(layers=40, hidden=5120, sequence=2048, vocabulary=32_000),
        Machine(8, 1, **FAST),
        batch=64,
    ),
    "office": Site(
        "four desks with a device each, and the office network",
        Transformer(layers=32, hidden=1600, sequence=1024, vocabulary=50_000),
        Machine(1, 4, **SLOW),
        batch=64,
    ),
    "cluster": Site(
        "eight such boxes, and a model of GPT-3's size",
        Transformer(layers=96, hidden=12288, sequence=2048, vocabulary=51_200),
        Machine(8, 8, **FAST),
        batch=128,
    ),
}
SLACK = 1.15  # times the best is good enough: the model is no better than that

# What a learner may give as a reason; `reasons` knows whether it is true.
REASONS = (
    "one device suffices",
    "must be cut",
    "small bubble",
    "tensor inside the node",
    "pipeline across nodes",
    "recompute to fit",
    "faster than a pipeline",
    "faster than data parallel",
)


@cache
def best_for(site: str) -> Recommendation:
    """The fastest mix that fits."""
    place = SITES[site]
    return recommend(place.model, place.machine, place.batch)


@cache
def true_reasons(site: str, mix: Mix) -> list[str]:
    """The kinds of all reasons that hold for a mix."""
    place = SITES[site]
    return [reason.kind for reason in reasons(place.model, place.machine, mix)]


def choose(site: str) -> tuple[Mix, list[str]]:
    """The best, with all that is true of it."""
    best = best_for(site).best.mix
    return best, [kind for kind in true_reasons(site, best) if kind in REASONS]


def choice(value: object) -> tuple[Mix, list[str]]:
    """A mix, and one reason or several."""
    wanted = 'a mix and a reason, such as (ps.mix.Mix(data=2, m=8), "must be cut")'
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[0], Mix):
        raise mistyped(wanted, described(value))
    given, said = value
    texts = [said] if isinstance(said, str) else plain.items(said, wanted)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise mistyped(wanted, f"{show(said)} in place of the reason")
    return given, [str(text) for text in texts]


BATCH = "the sequences of a step are shared out: `data` lines take `m` microbatches each"
MEMORY = (
    "is it the weights? Their bytes are shared by the stages and the tensor-parallel devices. Or "
    "the activations? They grow with `microbatch`, and with the microbatches in flight"
)
TABLE = (
    "the table of reasons above the exercise: when is each true? ps.mix.reasons(model, machine, "
    "mix) gives all that are, with their numbers"
)


def judge_choose(answer: Answer, site: str) -> None:
    """Anything that fits and is nearly as fast as the best, for reasons that are true."""
    place = SITES[site]
    mix, said = answer(site)
    if mix.batch != place.batch:
        raise Wrong(
            f"a step of {place.batch} sequences: data * m * microbatch",
            f"{mix.data} * {mix.m} * {mix.microbatch} = {mix.batch}",
            hint=BATCH,
        )
    try:
        found = estimate(place.model, place.machine, mix)
    except ValueError as problem:
        raise Wrong("a mix that can be built there", str(problem)) from None
    if not found.fits:
        raise Wrong(
            f"at most {gigabytes(found.capacity)} on every device",
            f"{gigabytes(found.memory)} with {mix}",
            hint=MEMORY,
        )
    best = best_for(site).best.seconds
    if found.seconds > SLACK * best:
        used, there = mix.devices, place.machine.devices
        raise Wrong(
            f"a step in {SLACK * best:.3g} seconds or less",
            f"{found.seconds:.3g} seconds with {mix}: compute {found.compute:.3g}, bubble "
            f"{found.bubble:.3g}, tensor {found.tensor:.3g}, data {found.data:.3g}",
            hint=f"data * pipeline * tensor: {used} of {there} devices" if used < there else "",
        )
    for reason in said:
        if reason not in REASONS:
            raise Wrong(f"a reason out of {', '.join(REASONS)}", show(reason), hint=TABLE)
        if reason not in true_reasons(site, mix):
            raise Wrong(f"a reason that is true of {mix}", f"{reason!r}: not true", hint=TABLE)


def site_part(site: str, hint: str) -> Part:
    """One choice; with a seed it is checked again, for there are no other sites."""
    return Part(title=f"for the {site}", cases=[(site,)], draw=lambda rng, size: (site,), hint=hint)


CHOOSE = Exercise(
    name="choose",
    arguments="site",
    returns=choice,
    reference=choose,
    judge=judge_choose,
    parts=[
        site_part(
            "desk",
            "how many devices are there, and does the model fit on them? Then what could make a "
            "step longer than it need be?",
        ),
        site_part(
            "workstation",
            "does a whole copy of the model fit on one device? Then what would a pipeline give you "
            "in return for its bubble?",
        ),
        site_part(
            "server",
            "16 bytes for each weight: into how many parts must the model be cut? Cut it no "
            "further, and use the other devices for copies",
        ),
        site_part(
            "office",
            "a copy fits. But how long does the all-reduce of its gradients take over this "
            "network, and how long a few messages?",
        ),
        site_part(
            "cluster",
            "tensor parallel over links that are fast enough for it, a pipeline over those that "
            "are not; then see whether it fits",
        ),
    ],
)

EXERCISES = [BOUNDARY_BYTES, TENSOR_BYTES, PLAN_BYTES, SHARE_OF, MEAN_GRADIENT, CHOOSE]

# What the claims lab says about each claim.
CLAIMS = {1: "half", 2: "wrong", 3: "half", 4: "wrong", 5: "wrong", 6: "right"}
