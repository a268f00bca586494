"""The exercises of unit 05 on tuning, and on faults that make training wrong or unstable."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, hypot, isclose, log2
from random import Random

from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part, same
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import Wrong, require, show

# --- how many microbatches -----------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Line:
    """A pipeline to measure: ``Line(p, samples, a, b)(m)`` is its throughput in samples per second.

    A microbatch of n samples takes a + b n seconds on each of p workers, there and back. A batch of
    `samples` then takes (m + p - 1)(a + b samples / m). Every m that is asked for is noted in
    `asked`; one that was asked for before costs no further probe.
    """

    p: int
    samples: int
    a: float
    b: float
    asked: set[int] = field(default_factory=set, compare=False)

    def __call__(self, m: int) -> float:
        """Samples per second with `m` microbatches; ValueError where there is no such m."""
        whole = plain.whole_number(m)
        if not 1 <= whole <= self.samples:
            raise ValueError(f"measure({m}): m must be from 1 to {self.samples}")
        self.asked.add(whole)
        return self.throughput(whole)

    def throughput(self, m: int) -> float:
        """The same, without a probe."""
        return self.samples / ((m + self.p - 1) * (self.a + self.b * self.samples / m))

    def __repr__(self) -> str:
        """As a learner can paste it into a cell."""
        numbers = f"p={self.p}, samples={self.samples}, a={self.a}, b={self.b}"
        return f"grade.unit05_training.Line({numbers})"

    def __deepcopy__(self, memo: object) -> Line:
        """Itself, so that the probes are counted."""
        return self

    def best(self) -> int:
        """By trying all."""
        return max(range(1, self.samples + 1), key=self.throughput)


def best_m(measure: Line, start: int, most: int, budget: int) -> int:
    """Double or halve until it gets worse on both sides, then bisect between the neighbours."""
    known: dict[int, float] = {}

    def rate(m: int) -> float:
        if m not in known:
            known[m] = measure(m)
        return known[m]

    middle = min(start, most)
    low, high = max(1, middle // 2), min(most, 2 * middle)
    while low < middle and rate(low) > rate(middle):
        low, middle, high = max(1, low // 2), low, middle
    while high > middle and rate(high) > rate(middle):
        low, middle, high = middle, high, min(most, 2 * high)
    while high - low > 1 and len(known) <= budget - 2:
        m = (low + high) // 2
        if rate(m) < rate(m + 1):
            low = m + 1
        else:
            high = m
    return max(known, key=lambda m: known[m], default=1)


def budget_of(most: int) -> int:
    """Enough to double and then to halve, at two probes a step."""
    return 3 * ceil(log2(most)) + 3


NEAR = 0.995  # of the best throughput


def judge_best_m(answer: Answer, measure: Line, start: int, most: int, budget: int) -> None:
    """As good as the best, up to half a percent, in no more probes than there are."""
    measure.asked.clear()
    found = answer(measure, start, most, budget)
    probes = len(measure.asked)
    measure.asked.clear()
    require(
        probes <= budget,
        f"at most {budget} probes",
        f"measure was asked for {probes} values of m",
    )
    require(1 <= found <= most, f"an m from 1 to {most}", str(found))
    best = measure.best()
    rates = measure.throughput(best), measure.throughput(found)
    require(
        rates[1] >= NEAR * rates[0],
        f"an m within 0.5% of the best throughput, {rates[0]:.4g}",
        f"m = {found}, whose throughput is {rates[1]:.4g}, after {probes} probes",
    )


def tuning_case(p: int, samples: int, a: float, b: float) -> Case:
    return Line(p, samples, a, b), 4 * p, samples, budget_of(samples)


def draw_line(rng: Random, size: int, low: float, high: float) -> Case:
    """Whose best m is `low` to `high` times 4p."""
    p = rng.randint(2, 6)
    goal = 4 * p * rng.uniform(low, high)
    samples = max(64, 2 ** ceil(log2(3 * goal)), 2 ** rng.randint(6, min(6 + size, 10)))
    return tuning_case(p, samples, round((p - 1) * samples / goal**2, 6), 1.0)


BEST_M = Exercise(
    name="best_m",
    arguments="measure start most budget",
    returns=plain.whole_number,
    reference=best_m,
    judge=judge_best_m,
    parts=[
        Part(
            title="where the best m is larger than the start",
            share=2,
            cases=[
                tuning_case(2, 64, 0.1, 1.0),
                tuning_case(4, 128, 0.75, 1.0),  # between 4p and 8p
                tuning_case(2, 256, 0.2, 1.0),
                tuning_case(4, 512, 1.0, 1.0),
            ],
            draw=lambda rng, size: draw_line(rng, size, 1.3, 6),
            hint="double m for as long as the throughput rises. When it falls, the best m is no "
            "longer above, but it may be on either side of the last good one: halve what is left, "
            "by asking on which side of its middle the throughput still rises",
        ),
        Part(
            title="where the best m is smaller",
            share=2,
            cases=[
                tuning_case(2, 64, 16.0, 1.0),
                tuning_case(4, 64, 6.0, 1.0),
                tuning_case(8, 256, 10.0, 1.0),
            ],
            draw=lambda rng, size: draw_line(rng, size, 0.3, 0.75),
            hint="if twice as many microbatches are slower, look in the other direction as well. "
            "Then the best m is between two values that you know: halve what is left there, too",
        ),
        Part(
            title="where the best m is at an end",
            share=1,
            cases=[
                tuning_case(1, 8, 1.0, 1.0),
                tuning_case(3, 9, 0.001, 1.0),
                tuning_case(2, 64, 1000.0, 1.0),
                tuning_case(4, 128, 0.0, 1.0),
            ],
            draw=lambda rng, size: tuning_case(
                rng.randint(2, 4), 16 * size, rng.choice([0.0, 5000.0]), 1.0
            ),
            hint="m can be 1, or as many as there are samples, and start may be above that: does "
            "your search stop at both ends, and look at them?",
        ),
    ],
)

# --- a wrong scale, or a wrong direction ---------------------------------------------------------


def scale_of(found: list[float], right: list[float]) -> float | None:
    """By projection; what is left over tells whether the direction is right."""
    square = sum(r * r for r in right)
    factor = sum(f * r for f, r in zip(found, right, strict=True)) / square
    rest = hypot(*(f - factor * r for f, r in zip(found, right, strict=True)))
    return factor if rest <= 1e-4 * hypot(*found) else None


def number_or_none(value: object) -> float | None:
    """A number, or None."""
    return None if value is None else plain.number(value)


def judge_scale(answer: Answer, found: list[float], right: list[float]) -> None:
    """The factor, up to rounding; None where there is none."""
    expected, got = scale_of(found, right), answer(found, right)
    wanted = "None, for no factor makes one of the other" if expected is None else f"{expected:g}"
    if expected is None or got is None:
        agree = expected is got
    else:
        agree = isclose(expected, got, rel_tol=1e-4)
    require(agree, wanted, show(got))


def draw_scaled(rng: Random, size: int) -> Case:
    """Long or short, some numbers 0 now and then, and each a little off, as after float32."""
    unit = rng.choice([1e-6, 1.0, 1e3])
    right = [unit * rng.randint(-9, 9) / 4 for _ in range(size + 1)]
    right[rng.randrange(size + 1)] = 1.25 * unit
    factor = rng.choice([-1.0, 0.25, 1.0, 2.0, 8.0])
    off = 1e-7 * hypot(*right)
    return [factor * (r + rng.uniform(-1, 1) * off) for r in right], right


def draw_turned(rng: Random, size: int) -> Case:
    """Another direction, by two numbers that change places, or by one that is a little off."""
    unit, factor = rng.choice([1e-6, 1.0]), rng.choice([1.0, 4.0])
    right = [unit * n for n in rng.sample(range(1, 40), size + 1)]
    found = [factor * r for r in right]
    if rng.random() < 0.5:
        found[0], found[-1] = found[-1], found[0]
    else:
        found[right.index(min(right))] += 0.002 * hypot(*found)
    return found, right


SCALE_OF = Exercise(
    name="scale_of",
    arguments="found right",
    returns=number_or_none,
    reference=scale_of,
    judge=judge_scale,
    parts=[
        Part(
            title="where only the scale is wrong",
            cases=[
                ([2.0], [2.0]),
                ([8.0], [2.0]),
                ([0.0, 8.0], [0.0, 1.0]),
                ([-3.0, 1.0], [3.0, -1.0]),
                ([0.5, 0.25, -1.0], [2.0, 1.0, -4.0]),
                ([3.0000003, 6.0], [1.0, 2.0]),
                ([2.0, 1e-8], [1.0, 0.0]),  # rounding, where `right` is 0
                ([3000.1, 6000.0], [1000.0, 2000.0]),
            ],
            draw=draw_scaled,
            hint="one factor for all numbers, with its sign. A number of `right` may be 0, so do "
            "not divide by it. And real gradients are a little off, here a bit and there a bit: "
            "how long is what is left over, beside the whole?",
        ),
        Part(
            title="where the direction is wrong",
            cases=[
                ([2.0, 1.0], [1.0, 2.0]),
                ([1.0, 0.0], [1.0, 1.0]),
                ([2.0, 4.0, 3.0], [1.0, 2.0, 0.0]),
                ([2.0, 2.0, 4.0], [1.0, 1.0, 1.0]),
                ([4.0, 8.0, 0.0], [1.0, 2.0, 1.0]),
                ([2e-6, 1e-6], [1e-6, 2e-6]),  # small numbers, and a large difference
                ([2.0, 2.01], [1.0, 1.0]),
            ],
            draw=lambda rng, size: draw_turned(rng, size + 1),
            hint="multiply `right` by your factor: is that `found`, in every number? Gradients may "
            "be tiny: a difference is large or small beside their length, not by itself",
        ),
    ],
)

# --- clipping ------------------------------------------------------------------------------------


def clip_factor(norms: list[float], clip_norm: float) -> float:
    """One factor for all stages."""
    whole = hypot(*norms)
    return min(1.0, clip_norm / whole) if whole else 1.0


def draw_norms(rng: Random, size: int, longer: bool) -> Case:
    norms = [rng.randint(1, 40) / 4 for _ in range(size + 1)]
    share = rng.uniform(0.1, 0.9) if longer else rng.uniform(1.0, 3.0)
    return norms, round(hypot(*norms) * share + 0.005, 2)


CLIP_FACTOR = Exercise(
    name="clip_factor",
    arguments="norms clip_norm",
    returns=plain.number,
    reference=clip_factor,
    parts=[
        Part(
            title="where the gradient is too long",
            cases=[
                ([2.0], 1.0),
                ([3.0, 4.0], 1.0),
                ([3.0, 4.0], 4.5),
                ([1.0, 2.0, 2.0, 4.0], 2.0),
                ([0.0, 8.0], 2.0),
            ],
            draw=lambda rng, size: draw_norms(rng, size, longer=True),
            hint="the stages' gradients are pieces of one long list of numbers. Its length is the "
            "root of the sum of all squares, so what can you add up of the stages' lengths?",
        ),
        Part(
            title="where the gradient is short enough",
            cases=[
                ([0.5], 1.0),
                ([4.0], 2.0),  # too long, so that "always 1" is no answer
                ([3.0, 4.0], 5.0),
                ([3.0, 4.0], 50.0),
                ([0.0, 0.0], 1.0),
            ],
            draw=lambda rng, size: draw_norms(rng, size, longer=False),
            hint="clipping only ever makes a gradient shorter. And one of length 0 stays as it is",
        ),
    ],
)

# --- gradients that come late --------------------------------------------------------------------


def late_descent(rate: float, delay: int, steps: int) -> list[float]:
    """Every weight, from the start on."""
    weights = [1.0]
    for t in range(steps):
        weights.append(weights[t] - rate * weights[max(t - delay, 0)])
    return weights


def judge_late(answer: Answer, rate: float, delay: int, steps: int) -> None:
    """Name the first weight that is wrong."""
    right, got = late_descent(rate, delay, steps), answer(rate, delay, steps)
    if len(got) != len(right):
        raise Wrong(
            f"as many weights as steps + 1 = {steps + 1}, the first 1.0",
            f"{len(got)} of them: {show(got)}",
            hint="how often your loop goes round: the start is a weight, and each step adds one",
        )
    for t, (expected, weight) in enumerate(zip(right, got, strict=True)):
        if not same(expected, weight):
            raise Wrong(f"weight {t} to be {expected:g}", f"{weight:g}, in {show(got)}")


def draw_late(rng: Random, size: int, delay: int) -> Case:
    return rng.randint(1, 9) / 10, delay, size + delay + 1


LATE_DESCENT = Exercise(
    name="late_descent",
    arguments="rate delay steps",
    returns=plain.numbers,
    reference=late_descent,
    judge=judge_late,
    parts=[
        Part(
            title="without a delay",
            cases=[(0.5, 0, 0), (0.5, 0, 1), (0.5, 0, 3), (1.5, 0, 4)],
            draw=lambda rng, size: draw_late(rng, size, 0),
            hint="the gradient of w * w / 2 is w itself, and a step goes against it",
        ),
        Part(
            title="with a delay",
            share=2,
            cases=[(0.5, 1, 1), (0.5, 1, 3), (0.25, 2, 5), (0.5, 3, 2), (1.5, 3, 6)],
            draw=lambda rng, size: draw_late(rng, size, rng.randint(1, size)),
            hint="the step starts at the newest weight, but its gradient is that of the weight "
            "`delay` steps before. In the first steps there is none so old: take the first",
        ),
    ],
)
