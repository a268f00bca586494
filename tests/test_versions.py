"""The ledger of weight versions, step by step, against sequences worked out by hand."""

from __future__ import annotations

import pipeschool as ps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeschool.actions import Action
from pipeschool.schedules.one_f_one_b import one_f_one_b_order
from pipeschool.versions import (
    POLICIES,
    DoubleBuffer,
    Flush,
    Latest,
    Ledger,
    Policy,
    Stash,
    VerticalSync,
    policy_named,
    with_weights,
)


def replay(policy: Policy, text: str) -> list[tuple[int, int]]:
    """(version used or made, versions held) of each action in `text`."""
    ledger = Ledger(policy)
    return [ledger.record(Action.parse(word)) for word in text.split()]


def test_a_flush_keeps_one_version() -> None:
    text = "0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0B3 0U1"
    assert replay(Flush(), text) == [(0, 1)] * 4 + [(1, 1)] * 5 + [(2, 1)]


def test_stashing_gives_the_backward_the_version_of_its_forward() -> None:
    # Worker 0 of two: one microbatch deep, so one update late.
    text = "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2"
    assert replay(Stash(), text) == [
        (0, 1), (0, 1), (0, 1), (1, 2),  # 0F1 still needs version 0
        (1, 2), (0, 2), (2, 2),  # 0F2 needs version 1
        (1, 2), (3, 1),
    ]  # fmt: skip


def test_a_version_is_dropped_with_its_last_user_and_not_before() -> None:
    text = "0F0 0F1 0B0 0U0 0B1 0U1"
    assert replay(Stash(), text) == [(0, 1), (0, 1), (0, 1), (1, 2), (0, 2), (2, 1)]


def test_a_split_backward_holds_its_version_until_the_weight_half() -> None:
    text = "0F0 0I0 0F1 0W0 0U0 0I1 0W1 0U1"
    assert replay(Stash(), text) == [
        (0, 1), (0, 1), (0, 1), (0, 1), (1, 2), (0, 2), (0, 2), (2, 1),
    ]  # fmt: skip


def test_latest_holds_one_version_and_gives_a_backward_the_newest() -> None:
    # Worker 0 of two; microbatches 1 and 2 each see an update between forward and backward.
    text = "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2"
    assert replay(Latest(), text) == [
        (0, 1), (0, 1), (0, 1), (1, 1),
        (1, 1), (1, 1), (2, 1),
        (2, 1), (3, 1),
    ]  # fmt: skip


def test_vertical_sync_on_the_first_of_two_stages() -> None:
    text = "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2"
    assert replay(VerticalSync(stage=0, stages=2), text) == [
        (0, 1), (0, 1), (0, 1), (1, 2),  # 0F1 still needs version 0
        (1, 2), (0, 2), (2, 2),  # 0F2 needs version 1
        (1, 2), (3, 2),  # a microbatch 3 would ask for version 2
    ]  # fmt: skip


def test_vertical_sync_makes_the_last_of_two_stages_keep_the_version_of_the_first() -> None:
    # Nothing is in flight here at an update, but the next microbatch will ask for what stage 0
    # had, which is one version behind.
    text = "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2"
    assert replay(VerticalSync(stage=1, stages=2), text) == [
        (0, 1), (0, 1), (1, 2),
        (0, 2), (0, 2), (2, 2),
        (1, 2), (1, 2), (3, 2),
    ]  # fmt: skip


def test_a_double_buffer_holds_two_versions_and_moves_on_with_the_batch() -> None:
    # Worker 0 of two, two microbatches in an update: 0 to 3 use version 0, 4 and 5 version 1.
    text = "0F0 0F1 0B0 0F2 0B1 0U0 0F3 0B2 0F4 0B3 0U1 0F5 0B4 0B5 0U2"
    assert replay(DoubleBuffer(stage=0, stages=2, m=2), text) == [
        (0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (1, 2),
        (0, 2), (0, 2), (1, 2), (0, 2), (2, 2),
        (1, 2), (1, 2), (1, 2), (3, 2),
    ]  # fmt: skip


def test_a_version_that_nobody_uses_is_held_until_the_forward_that_rules_it_out() -> None:
    class EverySecond(Policy):
        """Microbatches 0 and 1 use version 0, then 2 and 3 use version 2."""

        def forward(self, microbatch: int, newest: int) -> int:
            return microbatch // 2 * 2

        def oldest_needed(self, next_microbatch: int, newest: int) -> int:
            return self.forward(next_microbatch, newest)

    text = "0F0 0B0 0U0 0F1 0B1 0U1 0F2 0B2 0U2"
    assert replay(EverySecond(), text) == [
        (0, 1), (0, 1), (1, 2),
        (0, 2), (0, 2), (2, 1),  # after 0F1 nobody will use version 1, which is the newest
        (2, 1), (2, 1), (3, 2),
    ]  # fmt: skip


def test_a_ledger_asks_its_policy_with_what_it_knows() -> None:
    class Curious(Latest):
        """As Latest; notes what it is asked."""

        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[int, ...]] = []

        def forward(self, microbatch: int, newest: int) -> int:
            self.asked.append((microbatch, newest))
            return super().forward(microbatch, newest)

        def backward(self, microbatch: int, used: int, newest: int) -> int:
            self.asked.append((microbatch, used, newest))
            return super().backward(microbatch, used, newest)

        def oldest_needed(self, next_microbatch: int, newest: int) -> int:
            self.asked.append((next_microbatch,))
            return newest

    policy = Curious()
    assert [version for version, _ in replay(policy, "0F0 0U0 0F1 0U1 0B1 0B0")] == [
        0,
        1,
        1,
        2,
        2,
        2,
    ]
    assert policy.asked == [(0, 0), (1,), (1,), (1, 1), (2,), (2,), (1, 1, 2), (0, 0, 2)]


@pytest.mark.parametrize(
    ("answers", "in_place", "text", "words"),
    [
        ({0: 1}, False, "0F0", "0F0 (forward of microbatch 0 on stage 0) asks for weight version "
         "1, but the stage holds only 0"),
        ({0: -1}, False, "0F0", "asks for weight version -1, but the stage holds only 0"),
        ({0: None}, False, "0F0", "asks for weight version None, but the stage holds only 0"),
        # Dropped: nobody was using it any more.
        ({1: 0}, False, "0F0 0B0 0U0 0F1", "asks for weight version 0, but the stage holds only 1"),
        # Version 1 was dropped at once, version 0 is kept for microbatch 0.
        ({1: 1}, False, "0F0 0U0 0U1 0F1", "version 1, but the stage holds only 0, 2"),
        # In place there is the newest and no other, whoever is in flight.
        ({1: 0}, True, "0F0 0U0 0F1", "asks for weight version 0, but the stage holds only 1"),
        ({}, True, "0F0 0U0 0B0", "0B0 (backward of microbatch 0 on stage 0) asks for weight "
         "version 0, but the stage holds only 1"),
    ],
)  # fmt: skip
def test_a_version_that_is_not_there_is_refused_with_those_that_are(
    answers: dict[int, int], in_place: bool, text: str, words: str
) -> None:
    class Told(Policy):
        def forward(self, microbatch: int, newest: int) -> int:
            return answers.get(microbatch, newest)

    Told.in_place = in_place
    with pytest.raises(ps.IllegalSchedule) as caught:
        replay(Told(), text)
    assert str(caught.value).endswith(words)
    assert caught.value.action == Action.parse(text.split()[-1])


def test_a_backward_may_not_leave_the_version_of_its_forward_unless_in_place() -> None:
    class Newer(Policy):
        def backward(self, microbatch: int, used: int, newest: int) -> int:
            return newest

    with pytest.raises(ps.IllegalSchedule, match="but its forward used 0, and the graph holds on"):
        replay(Newer(), "0F0 0U0 0B0")


def test_a_policy_that_forgets_which_versions_it_needs_is_refused() -> None:
    class Speechless(Policy):
        def oldest_needed(self, next_microbatch: int, newest: int) -> int:
            return None  # type: ignore[return-value]

    with pytest.raises(ValueError) as caught:
        replay(Speechless(), "0F0")
    assert str(caught.value) == (
        "oldest_needed of Speechless must give the number of a weight version, not None"
    )


# ---------------------------------------------------------------------------------------------
# Closed forms, with what a short stream makes of them

workers = st.integers(1, 6)
streams = st.integers(1, 40)
many_streams = settings(deadline=None)


def forward_versions(trace: ps.Trace) -> list[list[int]]:
    """The version of each forward, worker by worker."""
    return [[s.version for s in row if s.action.kind == "F"] for row in trace.rows]


@many_streams
@given(p=workers, n=streams)
def test_stashing_is_p_minus_1_minus_s_late_and_keeps_p_minus_s_versions(p: int, n: int) -> None:
    trace = ps.simulate(ps.pipedream(p, n))
    assert forward_versions(trace) == [
        [max(k - (p - 1 - s), 0) for k in range(n)] for s in range(p)
    ]
    assert trace.staleness == [min(p - 1 - s, n - 1) for s in range(p)]
    assert trace.weight_versions == [stashed(p - s, n) for s in range(p)]
    assert trace.mismatched == [[]] * p


def stashed(deep: int, n: int) -> int:
    """The most versions of a stage with up to `deep` microbatches in flight, out of n in all.

    It takes 2 * deep - 2 of them to reach `deep`. The first `deep` all use version 0, so with
    fewer than that the newest is the only other; each one more adds a version.
    """
    return 1 if n == 1 else min(deep, 2 + max(n - deep, 0))


@many_streams
@given(p=workers, n=streams)
def test_without_stashing_all_but_the_first_microbatch_are_torn(p: int, n: int) -> None:
    trace = ps.simulate(ps.pipedream(p, n), weights="latest")
    assert forward_versions(trace) == [
        [max(k - (p - 1 - s), 0) for k in range(n)] for s in range(p)
    ]
    for row in trace.rows:
        assert [s.version for s in row if s.action.kind == "B"] == list(range(n))
    assert trace.staleness == [min(p - 1 - s, n - 1) for s in range(p)]
    assert trace.weight_versions == [1] * p
    torn = [[(s, k) for k in range(1, n)] for s in range(p - 1)]
    assert trace.mismatched == [*torn, []]  # the last stage goes back at once


@many_streams
@given(p=workers, n=streams)
def test_vertical_sync_is_p_minus_1_late_and_keeps_p_versions_everywhere(p: int, n: int) -> None:
    trace = ps.simulate(ps.pipedream(p, n), weights="vertical_sync")
    assert forward_versions(trace) == [[max(k - (p - 1), 0) for k in range(n)]] * p
    assert trace.staleness == [min(p - 1, n - 1)] * p
    # A stage cannot tell that the stream ends, and keeps what one more microbatch would use.
    assert trace.weight_versions == [min(p, n + 1)] * p
    assert trace.mismatched == [[]] * p


@many_streams
@given(p=workers, more=st.integers(0, 5), batches=st.integers(1, 6))
def test_a_double_buffer_is_one_late_and_keeps_two_versions(
    p: int, more: int, batches: int
) -> None:
    m = max(p - 1, 1) + more
    trace = ps.simulate(ps.pipedream_2bw(p, m, batches))
    assert forward_versions(trace) == [[max(k // m - 1, 0) for k in range(m * batches)]] * p
    assert trace.staleness == [min(1, batches - 1)] * p
    assert trace.weight_versions == [2] * p
    assert trace.mismatched == [[]] * p


@many_streams
@given(p=workers, m=streams, batches=st.integers(1, 3))
def test_a_flush_is_never_late_and_keeps_one_version(p: int, m: int, batches: int) -> None:
    trace = ps.simulate(ps.one_f_one_b(p, m, batches))
    assert forward_versions(trace) == [[k // m for k in range(m * batches)]] * p
    assert (trace.staleness, trace.weight_versions) == ([0] * p, [1] * p)


def test_2bw_is_refused_with_two_microbatches_on_four_stages_and_not_with_three() -> None:
    with pytest.raises(ValueError) as caught:
        ps.pipedream_2bw(p=4, m=2)
    assert str(caught.value) == (
        "pipedream_2bw needs m of at least p - 1 = 3, not 2: with fewer, a microbatch enters "
        "before the weight version that it uses exists"
    )
    ps.check(ps.pipedream_2bw(p=4, m=3, batches=10))


def double_buffered(p: int, m: int) -> ps.Schedule:
    """The 2BW order without the builder's own refusal."""
    return ps.Schedule.from_workers(
        one_f_one_b_order, p, m, batches=4, weights="double_buffer", updates_every=m
    )


@many_streams
@given(p=workers, m=streams)
def test_2bw_lacks_a_version_exactly_where_the_builder_refuses_it(p: int, m: int) -> None:
    if m >= p - 1:
        assert ps.check(double_buffered(p, m)).workers == ps.pipedream_2bw(p, m, 4).workers
        return
    with pytest.raises(ps.IllegalSchedule, match="asks for weight version 1, but the stage holds"):
        ps.check(double_buffered(p, m))
    with pytest.raises(ValueError, match="before the weight version that it uses exists"):
        ps.pipedream_2bw(p, m, 4)


def test_the_missing_version_of_2bw_is_named_with_the_forward_that_asks_for_it() -> None:
    with pytest.raises(ps.IllegalSchedule) as caught:
        ps.check(double_buffered(4, 2))
    assert str(caught.value) == (
        "one_f_one_b_order does not go with weights='double_buffer', which counts on at most 3 "
        "microbatches in flight at a stage: stage 0 has 4; worker 0: 0F4 (forward of microbatch 4 "
        "on stage 0) asks for weight version 1, but the stage holds only 0"
    )


# ---------------------------------------------------------------------------------------------
# Names


def test_a_policy_is_found_by_its_class_too() -> None:
    class Mine(Stash):
        pass

    assert policy_named(Mine) is Mine
    assert with_weights(ps.pipedream(2, 4), Mine).weights is Mine
    assert ps.simulate(ps.pipedream(2, 4), weights=Mine).spans == (
        ps.simulate(ps.pipedream(2, 4)).spans
    )


def test_every_policy_is_found_by_its_name() -> None:
    for name, policy in POLICIES.items():
        assert policy_named(name) is policy
        assert policy.name == name
    assert {"flush", "stash"} <= POLICIES.keys()


@pytest.mark.parametrize("name", ["", "Stash", "guess"])
def test_an_unknown_policy_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        policy_named(name)
    assert str(caught.value) == (
        f"there is no weight policy {name!r}; choose one of {', '.join(POLICIES)}, "
        "or give a subclass of Policy"
    )
