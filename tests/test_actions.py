"""Actions and schedules as plain data: their text, their numbers, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle

import pipeschool as ps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import owner_of, random_schedule
from pipeschool import Action, B, F, I, Schedule, U, W
from pipeschool.actions import KINDS, peak_in_flight, with_updates

seeds = st.integers(min_value=0, max_value=10**9)
actions = st.builds(Action, st.sampled_from(KINDS), st.integers(0, 999), st.integers(0, 9999))


@given(action=actions)
def test_the_text_of_an_action_names_it(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action}\n") == action


def test_the_text_is_that_of_pytorchs_schedule_files() -> None:
    assert [str(kind(2, 5)) for kind in (F, B, I, W, U)] == ["2F5", "2B5", "2I5", "2W5", "2U5"]
    assert str(Action("SEND_F", 0, 13)) == "0SEND_F13"


@pytest.mark.parametrize(
    "text", ["", "F", "2F", "F5", "2X5", "2f5", "-1F0", "2F-5", "2F5 2F6", "2 F5"]
)
def test_text_that_names_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Action.parse(text)
    assert str(caught.value).startswith(f"{text!r} is no action: write stage, kind and microbatch")
    assert all(kind in str(caught.value) for kind in KINDS)


def test_actions_in_words() -> None:
    assert F(2, 5).describe() == "2F5 (forward of microbatch 5 on stage 2)"
    assert U(1, 3).describe() == "1U3 (optimizer update number 3 on stage 1)"
    for kind in KINDS:
        assert "stage 1" in Action(kind, 1, 0).describe()


def test_only_sends_and_receives_are_messages() -> None:
    assert [kind for kind in KINDS if Action(kind, 0, 0).is_message] == [
        "SEND_F", "RECV_F", "SEND_B", "RECV_B",
    ]  # fmt: skip


# Schedules


def last_first(worker: int, p: int, m: int) -> list[Action]:
    """Some order of one's own."""
    forwards = [F(worker, k) for k in range(m)]
    return forwards + [B(worker, k) for k in reversed(range(m))]


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.workers]


def test_from_workers_asks_for_every_row_and_adds_the_updates() -> None:
    schedule = Schedule.from_workers(last_first, p=2, m=2)
    assert rows(schedule) == ["0F0 0F1 0B1 0B0 0U0", "1F0 1F1 1B1 1B0 1U0"]
    assert (schedule.name, schedule.p, schedule.m, schedule.batches) == ("last_first", 2, 2, 1)
    assert schedule.synchronous
    assert schedule.updates_every == 2


def test_from_workers_repeats_a_synchronous_order_batch_after_batch() -> None:
    schedule = Schedule.from_workers(last_first, p=1, m=2, batches=3)
    assert rows(schedule) == ["0F0 0F1 0B1 0B0 0U0 0F2 0F3 0B3 0B2 0U1 0F4 0F5 0B5 0B4 0U2"]
    assert (schedule.m, schedule.batches, schedule.microbatches) == (2, 3, 6)


def test_from_workers_asks_an_asynchronous_order_once_for_the_whole_stream() -> None:
    asked = []

    def order(worker: int, p: int, m: int) -> list[Action]:
        asked.append((worker, p, m))
        return [kind(worker, k) for k in range(m) for kind in (F, B)]

    schedule = Schedule.from_workers(order, p=2, m=2, batches=2, weights="stash")
    assert asked == [(0, 2, 4), (1, 2, 4)]
    assert rows(schedule)[0] == "0F0 0B0 0U0 0F1 0B1 0U1 0F2 0B2 0U2 0F3 0B3 0U3"
    assert not schedule.synchronous
    assert schedule.updates_every == 1


def test_from_workers_leaves_updates_of_ones_own_alone() -> None:
    own = Schedule.from_workers(lambda w, p, m: [F(w, 0), B(w, 0), U(w, 0)], p=2, m=1)
    assert rows(own) == ["0F0 0B0 0U0", "1F0 1B0 1U0"]


def test_a_schedule_is_named_after_its_order_or_as_told() -> None:
    assert Schedule.from_workers(last_first, 1, 1, name="mine").name == "mine"
    assert Schedule.from_workers(partial(last_first), 1, 1).name == "my order"


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "broken returned None for worker 0: it must return a list of actions"),
        ("0F0", "broken returned '0F0' for worker 0"),
        (F(0, 0), "broken returned Action(kind='F', stage=0, microbatch=0) for worker 0"),
        (5, "broken returned 5 for worker 0"),
        ([F], "broken listed <function F at "),
        (["0F0"], "broken listed '0F0' for worker 0: it must return a list of actions"),
        ([("F", 0, 0)], "broken listed ('F', 0, 0) for worker 0"),
        ([Action("X", 0, 0)], "broken listed kind 'X'; allowed are F, B, I, W, U, SEND_F"),
        ([F(-1, 0)], "the stage of -1F0 must be at least 0, not -1"),
        ([F(0, -1)], "the microbatch of 0F-1 must be at least 0, not -1"),
        ([F(0, 0.5)], "the microbatch of 0F0.5 must be a whole number of at least 0, not 0.5"),  # type: ignore[arg-type]
        ([F(True, 0)], "the stage of TrueF0 must be a whole number of at least 0, not True"),
    ],
)
def test_an_order_that_returns_something_else_is_told_what_to_return(
    returned: object, says: str
) -> None:
    def broken(worker: int, p: int, m: int) -> object:
        return returned

    with pytest.raises(ValueError) as caught:
        Schedule.from_workers(broken, p=2, m=1)  # type: ignore[arg-type]
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def fails(worker: int, p: int, m: int) -> list[Action]:
    return [F(1 // (1 - worker), 0), B(worker, 0)]


def never_ends(worker: int, p: int, m: int) -> Iterator[Action]:
    return (F(worker, k) for k in count())


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (
            fails,
            "fails failed for worker 1 of p=2, m=3 with ZeroDivisionError: integer division or "
            "modulo by zero: order(worker, p, m) must list the actions of that worker",
        ),
        (
            lambda worker: [],
            "<lambda> failed for worker 0 of p=2, m=3 with TypeError: <lambda>() takes 1 "
            "positional argument but 3 were given: order(worker, p, m) must list the actions of "
            "that worker",
        ),
        (
            never_ends,
            "never_ends returned more than 30000 actions for worker 0 and 3 microbatches: "
            "it must return a list that comes to an end",
        ),
        (lambda w, p, m: {F(w, 0), B(w, 0)}, "<lambda> returned {Action("),
        (
            [[F(0, 0)]],
            "order must be a function order(worker, p, m) that lists the actions of a worker, not "
            "[[Action(kind='F', stage=0, microbatch=0)]]",
        ),
    ],
)
def test_an_order_that_cannot_be_asked_is_told_what_it_must_do(order: object, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        Schedule.from_workers(order, p=2, m=3)  # type: ignore[arg-type]
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_the_error_of_an_order_is_kept_as_the_cause() -> None:
    with pytest.raises(ValueError) as caught:
        Schedule.from_workers(fails, p=2, m=1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_order_that_is_not_written_yet_says_so() -> None:
    def stub(worker: int, p: int, m: int) -> list[Action]:
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        Schedule.from_workers(stub, p=2, m=1)


def test_an_order_may_be_a_generator() -> None:
    def order(worker: int, p: int, m: int) -> Iterator[Action]:
        yield F(worker, 0)
        yield B(worker, 0)

    assert rows(Schedule.from_workers(order, p=2, m=1)) == ["0F0 0B0 0U0", "1F0 1B0 1U0"]


GOOD_ROW = [F(0, 0), B(0, 0), U(0, 0)]
ROW = "a row must be a list of actions such as [ps.F(0, 0), ps.B(0, 0)]"
ROWS = "such as [[ps.F(0, 0), ps.B(0, 0)]]"
REPLICAS = (
    "replicas must list the workers of each stage by their numbers, such as ((0, 1), (2,)), not "
)
OVERLAPPED = (
    "overlapped must be a set of pairs of actions, such as {(ps.F(0, 1), ps.B(0, 0))}, not "
)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"p": 1.0}, "p must be a whole number of at least 1, not 1.0"),
        ({"p": 0}, "p must be at least 1, not 0"),
        ({"m": "1"}, "m must be a whole number of at least 1, not '1'"),
        ({"m": None}, "m must be a whole number of at least 1, not None"),
        ({"batches": True}, "batches must be a whole number of at least 1, not True"),
        ({"updates_every": 0.5}, "updates_every must be a whole number of at least 0, not 0.5"),
        ({"chunks": -1}, "chunks must be at least 0, not -1"),
        (
            {"workers": None},
            f"workers must be a list with one row of actions per worker, {ROWS}, not None",
        ),
        (
            {"workers": {0: GOOD_ROW[:1]}},
            f"workers must be a list with one row of actions per worker, {ROWS}, not "
            "{0: [Action(kind='F', stage=0, microbatch=0)]}",
        ),
        ({"workers": [None]}, f"mine has None for worker 0: {ROW}"),
        ({"workers": ["0F0"]}, f"mine has '0F0' for worker 0: {ROW}"),
        ({"workers": GOOD_ROW}, f"mine has {GOOD_ROW[0]!r} for worker 0: {ROW}"),
        ({"workers": [GOOD_ROW, ["0F0"]]}, f"mine listed '0F0' for worker 1: {ROW}"),
        ({"workers": [[("F", 0, 0)]]}, f"mine listed ('F', 0, 0) for worker 0: {ROW}"),
        (
            {"workers": [[Action(5, 0, 0)]]},  # type: ignore[arg-type]
            "mine listed kind 5; allowed are F, B, I, W, U, SEND_F, RECV_F, SEND_B, RECV_B",
        ),
        (
            {"workers": [[F("0", 0)]]},  # type: ignore[arg-type]
            "the stage of 0F0 must be a whole number of at least 0, not '0'",
        ),
        (
            {"workers": [[*GOOD_ROW, F(0, None)]]},  # type: ignore[arg-type]
            "the microbatch of 0FNone must be a whole number of at least 0, not None",
        ),
        (
            {"workers": [cycle(GOOD_ROW)]},
            "mine has more than 10000 actions for worker 0 and 1 microbatches: a row must be a "
            "list that comes to an end",
        ),
        ({"replicas": 1}, REPLICAS + "1"),
        ({"replicas": (0, 1)}, REPLICAS + "(0, 1)"),
        ({"replicas": (("0",),)}, REPLICAS + "(('0',),)"),
        ({"overlapped": 1}, OVERLAPPED + "1"),
        ({"overlapped": [(F(0, 0),)]}, OVERLAPPED + f"[({F(0, 0)!r},)]"),
    ],
)
def test_a_schedule_of_another_form_is_refused_by_what_is_wrong(
    fields: dict[str, object], says: str
) -> None:
    sizes = {"name": "mine", "p": 1, "m": 1, "workers": [GOOD_ROW]}
    with pytest.raises(ValueError) as caught:
        ps.check(Schedule(**{**sizes, **fields}))  # type: ignore[arg-type]
    assert str(caught.value) == says


def test_a_long_value_is_named_in_short() -> None:
    with pytest.raises(ValueError) as caught:
        Schedule("mine", 1, 1, [["x" * 10_000]])  # type: ignore[arg-type]
    assert str(caught.value) == f"mine listed '{'x' * 96}... for worker 0: {ROW}"


def test_rows_may_be_lists_and_numbers_those_of_other_libraries() -> None:
    numpy = pytest.importorskip("numpy")
    row = [kind(numpy.int64(0), numpy.int64(0)) for kind in (F, B, U)]
    schedule = ps.check(Schedule("mine", 1, 1, [row]))  # type: ignore[arg-type]
    assert schedule == Schedule("mine", 1, 1, (tuple(GOOD_ROW),))


@pytest.mark.parametrize("use", [ps.check, ps.simulate, ps.lower])
def test_what_is_no_schedule_is_refused(use: Callable[[object], object]) -> None:
    with pytest.raises(ValueError) as caught:
        use("gpipe")
    assert str(caught.value) == (
        "schedule must be a pipeschool Schedule, such as ps.gpipe(p=4, m=8), not str"
    )


@pytest.mark.parametrize("argument", ["p", "m", "batches"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5, "x"])
def test_bad_sizes_of_a_schedule_of_ones_own_are_refused_by_name(
    argument: str, value: object
) -> None:
    sizes = {"p": 2, "m": 2, "batches": 1, argument: value}
    with pytest.raises(ValueError, match=rf"^{argument} must be .*at least 1, not {value!r}$"):
        Schedule.from_workers(last_first, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "schedule", [ps.pipedream(2, 2), ps.gpipe(2, 2, batches=2)], ids=["asynchronous", "repeated"]
)
def test_only_one_synchronous_batch_can_be_repeated(schedule: Schedule) -> None:
    with pytest.raises(
        ValueError, match="only a synchronous schedule of one batch can be repeated"
    ):
        schedule.repeat(2)


@pytest.mark.parametrize("build", [ps.naive, ps.gpipe, ps.one_f_one_b])
def test_repeating_is_building_with_batches(build: Callable[..., Schedule]) -> None:
    assert build(3, 4).repeat(3) == build(3, 4, batches=3)
    assert build(3, 4).repeat(1) == build(3, 4)


@given(seed=seeds)
@settings(max_examples=100, deadline=None)
def test_placement_says_where_every_stage_is(seed: int) -> None:
    schedule = random_schedule(seed)
    owner = owner_of(schedule.workers)
    assert dict(enumerate(schedule.placement)) == owner
    assert schedule.stages == len(owner)
    for worker in range(schedule.p):
        assert schedule.stages_of(worker) == sorted(s for s, w in owner.items() if w == worker)


def test_chunks_per_worker() -> None:
    two = Schedule.from_workers(lambda w, p, m: [F(w, 0), F(w + p, 0), B(w + p, 0), B(w, 0)], 2, 1)
    assert two.v == 2
    assert ps.gpipe(4, 2).v == 1


def test_a_schedule_prints_as_a_grid() -> None:
    assert str(ps.one_f_one_b(2, 2)) == (
        "one_f_one_b: p=2, m=2\nworker 0 | 0F0 0F1 0B0 0B1 0U0\nworker 1 | 1F0 1B0 1F1 1B1 1U0"
    )
    assert str(ps.naive(1, 1, batches=2)).startswith("naive: p=1, m=1, batches=2\n")


def test_schedules_are_values() -> None:
    """Equal when they say the same, whatever has been asked of them; usable as keys; picklable."""
    one, other = ps.gpipe(2, 3), ps.gpipe(2, 3)
    assert (one.placement, one.lowered) == ((0, 1), False)
    assert one == other
    assert len({one, other}) == 1
    assert pickle.loads(pickle.dumps(one)) == one


def test_an_update_of_a_stage_follows_every_so_many_of_its_backwards() -> None:
    row = [F(0, 0), F(2, 0), I(2, 0), W(2, 0), B(0, 0), F(0, 1), B(0, 1)]
    assert with_updates(row, every=1) == [
        *row[:4], U(2, 0), B(0, 0), U(0, 0), F(0, 1), B(0, 1), U(0, 1),
    ]  # fmt: skip
    assert with_updates(row, every=2) == [*row, U(0, 0)]


def test_activations_are_held_from_the_forward_to_the_last_use() -> None:
    assert peak_in_flight([]) == 0
    assert peak_in_flight([F(0, 0), F(0, 1), B(0, 0), F(0, 2), B(0, 1), B(0, 2)]) == 2
    assert peak_in_flight([F(0, 0), I(0, 0), F(0, 1), W(0, 0), I(0, 1), W(0, 1)]) == 2
    assert peak_in_flight([F(0, 0), I(0, 0), W(0, 0), F(0, 1), I(0, 1), W(0, 1)]) == 1


def test_the_front_door_shows_what_it_promises() -> None:
    for name in ps.__all__:
        assert hasattr(ps, name)
    with pytest.raises(AttributeError, match="no attribute 'zero'"):
        ps.zero  # noqa: B018
