"""Stages on several workers: data parallel lines, and PipeDream's round robin."""

from __future__ import annotations

from itertools import product

import pipeschool as ps
import pytest

BALANCED = [reps for n in (1, 2, 3) for reps in product((1, 2, 3), repeat=n)]


@pytest.mark.parametrize("weights", ["stash", "flush"])
@pytest.mark.parametrize("reps", BALANCED)
def test_a_stage_on_r_workers_is_r_times_as_fast(reps, weights):
    """Stages as slow as they have workers: the line takes a microbatch every 3 seconds, and fills
    once. The exception: neighbours of 2 and 3 workers that wait for each other at every update."""
    schedule = ps.check(ps.round_robin(reps, 48, weights=weights))
    ps.check(ps.lower(schedule))
    cost = ps.Cost(forward=list(reps), backward=[2 * r for r in reps])
    makespan = ps.simulate(schedule, cost).makespan
    assert 48 * 3 <= makespan
    if weights == "flush" or not {2, 3} <= set(reps):
        assert makespan <= 48 * 3 + 3 * sum(reps)
    alone = ps.simulate(ps.one_f_one_b(len(reps), 48), cost).makespan
    assert makespan <= alone


@pytest.mark.parametrize("m", [1, 2, 5, 9])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_with_one_worker_each_it_is_1f1b(p, m):
    flush = ps.round_robin([1] * p, m, batches=2, weights="flush")
    assert flush.workers == ps.one_f_one_b(p, m, batches=2).workers
    assert ps.round_robin([1] * p, m, batches=2).workers == ps.pipedream(p, m, batches=2).workers


def test_turns_workers_and_updates():
    schedule = ps.round_robin([2, 1], 4)
    assert schedule.owners == ((0, 1), (2,))
    assert schedule.updates_every == 2
    assert [str(a) for a in schedule.workers[0]] == [
        "0F0", "0F2", "0B0", "0U0", "0B2", "0U1",
    ]  # fmt: skip
    assert [str(a) for a in schedule.workers[2]] == [
        "1F0", "1B0", "1F1", "1B1", "1U0", "1F2", "1B2", "1F3", "1B3", "1U1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("replicas", "m", "weights", "message"),
    [
        ([], 4, "stash", "replicas must name the number of workers of at least one stage"),
        ([2, 0], 4, "stash", "a number of workers must be at least 1, not 0"),
        ([2, 3], 4, "flush", r"m must be a multiple of 6 for workers \(2, 3\), not 4"),
        # One worker would update once more than the other; or a last gradient would find no update.
        ([2, 1], 5, "stash", r"m \* batches must be a multiple of 2 for workers \(2, 1\), not 5"),
        ([2, 3], 7, "stash", r"m \* batches must be a multiple of 6 for workers \(2, 3\), not 7"),
    ],
)
def test_wrong_numbers_are_refused(replicas, m, weights, message):
    with pytest.raises(ValueError, match=message):
        ps.round_robin(replicas, m, weights=weights)


@pytest.mark.parametrize(
    ("replicas", "worker", "microbatch", "in_flight"), [([2, 1], 1, 3, 4), ([1, 2], 0, 3, 4)]
)
def test_vertical_sync_does_not_go_with_turns(replicas, worker, microbatch, in_flight):
    """It wants version (k - 1) // 2 at microbatch k: 1 at number 3. Two stages in line would have
    two microbatches in flight; here stage 0 takes in four before its first backward."""
    schedule = ps.round_robin(replicas, 8, weights="vertical_sync")
    with pytest.raises(ps.IllegalSchedule) as caught:
        ps.check(schedule)
    assert str(caught.value) == (
        "round_robin does not go with weights='vertical_sync', which counts on at most 2 "
        f"microbatches in flight at a stage: stage 0 has {in_flight}, because workers take turns; "
        f"worker {worker}: 0F{microbatch} (forward of microbatch {microbatch} on stage 0) asks for "
        "weight version 1, but the stage holds only 0"
    )
    assert caught.value.worker == worker
    assert caught.value.action == ps.F(0, microbatch)


def test_vertical_sync_goes_with_one_worker_each_and_with_one_stage():
    for replicas in ([1, 1, 1], [3]):
        ps.check(ps.round_robin(replicas, 12, weights="vertical_sync"))


LINES = [
    ps.one_f_one_b(4, 8),
    ps.gpipe(3, 5, batches=2),
    ps.zb_v(3, 6),
    ps.interleaved_1f1b(2, 4, v=3),
    ps.chimera(4, 4),
    ps.pipedream(3, 6),
    ps.forward_only(2, 4, tokens=2),
]


@pytest.mark.parametrize("schedule", LINES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("lines", [1, 2, 3])
def test_lines_side_by_side_take_the_time_and_memory_of_one(schedule, lines):
    several = ps.check(ps.replicate(schedule, lines))
    ps.check(ps.lower(several))
    assert (several.p, several.m) == (schedule.p * lines, schedule.m * lines)
    one, all_of_them = ps.simulate(schedule), ps.simulate(several)
    assert all_of_them.makespan == one.makespan
    assert all_of_them.bubble_of_total == pytest.approx(one.bubble_of_total)
    assert all_of_them.peak_activations == one.peak_activations * lines
    assert all_of_them.weight_versions == one.weight_versions * lines


def test_a_line_takes_every_other_microbatch():
    schedule = ps.replicate(ps.gpipe(2, 2), 2)
    assert [[str(a) for a in row] for row in schedule.workers] == [
        ["0F0", "0F2", "0B0", "0B2", "0U0"],
        ["1F0", "1F2", "1B0", "1B2", "1U0"],
        ["0F1", "0F3", "0B1", "0B3", "0U0"],
        ["1F1", "1F3", "1B1", "1B3", "1U0"],
    ]
    assert schedule.owners == ((0, 2), (1, 3))


def test_only_a_schedule_without_messages_is_replicated():
    with pytest.raises(ValueError, match="before it is lowered"):
        ps.replicate(ps.lower(ps.gpipe(2, 2)), 2)
