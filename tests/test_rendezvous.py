"""Sends that wait for their receivers: what `check` passes, what `lower` fuses, what they cost.

The judge searches all states that the workers could get into; see `Meetings` in `oracles`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pipeschool as ps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    DEADLOCK,
    WRONG_TENSOR,
    Meetings,
    Rates,
    names_it_all,
    paths_through_meetings,
    random_schedule,
    scatter_messages,
)
from pipeschool import Action, B, Cost, F, Schedule
from pipeschool.checking import checked_order
from pipeschool.formats import to_csv
from pipeschool.lowering import compute_only
from test_simulator import random_cost

seeds = st.integers(min_value=0, max_value=10**9)

FACING = [  # 1F1B of two workers and two microbatches
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1U0",
]


def written(rows: list[str], m: int = 2, **more: object) -> Schedule:
    workers = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("written", len(rows), m, workers, **more)


def verdict(schedule: Schedule) -> str:
    """What `check` says, in the words of the judge; its sentence must be short, and name all."""
    try:
        ps.check(schedule, matching="rendezvous")
    except ps.IllegalSchedule as error:
        assert names_it_all(error), error
        assert len(str(error)) < 300, error
        return DEADLOCK if str(error).startswith("deadlock: ") else WRONG_TENSOR
    return "through"


# --- what is legal -------------------------------------------------------------------------------


def test_facing_sends_that_are_not_fused_are_refused_and_fused_ones_are_not() -> None:
    with pytest.raises(ps.IllegalSchedule) as caught:
        ps.check(written(FACING), matching="rendezvous")
    assert str(caught.value) == (
        "deadlock: worker 0 waits at 0SEND_F1 (send of the activations of microbatch 1 on stage 0) "
        "for worker 1 to receive it; worker 1 waits at 1SEND_B0 (send of the gradients of "
        "microbatch 0 on stage 1) for worker 0 to receive it"
    )
    assert (caught.value.worker, caught.value.action) == (0, Action("SEND_F", 0, 1))
    ps.check(written(FACING))  # where sends do not wait
    ps.check(written(FACING, fused=True), matching="rendezvous")


def test_one_after_the_other_is_right_where_both_ends_agree_on_the_order() -> None:
    swapped = [FACING[0], FACING[1].replace("1SEND_B0 1RECV_F1", "1RECV_F1 1SEND_B0")]
    ps.check(written(swapped), matching="rendezvous")


def test_a_receive_that_waits_is_named_with_its_send() -> None:
    rows = [
        "0F0 0RECV_B0 0SEND_F0 0B0 0U0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1U0",
    ]
    with pytest.raises(ps.IllegalSchedule, match=r"^deadlock: worker 0 waits at 0RECV_B0 .* for "
                       r"1SEND_B0 from worker 1; worker 1 waits at 1RECV_F0 .* for 0SEND_F0 from "
                       r"worker 0$"):  # fmt: skip
        ps.check(written(rows, m=1), matching="rendezvous")


def test_of_a_large_circle_the_first_few_are_named() -> None:
    with pytest.raises(ps.IllegalSchedule) as caught:
        ps.check(ps.lower(ps.looped_bfs(8, 16, v=2)), matching="rendezvous")
    assert str(caught.value) == (
        "deadlock: worker 0 waits at 0SEND_F7 (send of the activations of microbatch 7 on stage 0) "
        "for worker 1 to receive it; worker 1 waits at 1SEND_F6 for worker 2 to receive it; worker "
        "2 waits at 2SEND_F5 for worker 3 to receive it; and so on, 8 workers in a circle"
    )


def test_messages_in_another_order_at_both_ends_are_the_wrong_tensors() -> None:
    rows = [
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1U0",
    ]
    for fused in (False, True):
        with pytest.raises(ps.IllegalSchedule, match="wrong tensor at 1RECV_F1 .*0SEND_F0, not"):
            ps.check(written(rows, fused=fused), matching="rendezvous")


def test_a_schedule_without_its_messages_is_to_be_lowered_first() -> None:
    with pytest.raises(ValueError, match="gpipe has none yet: give lower.schedule, fuse=True."):
        ps.check(ps.gpipe(2, 2), matching="rendezvous")
    ps.check(ps.gpipe(1, 2), matching="rendezvous")  # needs none


def random_lowered(seed: int) -> Schedule:
    """Lowered by need, by time, or with its messages anywhere; then perhaps a few of one row, or a
    message and a compute, swapped; fused or not."""
    rng = random.Random(seed)
    schedule = random_schedule(seed, max_p=3, max_m=3)
    lowered = rng.choice(
        [ps.lower, lambda s: ps.lower(s, fuse=True), lambda s: scatter_messages(s, seed)]
    )(schedule)
    rows = [list(row) for row in lowered.workers]
    for _ in range(rng.choice([0, 1, 2])):
        row = rng.choice(rows)
        places = [n for n in range(len(row) - 1) if row[n].is_message or row[n + 1].is_message]
        if places:
            n = rng.choice(places)
            row[n], row[n + 1] = row[n + 1], row[n]
    workers = tuple(map(tuple, rows))
    return replace(lowered, workers=workers, fused=rng.random() < 0.5)


def agree(numbers: range) -> dict[str, int]:
    """Judge and `check` say the same of random schedules; how often each verdict came."""
    counts = {"through": 0, DEADLOCK: 0, WRONG_TENSOR: 0}
    for seed in numbers:
        schedule = random_lowered(seed)
        try:
            ps.check(schedule, matching="tag")
        except ps.IllegalSchedule:
            continue  # wrong without any rendezvous, as other tests have it
        if not schedule.lowered:
            continue
        outcomes = Meetings(schedule).outcomes()
        said = verdict(schedule)
        # Where two do not match, some may also be stuck before they come to it.
        assert said in outcomes, f"seed {seed}: {outcomes}, not {said}\n{schedule}"
        assert len(outcomes) == 1 or WRONG_TENSOR in outcomes
        assert "through" not in outcomes or outcomes == {"through"}
        counts[said] += 1
        if said == "through":
            ps.check(schedule)
    return counts


def test_judge_and_check_agree_on_random_schedules() -> None:
    counts = agree(range(400))
    assert min(counts.values()) > 5, counts


@pytest.mark.exhaustive
def test_judge_and_check_agree_on_thousands_of_random_schedules() -> None:
    counts = agree(range(400, 8000))
    assert min(counts.values()) > 100, counts


@given(seed=seeds)
@settings(max_examples=100, deadline=None)
def test_the_order_of_a_rendezvous_has_every_action_once_and_sends_before_their_receives(
    seed: int,
) -> None:
    schedule = ps.lower(random_schedule(seed), fuse=True)
    order = list(checked_order(schedule, "rendezvous"))
    for worker, row in enumerate(schedule.workers):
        assert sorted(a for w, a in order if w == worker) == sorted(row)
    for (_, action), (_, after) in zip(order, order[1:], strict=False):
        if action.kind.startswith("SEND"):
            assert after.kind == f"RECV_{action.kind[-1]}"
            assert after.microbatch == action.microbatch


# --- lower(fuse=True) ----------------------------------------------------------------------------


def families(most_p: int, sizes_m: range) -> Iterator[Schedule]:
    """Every builder at every size that it has."""
    for name in ps.SCHEDULES:
        for p in range(2, most_p + 1):
            for m in sizes_m:
                for v in (1, 2, 3):
                    for batches in (1, 2):
                        try:
                            yield ps.check(ps.build(name, p, m, batches, v))
                        except ValueError:
                            continue  # it has no such size
    for p in range(1, most_p // 2 + 1):
        for m in sizes_m:
            for schedule in (ps.one_f_one_b(p, m), ps.gpipe(p, m), ps.zb_h1(p, m)):
                yield ps.replicate(schedule, 2)
    for replicas in ((1, 2), (2, 1), (1, 3, 1), (2, 2), (1, 2, 4), (3, 1, 2)):
        for m in (12, 24):
            for weights in ("flush", "stash"):
                if sum(replicas) <= most_p:
                    yield ps.round_robin(replicas, m, weights=weights)


def assert_right_where_sends_wait(schedule: Schedule) -> None:
    fused = ps.lower(schedule, fuse=True)
    for matching in ("rendezvous", "in_order", "tag"):
        ps.check(fused, matching=matching)
    assert compute_only(fused) == schedule


def test_every_family_is_right_where_sends_wait() -> None:
    seen = set()
    for schedule in families(4, range(1, 7, 2)):
        assert_right_where_sends_wait(schedule)
        seen.add(schedule.name)
    assert seen >= {*ps.SCHEDULES, "round_robin", "one_f_one_b x 2"} - {
        "chimera"
    }  # m is even there
    for m in (4, 8):  # chimera wants an even number
        assert_right_where_sends_wait(ps.chimera(4, m))


@pytest.mark.exhaustive
def test_every_family_of_any_size_is_right_where_sends_wait() -> None:
    for schedule in families(8, range(1, 17)):
        assert_right_where_sends_wait(schedule)


@given(seed=seeds)
@settings(max_examples=200, deadline=None)
def test_every_legal_schedule_is_right_where_sends_wait(seed: int) -> None:
    assert_right_where_sends_wait(random_schedule(seed))


def test_one_f_one_b_fused_as_a_reader_expects() -> None:
    fused = ps.lower(ps.one_f_one_b(2, 3), fuse=True)
    assert fused.fused
    groups = [[" ".join(map(str, step)) for step in fused.steps_of(w)] for w in range(2)]
    assert groups == [
        [
            "0F0", "0SEND_F0", "0F1", "0SEND_F1 0RECV_B0", "0B0", "0F2",
            "0SEND_F2 0RECV_B1", "0B1", "0RECV_B2", "0B2", "0U0",
        ],
        [
            "1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1 1RECV_F2",
            "1F2", "1B2", "1SEND_B2", "1U0",
        ],
    ]  # fmt: skip


def test_messages_that_stand_there_already_are_fused_where_they_are_sends_first() -> None:
    rows = [FACING[0].replace("0SEND_F1 0RECV_B0", "0RECV_B0 0SEND_F1"), FACING[1]]
    fused = ps.lower(written(rows), fuse=True)
    assert fused == written(FACING, fused=True)
    assert ps.lower(fused, fuse=True) == fused == ps.lower(fused)


def test_what_is_illegal_cannot_be_fused() -> None:
    rows = [[F(0, 0), B(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]]
    schedule = Schedule.from_workers(lambda worker, p, m: rows[worker], p=2, m=1)
    with pytest.raises(ps.IllegalSchedule, match="worker 0 does 0B0 .* twice"):
        ps.lower(schedule, fuse=True)


def test_one_worker_has_nothing_to_fuse() -> None:
    assert ps.lower(ps.gpipe(1, 2), fuse=True) == ps.gpipe(1, 2)


def test_steps_are_groups_only_where_they_are_fused() -> None:
    alone = written(FACING)
    assert [len(step) for step in alone.steps_of(0)] == [1] * 9
    together = written(FACING, fused=True)
    assert [len(step) for step in together.steps_of(0)] == [1, 1, 1, 2, 1, 1, 1, 1]
    assert str(together).startswith("written: p=2, m=2, fused\n")
    with pytest.raises(ValueError, match="fused must be True or False, not 1"):
        written(FACING, fused=1)


def test_a_schedule_file_cannot_say_what_is_fused() -> None:
    with pytest.raises(ValueError, match="cannot say which messages are fused: .* without fuse"):
        to_csv(ps.lower(ps.gpipe(2, 2), fuse=True))


# --- what waiting costs --------------------------------------------------------------------------


def everything(trace: ps.Trace) -> dict[tuple[int, Action], tuple[float, float]]:
    return {(s.worker, s.action): (s.start, s.end) for s in (*trace.spans, *trace.messages)}


def test_a_send_takes_its_worker_until_the_receiver_has_it() -> None:
    # Worker 1 computes for 6 seconds before it receives the second message.
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1U0",
    ]
    trace = ps.simulate(
        written(rows), Cost(forward=[1, 6], backward=2, comm=1), matching="rendezvous"
    )
    found = {str(action): times for (_, action), times in everything(trace).items()}
    assert found["0F0"] == (0, 1) and found["0SEND_F0"] == (1, 2)
    assert found["1RECV_F0"] == (0, 2) and found["1F0"] == (2, 8)
    assert found["0F1"] == (2, 3) and found["0SEND_F1"] == (3, 9)
    assert found["1RECV_F1"] == (8, 9) and found["1F1"] == (9, 15)
    assert found["1B0"] == (15, 17) and found["1SEND_B0"] == (17, 18)
    assert found["0RECV_B0"] == (9, 18) and found["0B0"] == (18, 20)
    assert found["1B1"] == (18, 20) and found["1SEND_B1"] == (20, 21)
    assert found["0RECV_B1"] == (20, 21) and found["0B1"] == (21, 23)
    assert trace.makespan == 23


def test_a_receive_posted_early_holds_up_what_comes_after_it() -> None:
    # Worker 0 takes 10 seconds to a forward. Worker 1 could do 1B0 meanwhile, at 11.
    late = "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1 1U0"
    early = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1U0"
    cost, starts = Cost(forward=[10, 1], backward=1), []
    for row in (late, early):
        schedule = written([FACING[0], row])
        trace = ps.simulate(schedule, cost, matching="rendezvous")
        starts.append({str(span.action): span.start for span in trace.spans}["1B0"])
        assert ps.simulate(schedule, cost) == ps.simulate(compute_only(schedule), cost)
    assert starts == [11, 20]


def test_messages_of_a_group_go_at_the_same_time_and_end_together() -> None:
    cost = Cost(forward=1, backward=1, comm=3, latency=0.5)
    found = {
        str(action): times
        for (_, action), times in everything(
            ps.simulate(written(FACING, fused=True), cost, matching="rendezvous")
        ).items()
    }
    assert found["0F1"] == (4.5, 5.5) and found["1B0"] == (5.5, 6.5)
    assert found["0SEND_F1"] == (5.5, 10) and found["0RECV_B0"] == (5.5, 10)
    assert found["1SEND_B0"] == (6.5, 10) and found["1RECV_F1"] == (6.5, 10)
    assert found["0B0"] == (10, 11) == found["1F1"]


def test_messages_of_one_link_follow_each_other_in_a_group() -> None:
    rows = [
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1 0U0",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1 1U0",
    ]
    trace = ps.simulate(written(rows, fused=True), Cost(comm=3), matching="rendezvous")
    ends = {str(span.action): span.end for span in trace.messages}
    assert (ends["0SEND_F0"], ends["0SEND_F1"]) == (5, 8)
    assert {str(span.action): span.start for span in trace.spans}["1F0"] == 8


@given(seed=seeds)
@settings(max_examples=300, deadline=None)
def test_times_are_the_longest_paths_of_a_graph(seed: int) -> None:
    schedule = random_lowered(seed)
    cost, rates = random_cost(schedule, seed)
    try:
        trace = ps.simulate(schedule, cost, matching="rendezvous")
    except ValueError:
        return
    assert everything(trace) == paths_through_meetings(schedule, rates)


@pytest.mark.parametrize("weights", ["flush", "stash"])
def test_workers_that_take_turns_cost_what_the_graph_says(weights: str) -> None:
    schedule = ps.lower(ps.round_robin((1, 2, 1), 4, weights=weights), fuse=True)
    rates = Rates(
        {"F": [1, 4, 1], "B": [2, 8, 2], "U": [0.5, 1, 2]}, [1] * 4, [0.25, 0.5, 0.0], 0.125
    )
    cost = Cost(
        forward=[1, 4, 1], backward=[2, 8, 2], update=[0.5, 1, 2], latency=0.125,
        message_bytes=[0.25, 0.5, 0], bandwidth=1,
    )  # fmt: skip
    trace = ps.simulate(schedule, cost, matching="rendezvous")
    assert everything(trace) == paths_through_meetings(schedule, rates)


@pytest.mark.parametrize("name", [name for name in ps.SCHEDULES if name != "chimera"])
def test_with_free_messages_waiting_costs_little(name: str) -> None:
    """Both ends come to a message at about the same time: that is what the places are chosen for.
    Where receives stand just before they are needed, eager 1F1B takes twice as long."""
    schedule = ps.build(name, 4, 8)
    fused = ps.simulate(ps.lower(schedule, fuse=True), matching="rendezvous")
    assert fused.makespan <= ps.simulate(schedule).makespan * 1.16


def test_the_bytes_of_what_is_handed_on_stay_with_the_compute_and_with_the_message() -> None:
    cost = Cost(message_bytes=[8, 16, 0], bandwidth=8)
    schedule = ps.lower(ps.gpipe(3, 1), fuse=True)
    waits, travels = (ps.simulate(schedule, cost, matching=m) for m in ("rendezvous", "in_order"))
    sizes = [{s.action: s.bytes for s in trace.spans} for trace in (waits, travels)]
    assert sizes[0] == sizes[1]
    assert {str(s.action): s.bytes for s in waits.messages} == {
        "0SEND_F0": 8, "1RECV_F0": 8, "1SEND_F0": 16, "2RECV_F0": 16,
        "2SEND_B0": 16, "1RECV_B0": 16, "1SEND_B0": 8, "0RECV_B0": 8,
    }  # fmt: skip
    assert travels.messages == ()


def test_requests_that_arrive_later_are_waited_for() -> None:
    schedule = ps.lower(ps.forward_only(2, 2), fuse=True)
    trace = ps.simulate(schedule, Cost(comm=1), release=[0, 5], matching="rendezvous")
    assert {str(s.action): s.start for s in trace.spans} == {"0F0": 0, "1F0": 2, "0F1": 5, "1F1": 7}
