"""The built-in schedules keep the closed forms of the papers, for all p up to 8 and m up to 24."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction

import pipeschool as ps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeschool import Cost, Schedule, Trace

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 25)]

# Eighths are exact in floating point, so the makespans can be compared exactly.
times = st.integers(min_value=1, max_value=400).map(lambda n: n / 8)
one_pair_of_times_each_run = settings(max_examples=8, deadline=None)

Build = Callable[[int, int], Schedule]


def traces(build: Build, forward: float, backward: float) -> Iterator[tuple[int, int, Trace]]:
    """p, m and the simulated trace, for all sizes."""
    for p, m in SIZES:
        yield p, m, ps.simulate(build(p, m), Cost(forward, backward))


@one_pair_of_times_each_run
@given(forward=times, backward=times)
def test_naive_keeps_one_worker_busy(forward: float, backward: float) -> None:
    for p, m, trace in traces(ps.naive, forward, backward):
        assert trace.makespan == m * p * (forward + backward)
        assert trace.bubble_of_ideal == pytest.approx(p - 1)
        assert trace.bubble_of_total == pytest.approx((p - 1) / p)
        assert trace.peak_activations == [1] * p
        assert trace.weight_versions == [1] * p
        assert trace.staleness == [0] * p


@one_pair_of_times_each_run
@given(forward=times, backward=times)
def test_gpipe_fills_and_drains(forward: float, backward: float) -> None:
    for p, m, trace in traces(ps.gpipe, forward, backward):
        assert trace.makespan == (m + p - 1) * (forward + backward)
        assert trace.bubble_of_ideal == pytest.approx((p - 1) / m)
        assert trace.bubble_of_total == pytest.approx((p - 1) / (m + p - 1))
        assert trace.peak_activations == [m] * p
        assert trace.weight_versions == [1] * p
        assert trace.staleness == [0] * p


@one_pair_of_times_each_run
@given(forward=times, backward=times)
def test_one_f_one_b_is_as_fast_as_gpipe_and_holds_fewer_activations(
    forward: float, backward: float
) -> None:
    for p, m, trace in traces(ps.one_f_one_b, forward, backward):
        assert trace.makespan == (m + p - 1) * (forward + backward)
        assert trace.bubble_of_ideal == pytest.approx((p - 1) / m)
        assert trace.bubble_of_total == pytest.approx((p - 1) / (m + p - 1))
        assert trace.peak_activations == [min(m, p - s) for s in range(p)]
        assert trace.weight_versions == [1] * p
        assert trace.staleness == [0] * p


@one_pair_of_times_each_run
@given(forward=times, backward=times)
def test_pipedream_trades_the_flush_for_versions_and_staleness(
    forward: float, backward: float
) -> None:
    for p, n, trace in traces(ps.pipedream, forward, backward):
        assert trace.makespan == (n + p - 1) * (forward + backward)
        assert trace.bubble_of_ideal == pytest.approx((p - 1) / n)
        assert trace.bubble_of_total == pytest.approx((p - 1) / (n + p - 1))
        assert trace.peak_activations == [min(n, p - s) for s in range(p)]
        # A stage that is d microbatches deep is d updates late. A version that is d updates old
        # needs d microbatches to come up; after them, the last n - d still hold one each.
        depth = [min(p - 1 - s, n - 1) for s in range(p)]
        assert trace.staleness == depth
        assert trace.weight_versions == [1 + min(d, n - d) for d in depth]


@pytest.mark.parametrize("p", range(1, 9))
def test_pipedream_in_steady_state_keeps_p_minus_s_versions(p: int) -> None:
    trace = ps.simulate(ps.pipedream(p, 4 * p))
    assert trace.weight_versions == [p - s for s in range(p)]
    assert trace.staleness == [p - 1 - s for s in range(p)]


@pytest.mark.parametrize("p", range(1, 9))
def test_pipedream_stage_uses_the_version_of_the_papers_update_rule(p: int) -> None:
    # w(t+1) = w(t) - lr * grad f(w_1^(t-p+1), ..., w_p^(t)), stages counted from 1, versions from 0
    for span in ps.simulate(ps.pipedream(p, 3 * p)).spans:
        kind, stage, number = span.action
        if kind == "U":
            assert span.version == number + 1
        else:
            assert span.version == max(0, number - (p - 1 - stage))


def test_numbers_of_the_course_for_four_workers_and_eight_microbatches() -> None:
    gpipe, one_f_one_b, naive = (
        ps.simulate(build(4, 8), Cost(forward=1, backward=2))
        for build in (ps.gpipe, ps.one_f_one_b, ps.naive)
    )
    for trace in (gpipe, one_f_one_b):
        assert trace.makespan == 33
        assert trace.bubble_of_total == pytest.approx(3 / 11)
        assert trace.bubble_of_ideal == pytest.approx(3 / 8)
    assert gpipe.peak_activations == [8, 8, 8, 8]
    assert one_f_one_b.peak_activations == [4, 3, 2, 1]
    assert naive.makespan == 96


@pytest.mark.parametrize(
    ("p", "m", "total"),
    [(8, 4, Fraction(7, 11)), (8, 32, Fraction(7, 39)), (4, 16, Fraction(3, 19))],
)
def test_bubbles_that_the_claims_lab_judges(p: int, m: int, total: Fraction) -> None:
    assert ps.simulate(ps.gpipe(p, m)).bubble_of_total == pytest.approx(float(total))


@pytest.mark.parametrize("name", ["naive", "gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 3), (4, 8), (8, 5)])
def test_synchronous_batches_follow_one_another(name: str, p: int, m: int) -> None:
    cost = Cost(forward=1.25, backward=2.5)
    one, five = (ps.simulate(ps.build(name, p, m, batches), cost) for batches in (1, 5))
    assert five.makespan == 5 * one.makespan
    assert five.bubble_of_total == pytest.approx(one.bubble_of_total)
    assert five.bubble_of_ideal == pytest.approx(one.bubble_of_ideal)
    assert five.peak_activations == one.peak_activations
    assert five.weight_versions == [1] * p
    assert five.staleness == [0] * p
    assert [s.version for s in five.rows[0] if s.action.kind == "U"] == [1, 2, 3, 4, 5]


def test_pipedream_batches_are_one_stream() -> None:
    schedule = ps.pipedream(4, 8, batches=5)
    assert (schedule.m, schedule.batches, schedule.microbatches) == (8, 5, 40)
    assert schedule.workers == ps.pipedream(4, 40).workers
    assert ps.simulate(schedule).makespan == (40 + 4 - 1) * 3


def test_orders_as_the_papers_draw_them() -> None:
    assert rows(ps.naive(2, 2)) == ["0F0 0B0 0F1 0B1 0U0", "1F0 1B0 1F1 1B1 1U0"]
    assert rows(ps.gpipe(2, 2)) == ["0F0 0F1 0B0 0B1 0U0", "1F0 1F1 1B0 1B1 1U0"]
    assert rows(ps.one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0U0",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1U0",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U0",
    ]
    assert rows(ps.pipedream_2bw(2, 2, batches=2)) == [
        "0F0 0F1 0B0 0F2 0B1 0U0 0F3 0B2 0B3 0U1",
        "1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1",
    ]
    assert rows(ps.pipedream(2, 3)) == [
        "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2",
    ]


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.workers]


def test_only_the_pipedreams_are_asynchronous() -> None:
    weights = {name: ps.build(name, 2, 2).weights for name in ps.SCHEDULES}
    assert weights.pop("pipedream") == "stash"
    assert weights.pop("pipedream_2bw") == "double_buffer"
    assert weights.pop("forward_only") == "frozen"
    assert set(weights.values()) == {"flush"}
    assert not ps.pipedream(2, 2).synchronous
    assert not ps.pipedream_2bw(2, 2).synchronous


@pytest.mark.parametrize("name", ps.SCHEDULES)
def test_build_finds_every_schedule_by_its_name(name: str) -> None:
    assert ps.build(name, 4, 4, batches=2) == ps.SCHEDULES[name](4, 4, batches=2)
    assert ps.build(name, 4, 4).name == name


def test_build_knows_the_short_name() -> None:
    assert ps.build("1f1b", 3, 4) == ps.one_f_one_b(3, 4)


@pytest.mark.parametrize("name", ["zero", "", "GPipe", None, 3])
def test_unknown_schedule_is_refused_with_those_there_are(name: object) -> None:
    with pytest.raises(ValueError) as caught:
        ps.build(name, 4, 8)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"there is no schedule {name!r}; choose one of naive, gpipe, one_f_one_b, pipedream, "
        "pipedream_2bw, eager_1f1b, interleaved_1f1b, looped_bfs, zb_h1, zb_h2, zb_v, dualpipe_v, "
        "chimera, forward_only, 1f1b, interleaved"
    )


@pytest.mark.parametrize("name", ps.SCHEDULES)
def test_bad_sizes_are_refused_in_one_sentence(name: str) -> None:
    wrong = {
        0: "must be at least 1, not 0",
        -1: "must be at least 1, not -1",
        2.5: "must be a whole number of at least 1, not 2.5",
        2.0: "must be a whole number of at least 1, not 2.0",
        "x": "must be a whole number of at least 1, not 'x'",
        None: "must be a whole number of at least 1, not None",
        True: "must be a whole number of at least 1, not True",
    }
    for argument, (value, says) in itertools.product(("p", "m", "batches"), wrong.items()):
        sizes = {"p": 2, "m": 2, "batches": 1, argument: value}
        with pytest.raises(ValueError) as caught:
            ps.build(name, **sizes)  # type: ignore[arg-type]
        assert str(caught.value) == f"{argument} {says}"
