"""What an action needs and hands on: by hand for small schedules, and as rows and checks say."""

from __future__ import annotations

import pipeschool as ps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import random_schedule
from pipeschool import Action, B, F, Schedule
from pipeschool.checking import checked_order
from pipeschool.dependencies import (
    Channel,
    consumer,
    handovers,
    hands_on,
    message_of,
    needs,
    needs_table,
    peer_of,
    sender_of,
)

schedules = st.integers(min_value=0, max_value=10**9).map(random_schedule)
many_schedules = settings(max_examples=150, deadline=None)

LINE = ps.gpipe(3, 2)
LOWERED = ps.lower(LINE)
SPLIT = ps.zb_h1(2, 2)
TWO_CHUNKS = ps.lower(ps.zb_v(2, 2))  # stages 1 and 2 are both on worker 1
TURNS = ps.lower(ps.round_robin([1, 2], 2))  # stage 1: microbatch 0 on worker 1, 1 on worker 2
INFERENCE = ps.forward_only(2, 2)


def texts(actions: list[Action]) -> str:
    return " ".join(map(str, actions))


@pytest.mark.parametrize(
    ("schedule", "action", "needed", "users"),
    [
        (LINE, "0F1", "", "1F1 0B1"),
        (LINE, "1F1", "0F1", "2F1 1B1"),
        (LINE, "2F1", "1F1", "2B1"),
        (LINE, "2B1", "2F1", "1B1"),
        (LINE, "0B1", "0F1 1B1", ""),
        (LINE, "1U0", "", ""),
        (LOWERED, "0F1", "", "0SEND_F1 0B1"),
        (LOWERED, "0SEND_F1", "0F1", "1RECV_F1"),
        (LOWERED, "1RECV_F1", "0SEND_F1", "1F1"),
        (LOWERED, "1F1", "1RECV_F1", "1SEND_F1 1B1"),
        (LOWERED, "1B1", "1F1 1RECV_B1", "1SEND_B1"),
        (LOWERED, "1SEND_B1", "1B1", "0RECV_B1"),
        (LOWERED, "0RECV_B1", "1SEND_B1", "0B1"),
        (SPLIT, "0F0", "", "1F0 0I0"),
        (SPLIT, "1F0", "0F0", "1I0"),
        (SPLIT, "1I0", "1F0", "0I0 1W0"),
        (SPLIT, "0I0", "0F0 1I0", "0W0"),
        (SPLIT, "0W0", "0I0", ""),
        (TWO_CHUNKS, "1F0", "1RECV_F0", "2F0 1I0"),
        (TWO_CHUNKS, "2F0", "1F0", "2SEND_F0 2I0"),
        (TWO_CHUNKS, "1I0", "1F0 2I0", "1SEND_B0 1W0"),
        (TWO_CHUNKS, "2RECV_B0", "3SEND_B0", "2I0"),
        (TURNS, "0F1", "", "0SEND_F1 0B1"),
        (INFERENCE, "0F1", "", "1F1"),
        (INFERENCE, "1F1", "0F1", ""),
    ],
)
def test_what_an_action_needs_and_who_uses_its_results(
    schedule: Schedule, action: str, needed: str, users: str
) -> None:
    assert texts(needs(Action.parse(action), schedule)) == needed
    assert texts(hands_on(Action.parse(action), schedule)) == users


def test_a_backward_that_is_whole_here_and_split_there_is_named_as_it_is_listed() -> None:
    rows = [[F(0, 0), B(0, 0)], [F(1, 0), ps.I(1, 0), ps.W(1, 0)]]
    schedule = Schedule.from_workers(lambda worker, p, m: rows[worker], p=2, m=1)
    assert texts(needs(B(0, 0), schedule)) == "0F0 1I0"
    assert texts(hands_on(ps.I(1, 0), schedule)) == "0B0 1W0"


@pytest.mark.parametrize("lowered", [False, True])
@many_schedules
@given(schedule=schedules)
def test_needs_and_hands_on_are_two_sides_of_one_thing(schedule: Schedule, lowered: bool) -> None:
    schedule = ps.lower(schedule) if lowered else schedule
    listed = [action for row in schedule.workers for action in row]
    needed = {(need, action) for action in listed for need in needs(action, schedule)}
    used = {(action, user) for action in listed for user in hands_on(action, schedule)}
    assert needed == used
    assert {action for pair in needed for action in pair} <= set(listed)


@pytest.mark.parametrize("lowered", [False, True])
@many_schedules
@given(schedule=schedules)
def test_needs_are_done_first_and_in_their_order(schedule: Schedule, lowered: bool) -> None:
    schedule = ps.lower(schedule) if lowered else schedule
    place = {action: n for n, (_, action) in enumerate(checked_order(schedule))}
    for action, mine in place.items():
        places = [place[need] for need in needs(action, schedule)]
        assert [*places, mine] == sorted([*places, mine])


@many_schedules
@given(schedule=schedules)
def test_only_a_receive_needs_another_worker_in_a_lowered_schedule(schedule: Schedule) -> None:
    lowered = ps.lower(schedule)
    where = {a: worker for worker, row in enumerate(lowered.workers) for a in row if a.kind != "U"}
    for action, worker in where.items():
        others = {where[need] for need in needs(action, lowered)} - {worker}
        assert bool(others) == action.kind.startswith("RECV")
        if action.is_message:
            assert peer_of(action, lowered) != worker


@many_schedules
@given(schedule=schedules)
def test_the_tables_say_the_same(schedule: Schedule) -> None:
    for form in (schedule, ps.lower(schedule)):
        table = needs_table(form)
        for action in {a for row in form.workers for a in row if a.kind != "U"}:
            kind, stage, microbatch = action
            found = table[kind, stage][microbatch % form.period]
            as_b = {"I": "B"} if kind != "W" else {}
            assert found == [(as_b.get(n.kind, n.kind), n.stage) for n in needs(action, form)]


@many_schedules
@given(schedule=schedules)
def test_every_handover_is_a_message_of_the_lowered_schedule(schedule: Schedule) -> None:
    lowered = ps.lower(schedule)
    where = {a: worker for worker, row in enumerate(lowered.workers) for a in row}
    table = handovers(schedule)
    assert table == handovers(lowered)
    for worker, row in enumerate(schedule.workers):
        for action in row:
            turns = table.get((action.kind, action.stage), [None] * schedule.period)
            found = turns[action.microbatch % schedule.period]
            if found is None:
                assert Action(f"SEND_{action.kind[-1]}", *action[1:]) not in where
                continue
            letter, stage, channel = found
            send = Action(f"SEND_{letter}", action.stage, action.microbatch)
            receive = Action(f"RECV_{letter}", stage, action.microbatch)
            assert where[send] == channel.source == worker
            assert where[receive] == channel.target
            assert consumer(action, lowered) == send
            assert consumer(send, lowered) == message_of(send) == message_of(receive) == receive
            assert sender_of(receive) == send
            assert peer_of(send, schedule) == channel.target
            assert peer_of(receive, schedule) == channel.source


def test_workers_that_take_turns_have_channels_of_their_own() -> None:
    assert [h and h.channel for h in handovers(TURNS)["F", 0]] == [Channel(0, 1), Channel(0, 2)]
    assert [h and h.channel for h in handovers(TURNS)["B", 1]] == [Channel(1, 0), Channel(2, 0)]


def test_one_worker_hands_on_no_message() -> None:
    assert handovers(ps.gpipe(1, 4)) == {}
    assert texts(hands_on(F(0, 2), ps.gpipe(1, 4))) == "0B2"
