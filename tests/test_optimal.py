"""`par` finds the least makespan: that of trying everything, wherever everything can be tried."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pipeschool as ps
import pytest
from least_makespan import least_makespan
from pipeschool import Cost
from pipeschool.optimal import lower_bound
from pipeschool.problem import problem

PLACES = {  # p, placement, v -> the worker of each stage
    (1, "loop", 1): [0],
    (2, "loop", 1): [0, 1],
    (3, "loop", 1): [0, 1, 2],
    (1, "loop", 2): [0, 0],
    (2, "loop", 2): [0, 1, 0, 1],
    (2, "V", 2): [0, 1, 1, 0],
    (3, "V", 2): [0, 1, 2, 2, 1, 0],
}
SIZES = [(place, m) for place in PLACES for m in (1, 2, 3) if m < 3 or place != (3, "V", 2)]
COSTS = [  # F, I, W of every stage; transfer and latency of every message
    (1, 1, 1, 0, 0),
    (2, 1, 1, 0, 0),
    (1, 3, 2, 0, 0),
    (2, 2, 1, 1, 0),
    (1, 1, 1, 3, 1),
]


def caps_of(p: int, m: int) -> list[list[int] | None]:
    """Activations per worker: as many as there are, the fewest, two, and as in 1F1B."""
    some = [None, [1] * p, [2] * p, [p - s for s in range(p)]]
    return [caps for caps in some if caps is None or min(caps) < m]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("place", "m"),
    [
        pytest.param(place, m, marks=pytest.mark.exhaustive if len(PLACES[place]) * m > 8 else ())
        for place, m in SIZES
    ],
    ids=str,
)
def test_equals_the_least_of_everything_there_is(
    place: tuple[int, str, int], m: int, split: bool
) -> None:
    (p, placement, v), workers = place, PLACES[place]
    costs = COSTS if len(workers) * m < 12 else COSTS[1::2]  # there is more to try
    for caps, (forward, inputs, weight, transfer, latency) in product(caps_of(p, m), costs):
        kinds = {"F": forward, "I": inputs, "W": weight}
        if not split:
            kinds = {"F": forward, "B": inputs + weight}
        least = least_makespan(
            workers,
            m,
            {kind: [time] * len(workers) for kind, time in kinds.items()},
            caps=caps and [v * cap for cap in caps],
            transfer=transfer,
            latency=latency,
        )
        cost = Cost(forward, inputs + weight, inputs, weight, comm=transfer, latency=latency)
        schedule, proven, bound = ps.par(
            p, m, placement=placement, v=v, split=split, memory_cap=caps, cost=cost
        )
        trace = ps.simulate(schedule, cost)
        assert (trace.makespan, proven, bound) == (least, True, pytest.approx(least))
        assert all(map(float.__le__, map(float, trace.peak_activations), caps or [m] * p))
        assert schedule.placement == tuple(workers)
        sizes = problem(p, m, placement=placement, v=v, split=split, cost=cost)
        assert lower_bound(sizes) <= least


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("caps", [None, [2, 1], [2, 2]])
def test_stages_and_workers_may_differ(split: bool, caps: list[int] | None) -> None:
    forward, backward = [2, 3], [4, 2]
    kinds = {"I": [2, 1], "W": [2, 1]} if split else {"B": backward}
    for m in (1, 2, 3, 4):
        least = least_makespan([0, 1], m, {"F": forward, **kinds}, caps=caps)
        best = ps.par(2, m, split=split, memory_cap=caps, cost=Cost(forward, backward))
        assert ps.simulate(best.schedule, Cost(forward, backward)).makespan == least


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("place", [(2, "loop", 1), (3, "loop", 1), (1, "loop", 2), (2, "V", 2)])
def test_microbatches_in_order_lose_nothing(place: tuple[int, str, int], split: bool) -> None:
    workers = PLACES[place]
    times = {"F": 2, "I": 1, "W": 1} if split else {"F": 2, "B": 3}
    seconds = {kind: [time] * len(workers) for kind, time in times.items()}
    m = 3 if len(workers) == 2 else 2
    for caps, transfer in product([None, [place[2]] * place[0]], [0, 1]):
        freely, in_order = (
            least_makespan(workers, m, seconds, caps=caps, transfer=transfer, in_order=order)
            for order in (False, True)
        )
        assert freely == in_order


def test_decimal_times_are_exact() -> None:
    cost = Cost(forward=0.1, backward=0.2, comm=0.05)
    best = ps.par(2, 3, memory_cap=2, cost=cost)
    least = least_makespan([0, 1], 3, {"F": [2, 2], "B": [4, 4]}, caps=[2, 2], transfer=1)
    assert ps.simulate(best.schedule, cost).makespan == pytest.approx(least / 20)
    assert best.proven


def test_what_par_says_of_the_schedules_of_the_course() -> None:
    # 1F1B and GPipe are as fast as whole backwards can be; ZB-H1 is as fast as its memory allows,
    # and ZB-V as anything in a V.
    one_f_one_b = ps.par(4, 8, memory_cap=[4, 3, 2, 1])
    assert one_f_one_b.proven and one_f_one_b.bound == 33
    zb_h1 = ps.par(4, 8, split=True, memory_cap=4)
    assert zb_h1.proven and zb_h1.bound == ps.simulate(ps.zb_h1(4, 8)).makespan == 27
    zb_v = ps.par(4, 8, placement="V", split=True, memory_cap=4)
    assert zb_v.proven and zb_v.bound == ps.simulate(ps.zb_v(4, 8)).makespan == 51


def test_same_arguments_same_schedule() -> None:
    first, second = (ps.par(4, 6, split=True, memory_cap=3) for _ in range(2))
    assert first == second


def test_out_of_time_is_said() -> None:
    cost = Cost([7, 5, 6, 4], [9, 11, 8, 13])
    best = ps.par(4, 12, split=True, memory_cap=3, cost=cost, seconds=1e-6)
    makespan = ps.simulate(best.schedule, cost).makespan
    assert not best.proven
    assert 0 < best.bound < makespan
    ps.check(best.schedule, memory_cap=3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"seconds": 0}, "seconds must be a number, above 0, not 0"),
        (
            {"cost": Cost(1, 2, update=1)},
            "par plans forwards and backwards alone: update must be 0",
        ),
        (
            {"cost": Cost(0, 2)},
            "par needs forwards and backwards that take more than 0 seconds",
        ),
        (
            {"cost": Cost(1, 1.23456789)},
            "par needs times that are multiples of one step, with at most 10000 steps in the "
            "longest, not 123456789: round them",
        ),
        ({"placement": "W"}, "placement must be one of loop, V, not 'W'"),
        ({"placement": "V", "v": 3}, "v must be 2 for placement V, not 3"),
        ({"memory_cap": 0.5}, "memory_cap must be at least 1, not 0.5: a microbatch has to fit"),
        ({"memory_cap": [2, 1, 1]}, "memory_cap needs one number, or one per worker: 2, not 3"),
        ({"m": 0}, "m must be at least 1, not 0"),
    ],
)
def test_what_makes_no_problem_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        ps.par(**{"p": 2, "m": 3, **arguments})  # type: ignore[arg-type]
    assert str(caught.value) == says


def test_the_solver_is_loaded_when_it_is_needed() -> None:
    code = (
        "import sys, pipeschool as ps\n"
        "ps.greedy(3, 4)\n"
        "print('ortools' in sys.modules)\n"
        "ps.par(3, 4, split=True, memory_cap=2)\n"
        "print('ortools' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]


def test_a_bound_that_floats_write_a_little_too_high_shuts_no_schedule_out():
    cost = Cost(forward=0.11, backward=0.21)  # 2.24 s are 224.00000000000003 ticks of 0.01 s
    found = ps.par(2, 3, placement="V", cost=cost)
    assert (found.bound, found.proven) == (2.24, True)
    assert ps.simulate(found.schedule, cost).makespan == pytest.approx(2.24)
