"""Schedules from a rule: the known ones come out of theirs, and no cap is in anybody's way."""

from __future__ import annotations

from itertools import permutations, product

import pipeschool as ps
import pytest
from pipeschool import Action, Cost, Schedule
from pipeschool.greedy_schedule import Moment

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 25)]


def makespan(schedule: Schedule, cost: Cost | None = None) -> float:
    return ps.simulate(schedule, cost).makespan


# ---------------------------------------------------------------------------------------------
# Known schedules out of rules


def test_backwards_first_within_the_memory_of_1f1b_is_1f1b() -> None:
    for p, m in SIZES:
        found = ps.greedy(p, m, memory_cap=[p - s for s in range(p)], priority="BFW")
        assert found.workers == ps.one_f_one_b(p, m).workers


def test_forwards_first_without_a_cap_is_gpipe() -> None:
    for p, m in SIZES:
        assert ps.greedy(p, m, priority="FBW").workers == ps.gpipe(p, m).workers


def in_turn_and_weights_last(action: Action, now: Moment) -> tuple[bool, float]:
    """Forward k, then the input half that is due after it in 1F1B; a weight half if neither."""
    in_advance = now.p - now.worker - 0.5
    return action.kind == "W", action.microbatch + (in_advance if action.kind == "I" else 0)


def test_a_rule_of_ones_own_is_as_fast_as_zb_h1_in_its_memory() -> None:
    for p, m in SIZES:
        found = ps.greedy(p, m, split=True, memory_cap=p, priority=in_turn_and_weights_last)
        assert makespan(found) == makespan(ps.zb_h1(p, m))


def test_weight_halves_last_are_as_good_as_the_handcrafted_ones() -> None:
    for p, m in SIZES:
        assert makespan(ps.greedy(p, m, split=True)) <= makespan(ps.zb_h1(p, m))
        found = ps.greedy(p, m, split=True, memory_cap=2 * p - 1)
        assert makespan(found) <= makespan(ps.zb_h2(p, m))


def test_a_rule_can_put_newer_chunks_first() -> None:
    # Depth first on the way there: what came furthest goes on first.
    schedule = ps.greedy(
        1, 2, v=2, priority=lambda action, now: (action.kind == "B", -action.stage)
    )
    assert [
        str(a) for a in schedule.workers[0]
    ] == "0F0 1F0 0F1 1F1 1B0 1B1 1U0 0B0 0B1 0U0".split()


def test_the_order_of_kinds_in_small() -> None:
    orders = {
        order: " ".join(str(a) for a in ps.greedy(1, 2, split=True, priority=order).workers[0])
        for order in ("FBW", "BFW", "BWF", "FWB")
    }
    assert orders == {
        "FBW": "0F0 0F1 0I0 0I1 0W0 0W1 0U0",
        "BFW": "0F0 0I0 0F1 0I1 0W0 0W1 0U0",
        "BWF": "0F0 0I0 0W0 0F1 0I1 0W1 0U0",
        "FWB": "0F0 0F1 0I0 0W0 0I1 0W1 0U0",
    }


# ---------------------------------------------------------------------------------------------
# The clock, the memory


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "cost",
    [
        Cost(1, 2),
        Cost(0.1, 0.3, comm=0.05, latency=0.02),
        Cost(2, 3, speed=[1, 2, 4], comm=1.5),
        Cost(1, 2, message_bytes=3, bandwidth=4, latency=0.25),
    ],
)
@pytest.mark.parametrize(("placement", "v"), [("loop", 1), ("loop", 2), ("V", 2)])
def test_its_clock_is_that_of_the_simulator(
    placement: str, v: int, cost: Cost, split: bool
) -> None:
    asked: dict[Action, float] = {}  # when the rule was last asked: then the action was chosen

    def rule(action: Action, now: Moment) -> tuple[bool, int]:
        asked[action] = now.time
        return action.kind == "F", action.microbatch

    for cap in (None, 2):
        schedule = ps.greedy(
            3,
            5,
            placement=placement,
            v=v,
            split=split,
            cost=cost,
            memory_cap=cap,
            priority=rule,
        )
        for span in ps.simulate(schedule, cost).spans:
            if span.action.kind != "U":
                assert span.start == pytest.approx(asked[span.action], abs=1e-9)


def test_a_rule_knows_what_is_in_memory() -> None:
    held: dict[str, float] = {}

    def rule(action: Action, now: Moment) -> int:
        assert (now.p, now.m, now.v, now.worker) == (2, 3, 2, action.stage % 2)
        held[str(action)] = now.held
        return action.microbatch

    ps.greedy(2, 3, v=2, priority=rule)
    assert {a: held[a] for a in ("0F0", "0F1", "2F0", "3F0")} == {
        "0F0": 0,
        "0F1": 0.5,
        "2F0": 1,
        "3F0": 1,
    }


@pytest.mark.parametrize("order", ["".join(order) for order in permutations("FBW")])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("placement", "v"), [("loop", 1), ("loop", 2), ("loop", 3), ("V", 2)])
def test_no_cap_is_exceeded_and_none_gets_in_the_way(
    placement: str, v: int, split: bool, order: str
) -> None:
    for p, m in product((1, 2, 3, 4), (1, 2, 5)):
        for caps in (
            [1] * p,
            [1.5] * p,
            [2] * p,
            [p - s for s in range(p)],
            [1 + s for s in range(p)],
        ):
            schedule = ps.greedy(
                p, m, placement=placement, v=v, split=split, memory_cap=caps, priority=order
            )
            peaks = ps.simulate(schedule).peak_activations
            assert all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))


def test_forwards_first_would_fill_the_memory_with_what_cannot_go_on() -> None:
    # Two chunks fit on each worker. 0F0 0F1 would leave no room for 3F0, and 3B0 would never come.
    schedule = ps.greedy(2, 2, placement="V", memory_cap=1, priority="FBW")
    assert [str(a) for a in schedule.workers[0]][:5] == "0F0 3F0 3B0 0F1 0B0".split()
    ps.check(schedule, memory_cap=1)


@pytest.mark.parametrize("chunks", [3, 4, 5, 7, 8, 10, 11])
def test_a_cap_may_be_a_fraction_of_a_microbatch(chunks: int) -> None:
    schedule = ps.greedy(2, 5, v=3, memory_cap=chunks / 3, priority="FBW")
    assert max(ps.simulate(schedule).peak_activations) == chunks / 3


@pytest.mark.parametrize("cap", [3, 4, 6])
def test_more_memory_than_the_batch_needs_is_no_cap(cap: float) -> None:
    assert ps.greedy(3, 3, v=2, memory_cap=cap) == ps.greedy(3, 3, v=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"priority": "BF1"},
            "priority must put B, F and W in an order, such as 'BFW', or be a function, not 'BF1'",
        ),
        (
            {"priority": 3},
            "priority must put B, F and W in an order, such as 'BFW', or be a function, not 3",
        ),
        ({"placement": "v"}, "placement must be one of loop, V, not 'v'"),
        ({"placement": "V", "v": 1}, "v must be 2 for placement V, not 1"),
        ({"v": 0}, "v must be at least 1, not 0"),
        ({"p": 0}, "p must be at least 1, not 0"),
        ({"memory_cap": 0}, "memory_cap must be at least 1, not 0: a microbatch has to fit"),
        (
            {"memory_cap": [2, 0.5]},
            "memory_cap must be at least 1, not 0.5: a microbatch has to fit",
        ),
        ({"memory_cap": [2]}, "memory_cap needs one number, or one per worker: 2, not 1"),
        ({"memory_cap": "2"}, "memory_cap must be a number, 0 or more, not '2'"),
        ({"cost": Cost([1, 2, 3], 2)}, "forward needs one number, or one per stage: 2, not 3"),
    ],
)
def test_what_makes_no_problem_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        ps.greedy(**{"p": 2, "m": 3, **arguments})  # type: ignore[arg-type]
    assert str(caught.value) == says
