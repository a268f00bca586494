"""A carrier whose sends wait, as NCCL's do: every family runs on it, and what would stand still is
refused, or named by the watch."""

from __future__ import annotations

from dataclasses import replace

import pipeschool as ps
import pytest
import torch
from pipeschool.runtime import launch, reference
from test_run import batch, linear_stages, sgd

FAMILIES = [
    ("naive", 4, 4, None),
    ("gpipe", 4, 8, None),
    ("one_f_one_b", 4, 8, None),
    ("eager_1f1b", 4, 9, None),
    ("interleaved_1f1b", 4, 8, 2),
    ("looped_bfs", 4, 8, 2),
    ("zb_h1", 4, 8, None),
    ("zb_h2", 4, 8, None),
    ("zb_v", 4, 7, None),
    ("dualpipe_v", 4, 8, None),
    ("chimera", 4, 8, None),
]
TURNS = {
    "replicas": lambda: ps.replicate(ps.one_f_one_b(2, 4), 2),
    "round robin": lambda: ps.round_robin((1, 2, 1), 8, weights="flush"),
}


def both(schedule, data, **options):
    """The same run on both carriers of one machine."""
    stages = linear_stages(schedule.stages)
    return [
        ps.run(schedule, stages, data, optimizer=sgd, matching=matching, **options)
        for matching in ("rendezvous", "in_order")
    ]


def assert_same(waiting, other):
    assert (waiting.backend, other.backend) == ("rendezvous", "local")
    assert waiting.losses == other.losses
    for a, b in zip(waiting.gradients, other.gradients, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
    for a, b in zip(waiting.state_dicts, other.state_dicts, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize(("name", "p", "m", "v"), FAMILIES)
def test_gradients_equal_one_process_and_the_other_carrier(name, p, m, v):
    schedule = ps.build(name, p, m, v=v)
    data = [batch(2 * m + 1), batch(2 * m + 1, seed=1)]
    waiting, other = both(schedule, data)
    assert_same(waiting, other)
    expected = reference.gradients(
        linear_stages(schedule.stages), data, m, optimizer=sgd,
        replicas=[len(workers) for workers in schedule.owners],
    )  # fmt: skip
    assert reference.max_error(waiting.gradients, expected) == 0.0


@pytest.mark.parametrize("turns", TURNS)
def test_workers_that_take_turns(turns):
    schedule = TURNS[turns]()
    assert_same(*both(schedule, [batch(16), batch(16, seed=1)]))


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_asynchronous_streams(name):
    assert_same(*both(ps.build(name, 4, 4, batches=2), [batch(8), batch(8, seed=1)]))


def test_inference():
    stages, (x, _) = linear_stages(4), batch(8)
    schedule = ps.forward_only(4, 4)
    results = [
        ps.run(schedule, stages, [(x, None)], matching=matching)
        for matching in ("rendezvous", "in_order")
    ]
    for a, b in zip(*(result.outputs for result in results), strict=True):
        assert torch.equal(a[0], b[0])


def test_large_tensors_and_a_shared_parameter():
    stages = linear_stages(4, width=96)
    stages[3][0].weight = stages[0][0].weight
    x, y = batch(64, width=96)  # beyond what a packet holds
    results = [
        ps.run(ps.zb_h1(4, 4), stages, [(x, y)] * 2, optimizer=sgd, matching=matching)
        for matching in ("rendezvous", "in_order")
    ]
    assert_same(*results)


@pytest.mark.exhaustive
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name in ps.SCHEDULES if name != "forward_only"])
def test_every_family_at_more_sizes(name, p):
    for m in (1, 2, 5, 8, 12):
        try:
            schedule = ps.check(ps.build(name, p, m))
        except ValueError:
            continue
        assert_same(*both(schedule, [batch(2 * m)] * schedule.batches))


# --- what stands still ---------------------------------------------------------------------------

FACING = ps.lower(ps.one_f_one_b(2, 4))  # and not fused


def test_facing_sends_that_are_not_fused_are_refused_beforehand():
    with pytest.raises(ps.IllegalSchedule) as caught:
        ps.run(FACING, linear_stages(2), [batch(8)], matching="rendezvous")
    assert str(caught.value) == (
        "deadlock: worker 0 waits at 0SEND_F1 (send of the activations of microbatch 1 on stage 0) "
        "for worker 1 to receive it; worker 1 waits at 1SEND_B0 (send of the gradients of "
        "microbatch 0 on stage 1) for worker 0 to receive it"
    )


def test_the_same_row_runs_where_sends_do_not_wait_and_where_it_is_fused():
    stages, data = linear_stages(2), [batch(8)]
    expected = reference.gradients(stages, data, 4)
    for schedule, matching in (
        (FACING, "in_order"),
        (ps.lower(FACING, fuse=True), "rendezvous"),
        (ps.lower(FACING, fuse=True), "in_order"),
    ):
        result = ps.run(schedule, stages, data, matching=matching)
        assert reference.max_error(result.gradients, expected) == 0.0


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(launch, "check", lambda schedule, **options: schedule)


def test_it_really_stands_still_and_the_watch_says_who_waits_for_whom(unchecked):
    with pytest.raises(ps.RunError) as caught:
        ps.run(FACING, linear_stages(2), [batch(8)], matching="rendezvous", timeout=1)
    assert str(caught.value).startswith(
        "worker 0 is stuck at 0SEND_F1 (send of the activations of microbatch 1 on stage 0) (for "
        "worker 1 to receive it; worker 1 waits for it at 1SEND_B0): nothing has moved for "
    )
    error = caught.value
    assert (error.worker, error.action, error.peer) == (0, ps.Action("SEND_F", 0, 1), 1)


def test_in_a_group_the_send_is_named_that_is_waited_for(unchecked):
    # Worker 1 sends both ways at once. Worker 2 receives; worker 0 wants something else first.
    good = ps.lower(ps.one_f_one_b(3, 1), fuse=True)
    rows = [
        "0F0 0RECV_B0 0SEND_F0 0B0 0U0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1U0",
    ]
    workers = [tuple(map(ps.Action.parse, row.split())) for row in rows]
    stuck = replace(good, workers=(*workers, good.workers[2]), fused=False)
    with pytest.raises(ps.RunError) as caught:
        ps.run(stuck, linear_stages(3), [batch(2)], matching="rendezvous", timeout=1)
    assert caught.value.worker in (0, 1)
