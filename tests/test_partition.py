"""Planners against brute force, against the simulator, and against plans worked out by hand."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, product

import pipeschool as ps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeschool.partition import (
    Layer,
    Plan,
    Profile,
    balanced,
    cut_at,
    equal,
    pipedream_plan,
)
from pipeschool.partition.planners import peak_bytes

# ---------------------------------------------------------------------------------------------
# Brute force: every way to cut, every number of workers per stage. Of the library it uses nothing.

Way = tuple[tuple[Fraction, ...], tuple[int, ...], tuple[int, ...]]  # times, ends, replicas
Stage = tuple[int, int, int, int]  # first layer, end, workers, number of the first worker


def ways(
    n: int, workers: int, most: int, groups: Sequence[Sequence[int]] = ()
) -> Iterator[list[Stage]]:
    """All ways to have consecutive stages of `n` layers on all `workers`."""
    for count in range(1, min(n, workers) + 1):
        for cuts in combinations(range(1, n), count - 1):
            ends = [*cuts, n]
            stage_of = [next(s for s, end in enumerate(ends) if layer < end) for layer in range(n)]
            if any(len({stage_of[layer] for layer in group}) > 1 for group in groups):
                continue
            for replicas in product(range(1, most + 1), repeat=count):
                if sum(replicas) == workers:
                    yield [
                        (ends[s - 1] if s else 0, end, replicas[s], sum(replicas[:s]))
                        for s, end in enumerate(ends)
                    ]


def best(
    n: int,
    workers: int,
    most: int,
    stage: Callable[[int, int, int, int], Fraction | None],
    boundary: Callable[[int], Fraction],
    groups: Sequence[Sequence[int]] = (),
) -> Way | None:
    """The way with the smallest list of times, the slowest first; then the earliest cuts."""
    found: Way | None = None
    for way in ways(n, workers, most, groups):
        times = [stage(*one) for one in way]
        if None in times:
            continue
        times += [boundary(end) for _, end, _, _ in way[:-1]]
        ends = tuple(end for _, end, _, _ in way)
        candidate = (tuple(sorted(times, reverse=True)), ends, tuple(r for _, _, r, _ in way))
        if found is None or candidate < found:
            found = candidate
    return found


def straight(
    layers: Sequence[dict[str, int]],
    p: int,
    speed: Sequence[int],
    bandwidth: int | None = None,
    cap: int | None = None,
    held: Sequence[int] = (1,) * 4,
    versions: Sequence[int] = (1,) * 4,
    groups: Sequence[Sequence[int]] = (),
) -> Way | None:
    """One worker per stage; held and versions: microbatches and weights that worker s has."""

    def stage(first: int, end: int, _: int, worker: int) -> Fraction | None:
        own = layers[first:end]
        size = sum(
            x["parameter_bytes"] * versions[worker] + x["gradient_bytes"] + x["optimizer_bytes"]
            for x in own
        )
        size += held[worker] * sum(x["activation_bytes"] for x in own)
        size += held[worker] * layers[first - 1]["output_bytes"] * (first > 0)
        size += max(x["working_bytes"] for x in own)
        if cap is not None and size > cap:
            return None
        return (
            sum((Fraction(x["forward"] + x["backward"]) for x in own), Fraction(0)) / speed[worker]
        )

    def boundary(end: int) -> Fraction:
        return Fraction(layers[end - 1]["output_bytes"], bandwidth) if bandwidth else Fraction(0)

    return best(len(layers), p, 1, stage, boundary, groups)


def replicated(
    layers: Sequence[dict[str, int]],
    workers: int,
    bandwidth: int,
    m: int,
    groups: Sequence[Sequence[int]] = (),
) -> Way | None:
    """The formulas of PipeDream's paper, stages on any number of workers."""

    def stage(first: int, end: int, r: int, _: int) -> Fraction:
        own = layers[first:end]
        compute = Fraction(sum(x["forward"] + x["backward"] for x in own), r)
        weights = sum(x["parameter_bytes"] for x in own)
        return max(compute, Fraction(2 * (r - 1), r) * weights / bandwidth / m)

    def boundary(end: int) -> Fraction:
        return Fraction(2 * layers[end - 1]["output_bytes"], bandwidth)

    return best(len(layers), workers, workers, stage, boundary, groups)


def found_by(plan: Plan) -> tuple[list[float], tuple[int, ...], tuple[int, ...]]:
    times = sorted((*plan.stage_seconds, *plan.boundary_seconds), reverse=True)
    return times, (*plan.cuts, len(plan.profile)), plan.replicas


def agrees(plan: Plan, way: Way | None) -> None:
    """The same times, the same cuts, the same workers; and the bottleneck is the largest time."""
    assert way is not None
    times, ends, replicas = way
    assert found_by(plan) == ([float(t) for t in times], ends, replicas)
    assert plan.bottleneck == float(times[0])
    assert plan.throughput == (1 / float(times[0]) if times[0] else math.inf)


# ---------------------------------------------------------------------------------------------
# Instances


def random_layers(rng: random.Random, n: int) -> list[dict[str, int]]:
    """Integers, few enough of them that ties are common."""
    top = rng.choice([2, 5, 30])
    names = ("activation_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes",
             "output_bytes", "working_bytes")  # fmt: skip
    return [
        {"forward": rng.randint(0, top), "backward": rng.randint(0, top)}
        | {name: rng.randint(0, top) for name in names}
        for _ in range(n)
    ]


def profile_of(layers: Sequence[dict[str, int]], tied: Sequence[Sequence[int]] = ()) -> Profile:
    return Profile([Layer(**layer) for layer in layers], tied=tied)


def times(*seconds: float) -> Profile:
    """A profile whose layers take so long, a third of it forward."""
    return Profile([Layer(forward=t / 3, backward=t - t / 3) for t in seconds])


SIZES = [(n, workers) for n in range(1, 11) for workers in range(1, 5)]


@pytest.mark.parametrize(("n", "p"), SIZES)
def test_balanced_equals_brute_force_with_speeds_and_links(n, p):
    for seed in range(12):
        rng = random.Random(f"{n} {p} {seed}")
        layers = random_layers(rng, n)
        speed = [rng.choice([1, 2, 4]) for _ in range(p)] if seed % 2 else [1] * p
        bandwidth = rng.choice([None, 1, 4])
        if p > n:
            with pytest.raises(ValueError, match=f"of {n} layers cannot be cut into {p} stages"):
                balanced(profile_of(layers), p, speed)
            continue
        plan = balanced(profile_of(layers), p, speed, bandwidth=bandwidth or math.inf)
        agrees(plan, straight(layers, p, speed, bandwidth))


@pytest.mark.parametrize(
    ("name", "held", "versions"),
    [
        ("one_f_one_b", lambda s, p, m: min(m, p - s), lambda s, p, m: 1),
        ("gpipe", lambda s, p, m: m, lambda s, p, m: 1),
        ("pipedream", lambda s, p, m: p - s, lambda s, p, m: p - s),
    ],
)
@pytest.mark.parametrize(("n", "p"), [(n, p) for n, p in SIZES if p <= n])
def test_balanced_under_a_memory_cap_equals_brute_force(n, p, name, held, versions):
    """The cap ranges from what nothing keeps to, up to what everything does."""
    for seed in range(6):
        rng = random.Random(f"{n} {p} {seed}")
        layers = random_layers(rng, n)
        m = rng.randint(1, 6)
        everything = p * m * sum(sum(layer.values()) for layer in layers)
        cap = int(everything * rng.random() ** 3)
        counts = [[of(s, p, m) for s in range(p)] for of in (held, versions)]
        way = straight(layers, p, [1] * p, None, cap, *counts)
        if way is None:
            with pytest.raises(ValueError, match=f"keeps to memory_cap={cap} with {name}"):
                balanced(profile_of(layers), p, memory_cap=cap, m=m, schedule=name)
        else:
            plan = balanced(profile_of(layers), p, memory_cap=cap, m=m, schedule=name)
            agrees(plan, way)


@pytest.mark.parametrize(("n", "workers"), SIZES)
def test_pipedream_equals_brute_force(n, workers):
    for seed in range(12):
        rng = random.Random(f"{n} {workers} {seed}")
        layers = random_layers(rng, n)
        bandwidth, m = rng.choice([1, 2, 8, 64]), rng.choice([1, 1, 4])
        plan = pipedream_plan(profile_of(layers), workers, bandwidth=bandwidth, m=m)
        agrees(plan, replicated(layers, workers, bandwidth, m))
        assert plan.workers == workers


@pytest.mark.parametrize("n", range(1, 6))
def test_both_equal_brute_force_on_every_profile_of_few_numbers(n):
    """Every list of up to five layers that take 0, 1 or 3 seconds, on up to four workers."""
    for seconds in product([0, 1, 3], repeat=n):
        layers = [
            dict.fromkeys(random_layers(random.Random(0), 1)[0], 0)
            | {"backward": t, "parameter_bytes": 2, "output_bytes": 1 + index % 2}
            for index, t in enumerate(seconds)
        ]
        profile = profile_of(layers)
        for workers in range(1, 5):
            agrees(pipedream_plan(profile, workers, bandwidth=2), replicated(layers, workers, 2, 1))
            if workers <= n:
                agrees(balanced(profile, workers), straight(layers, workers, [1] * workers))


@given(data=st.data(), n=st.integers(1, 8), p=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_layers_that_belong_together_stay_together(data, n, p):
    number = st.integers(0, 9)
    names = list(random_layers(random.Random(0), 1)[0])
    layers = [{name: data.draw(number) for name in names} for _ in range(n)]
    groups = data.draw(
        st.lists(st.lists(st.integers(0, n - 1), min_size=1, max_size=3), max_size=2)
    )
    tied = profile_of(layers, tied=groups)
    agrees(pipedream_plan(tied, p, bandwidth=4), replicated(layers, p, 4, 1, groups))
    way = straight(layers, p, [1] * p, 4, groups=groups)
    if way is None:
        with pytest.raises(ValueError, match=f"cannot be cut into {p} stages"):
            balanced(tied, p, bandwidth=4)
    else:
        agrees(balanced(tied, p, bandwidth=4), way)
        agrees(balanced(profile_of(layers), p, bandwidth=4, keep_together=groups), way)
    if p <= n:  # and apart where that is asked for
        agrees(balanced(tied, p, bandwidth=4, keep_together=()), straight(layers, p, [1] * p, 4))


@pytest.mark.parametrize(("n", "p"), [(n, p) for n, p in SIZES if p <= n])
def test_equal_has_the_only_cuts_whose_sizes_fall_by_one_at_most(n, p):
    def sizes(cuts):
        return [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]

    (only,) = (
        cuts
        for cuts in combinations(range(1, n), p - 1)
        if max(sizes(cuts)) - min(sizes(cuts)) <= 1
        and sizes(cuts) == sorted(sizes(cuts), reverse=True)
    )
    assert equal(times(*range(n)), p).cuts == only


# ---------------------------------------------------------------------------------------------
# By hand


def test_the_slowest_stage_decides_and_then_the_second_slowest():
    assert balanced(times(1, 1, 1, 1, 10), 3).stage_seconds == (2, 2, 10)
    assert balanced(times(9, 3, 3, 3, 3), 3).cuts == (1, 3)
    assert equal(times(9, 3, 3, 3, 3), 3).stage_seconds == (12, 6, 3)


def test_a_worker_of_twice_the_speed_gets_twice_the_work():
    plan = balanced(times(*[3] * 9), 2, speed=[1, 2])
    assert plan.cuts == (3,)
    assert plan.stage_seconds == (9, 9)
    assert balanced(times(*[3] * 9), 2, speed=[2, 1]).cuts == (6,)
    assert plan.cost().seconds(plan.schedule(4))["F"] == [3, 3]


def test_a_cut_goes_where_little_is_handed_on():
    """Layers of equal time; the message in the middle takes 9.5 s, the others 1 s."""
    layers = [Layer(1, 2, output_bytes=size) for size in (10, 95, 10, 10)]
    assert balanced(Profile(layers), 2).cuts == (2,)
    plan = balanced(Profile(layers), 2, bandwidth=10)
    assert (plan.cuts, plan.boundary_seconds, plan.bottleneck) == ((1,), (1,), 9)
    slow = balanced(Profile(layers), 2, bandwidth=1)  # now messages are all that counts
    assert (slow.cuts, slow.bottleneck, slow.throughput) == ((1,), 10, 0.1)


def test_memory_moves_a_cut_to_the_worker_with_fewer_microbatches_in_flight():
    """Four equal layers of 10 bytes: stage 0 holds two microbatches, stage 1 one."""
    layers = [Layer(1, 2, activation_bytes=10) for _ in range(4)]
    assert balanced(Profile(layers), 2, memory_cap=40, m=8).cuts == (2,)
    assert balanced(Profile(layers), 2, memory_cap=39, m=8).cuts == (1,)
    assert balanced(Profile(layers), 2, memory_cap=[39, 30], m=8).cuts == (1,)
    assert balanced(Profile(layers), 2, memory_cap=20, m=1).cuts == (2,)
    with pytest.raises(ValueError, match="the most even one needs 30 bytes on its fullest worker"):
        balanced(Profile(layers), 2, memory_cap=29, m=8)


UNEVEN = Profile(
    [
        Layer(2, 4, output_bytes=1),
        Layer(2, 4, parameter_bytes=8, output_bytes=1),
        Layer(4, 8, parameter_bytes=8),
    ]
)


def test_pipedream_by_hand():
    """Three layers of 6, 6 and 12 s on four workers, weights of 8 bytes in all but the first."""
    free = pipedream_plan(UNEVEN, 4)  # where an all-reduce costs nothing, data parallel is as good
    assert (free.replicas, free.stage_seconds) == ((4,), (6,))
    # At 1 byte/s that takes 2 (4 - 1) 16 / 4 = 24 s for its weights; two workers on the last layer
    # take 2 (2 - 1) 8 / 2 = 8 s. A message takes 1 s each way.
    slow = pipedream_plan(UNEVEN, 4, bandwidth=1)
    assert (slow.cuts, slow.replicas, slow.stage_seconds) == ((1, 2), (1, 1, 2), (6, 6, 8))
    assert slow.boundary_seconds == (2, 2)
    # At 1/2 byte/s they take 16 s, and one alone 12 s. The first layer has no weights: two on it.
    slower = pipedream_plan(UNEVEN, 4, bandwidth=0.5)
    assert (slower.replicas, slower.stage_seconds) == ((2, 1, 1), (3, 6, 12))
    # With one all-reduce for eight microbatches, 6 s for all weights on four, it pays again.
    eighth = pipedream_plan(UNEVEN, 4, bandwidth=0.5, m=8)
    assert (eighth.replicas, eighth.stage_seconds) == ((4,), (6,))


# ---------------------------------------------------------------------------------------------
# What a plan promises, and what the simulator makes of it


@given(
    seconds=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=4, max_size=8),
    speed=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    weights=st.sampled_from(["flush", "stash"]),
)
@settings(max_examples=60, deadline=None)
def test_in_steady_state_the_simulator_takes_the_bottleneck_for_each_microbatch(
    seconds, speed, weights
):
    profile = Profile([Layer(forward, backward) for forward, backward in seconds])
    plan = balanced(profile, len(speed), speed)

    def makespan(m):
        return ps.simulate(plan.schedule(m, weights=weights), plan.cost()).makespan

    assert makespan(60) - makespan(40) == pytest.approx(20 * plan.bottleneck)


@given(
    seconds=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    workers=st.integers(1, 5),
    weights=st.sampled_from(["flush", "stash"]),
)
@settings(max_examples=40, deadline=None)
def test_replicated_stages_in_the_simulator_take_the_bottleneck_too(seconds, workers, weights):
    plan = pipedream_plan(Profile([Layer(t, 2 * t) for t in seconds]), workers)
    turns = math.lcm(*plan.replicas)

    def makespan(m):
        return ps.simulate(plan.schedule(m, weights=weights), plan.cost()).makespan

    a, b = 20 * turns, 30 * turns
    assert makespan(b) - makespan(a) == pytest.approx((b - a) * plan.bottleneck, rel=0.05)


@given(seed=st.integers(0, 10**6), n=st.integers(4, 8), p=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_plan_under_a_cap_keeps_to_it_in_the_simulator(seed, n, p):
    """And the cap's own sum is what the simulator counts in a second batch of 1F1B, m > p."""
    layers = random_layers(random.Random(seed), n)
    profile = profile_of(layers)
    m = p + 2
    plan = balanced(profile, p, memory_cap=10**6, m=m)
    for name in ("one_f_one_b", "gpipe", "pipedream"):
        trace = ps.simulate(ps.build(name, p, m, batches=2), plan.cost())
        predicted = [
            peak_bytes(profile, layers, held, versions)
            for layers, held, versions in zip(
                plan.ranges, trace.peak_activations, trace.weight_versions, strict=True
            )
        ]
        assert all(a <= b for a, b in zip(trace.peak_bytes, predicted, strict=True))
        if name == "one_f_one_b":
            assert trace.peak_bytes == predicted
            tight = max(predicted)
            assert balanced(profile, p, memory_cap=tight, m=m).bottleneck == plan.bottleneck


def test_where_messages_take_time_eager_1f1b_takes_the_bottleneck_and_1f1b_takes_longer():
    """Two stages of 1 + 2 s, messages of 1 s: with two microbatches in flight, the first worker has
    a new one every (1 + 1 + 3 + 1 + 2)/2 = 4 s."""
    plan = cut_at(Profile([Layer(1, 2, output_bytes=10), Layer(1, 2)]), [1], bandwidth=10)
    assert (plan.bottleneck, plan.boundary_seconds) == (3, (1,))

    def per_microbatch(build):
        makespans = [ps.simulate(build(plan.p, m), plan.cost()).makespan for m in (20, 40)]
        return (makespans[1] - makespans[0]) / 20

    assert per_microbatch(ps.eager_1f1b) == 3
    assert per_microbatch(ps.one_f_one_b) == 4


@given(seed=st.integers(0, 10**6), n=st.integers(4, 8), p=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_no_schedule_is_faster_than_predicted(seed, n, p):
    plan = balanced(profile_of(random_layers(random.Random(seed), n)), p, bandwidth=2)
    for build in (ps.one_f_one_b, ps.eager_1f1b, ps.gpipe):
        trace = ps.simulate(build(p, 20), plan.cost())
        assert trace.makespan >= 20 * plan.bottleneck - 1e-9


def test_the_cost_of_a_plan_is_that_of_its_layers():
    layers = [
        Layer(i, 10 * i, 0, 0, 2 * i, 3 * i, 4 * i, 5 * i, 6 * i, 7 * i, 8 * i) for i in range(1, 5)
    ]
    plan = cut_at(Profile(layers), [1], speed=[1, 2], bandwidth=9, latency=3)
    assert plan.cost() == ps.Cost(
        forward=[1, 9], backward=[10, 90], update=[2, 18], speed=[1, 2], activation_bytes=[3, 27],
        parameter_bytes=[4, 36], gradient_bytes=[5, 45], optimizer_bytes=[6, 54],
        message_bytes=[7, 28], working_bytes=[8, 32], bandwidth=9, latency=3,
    )  # fmt: skip


def test_the_schedules_of_a_plan():
    plan = cut_at(times(1, 1, 1), [1, 2])
    assert plan.schedule(4, batches=2) == ps.one_f_one_b(3, 4, batches=2)
    assert plan.schedule(4, weights="stash") == ps.pipedream(3, 4)
    several = pipedream_plan(UNEVEN, 4, bandwidth=1)
    assert several.schedule(4) == ps.round_robin((1, 1, 2), 4, weights="flush")
    with pytest.raises(ValueError, match="weights must be 'flush' or 'stash', not 'latest'"):
        plan.schedule(4, weights="latest")


def test_a_plan_says_what_it_is():
    assert str(balanced(times(3, 3, 6), 2)).splitlines() == [
        "stages: 2, workers: 2, predicted: 6 s per microbatch, 0.1667 microbatches/s",
        "stage 0 | layers 0 to 1 | 1 worker | 6 s",
        "stage 1 | layer 2 | 1 worker | 6 s",
    ]


# ---------------------------------------------------------------------------------------------
# What makes no sense


TIED = Profile([Layer() for _ in range(4)], tied=[(0, 3)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Profile([]), "a profile needs at least one layer"),
        (lambda: Profile([3]), "a profile takes layers, such as"),
        (lambda: Layer(forward=-1), "forward of a layer must be a number, 0 or more, not -1"),
        (lambda: Profile([Layer()], tied=[(0, 1)]), "names layer 1, but the last layer is 0"),
        (lambda: balanced(times(1, 2), 0), "p must be at least 1, not 0"),
        (lambda: equal(times(1, 2), 3), "a model of 2 layers cannot be cut into 3 stages"),
        (lambda: balanced(times(1, 2), 2, [1, 2, 3]), "one per worker: 2, not 3"),
        (lambda: balanced(times(1, 2), 2, 0), "speed must be a number, above 0, not 0"),
        (lambda: balanced(times(1), 1, bandwidth=0), "bandwidth must be a number, above 0"),
        (lambda: balanced(times(1), 1, memory_cap=5), "a memory cap needs m"),
        (lambda: balanced(times(1), 1, memory_cap=5, m=1, schedule="x"), "there is no schedule"),
        (
            lambda: balanced(times(1, 1), 2, memory_cap=5, m=2, schedule="chimera"),
            "a plan has one stage per worker, and chimera does not train so",
        ),
        (
            lambda: balanced(times(1, 1), 2, memory_cap=5, m=2, schedule="forward_only"),
            "forward_only does not train so",
        ),
        (lambda: balanced(TIED, 2), "where layers 0 and 3 must be on one stage, with all between"),
        (lambda: equal(TIED, 2), "where layers 0 and 3 must be on one stage, with all between"),
        (
            lambda: equal(times(1, 1, 1, 1), 2, keep_together=[(1, 2)]),
            "equal stages would part layers 1 and 2, which belong together: plan with balanced",
        ),
        (lambda: balanced(times(1), 1, keep_together=[0]), "keep_together takes groups of layer"),
        (lambda: pipedream_plan(times(1), 0), "workers must be at least 1, not 0"),
        (lambda: cut_at(times(1, 1, 1), [2, 1]), "cuts must rise from 1 to 2 at most"),
        (lambda: cut_at(times(1, 1, 1), [3]), "cuts must rise from 1 to 2 at most"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_planning_does_without_torch():
    code = (
        "import sys, pipeschool as ps\n"
        "profile = ps.partition.Profile([ps.partition.Layer() for _ in range(6)])\n"
        "plan = ps.partition.pipedream_plan(profile, 4, bandwidth=1e9)\n"
        "ps.simulate(plan.schedule(4), plan.cost())\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
