"""Lowering adds each message once, in an order that is right with tags and without."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pipeschool as ps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Machine, owner_of, random_schedule, weights_in_one_process
from pipeschool import Action, B, F, I, Schedule, W
from pipeschool.lowering import compute_only, lower

schedules = st.integers(min_value=0, max_value=10**9).map(random_schedule)
many_schedules = settings(max_examples=150, deadline=None)


def test_one_f_one_b_lowered_as_a_reader_expects() -> None:
    assert [" ".join(map(str, row)) for row in lower(ps.one_f_one_b(2, 2)).workers] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1U0",
    ]


@many_schedules
@given(schedule=schedules)
def test_lowering_leaves_the_compute_and_its_order_alone(schedule: Schedule) -> None:
    assert compute_only(lower(schedule)) == schedule


@many_schedules
@given(schedule=schedules)
def test_every_crossing_is_sent_right_after_its_compute_and_received_before_its_use(
    schedule: Schedule,
) -> None:
    owner = owner_of(schedule.workers)
    lowered = lower(schedule)
    expected = []  # (worker, message), in any order
    for worker, row in enumerate(lowered.workers):
        for place, action in enumerate(row):
            kind, stage, k = action
            for letter, kinds, target in (("F", "F", stage + 1), ("B", "BI", stage - 1)):
                if kind not in kinds or owner.get(target, worker) == worker:
                    continue
                send, receive = (
                    Action(f"SEND_{letter}", stage, k),
                    Action(f"RECV_{letter}", target, k),
                )
                assert row[place + 1] == send
                there = lowered.workers[owner[target]]
                users = [there.index(a) for a in there if a[1:] == (target, k) and a.kind in kinds]
                assert there.index(receive) < min(users)
                expected += [(worker, send), (owner[target], receive)]
    found = [
        (worker, action)
        for worker, row in enumerate(lowered.workers)
        for action in row
        if action.is_message
    ]
    assert sorted(found) == sorted(expected)


@many_schedules
@given(schedule=schedules)
def test_receives_stand_in_the_order_of_the_sends_of_their_link(schedule: Schedule) -> None:
    lowered = lower(schedule)
    owner = owner_of(schedule.workers)
    sent, received = defaultdict(list), defaultdict(list)
    for worker, row in enumerate(lowered.workers):
        for action in row:
            kind, stage, k = action
            if kind.startswith("SEND"):
                target = stage + (1 if kind == "SEND_F" else -1)
                sent[worker, owner[target]].append((kind[-1], target, k))
            elif kind.startswith("RECV"):
                source = stage + (-1 if kind == "RECV_F" else 1)
                received[owner[source], worker].append((kind[-1], stage, k))
    assert sent == received


@pytest.mark.parametrize("matching", ["tag", "in_order"])
@pytest.mark.parametrize("seed", range(60))
def test_lowered_schedules_end_with_the_weights_of_one_process(matching: str, seed: int) -> None:
    schedule = random_schedule(seed, max_p=3, max_m=2, weights="flush")
    expected = weights_in_one_process(
        schedule.stages, schedule.microbatches, schedule.m, lambda stage, k: k // schedule.m
    )
    assert Machine(lower(schedule).workers, matching).outcomes() == {expected}


def test_lowering_twice_changes_nothing() -> None:
    lowered = lower(ps.gpipe(3, 4))
    assert lower(lowered) is lowered


def test_one_worker_needs_no_message() -> None:
    schedule = ps.gpipe(1, 4)
    assert lower(schedule) == schedule


def test_a_message_is_taken_early_where_its_link_has_it_before_the_one_that_is_needed() -> None:
    # Worker 0 computes 0F1 before 2F0, worker 1 needs them the other way round.
    rows = [
        [F(0, 0), F(0, 1), F(2, 0), B(2, 0), F(2, 1), B(2, 1), B(0, 0), B(0, 1)],
        [F(1, 0), F(3, 0), F(1, 1), F(3, 1), B(3, 0), B(1, 0), B(3, 1), B(1, 1)],
    ]
    schedule = Schedule.from_workers(lambda worker, p, m: rows[worker], p=2, m=2)
    row = [str(action) for action in lower(schedule).workers[1]]
    assert row[:8] == [
        "1RECV_F0",
        "1F0",
        "1SEND_F0",
        "1RECV_F1",
        "3RECV_F0",
        "3F0",
        "1F1",
        "1SEND_F1",
    ]


def test_an_input_gradient_is_sent_before_the_weight_half() -> None:
    halves = Schedule.from_workers(lambda w, p, m: [F(w, 0), I(w, 0), W(w, 0)], p=2, m=1)
    assert [str(action) for action in lower(halves).workers[1]] == [
        "1RECV_F0", "1F0", "1I0", "1SEND_B0", "1W0", "1U0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        [F(0, 0), F(0, 0), F(0, 1), B(0, 0), B(0, 1)],  # twice
        [F(0, 0), F(0, 1), F(0, 7), B(0, 0), B(0, 1)],  # out of range
        [F(0, 1), B(0, 0), B(0, 1)],  # missing
    ],
    ids=str,
)
def test_what_is_illegal_stays_for_the_check_to_name(row: list[Action]) -> None:
    schedule = Schedule.from_workers(
        lambda worker, p, m: [F(1, 0), F(1, 1), B(1, 0), B(1, 1)] if worker else row, p=2, m=2
    )
    with pytest.raises(ps.IllegalSchedule) as bare:
        ps.check(schedule)
    with pytest.raises(ps.IllegalSchedule) as lowered:
        ps.check(lower(schedule))
    assert (lowered.value.worker, lowered.value.action) == (bare.value.worker, bare.value.action)


def test_compute_only_undoes_a_schedule_that_came_lowered() -> None:
    lowered = lower(ps.one_f_one_b(3, 3))
    assert lowered.lowered
    assert not compute_only(lowered).lowered
    assert replace(lowered, workers=ps.one_f_one_b(3, 3).workers) == compute_only(lowered)
