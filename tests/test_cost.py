"""What actions and messages cost, and how wrong costs are refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pipeschool as ps
import pytest
from pipeschool import Cost

SCHEDULE = ps.gpipe(3, 2)


def test_one_number_holds_for_every_stage() -> None:
    assert Cost(forward=1, backward=2, update=3).seconds(SCHEDULE) == {
        "F": [1, 1, 1], "B": [2, 2, 2], "I": [1, 1, 1], "W": [1, 1, 1], "U": [3, 3, 3],
    }  # fmt: skip


def test_one_number_per_stage_and_per_worker() -> None:
    cost = Cost(
        forward=[1, 2, 3],
        backward=(2, 4, 6),
        input_backward=[1, 1, 1],
        weight_backward=5,
        update=[0, 1, 0],
        speed=[1, 2, 0.5],
    )
    assert cost.seconds(SCHEDULE) == {
        "F": [1, 1, 6], "B": [2, 2, 12], "I": [1, 0.5, 2], "W": [5, 2.5, 10], "U": [0, 0.5, 0],
    }  # fmt: skip


def test_speed_goes_by_the_worker_of_a_stage() -> None:
    rows = {0: [0, 2], 1: [1]}
    schedule = ps.Schedule.from_workers(
        lambda w, p, m: [ps.F(s, 0) for s in rows[w]] + [ps.B(s, 0) for s in reversed(rows[w])],
        p=2,
        m=1,
    )
    assert Cost(forward=4, speed=[1, 2]).seconds(schedule)["F"] == [4, 2, 4]


def test_halves_default_to_half_of_an_unequal_backward() -> None:
    table = Cost(backward=[2, 4, 6]).seconds(SCHEDULE)
    assert table["I"] == table["W"] == [1, 2, 3]


def test_time_on_the_link_is_overhead_and_bytes_over_bandwidth() -> None:
    assert Cost(comm=1, bandwidth=8, message_bytes=[8, 16, 0]).transfer(SCHEDULE) == [2, 3, 1]
    assert Cost(message_bytes=10**12).transfer(SCHEDULE) == [0, 0, 0]  # bandwidth is infinite
    assert Cost(latency=5).transfer(SCHEDULE) == [0, 0, 0]  # latency does not occupy the link


def test_message_sizes_by_boundary() -> None:
    assert Cost(message_bytes=[8, 16, 0]).message_sizes(SCHEDULE) == [8, 16, 0]
    assert Cost(message_bytes=7).message_sizes(SCHEDULE) == [7, 7, 7]


def test_numbers_may_come_from_numpy_or_fractions() -> None:
    cost = Cost(forward=np.array([1, 2, 3]), backward=np.float32(2), comm=Fraction(1, 4))
    assert cost == Cost(forward=[1, 2, 3], backward=2, comm=0.25)
    assert cost.seconds(SCHEDULE)["F"] == [1, 2, 3]
    assert Cost(forward=np.array(3)).seconds(SCHEDULE)["F"] == [3, 3, 3]


def test_a_cost_does_not_change_with_the_list_it_was_made_from() -> None:
    forward = [1.0, 2.0, 3.0]
    cost = Cost(forward=forward)
    forward[0] = 100.0
    assert cost.seconds(SCHEDULE)["F"] == [1, 2, 3]
    assert len({cost, Cost(forward=[1, 2, 3])}) == 1


PER_ITEM = ["forward", "backward", "input_backward", "weight_backward", "update", "message_bytes"]
SINGLE = ["comm", "latency"]
NO_NUMBERS = [-1, -0.5, math.nan, math.inf, -math.inf, "x", "1", b"1", True, {1: 2}, {1}, object]


@pytest.mark.parametrize("name", PER_ITEM + SINGLE)
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:
        Cost(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} must be a number, 0 or more, not {value!r}"


@pytest.mark.parametrize("name", ["speed", "bandwidth"])
@pytest.mark.parametrize("value", [0, -1, math.nan, "x", "1", True])
def test_speed_and_bandwidth_are_above_zero(name: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:
        Cost(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} must be a number, above 0, not {value!r}"


def test_bandwidth_alone_may_be_infinite() -> None:
    assert Cost(bandwidth=math.inf).bandwidth == math.inf
    with pytest.raises(ValueError, match="speed must be a number, above 0, not inf"):
        Cost(speed=math.inf)


@pytest.mark.parametrize("name", PER_ITEM)
@pytest.mark.parametrize("item", [-1, math.nan, "2", None, [1]])
def test_a_wrong_item_of_a_list_is_refused(name: str, item: object) -> None:
    with pytest.raises(ValueError) as caught:
        Cost(**{name: [1, item, 1]})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name} must be a number, 0 or more, not {item!r}"


@pytest.mark.parametrize("name", ["comm", "latency", "bandwidth"])
def test_a_list_is_refused_where_one_number_is_wanted(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be a number, .*, not \[1, 2, 3\]$"):
        Cost(**{name: [1, 2, 3]})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*PER_ITEM, "speed"])
@pytest.mark.parametrize("values", [[], [1, 2], [1, 2, 3, 4]], ids=len)
def test_a_list_of_another_length_is_refused(name: str, values: list[float]) -> None:
    cost = Cost(**{name: values})  # type: ignore[arg-type]
    with pytest.raises(ValueError) as caught:
        ps.simulate(SCHEDULE, cost)
    item = "worker" if name == "speed" else "stage"
    assert str(caught.value) == f"{name} needs one number, or one per {item}: 3, not {len(values)}"
