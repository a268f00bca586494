"""The schedules beyond 1F1B keep their closed forms, for all p up to 8, m up to 24 and v up to 4.

Times are those of one chunk. `simulate` checks each schedule before it runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pipeschool as ps
import pytest
from pipeschool import Cost, Schedule, Trace
from pipeschool.schedules.pieces import phases, take_turns

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 25)]
THIRDS = Cost(forward=1, backward=2)  # tF = tI = tW = 1

# Exact in floating point, so the makespans can be compared exactly.
two_pairs_of_times = pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2.5, 1.125)])

Build = Callable[[int, int], Schedule]


def traces(build: Build, cost: Cost = THIRDS) -> Iterator[tuple[int, int, Trace]]:
    """p, m and the simulated trace, for all sizes."""
    for p, m in SIZES:
        yield p, m, ps.simulate(build(p, m), cost)


def longest_worker(trace: Trace) -> float:
    """The cost in the zero-bubble rate: the longest that one worker takes, start to end."""
    return max(row[-1].end - row[0].start for row in trace.rows)


# ---------------------------------------------------------------------------------------------
# Whole backwards


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@two_pairs_of_times
def test_interleaving_makes_the_bubble_v_times_smaller(
    v: int, forward: float, backward: float
) -> None:
    build = lambda p, m: ps.interleaved_1f1b(p, m, v)  # noqa: E731
    for p, m, trace in traces(build, Cost(forward, backward)):
        if m >= p:
            assert trace.makespan == (v * m + p - 1) * (forward + backward)
            assert trace.bubble_of_ideal == pytest.approx((p - 1) / (v * m))
            assert trace.bubble_of_total == pytest.approx((p - 1) / (v * m + p - 1))
        else:
            assert trace.makespan == (v * p + m - 1) * (forward + backward)
        if m % p == 0 and m >= 2 * p and v > 1:
            assert trace.peak_activations[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))
        first_round = -(-m // max(1, m // p))  # the largest, rounded up
        hops = [(p - 1 - s) * (2 if v > 1 else 1) for s in range(p)]
        chunks = [min(v * m, (v - 1) * first_round + hop + 1) for hop in hops]
        assert trace.peak_activations == [n / v for n in chunks]


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@two_pairs_of_times
def test_breadth_first_is_as_fast_as_interleaved_with_the_memory_of_gpipe(
    v: int, forward: float, backward: float
) -> None:
    build = lambda p, m: ps.looped_bfs(p, m, v)  # noqa: E731
    for p, m, trace in traces(build, Cost(forward, backward)):
        slots = v * m + p - 1 if m >= p else v * p + m - 1
        assert trace.makespan == slots * (forward + backward)
        assert trace.peak_activations == [m] * p


def test_one_chunk_is_the_plain_schedule() -> None:
    for p, m in SIZES:
        assert ps.interleaved_1f1b(p, m, 1).workers == ps.one_f_one_b(p, m).workers
        assert ps.looped_bfs(p, m, 1).workers == ps.gpipe(p, m).workers


@two_pairs_of_times
@pytest.mark.parametrize("part", [0, 3, 8])
def test_eager_hides_messages_of_up_to_half_a_forward_and_backward(
    forward: float, backward: float, part: int
) -> None:
    comm = part / 16 * (forward + backward)
    for p, m in SIZES:
        cost = Cost(forward, backward, comm=comm)
        eager, plain = (ps.simulate(build(p, m), cost) for build in (ps.eager_1f1b, ps.one_f_one_b))
        way_there_and_back = (m + p - 1) * (forward + backward) + 2 * (p - 1) * comm
        assert eager.makespan == pytest.approx(way_there_and_back, rel=1e-12)
        round_trips = (m - 1) * (p - 1) // p
        assert plain.makespan == pytest.approx(
            way_there_and_back + 2 * round_trips * comm, rel=1e-12
        )
        assert eager.peak_activations == [min(m, 2 * (p - s) - 1) for s in range(p)]


def test_longer_messages_are_not_hidden() -> None:
    hidden, longer = (ps.simulate(ps.eager_1f1b(4, 16), Cost(2, 2, comm=c)) for c in (2, 2.5))
    assert hidden.makespan == 19 * 4 + 6 * 2
    assert longer.makespan > 19 * 4 + 6 * 2.5


# ---------------------------------------------------------------------------------------------
# Split backwards


def test_zb_h1_leaves_a_third_of_the_bubble() -> None:
    for p, m, trace in traces(ps.zb_h1):
        bubble = max(p - 1, 2 * p - 1 - m)
        assert trace.makespan == 3 * m + bubble
        assert trace.bubble_of_ideal == pytest.approx(bubble / (3 * m))
        assert trace.bubble_of_total == pytest.approx(bubble / (3 * m + bubble))
        assert trace.peak_activations == [min(m, p)] * p


def test_zb_h2_has_no_gap_from_2p_minus_1_microbatches_on() -> None:
    for p, m, trace in traces(ps.zb_h2):
        assert longest_worker(trace) - 3 * m == max(0, 2 * p - 1 - m)
        assert trace.makespan == 3 * m + max(p - 1, 2 * p - 2 - m // 2)
        assert [row[0].start for row in trace.rows] == list(range(p))
        assert trace.peak_activations == [min(m, 2 * p - 1)] * p


@pytest.mark.parametrize(
    ("forward", "inputs", "weight"), [(1, 1, 1), (2, 3, 1.5), (3, 2, 1.5), (2, 4, 0.5), (4, 2, 2)]
)
def test_bubble_seconds_of_the_paper_where_the_weight_half_is_the_shortest(
    forward: float, inputs: float, weight: float
) -> None:
    cost = Cost(forward, inputs + weight, input_backward=inputs, weight_backward=weight)
    work = forward + inputs + weight
    for p, m in SIZES:
        if m >= p:
            bubble = ps.simulate(ps.zb_h1(p, m), cost).makespan - m * work
            assert bubble == (p - 1) * (forward + inputs - weight)
        if m >= 2 * p - 1:
            gaps = longest_worker(ps.simulate(ps.zb_h2(p, m), cost)) - m * work
            assert gaps == (p - 1) * (forward + inputs - 2 * weight)


def test_zb_v_has_no_gap_from_2p_minus_1_microbatches_on_in_the_memory_of_1f1b() -> None:
    for p, m, trace in traces(ps.zb_v):
        gaps = max(0, 2 * (2 * p - 1 - m))
        assert longest_worker(trace) - 6 * m == gaps
        assert trace.makespan == 6 * m + max(p - 1, gaps)
        assert trace.peak_activations == [min(2 * m, m + 1 + s, 2 * p) / 2 for s in range(p)]


def test_dualpipe_v_has_half_the_published_bubble_where_pairs_run_one_after_the_other() -> None:
    for p, m, trace in traces(ps.dualpipe_v):
        missing = max(0, 2 * p - m) - (m <= p)  # microbatches that the order was made for
        assert trace.makespan == 6 * m + p - 1 + 2 * missing
        assert trace.peak_activations == [min(2 * m, m + 1 + s, 2 * p + 1) / 2 for s in range(p)]


@pytest.mark.parametrize(
    ("forward", "inputs", "weight"), [(1, 1, 1), (2, 2, 1), (4, 3, 2), (4, 2, 3), (4, 3, 8)]
)
def test_bubble_seconds_of_dualpipe_v(forward: float, inputs: float, weight: float) -> None:
    cost = Cost(forward, inputs + weight, input_backward=inputs, weight_backward=weight)
    for p, m in ((p, m) for p, m in SIZES if m >= 2 * p):
        bubble = ps.simulate(ps.dualpipe_v(p, m), cost).makespan - 2 * m * (
            forward + inputs + weight
        )
        assert bubble == (p - 1) * (forward + max(0, inputs - weight))


# ---------------------------------------------------------------------------------------------
# All of them

NEW = ["eager_1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "ideal", "total", "peak"),
    [
        ("interleaved_1f1b", 4, 8, 2, 0.1875, 0.1579, 5.5),
        ("interleaved_1f1b", 4, 16, 4, 0.0469, 0.0448, 4.75),
        ("zb_h1", 4, 8, None, 0.125, 0.1111, 4),
        ("zb_v", 4, 8, None, 0.0625, 0.0588, 4),
    ],
)
def test_numbers_of_the_course(
    name: str, p: int, m: int, v: int | None, ideal: float, total: float, peak: float
) -> None:
    trace = ps.simulate(ps.build(name, p, m, v=v))
    assert round(trace.bubble_of_ideal, 4) == ideal
    assert round(trace.bubble_of_total, 4) == total
    assert max(trace.peak_activations) == peak


def test_zb_v_by_the_zero_bubble_rate_and_by_makespan() -> None:
    trace = ps.simulate(ps.zb_v(4, 8))
    assert longest_worker(trace) == 8 * 6  # nothing but work: the rate is 0
    assert trace.bubble_of_ideal == 0.0625


@pytest.mark.parametrize("name", NEW)
def test_gradients_of_a_stage_add_up_in_the_order_of_one_process(name: str) -> None:
    for p, m in SIZES:
        for row in ps.build(name, p, m).workers:
            for kinds in ("F", "BI", "BW"):
                done: dict[int, list[int]] = {}
                for kind, stage, microbatch in row:
                    if kind in kinds:
                        done.setdefault(stage, []).append(microbatch)
                assert all(numbers == list(range(m)) for numbers in done.values())


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_lowered_schedules_pass_too(name: str, p: int) -> None:
    for m in sorted({1, 2, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 2}):
        for v in (None,) if name not in ("interleaved_1f1b", "looped_bfs") else (1, 2, 3, 4):
            schedule = ps.build(name, p, m, v=v)
            ps.check(ps.lower(schedule), memory_cap=max(ps.simulate(schedule).peak_activations))


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 3), (4, 8), (5, 7)])
def test_synchronous_batches_follow_one_another(name: str, p: int, m: int) -> None:
    one, three = (ps.simulate(ps.build(name, p, m, batches)) for batches in (1, 3))
    assert three.peak_activations == one.peak_activations
    assert three.weight_versions == [1] * p
    assert one.makespan <= three.makespan <= 3 * one.makespan
    assert sum(three.busy) == 3 * sum(one.busy)


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("interleaved_1f1b", (0, 1, 2, 0, 1, 2)),
        ("looped_bfs", (0, 1, 2, 0, 1, 2)),
        ("zb_v", (0, 1, 2, 2, 1, 0)),
        ("dualpipe_v", (0, 1, 2, 2, 1, 0)),
        ("zb_h2", (0, 1, 2)),
    ],
)
def test_stages_lie_round_and_round_or_in_a_v(name: str, placement: tuple[int, ...]) -> None:
    assert ps.build(name, 3, 4).placement == placement


def test_orders_as_the_papers_draw_them() -> None:
    assert rows(ps.interleaved_1f1b(2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 2U0 0B2 0B3 0U0".split(),
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 3U0 1B2 1B3 1U0".split(),
    ]
    assert rows(ps.zb_h1(2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2 0U0".split(),
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 1U0".split(),
    ]


def rows(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.workers]


# ---------------------------------------------------------------------------------------------
# build(v=)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved", "looped_bfs"])
def test_build_hands_v_on(name: str) -> None:
    assert ps.build(name, 3, 4).v == 2
    assert ps.build(name, 3, 4, v=3).v == 3
    assert ps.build(name, 3, 4, batches=2, v=1).v == 1


@pytest.mark.parametrize(
    ("name", "v"), [(n, 2 if n in ("zb_v", "dualpipe_v") else 1) for n in ps.SCHEDULES]
)
def test_build_takes_the_number_of_chunks_that_a_schedule_has(name: str, v: int) -> None:
    assert ps.build(name, 4, 4, v=v).v == v


@pytest.mark.parametrize(
    ("name", "v", "says"),
    [
        ("zb_v", 3, "v must be 2 for zb_v, not 3"),
        ("dualpipe_v", 1, "v must be 2 for dualpipe_v, not 1"),
        ("1f1b", 2, "v must be 1 for one_f_one_b, not 2"),
        ("interleaved", 0, "v must be at least 1, not 0"),
        ("gpipe", 0, "v must be at least 1, not 0"),
        ("looped_bfs", 1.5, "v must be a whole number of at least 1, not 1.5"),
    ],
)
def test_another_number_of_chunks_is_refused(name: str, v: int, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        ps.build(name, 3, 4, v=v)
    assert str(caught.value) == says


# ---------------------------------------------------------------------------------------------
# The pieces they are made of


def test_phases_number_each_stage_by_itself_and_take_the_oldest_weight_half() -> None:
    row = phases([0, 3], 9, ("F0 F1", 2), ("I1 I0", 2), ("W", 1), ("W0", 1), ("W", 2))
    assert " ".join(map(str, row)) == "0F0 3F0 0F1 3F1 3I0 0I0 3I1 0I1 3W0 0W0 3W1 0W1"


def test_phases_count_whole_and_split_backwards_together() -> None:
    row = phases([5], 9, ("F0", 3), ("B0 I0 B0 W", 1))
    assert " ".join(map(str, row)) == "5F0 5F1 5F2 5B0 5I1 5B2 5W1"


def test_phases_leave_out_microbatches_that_there_are_not() -> None:
    row = phases([0], 1, ("F0", 3), ("I0", 3), ("W", 3))
    assert " ".join(map(str, row)) == "0F0 0I0 0W0"


def test_taking_turns() -> None:
    forwards, backwards = ([kind(0, k) for k in range(3)] for kind in (ps.F, ps.B))
    turns = {n: " ".join(map(str, take_turns(forwards, backwards, n))) for n in (0, 1, 3, 7)}
    assert turns == {
        0: "0F0 0B0 0F1 0B1 0F2 0B2",
        1: "0F0 0F1 0B0 0F2 0B1 0B2",
        3: "0F0 0F1 0F2 0B0 0B1 0B2",
        7: "0F0 0F1 0F2 0B0 0B1 0B2",
    }
