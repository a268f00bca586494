"""The exercises of unit 05, engineering: messages, profiles, cuts, workers that take turns.

`unit05_training` has those on tuning and on faults of stability.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate
from math import ceil
from random import Random
from statistics import median

from pipeschool.cost import Cost
from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import require, show
from pipeschool.grade.unit05_training import (
    BEST_M,
    CLIP_FACTOR,
    LATE_DESCENT,
    SCALE_OF,
)
from pipeschool.schedules import gpipe, round_robin
from pipeschool.simulator import simulate

# --- messages ------------------------------------------------------------------------------------


def message_seconds(
    samples: int, m: int, numbers: int, number_bytes: int, latency: float, bandwidth: float
) -> float:
    """The largest microbatch, because the others wait for it."""
    return latency + ceil(samples / m) * numbers * number_bytes / bandwidth


def draw_message(rng: Random, size: int, even: bool) -> Case:
    m = rng.randint(2, size + 2)
    samples = m * rng.randint(1, 3 * size) + (0 if even else rng.randint(1, m - 1))
    numbers, width = 10 * rng.randint(1, 90), rng.choice([2, 4, 8])
    return samples, m, numbers, width, rng.choice([0, 0.001, 0.25]), 1000 * rng.randint(1, 99)


MESSAGE_SECONDS = Exercise(
    name="message_seconds",
    arguments="samples m numbers number_bytes latency bandwidth",
    returns=plain.number,
    reference=message_seconds,
    parts=[
        Part(
            title="where m divides the batch",
            cases=[
                (1, 1, 1, 4, 0, 4),
                (8, 2, 10, 4, 0, 1000),
                (8, 2, 10, 4, 0.5, 1000),
                (64, 8, 100, 2, 0.001, 200_000),
            ],
            draw=lambda rng, size: draw_message(rng, size, even=True),
            hint="one message holds the numbers of all samples of one microbatch. Bytes over bytes "
            "per second are seconds, and the latency comes on top, once",
        ),
        Part(
            title="where m does not divide the batch",
            cases=[
                (3, 2, 1, 4, 0, 4),
                (10, 4, 10, 4, 0.5, 1000),
                (65, 8, 100, 2, 0.001, 200_000),
            ],
            draw=lambda rng, size: draw_message(rng, size, even=False),
            hint="the microbatches of such a batch are not equally large: how many samples has the "
            "largest one? There are no halves of samples",
        ),
    ],
)


def gpipe_seconds(
    p: int, m: int, forward: float, backward: float, message: float, overlapped: bool
) -> float:
    """What the simulator says; a worker that sends by itself is busy for that long."""
    if overlapped:
        cost = Cost(forward, backward, comm=message)
    else:
        last = [forward] if p == 1 else [*[forward + message] * (p - 1), forward]
        back = [backward] if p == 1 else [backward, *[backward + message] * (p - 1)]
        cost = Cost(last, back)
    return simulate(gpipe(p, m), cost).makespan


def draw_gpipe(rng: Random, size: int, kind: str) -> Case:
    p, m = rng.randint(2, size + 2), rng.randint(2, 3 * size + 2)
    forward, backward = rng.randint(2, 6), rng.randint(6, 12)
    message = rng.randint(backward + 1, 20) if kind == "slow" else rng.randint(1, 2)
    return p, m, forward, backward, message, kind != "by hand"


GPIPE_SECONDS = Exercise(
    name="gpipe_seconds",
    arguments="p m forward backward message overlapped",
    returns=plain.number,
    reference=gpipe_seconds,
    parts=[
        Part(
            title="where messages overlap with work",
            cases=[
                (1, 3, 1, 2, 1, True),
                (2, 1, 1, 2, 1, True),
                (2, 3, 1, 2, 1, True),
                (4, 8, 2, 4, 1, True),
            ],
            draw=lambda rng, size: draw_gpipe(rng, size, "overlapped"),
            hint="all messages but those of the first microbatch on its way there, and of the last "
            "one on its way back, travel while their receiver works: count the boundaries",
        ),
        Part(
            title="where messages do not overlap",
            cases=[
                (1, 3, 1, 2, 1, False),
                (2, 1, 1, 2, 1, False),
                (2, 3, 1, 2, 1, False),
                (4, 8, 2, 4, 1, False),
            ],
            draw=lambda rng, size: draw_gpipe(rng, size, "by hand"),
            hint="a worker that sends is busy for work and message together, so that is its pace. "
            "The worker at the end of the way has nobody to send to: which one is that for "
            "forwards, and which for backwards?",
        ),
        Part(
            title="where the link is slower than the workers",
            cases=[
                (1, 3, 1, 2, 3, True),
                (2, 1, 1, 2, 3, True),
                (2, 2, 1, 2, 3, True),
                (2, 3, 2, 4, 3, True),
                (4, 8, 1, 2, 5, True),
            ],
            draw=lambda rng, size: draw_gpipe(rng, size, "slow"),
            hint="the slowest one sets the pace, and a link is one of them: between two "
            "microbatches that arrive lies the larger of the work and the message. Forwards and "
            "backwards have different paces. With p = 1 there is no link",
        ),
    ],
)

# --- profiles ------------------------------------------------------------------------------------


def typical_seconds(times: list[float]) -> float:
    """The median of all but the first."""
    return median(times[1:])


def draw_times(rng: Random, count: int) -> Case:
    times = [rng.randint(90, 110) / 10 for _ in range(count)]
    times[0] *= 10
    times[rng.randrange(1, count)] *= 5  # somebody else was at work
    return (times,)


TYPICAL_SECONDS = Exercise(
    name="typical_seconds",
    arguments="times",
    returns=plain.number,
    reference=typical_seconds,
    parts=[
        Part(
            cases=[
                ([9.0, 1.0],),
                ([9.0, 1.0, 2.0, 1.5],),
                ([9.0, 1.0, 1.5, 8.0, 1.0],),
                ([1.0, 3.0, 2.0, 30.0, 4.0, 3.5],),
            ],
            draw=lambda rng, size: draw_times(rng, size + 3),
            hint="the first time is the warm-up's: leave it out. Of the others, take the one in "
            "the middle when they are sorted, or half-way between the two in the middle",
        )
    ],
)

# --- cuts ----------------------------------------------------------------------------------------


def best_cuts(times: list[float], p: int) -> list[int]:
    """A dynamic programme over (first layer, stages left)."""
    sums = [0.0, *accumulate(times)]
    n = len(times)

    @cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return sums[n] - sums[first], ()
        found = []
        for cut in range(first + 1, n - stages + 2):
            slowest, cuts = best(cut, stages - 1)
            found.append((max(sums[cut] - sums[first], slowest), (cut, *cuts)))
        return min(found)

    return list(best(0, p)[1])


def slowest_stage(times: list[float], cuts: list[int]) -> float:
    """Seconds of the slowest stage."""
    ends = [0, *cuts, len(times)]
    return max(sum(times[a:b]) for a, b in zip(ends, ends[1:], strict=False))


def judge_best_cuts(answer: Answer, times: list[float], p: int) -> None:
    """Any cuts do whose slowest stage is as fast as can be."""
    cuts = answer(times, p)
    n = len(times)
    require(len(cuts) == p - 1, f"{p - 1} cuts for {p} stages", f"{len(cuts)}: {show(cuts)}")
    rising = all(a < b for a, b in zip([0, *cuts], [*cuts, n], strict=True))
    require(
        rising,
        f"rising cuts from 1 to {n - 1}, so that every stage has a layer: each is the number of "
        "the first layer behind it",
        show(cuts),
    )
    right, got = slowest_stage(times, best_cuts(times, p)), slowest_stage(times, cuts)
    require(
        got <= right + 1e-9,
        f"cuts whose slowest stage takes {right:g}",
        f"{show(cuts)}: the slowest stage takes {got:g}",
    )


def draw_layers(rng: Random, layers: int, p: int) -> Case:
    return [float(rng.choice([1, 2, 3, 5, 8, 13])) for _ in range(layers)], p


BEST_CUTS = Exercise(
    name="best_cuts",
    arguments="times p",
    returns=plain.whole_numbers,
    reference=best_cuts,
    judge=judge_best_cuts,
    parts=[
        Part(
            title="for two stages",
            cases=[
                ([1.0, 1.0], 2),
                ([3.0, 1.0, 1.0], 2),
                ([1.0, 1.0, 4.0], 2),
                ([1.0, 2.0, 3.0, 4.0, 5.0], 2),
            ],
            draw=lambda rng, size: draw_layers(rng, size + 2, 2),
            hint="with two stages there is one cut: try each place, and keep the one whose slower "
            "side is fastest",
        ),
        Part(
            title="for any number of stages",
            share=2,
            cases=[
                ([7.0], 1),
                ([1.0, 2.0, 1.0], 3),
                ([2.0, 3.0, 2.0, 3.0, 5.0], 3),
                ([1.0, 1.0, 1.0, 1.0, 1.0, 6.0], 3),
                ([4.0, 3.0, 3.0, 2.0, 4.0, 1.0, 5.0], 4),
                ([8.0, 1.0, 1.0, 8.0, 5.0, 2.0, 3.0, 5.0], 4),
            ],
            draw=lambda rng, size: draw_layers(rng, size + 4, rng.randint(3, min(5, size + 3))),
            hint="the first stage ends somewhere, and the rest is the same question again with one "
            "stage fewer: the slower of the two counts. Then the place where that is least",
        ),
        Part(
            title="for many layers",
            share=2,
            cases=[([float(1 + i * i % 7) for i in range(48)], 8)],
            draw=lambda rng, size: draw_layers(rng, 40 + 4 * size, 8),
            hint="to try all cuts takes too long here: the same ends of the model come up again "
            "and again. Work each one out once and keep it (functools.cache, or a table)",
        ),
    ],
)

# --- workers that take turns ---------------------------------------------------------------------


def worker_of(replicas: list[int], stage: int, microbatch: int) -> int:
    """As the library's schedule has it."""
    return round_robin(replicas, math.lcm(*replicas)).owner(stage, microbatch)


def draw_turn(rng: Random, size: int, most: int) -> Case:
    replicas = [rng.randint(1, most) for _ in range(size + 1)]
    stage = rng.randrange(len(replicas))
    replicas[stage] = most
    return replicas, stage, rng.randint(0, 3 * size)


WORKER_OF = Exercise(
    name="worker_of",
    arguments="replicas stage microbatch",
    returns=plain.whole_number,
    reference=worker_of,
    parts=[
        Part(
            title="where every stage has one worker",
            share=1,
            cases=[([1], 0, 0), ([1, 1], 1, 0), ([1, 1, 1], 1, 5)],
            draw=lambda rng, size: draw_turn(rng, size, 1),
            hint="worker s then has stage s, whichever microbatch it is",
        ),
        Part(
            title="where some stages have several",
            share=3,
            cases=[
                ([2], 0, 0),
                ([2], 0, 1),
                ([1, 2, 1], 1, 0),
                ([1, 2, 1], 1, 3),
                ([1, 2, 1], 2, 0),
                ([2, 3, 1], 1, 4),
                ([2, 3, 1], 2, 4),
            ],
            draw=lambda rng, size: draw_turn(rng, size, rng.randint(2, 4)),
            hint="how many workers stand in front of the first one of this stage? From there on, "
            "its workers take turns: 0, 1, ..., and from the start again",
        ),
    ],
)


def spread_workers(seconds: list[float], workers: int) -> list[int]:
    """One for each; then each further one to the stage that is slowest by now."""
    replicas = [1] * len(seconds)
    for _ in range(workers - len(seconds)):
        slowest = max(range(len(seconds)), key=lambda s: seconds[s] / replicas[s])
        replicas[slowest] += 1
    return replicas


def pace_of(seconds: list[float], replicas: list[int]) -> float:
    """Seconds from one microbatch to the next, once the line is full."""
    return max(t / r for t, r in zip(seconds, replicas, strict=True))


def judge_spread(answer: Answer, seconds: list[float], workers: int) -> None:
    """Any way does that has the best pace."""
    replicas = answer(seconds, workers)
    got = show(replicas)
    require(len(replicas) == len(seconds), f"one number per stage, {len(seconds)} in all", got)
    require(min(replicas) >= 1, "at least one worker for every stage", got)
    require(
        sum(replicas) == workers,
        f"numbers whose sum is workers = {workers}",
        f"{got}: the sum is {sum(replicas)}",
    )
    right, pace = pace_of(seconds, spread_workers(seconds, workers)), pace_of(seconds, replicas)
    require(
        pace <= right + 1e-9,
        f"a microbatch every {right:g} seconds",
        f"{got}: one every {pace:g} seconds",
    )


def draw_spread(rng: Random, size: int, extra: int) -> Case:
    seconds = [float(rng.randint(1, 9)) for _ in range(size + 1)]
    return seconds, len(seconds) + extra


SPREAD_WORKERS = Exercise(
    name="spread_workers",
    arguments="seconds workers",
    returns=plain.whole_numbers,
    reference=spread_workers,
    judge=judge_spread,
    parts=[
        Part(
            title="with at most one worker to spare",
            cases=[([1.0], 1), ([2.0, 1.0], 2), ([1.0, 2.0, 1.0], 4), ([3.0, 3.0, 4.0], 4)],
            draw=lambda rng, size: draw_spread(rng, size, rng.randint(0, 1)),
            hint="which stage does everybody wait for?",
        ),
        Part(
            title="with several workers to spare",
            share=2,
            cases=[
                ([3.0, 2.0], 4),
                ([1.0, 3.0], 4),
                ([1.0, 9.0], 4),
                ([6.0, 5.0, 1.0], 6),
                ([2.0, 9.0, 4.0], 9),
            ],
            draw=lambda rng, size: draw_spread(rng, size, rng.randint(2, size + 3)),
            hint="a stage of t seconds on r workers is done with a microbatch every t / r seconds. "
            "After each worker that you have given away, look again which stage is slowest",
        ),
    ],
)

EXERCISES = [
    MESSAGE_SECONDS,
    GPIPE_SECONDS,
    TYPICAL_SECONDS,
    BEST_CUTS,
    WORKER_OF,
    SPREAD_WORKERS,
    BEST_M,
    SCALE_OF,
    CLIP_FACTOR,
    LATE_DESCENT,
]

# What the claims lab says about each claim.
CLAIMS = {1: "half", 2: "wrong", 3: "right", 4: "right", 5: "half", 6: "wrong"}
