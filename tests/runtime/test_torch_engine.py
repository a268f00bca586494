"""PyTorch's own engine behind the same call gives what ours gives, and says what it cannot do."""

from __future__ import annotations

import importlib
import time

import pipeschool as ps
import pytest
import torch
import torch.distributed as dist
from faulty import Faulty, killed, raises, sleeps
from pipeschool.actions import Action
from pipeschool.runtime import reference
from pipeschool.runtime.errors import lost_connection
from pipeschool.runtime.host import progress
from pipeschool.runtime.torch_engine.shipped import shipped
from test_run import Fork, Join
from torch import nn

WIDTH = 6
FAMILIES = [
    "naive",
    "gpipe",
    "one_f_one_b",
    "eager_1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "dualpipe_v",
]


def linear_stages(count, dtype=torch.float32):
    torch.manual_seed(count)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(dtype) for _ in range(count)]


def batch(samples, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, WIDTH, dtype=dtype, generator=generator)
    return x, y


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def by_hand(rows, m, name="by hand", **fields):
    """A schedule from the text of its rows, with an update of each stage at the end."""
    workers = []
    for row in rows:
        actions = [Action.parse(cell) for cell in row.split()]
        stages = dict.fromkeys(action.stage for action in actions)
        workers.append((*actions, *(Action("U", stage, 0) for stage in stages)))
    return ps.Schedule(name, len(rows), m, tuple(workers), **fields)


SPLIT = by_hand(
    ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"],
    m=2,
)
BACKWARDS = by_hand(["0F1 0F0 0B1 0B0", "1F1 1F0 1B1 1B0"], m=2)  # the last microbatch first


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), pytest.param(3, 6, marks=pytest.mark.exhaustive)])
def test_gradients_and_losses_are_those_of_one_process_and_of_our_engine(name, p, m):
    schedule = ps.build(name, p, m)
    stages, data = linear_stages(schedule.stages), [batch(2 * m)]
    theirs = ps.run(schedule, stages, data, engine="torch")
    ours = ps.run(schedule, stages, data)
    assert reference.max_error(theirs.gradients, reference.gradients(stages, data, m)) < 1e-6
    assert reference.max_error(theirs.gradients, ours.gradients) < 1e-6
    assert theirs.losses == pytest.approx(ours.losses, abs=1e-6)


def test_no_synchronous_family_is_left_out():
    every = {name: ps.build(name, 2, 4) for name in ps.SCHEDULES}
    assert FAMILIES == [n for n, s in every.items() if s.synchronous and not s.replicas]


@pytest.mark.parametrize("schedule", [ps.gpipe(4, 2), ps.naive(1, 3), SPLIT, BACKWARDS])
def test_any_synchronous_order_runs(schedule):
    stages, data = linear_stages(schedule.stages), [batch(6)]
    result = ps.run(schedule, stages, data, engine="torch")
    expected = reference.gradients(stages, data, schedule.m)
    assert reference.max_error(result.gradients, expected) < 1e-6
    done = [[span.action for span in row] for row in result.trace.rows]
    assert done == [list(row) for row in schedule.workers]


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [
        ("interleaved_1f1b", 2, 4),
        ("looped_bfs", 2, 3),
        ("interleaved_zero_bubble", 3, 3),
        ("zbv_zero_bubble", 2, 4),
        ("dualpipe_v", 2, 5),
    ],
)
def test_what_pytorch_ships_runs_on_its_engine(name, p, m):
    schedule = shipped(name, p, m, 1 if name == "interleaved_zero_bubble" else 2)
    stages, data = linear_stages(schedule.stages), [batch(2 * m)] * 2
    result = ps.run(schedule, stages, data, engine="torch")
    assert reference.max_error(result.gradients, reference.gradients(stages, data, m)) < 1e-6
    assert len(result.losses) == 2 * m


def test_in_float64_the_gradients_agree_to_the_last_digits():
    stages, data = linear_stages(3, torch.float64), [batch(12, torch.float64)]
    result = ps.run(ps.one_f_one_b(p=3, m=6), stages, data, engine="torch")
    assert reference.max_error(result.gradients, reference.gradients(stages, data, 6)) < 1e-14


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("one_f_one_b", "zb_v") else pytest.mark.exhaustive)
        for n in FAMILIES
    ],
)
def test_training_on_two_batches_ends_with_the_weights_of_our_engine(name):
    schedule = ps.build(name, 2, 4)
    data = [batch(8, torch.float64, seed) for seed in range(2)]
    options = {"optimizer": adam, "clip_norm": 0.1, "history": True}
    options["scheduler"] = lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    stages = linear_stages(schedule.stages, torch.float64)
    ours = ps.run(schedule, stages, data, **options)
    theirs = ps.run(schedule, stages, data, engine="torch", update_stages=True, **options)
    assert theirs.losses == pytest.approx(ours.losses, abs=1e-12)
    assert len(theirs.history) == 3
    for a, b, stage in zip(theirs.state_dicts, ours.state_dicts, stages, strict=True):
        assert reference.max_error([a], [b]) < 1e-12
        assert reference.max_error([a], [stage.state_dict()]) == 0.0
    for a, b in zip(theirs.history, ours.history, strict=True):
        assert reference.max_error(a, b) < 1e-12


def test_training_over_epochs_goes_on_where_a_leg_ended():
    data = [batch(6, torch.float64, seed) for seed in range(2)]
    stages = linear_stages(2, torch.float64)
    options = {"m": 3, "epochs": 2, "every": 1, "optimizer": adam, "log": None}
    ours = ps.train("1f1b", stages, data, **options)
    theirs = ps.train("1f1b", stages, data, engine="torch", **options)
    assert theirs.losses == pytest.approx(ours.losses, abs=1e-12)
    assert reference.max_error(theirs.state_dicts, ours.state_dicts) < 1e-12


def test_stages_may_hand_on_several_tensors_of_any_shape_and_type():
    torch.manual_seed(0)
    stages, data = [Fork(), Join()], [batch(8, torch.float64)]
    result = ps.run(ps.one_f_one_b(p=2, m=4), stages, data, engine="torch")
    assert reference.max_error(result.gradients, reference.gradients(stages, data, m=4)) < 1e-14


def test_buffers_see_each_microbatch_once_and_random_numbers_are_those_of_our_engine():
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())
        for _ in range(2)
    ]
    ours = ps.run(ps.gpipe(p=2, m=3), stages, [batch(12)], seed=5)
    theirs = ps.run(ps.gpipe(p=2, m=3), stages, [batch(12)], seed=5, engine="torch")
    assert theirs.losses == pytest.approx(ours.losses, abs=1e-6)
    for a, b in zip(theirs.state_dicts, ours.state_dicts, strict=True):
        assert int(a["1.num_batches_tracked"]) == 3
        assert reference.max_error([a], [b]) < 1e-6


def test_a_stage_that_cannot_be_trained_passes_the_data_on():
    stages, data = linear_stages(3), [batch(8)]
    stages[0].requires_grad_(False)
    result = ps.run(ps.one_f_one_b(p=3, m=4), stages, data, engine="torch")
    assert result.gradients[0] == {}
    assert reference.max_error(result.gradients, reference.gradients(stages, data, 4)) < 1e-6


def test_the_trace_has_every_action_once_and_a_paced_one_lasts_as_declared():
    schedule = ps.one_f_one_b(p=2, m=3)
    result = ps.run(schedule, linear_stages(2), [batch(6)] * 2, engine="torch", pace=(0.002, 0.004))
    trace = result.trace
    assert (trace.label, result.paced) == ("measured, paced", True)
    rows = schedule.repeat(2).workers
    assert [[span.action for span in row] for row in trace.rows] == [list(row) for row in rows]
    for row in trace.rows:
        for span, after in zip(row, row[1:], strict=False):
            assert span.end <= after.start
        for kind, seconds in (("F", 0.002), ("B", 0.004)):
            assert min(span.seconds for span in row if span.action.kind == kind) >= seconds
    figure = ps.draw.compare(ps.simulate(schedule.repeat(2), ps.Cost(0.002, 0.004)), trace)
    assert figure is not None
    unpaced = ps.run(schedule, linear_stages(2), [batch(6)], engine="torch")
    assert (unpaced.trace.label, unpaced.paced) == ("measured", False)


def complains(x):
    raise RuntimeError("too hot")  # the type that a broken connection has


def refused(message, schedule=None, data=None, error=ValueError, **options):
    schedule = schedule or ps.gpipe(p=2, m=2)
    began = time.perf_counter()
    with pytest.raises(error, match=message) as caught:
        ps.run(
            schedule,
            linear_stages(schedule.stages),
            data or [batch(4)],
            engine="torch",
            **options,
        )
    assert "\n" not in str(caught.value)
    assert type(caught.value) is error  # an IllegalSchedule is a ValueError too
    assert time.perf_counter() - began < 60


def test_what_it_cannot_do_is_said_before_a_worker_starts(monkeypatch):
    def never(*_):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(importlib.import_module("pipeschool.runtime.launch"), "new_pool", never)
    refused("only synchronous schedules, and pipedream has weights='stash'", ps.pipedream(2, 2))
    refused("only synchronous schedules, and forward_only has .*'frozen'", ps.forward_only(2, 2))
    refused("one worker per stage: here several take turns", ps.chimera(2, 2))
    refused("sends and receives itself", ps.lower(ps.gpipe(p=2, m=2)))
    refused("has no nan_check: leave it out", nan_check=True)
    refused("has no recompute", recompute=[False, True])
    refused("has no memory", memory=True)
    refused("has no declared latency or bandwidth", latency=0.1)
    refused("has no declared latency or bandwidth", bandwidth=1e6)
    refused(r"m=2 must divide .* \(\(2, 6\) float32\) and \(\(1, 6\) float32\)", data=[batch(3)])
    refused("all microbatches alike", data=[batch(4), batch(6)])
    x, y = batch(4)
    refused("targets that are one tensor", data=[(x, (y, y))])
    every = ps.Schedule.from_workers(
        lambda w, p, m: [a for k in range(m) for a in (ps.F(w, k), ps.B(w, k))],
        p=1,
        m=2,
        updates_every=1,
        name="hasty",
    )
    refused("hasty must end every batch of m=2 in one update", every)
    uneven = by_hand(["0F0 2F0 2B0 0B0", "1F0 1B0"], m=1)
    refused("has 3 on 2", uneven, [batch(2)])
    frozen = [linear_stages(2)[0].requires_grad_(False), linear_stages(2)[1]]
    with pytest.raises(ValueError, match="as in zb_h1, and stage 0 has nothing to train"):
        ps.run(ps.zb_h1(2, 2), frozen, [batch(4)], engine="torch")
    with pytest.raises(ValueError, match="engine must be one of pipeschool, torch, not 'jax'"):
        ps.run(ps.gpipe(p=2, m=2), linear_stages(2), [batch(4)], engine="jax")


PLACES = [("F", 0, 0), ("F", 2, 3), ("B", 1, 2), ("B", 2, 3)]
FAULTS = [raises, complains, killed, sleeps]


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        pytest.param(
            fault,
            place,
            marks=pytest.mark.exhaustive if (fault, place) == (sleeps, PLACES[0]) else (),
        )
        for fault in FAULTS
        for place in PLACES
    ],
)
def test_a_stage_that_fails_ends_the_run_with_one_message(fault, place, monkeypatch):
    monkeypatch.setattr(progress, "START_LIMIT", 5.0)  # for who sleeps before anything has moved
    where, worker, microbatch = place
    stages = linear_stages(3, torch.float64)
    stages[worker] = Faulty(WIDTH, fault, where, microbatch)
    with pytest.raises(ps.RunError) as caught:
        ps.run(
            ps.one_f_one_b(p=3, m=4),
            stages,
            [batch(8, torch.float64)],
            engine="torch",
            timeout=1.0,
        )
    error = caught.value
    assert error.worker == worker
    assert error.action == Action(where, worker, microbatch)
    says = {
        raises: "KeyError: 'the brew is off'",
        complains: "RuntimeError: too hot",
        killed: "was killed by SIGKILL",
        sleeps: "is stuck",
    }[fault]
    assert says in str(error)
    assert "Full Schedule" not in str(error)
    if fault in (raises, complains):
        assert error.frames[-1].function == fault.__name__


class Recurrent(nn.Module):
    """Gives a tensor that is not contiguous, which PyTorch's engine cannot send."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


def test_what_pytorchs_engine_refuses_is_no_lost_connection():
    x = torch.randn(8, 3, WIDTH)
    with pytest.raises(ps.RunError) as caught:
        ps.run(ps.zb_v(2, 4), [Recurrent() for _ in range(4)], [(x, x)], engine="torch")
    assert "RuntimeError: input tensor has to be contiguous" in str(caught.value)
    assert "PeerLost" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (dist.DistBackendError("NCCL error"), True),
        (dist.DistNetworkError("The client socket has failed"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer"), True),
        (RuntimeError("Read error [127.0.0.1]:4711: Connection reset by peer"), True),
        (RuntimeError("[enforce fail at ../gloo/transport/tcp/pair.cc:84] 5 vs 4"), False),
        (RuntimeError("Can't detach views in-place. Use detach() instead"), False),
        (NotImplementedError("connection closed"), False),
    ],
)
def test_a_lost_connection_is_known_by_its_type_or_by_the_words_of_gloo(error, lost):
    assert lost_connection(error) == lost


def test_a_loss_that_is_no_number_is_named():
    with pytest.raises(ps.RunError, match="the loss must be a tensor with one number") as caught:
        ps.run(
            ps.gpipe(p=2, m=2),
            linear_stages(2),
            [batch(4)],
            engine="torch",
            loss=lambda out, y: out - y,
        )
    assert caught.value.worker == 1


def test_an_optimizer_that_raises_is_named_at_the_update():
    def optimizer(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.step = lambda: 1 / 0
        return optimizer

    with pytest.raises(ps.RunError, match=r"0U0 \(optimizer update number 0 on stage 0\)"):
        ps.run(
            ps.gpipe(p=1, m=2), linear_stages(1), [batch(4)], engine="torch", optimizer=optimizer
        )


def test_a_stage_that_raises_prints_no_table_of_the_whole_schedule(capfd):
    stages = linear_stages(2, torch.float64)
    stages[1] = Faulty(WIDTH, raises, "F", 1)
    with pytest.raises(ps.RunError, match="worker 1 failed at 1F1"):
        ps.run(ps.gpipe(p=2, m=2), stages, [batch(4, torch.float64)], engine="torch")
    assert capfd.readouterr().err == ""
