"""Every kind of illegality is refused in one sentence that names worker, action and microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pipeschool as ps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Machine, names_it_all, random_schedule, weights_in_one_process
from pipeschool import Action, B, F, I, IllegalSchedule, Schedule, U, W
from pipeschool.checking import execution_order


def schedule_of(*rows: str, m: int = 2, batches: int = 1, weights: str = "flush") -> Schedule:
    """A schedule as written: actions with blanks between, updates and messages included."""
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    size = m if weights == "flush" else 1
    return Schedule("written", len(rows), m, actions, batches, weights, updates_every=size)


def refused(schedule: Schedule, **options: object) -> IllegalSchedule:
    with pytest.raises(IllegalSchedule) as caught:
        ps.check(schedule, **options)  # type: ignore[arg-type]
    return caught.value


GOOD = ("0F0 0F1 0B0 0B1 0U0", "1F0 1F1 1B0 1B1 1U0")
LOWERED = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
    "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1U0",
)


def test_check_returns_the_schedule_that_passes() -> None:
    for rows in (GOOD, LOWERED):
        schedule = schedule_of(*rows)
        assert ps.check(schedule) is schedule


ONE_ROW_WRONG = {
    "forward missing": (
        GOOD[0], "1F0 1B0 1B1 1U0", "1F1",
        "worker 1 never does 1F1 (forward of microbatch 1 on stage 1)",
    ),
    "backward missing": (
        GOOD[0], "1F0 1F1 1B1 1U0", "1B0",
        "worker 1 never does 1B0 (backward of microbatch 0 on stage 1)",
    ),
    "forward twice": (
        GOOD[0], "1F0 1F1 1F0 1B0 1B1 1U0", "1F0",
        "worker 1 does 1F0 (forward of microbatch 0 on stage 1) twice",
    ),
    "backward twice": (
        GOOD[0], "1F0 1F1 1B0 1B0 1B1 1U0", "1B0",
        "worker 1 does 1B0 (backward of microbatch 0 on stage 1) twice",
    ),
    "backward before forward": (
        GOOD[0], "1B0 1F0 1F1 1B1 1U0", "1B0",
        "worker 1 does 1B0 (backward of microbatch 0 on stage 1) before 1F0, which it needs",
    ),
    "microbatch out of range": (
        GOOD[0], "1F0 1F1 1F2 1B0 1B1 1B2 1U0", "1F2",
        "worker 1 lists 1F2 (forward of microbatch 2 on stage 1), but the last microbatch is 1",
    ),
    "stage on two workers": (
        GOOD[0], "1F0 1F1 1B0 0B1 1B1 1U0", "0B1",
        "worker 1 lists 0B1 (backward of microbatch 1 on stage 0), but stage 0 is on worker 0: "
        "every stage lives on one worker",
    ),
    "update missing": (
        GOOD[0], "1F0 1F1 1B0 1B1", "1U0",
        "worker 1 never does 1U0 (optimizer update number 0 on stage 1)",
    ),
    "update twice": (
        GOOD[0], GOOD[1] + " 1U0", "1U0",
        "worker 1 does 1U0 (optimizer update number 0 on stage 1) twice",
    ),
    "update too many": (
        GOOD[0], GOOD[1] + " 1U1", "1U1",
        "worker 1 does 1U1 (optimizer update number 1 on stage 1) with the gradients of 0 "
        "microbatches, but an update takes those of 2",
    ),
    "update with the wrong number": (
        GOOD[0], "1F0 1F1 1B0 1B1 1U1", "1U1",
        "worker 1 does 1U1 (optimizer update number 1 on stage 1) where update 0 is next",
    ),
    "update before the last backward": (
        GOOD[0], "1F0 1F1 1B0 1U0 1B1", "1U0",
        "worker 1 does 1U0 (optimizer update number 0 on stage 1) with the gradients of 1 "
        "microbatches, but an update takes those of 2",
    ),
    "whole backward as well as a half": (
        GOOD[0], "1F0 1F1 1B0 1I0 1B1 1U0", "1I0",
        "worker 1 does 1B0 (backward of microbatch 0 on stage 1) as well as its half 1I0",
    ),
    "weight half missing": (
        GOOD[0], "1F0 1F1 1I0 1B1 1U0", "1W0",
        "worker 1 never does 1W0 (weight gradient of microbatch 0 on stage 1)",
    ),
    "input half missing": (
        GOOD[0], "1F0 1F1 1W0 1B1 1U0", "1I0",
        "worker 1 never does 1I0 (input gradient of microbatch 0 on stage 1)",
    ),
    "weight half before input half": (
        GOOD[0], "1F0 1F1 1W0 1I0 1B1 1U0", "1W0",
        "worker 1 does 1W0 (weight gradient of microbatch 0 on stage 1) before 1I0, which it needs",
    ),
    "send missing": (
        LOWERED[0], LOWERED[1].replace("1SEND_B0 ", ""), "1SEND_B0",
        "worker 1 never does 1SEND_B0 (send of the gradients of microbatch 0 on stage 1)",
    ),
    "receive missing": (
        LOWERED[0], LOWERED[1].replace("1RECV_F1 ", ""), "1RECV_F1",
        "worker 1 never does 1RECV_F1 (receive of the activations of microbatch 1 on stage 1)",
    ),
    "send twice": (
        LOWERED[0], LOWERED[1].replace("1SEND_B0", "1SEND_B0 1SEND_B0"), "1SEND_B0",
        "worker 1 does 1SEND_B0 (send of the gradients of microbatch 0 on stage 1) twice",
    ),
    "send before its compute": (
        LOWERED[0], LOWERED[1].replace("1B0 1SEND_B0", "1SEND_B0 1B0"), "1SEND_B0",
        "worker 1 does 1SEND_B0 (send of the gradients of microbatch 0 on stage 1) before 1B0, "
        "which it needs",
    ),
    "receive after its compute": (
        LOWERED[0], LOWERED[1].replace("1RECV_F1 1F1", "1F1 1RECV_F1"), "1F1",
        "worker 1 does 1F1 (forward of microbatch 1 on stage 1) before 1RECV_F1, which it needs",
    ),
    "send to nobody": (
        LOWERED[0], LOWERED[1].replace("1F1", "1F1 1SEND_F1"), "1SEND_F1",
        "worker 1 does 1SEND_F1 (send of the activations of microbatch 1 on stage 1), but there "
        "is nobody at its other end",
    ),
    "receive from nobody": (
        LOWERED[0], LOWERED[1].replace("1B0", "1RECV_B0 1B0"), "1RECV_B0",
        "worker 1 does 1RECV_B0 (receive of the gradients of microbatch 0 on stage 1), but there "
        "is nobody at its other end",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "action", "says"), ONE_ROW_WRONG.values(), ids=ONE_ROW_WRONG
)
@pytest.mark.parametrize("matching", ["tag", "in_order"])
def test_what_is_wrong_in_a_row_is_named(
    first: str, second: str, action: str, says: str, matching: str
) -> None:
    error = refused(schedule_of(first, second), matching=matching)
    assert str(error) == says
    assert (error.worker, error.action) == (1, Action.parse(action))
    assert names_it_all(error)


def test_deadlock_names_who_waits_for_whom() -> None:
    # Worker 0 wants the gradient of 0 before it sends 1; worker 1 wants 1 before it turns back.
    error = refused(schedule_of("0F0 0B0 0F1 0B1 0U0", "1F0 1F1 1B0 1B1 1U0"))
    assert str(error) == (
        "deadlock: worker 0 waits at 0B0 (backward of microbatch 0 on stage 0) for 1B0 from "
        "worker 1; worker 1 waits at 1F1 (forward of microbatch 1 on stage 1) for 0F1 from worker 0"
    )
    assert (error.worker, error.action, error.microbatch) == (0, B(0, 0), 0)
    assert names_it_all(error)


def test_deadlock_of_a_lowered_schedule_names_the_messages() -> None:
    error = refused(
        schedule_of(
            "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1 0U0",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1U0",
        )
    )
    assert str(error).startswith("deadlock: worker 0 waits at 0RECV_B0 (receive of the gradients")
    assert "for 1SEND_B0 from worker 1; worker 1 waits at 1RECV_F1" in str(error)
    assert names_it_all(error)


@pytest.mark.parametrize(
    ("rows", "bystander"),
    [
        (("0F0 0B0 0F1 0B1 0U0", "1F0 1F1 1B0 1B1 1U0", "2F1 2F0 2B0 2B1 2U0"), 2),
        (("0F0 0F1 0B0 0B1 0U0", "1F0 1B0 1F1 1B1 1U0", "2F0 2F1 2B0 2B1 2U0"), 0),
    ],
)
def test_deadlock_leaves_out_those_who_wait_only_for_the_circle(
    rows: tuple[str, ...], bystander: int
) -> None:
    error = refused(schedule_of(*rows))
    assert str(error).count("waits") == 2
    assert f"worker {bystander}" not in str(error)
    assert error.worker != bystander
    assert names_it_all(error)


def test_a_split_backward_in_a_deadlock_is_called_by_its_half() -> None:
    error = refused(
        schedule_of("0F0 0B0 0F1 0B1 0U0", "1F0 1F1 1I0 1W0 1I1 1W1 1U0"),
    )
    assert "for 1I0 from worker 1" in str(error)


def test_wrong_pairing_names_the_message_that_comes_instead() -> None:
    rows = (
        "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1U0",
    )
    error = refused(schedule_of(*rows))
    assert str(error) == (
        "worker 1 would get the wrong tensor at 1RECV_F0 (receive of the activations of "
        "microbatch 0 on stage 1): the next message from worker 0 is 0SEND_F1, not 0SEND_F0"
    )
    assert (error.worker, error.action) == (1, Action("RECV_F", 1, 0))
    assert names_it_all(error)
    ps.check(schedule_of(*rows), matching="tag")


def test_two_batches_need_a_flush_between_them() -> None:
    good = "0F0 0B0 0U0 0F1 0B1 0U1"
    ps.check(schedule_of(good, m=1, batches=2))
    error = refused(schedule_of("0F0 0F1 0B0 0U0 0B1 0U1", m=1, batches=2))
    assert str(error) == (
        "worker 0 does 0F1 (forward of microbatch 1 on stage 0) before 0U0: a synchronous "
        "schedule ends each batch with a flush and an update"
    )
    assert names_it_all(error)


def test_an_update_does_not_mix_the_gradients_of_two_batches() -> None:
    error = refused(schedule_of("0F0 0F2 0B0 0B2 0U0 0F1 0F3 0B1 0B3 0U1", batches=2))
    assert (error.worker, error.action) == (0, F(0, 2))


def test_a_receive_may_run_ahead_of_an_update() -> None:
    ps.check(
        schedule_of(
            "0F0 0SEND_F0 0RECV_B0 0B0 0U0 0F1 0SEND_F1 0RECV_B1 0B1 0U1",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1U0 1F1 1B1 1SEND_B1 1U1",
            m=1,
            batches=2,
        )
    )


def test_asynchronous_updates_take_one_gradient_each() -> None:
    ps.check(schedule_of("0F0 0F1 0B0 0U0 0B1 0U1", weights="stash"))
    error = refused(schedule_of("0F0 0F1 0B0 0B1 0U0 0U1", weights="stash"))
    assert "0U0 (optimizer update number 0 on stage 0) with the gradients of 2" in str(error)
    assert names_it_all(error)


def test_neighbour_stages_on_one_worker_are_in_order_too() -> None:
    wrong = schedule_of("0F0 1F0 0B0 1B0 0U0 1U0", m=1)
    assert str(refused(wrong)) == (
        "worker 0 does 0B0 (backward of microbatch 0 on stage 0) before 1B0, which it needs"
    )
    wrong = schedule_of("1F0 0F0 1B0 0B0 0U0 1U0", m=1)
    assert str(refused(wrong)) == (
        "worker 0 does 1F0 (forward of microbatch 0 on stage 1) before 0F0, which it needs"
    )


def test_number_of_rows_must_be_p() -> None:
    schedule = replace(schedule_of(*GOOD), p=3)
    assert str(refused(schedule)) == "written has rows for 2 workers, but p is 3"


def test_a_worker_without_work_is_named() -> None:
    error = refused(schedule_of(*GOOD, ""))
    assert (str(error), error.worker) == ("worker 2 has nothing to do", 2)


@pytest.mark.parametrize("far", [2, 10**12])
def test_a_stage_that_nobody_has_is_named(far: int) -> None:
    row = f"{far}F0 {far}F1 {far}B0 {far}B1 {far}U0"
    assert str(refused(schedule_of(GOOD[0], row))) == "stage 1 is on no worker"


@pytest.mark.parametrize("action", [Action("X", 1, 0), Action("F", -1, 0)])
def test_actions_that_there_are_not_are_named(action: Action) -> None:
    schedule = schedule_of(*GOOD)
    broken = replace(schedule, workers=(schedule.workers[0], (*schedule.workers[1], action)))
    error = refused(broken)
    assert str(error).startswith(f"worker 1 lists {action}, but kinds are F, B, I, W, U,")
    assert (error.worker, error.action) == (1, action)


def test_a_negative_microbatch_is_named() -> None:
    schedule = schedule_of(*GOOD)
    error = refused(
        replace(schedule, workers=(schedule.workers[0], (*schedule.workers[1], F(1, -1))))
    )
    assert (error.worker, error.action) == (1, F(1, -1))
    assert names_it_all(error)


# Memory


@pytest.mark.parametrize(
    ("build", "cap"), [(ps.gpipe, 8), (ps.one_f_one_b, 4), (ps.naive, 1), (ps.pipedream, 4)]
)
def test_the_peak_fits_under_a_cap_as_high_and_not_under_a_lower_one(
    build: Callable[[int, int], Schedule], cap: int
) -> None:
    schedule = build(4, 8)
    ps.check(schedule, memory_cap=cap)
    error = refused(schedule, memory_cap=cap - 0.5)
    assert (error.worker, error.action) == (0, F(0, cap - 1))
    assert str(error) == (
        f"worker 0 holds the activations of {cap} microbatches at {F(0, cap - 1).describe()}, "
        f"and the cap is {cap - 0.5:g}"
    )
    assert names_it_all(error)


def test_a_chunk_counts_as_a_part_of_a_workers_activations() -> None:
    both = schedule_of("0F0 1F0 1B0 0B0 0U0 1U0", m=1)
    ps.check(both, memory_cap=1)
    assert "holds the activations of 1 microbatches at 1F0" in str(refused(both, memory_cap=0.5))


def test_activations_stay_until_the_weight_half() -> None:
    late = schedule_of("0F0 0I0 0F1 0W0 0I1 0W1 0U0")
    assert refused(late, memory_cap=1).action == F(0, 1)
    ps.check(schedule_of("0F0 0I0 0W0 0F1 0I1 0W1 0U0"), memory_cap=1)


def test_every_worker_may_have_a_cap_of_its_own() -> None:
    """1F1B holds p - s microbatches on worker s: 4, 3, 2, 1."""
    schedule = ps.one_f_one_b(4, 8)
    ps.check(schedule, memory_cap=[4, 3, 2, 1])
    ps.check(schedule, memory_cap=(math.inf, 3, 2.5, 1))
    error = refused(schedule, memory_cap=[4, 3, 1, 1])
    assert str(error) == (
        f"worker 2 holds the activations of 2 microbatches at {F(2, 1).describe()}, and the cap "
        "is 1"
    )
    assert (error.worker, error.action) == (2, F(2, 1))


def test_caps_may_be_an_array() -> None:
    numpy = pytest.importorskip("numpy")
    ps.check(ps.gpipe(2, 3), memory_cap=numpy.array([3, 3]))
    assert refused(ps.gpipe(2, 3), memory_cap=numpy.array([3, 2])).action == F(1, 2)


@pytest.mark.parametrize("caps", [[], [4], [4, 4, 4]])
def test_a_list_of_caps_has_one_for_each_worker(caps: list[int]) -> None:
    with pytest.raises(ValueError) as caught:
        ps.check(ps.gpipe(2, 2), memory_cap=caps)
    assert str(caught.value) == (
        f"memory_cap needs one number, or one per worker: 2, not {len(caps)}"
    )
    assert not isinstance(caught.value, IllegalSchedule)


@pytest.mark.parametrize("cap", ["4", float("nan"), -1, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_cap_that_is_no_number_is_refused(cap: object, several: bool) -> None:
    with pytest.raises(ValueError) as caught:
        ps.check(ps.gpipe(2, 2), memory_cap=[2, cap] if several else cap)  # type: ignore[arg-type]
    assert str(caught.value) == f"memory_cap must be a number, 0 or more, not {cap!r}"
    assert not isinstance(caught.value, IllegalSchedule)


def test_unknown_matching_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="one of in_order, tag, rendezvous, not 'rank'"):
        ps.check(ps.gpipe(2, 2), matching="rank")


# In general


seeds = st.integers(min_value=0, max_value=10**9)


@given(seed=seeds, data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_reordering_is_refused_exactly_where_it_changes_what_is_computed(
    seed: int, data: st.DataObject
) -> None:
    """Whatever order the actions of a worker are put in, compute and messages alike, the verdict
    is that of an exhaustive search. (Synchronous: there only one outcome is right.)"""
    right = random_schedule(seed, max_p=3, max_chunks=2, max_m=2, weights="flush")
    schedule = ps.lower(right) if data.draw(st.booleans(), "lowered") else right
    rows = [list(row) for row in schedule.workers]
    for _ in range(data.draw(st.integers(1, 3), "moves")):
        row = data.draw(st.sampled_from(rows), "row")
        action = row.pop(data.draw(st.integers(0, len(row) - 1), "from"))
        row.insert(data.draw(st.integers(0, len(row)), "to"), action)
    mutated = replace(schedule, workers=tuple(map(tuple, rows)))
    # A compute-only schedule is judged by what it becomes when its messages are added.
    for matching in ("tag", "in_order"):
        outcomes = Machine(ps.lower(mutated).workers, matching).outcomes()
        expected = weights_in_one_process(
            right.stages, right.microbatches, right.m, lambda stage, k: k // right.m
        )
        try:
            ps.check(mutated, matching=matching)
        except IllegalSchedule as error:
            assert outcomes != {expected}, str(error)
            assert names_it_all(error)
        else:
            assert outcomes == {expected}


@given(seed=seeds)
@settings(max_examples=100, deadline=None)
def test_the_execution_order_holds_every_action_after_what_it_needs(seed: int) -> None:
    schedule = random_schedule(seed)
    place = {pair: n for n, pair in enumerate(execution_order(schedule))}
    assert len(place) == sum(map(len, schedule.workers))
    at = {action: n for (_, action), n in place.items()}
    for worker, row in enumerate(schedule.workers):
        order = [place[worker, action] for action in row]
        assert order == sorted(order)
    for action, n in at.items():
        kind, stage, k = action
        needs = []
        if kind == "F":
            needs = [F(stage - 1, k)]
        elif kind in ("B", "I"):
            needs = [B(stage + 1, k), I(stage + 1, k), F(stage, k)]
        elif kind == "W":
            needs = [I(stage, k)]
        assert all(at[need] < n for need in needs if need in at)


def test_an_error_about_an_update_has_no_microbatch() -> None:
    assert IllegalSchedule("text", 0, U(0, 3)).microbatch is None
    assert IllegalSchedule("text", 0, W(0, 3)).microbatch == 3
    assert IllegalSchedule("text").microbatch is None
