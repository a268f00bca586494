"""The simulator against longest paths in an explicit graph, on any legal schedule and any cost."""

from __future__ import annotations

import random

import pipeschool as ps
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import Rates, longest_paths, most_at_once, random_schedule, scatter_messages
from pipeschool import Action, B, Cost, F, I, Schedule, Trace, U, W

seeds = st.integers(min_value=0, max_value=10**9)
many_schedules = settings(max_examples=200, deadline=None)


def random_cost(schedule: Schedule, seed: int) -> tuple[Cost, Rates]:
    """A cost with everything unequal, and the same numbers as the oracle wants them.

    Eighths and powers of two are exact in floating point: the two must agree to the last bit.
    """
    rng = random.Random(seed)
    stages = schedule.stages

    def eighths(count: int, low: int = 1) -> list[float]:
        return [rng.randint(low, 80) / 8 for _ in range(count)]

    seconds = {
        "F": eighths(stages),
        "B": eighths(stages),
        "I": eighths(stages),
        "W": eighths(stages),
        "U": eighths(stages, low=0),
    }
    speed = [rng.choice([0.5, 1.0, 2.0, 4.0]) for _ in range(schedule.p)]
    comm, latency = rng.choice([0.0, 0.5, 6.0]), rng.choice([0.0, 0.25, 9.0])
    sizes = [float(2 ** rng.randint(0, 6)) for _ in range(stages)]
    bandwidth = float(2 ** rng.randint(0, 6))
    cost = Cost(
        forward=seconds["F"],
        backward=seconds["B"],
        input_backward=seconds["I"],
        weight_backward=seconds["W"],
        update=seconds["U"],
        speed=speed,
        comm=comm,
        latency=latency,
        bandwidth=bandwidth,
        message_bytes=sizes,
    )
    messages = [comm + size / bandwidth for size in sizes]
    return cost, Rates(seconds, speed, messages, latency)


def times(trace: Trace) -> dict[Action, tuple[float, float]]:
    return {span.action: (span.start, span.end) for span in trace.spans}


@many_schedules
@given(seed=seeds)
def test_every_action_starts_and_ends_as_in_the_graph(seed: int) -> None:
    schedule = random_schedule(seed)
    cost, rates = random_cost(schedule, seed)
    assert times(ps.simulate(schedule, cost)) == longest_paths(schedule.workers, rates)


# The graph knows one model; two copies have tests of their own in test_chimera.py.
@pytest.mark.parametrize("name", [name for name in ps.SCHEDULES if name != "chimera"])
@given(p=st.integers(1, 5), m=st.integers(1, 6), batches=st.integers(1, 2), seed=seeds)
@settings(max_examples=40, deadline=None)
def test_built_in_schedules_agree_with_the_graph(
    name: str, p: int, m: int, batches: int, seed: int
) -> None:
    assume(name != "pipedream_2bw" or m >= p - 1)
    schedule = ps.build(name, p, m, batches)
    cost, rates = random_cost(schedule, seed)
    assert times(ps.simulate(schedule, cost)) == longest_paths(schedule.workers, rates)


@many_schedules
@given(seed=seeds)
def test_metrics_follow_from_the_times_of_the_graph(seed: int) -> None:
    schedule = random_schedule(seed)
    cost, rates = random_cost(schedule, seed)
    trace = ps.simulate(schedule, cost)
    graph = longest_paths(schedule.workers, rates)

    makespan = max(end for _, end in graph.values()) - min(start for start, _ in graph.values())
    work = sum(end - start for action, (start, end) in graph.items() if action.kind != "U")
    idle = schedule.p * makespan - work
    assert trace.makespan == makespan
    assert trace.bubble_of_total == pytest.approx(idle / (schedule.p * makespan))
    assert trace.bubble_of_ideal == pytest.approx(idle / work)

    for worker, row in enumerate(schedule.workers):
        held = []
        for action in row:
            if action.kind == "F":
                _, stage, k = action
                give_back = B(stage, k) if B(stage, k) in graph else W(stage, k)
                held.append((graph[action][0], graph[give_back][1]))
        assert trace.peak_activations[worker] == most_at_once(held) / schedule.v


@many_schedules
@given(seed=seeds)
def test_versions_are_those_of_a_replay_by_hand(seed: int) -> None:
    schedule = random_schedule(seed)
    spans = {span.action: span for span in ps.simulate(schedule).spans}
    late = []
    for row in schedule.workers:
        late.append(0)
        for stage in {action.stage for action in row}:
            updates = 0
            version_of: dict[int, int] = {}  # all microbatches whose forward is done
            in_flight: set[int] = set()
            gradients: list[int] = []  # versions of the gradients that wait for an update
            for action in (a for a in row if a.stage == stage):
                kind, _, k = action
                if kind == "F":
                    version_of[k] = updates
                    in_flight.add(k)
                if kind == "U":
                    late[-1] = max(late[-1], *(updates - version for version in gradients))
                    gradients = []
                    updates += 1
                version = updates if kind == "U" else version_of[k]
                alive = {updates} | {version_of[k] for k in in_flight}
                assert (spans[action].version, spans[action].alive) == (version, len(alive))
                if kind in ("B", "W"):
                    in_flight.remove(k)
                    gradients.append(version)
    assert ps.simulate(schedule).staleness == late


@many_schedules
@given(seed=seeds)
def test_a_lowered_schedule_takes_the_same_time(seed: int) -> None:
    schedule = random_schedule(seed)
    cost, _ = random_cost(schedule, seed)
    expected = times(ps.simulate(schedule, cost))
    for lowered in (ps.lower(schedule), scatter_messages(schedule, seed)):
        assert times(ps.simulate(lowered, cost)) == expected


@pytest.mark.parametrize("matching", ["tag", "in_order"])
@given(seed=seeds)
@settings(max_examples=100, deadline=None)
def test_legal_schedules_pass_the_check(matching: str, seed: int) -> None:
    schedule = random_schedule(seed)
    for version in (schedule, ps.lower(schedule), scatter_messages(schedule, seed)):
        assert ps.check(version, matching=matching) is version


# Small cases, worked out by hand.


def test_a_message_travels_while_its_sender_goes_on() -> None:
    trace = ps.simulate(ps.gpipe(2, 2), Cost(forward=1, backward=2, comm=0.5, latency=3))
    at = times(trace)
    assert at[F(0, 1)] == (1, 2)  # the sender does not wait for its message
    assert at[F(1, 0)] == (4.5, 5.5)  # 1 forward + 0.5 on the link + 3 latency
    assert at[F(1, 1)] == (5.5, 6.5)  # its input was there at 5.5
    assert at[B(1, 0)] == (6.5, 8.5)
    assert at[B(0, 0)] == (12, 14)


def test_messages_of_one_link_follow_one_another_but_latency_overlaps() -> None:
    at = times(ps.simulate(ps.gpipe(2, 3), Cost(forward=1, backward=2, comm=4, latency=10)))
    # On the link from 1 to 5, 5 to 9 and 9 to 13; each arrives 10 later.
    assert [at[F(1, k)][0] for k in range(3)] == [15, 19, 23]


def test_the_two_directions_between_neighbours_are_two_links() -> None:
    at = times(ps.simulate(ps.one_f_one_b(2, 2), Cost(forward=1, backward=1, comm=4)))
    # 0F1 leaves worker 0 at 5 and arrives at 9; 1B0 leaves worker 1 at 7 and arrives at 11.
    assert at[B(1, 0)] == (6, 7)
    assert at[F(1, 1)] == (9, 10)
    assert at[B(0, 0)] == (11, 12)


def test_bandwidth_and_message_size_add_to_the_time_on_the_link() -> None:
    cost = Cost(1, 1, comm=1, bandwidth=4, message_bytes=[8, 20, 0])
    trace = ps.simulate(ps.gpipe(3, 1), cost)
    at = times(trace)
    assert at[F(1, 0)][0] - at[F(0, 0)][1] == 1 + 8 / 4
    assert at[F(2, 0)][0] - at[F(1, 0)][1] == 1 + 20 / 4
    assert at[B(1, 0)][0] - at[B(2, 0)][1] == 1 + 20 / 4  # a gradient is as large
    assert at[B(0, 0)][0] - at[B(1, 0)][1] == 1 + 8 / 4
    assert {str(span.action): span.bytes for span in trace.spans if span.bytes} == {
        "0F0": 8, "1F0": 20, "2B0": 20, "1B0": 8,
    }  # fmt: skip


def test_the_slowest_stage_sets_the_pace() -> None:
    m = 50
    trace = ps.simulate(ps.one_f_one_b(4, m), Cost(forward=[1, 3, 1, 1], backward=[2, 6, 2, 2]))
    # Worker 1 never pauses: its warm-up bridges the time until the first gradient is back. Before
    # it starts there is one forward of stage 0, after it ends one backward.
    assert trace.makespan == 1 + m * 9 + 2
    assert trace.busy == [m * 3, m * 9, m * 3, m * 3]
    assert trace.bubble_of_total == pytest.approx(1 - m * 18 / (4 * trace.makespan))


def test_a_worker_of_speed_two_takes_half_the_time() -> None:
    at = times(ps.simulate(ps.gpipe(2, 1), Cost(forward=1, backward=2, update=4, speed=[1, 2])))
    assert at[F(1, 0)] == (1, 1.5)
    assert at[B(1, 0)] == (1.5, 2.5)
    assert at[U(1, 0)] == (2.5, 4.5)
    assert at[B(0, 0)] == (2.5, 4.5)


def test_halves_of_a_backward_take_half_of_it_each() -> None:
    halves = Schedule.from_workers(lambda w, p, m: [F(w, 0), I(w, 0), W(w, 0)], p=2, m=1)
    at = times(ps.simulate(halves, Cost(forward=1, backward=6)))
    assert at[I(1, 0)] == (2, 5)
    assert at[W(1, 0)] == (5, 8)
    assert at[I(0, 0)] == (5, 8)  # the stage before needs the input half alone


def test_neighbour_stages_on_one_worker_pass_no_message() -> None:
    both = Schedule.from_workers(lambda w, p, m: [F(0, 0), F(1, 0), B(1, 0), B(0, 0)], p=1, m=1)
    trace = ps.simulate(both, Cost(1, 2, comm=100, message_bytes=7))
    assert trace.makespan == 6
    assert trace.v == 2
    assert trace.peak_activations == [1]  # two chunks of half the size


def test_work_without_any_time_has_no_bubble() -> None:
    trace = ps.simulate(ps.gpipe(3, 2), Cost(forward=0, backward=0))
    assert (trace.makespan, trace.bubble_of_total, trace.bubble_of_ideal) == (0, 0, 0)
    assert trace.peak_activations == [2, 2, 2]


def test_simulating_an_illegal_schedule_is_refused() -> None:
    backwards_first = Schedule.from_workers(lambda w, p, m: [B(w, 0), F(w, 0)], p=2, m=1)
    with pytest.raises(ps.IllegalSchedule, match="worker 0 does 0B0"):
        ps.simulate(backwards_first)


def test_an_illegal_schedule_is_named_before_a_wrong_cost() -> None:
    backwards_first = Schedule.from_workers(lambda w, p, m: [B(w, 0), F(w, 0)], p=2, m=1)
    with pytest.raises(ps.IllegalSchedule):
        ps.simulate(backwards_first, Cost(forward=[1, 2, 3]))


def test_an_unknown_weight_policy_is_refused_with_those_there_are() -> None:
    schedule = Schedule.from_workers(lambda w, p, m: [F(w, 0), B(w, 0)], p=2, m=1, weights="guess")
    with pytest.raises(ValueError, match="there is no weight policy 'guess'; choose one of flush"):
        ps.simulate(schedule)
