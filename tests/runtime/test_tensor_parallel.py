"""Tensor times pipeline parallel: two processes per worker train to the weights of one."""

from __future__ import annotations

import copy
import importlib

import pipeschool as ps
import pytest
import torch
from test_run import batch, linear_stages
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    """A feed-forward layer of a Transformer: wide in the middle, which is where it is cut."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks(p: int) -> list[nn.Module]:
    torch.manual_seed(p)
    return [Block() for _ in range(p)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        (ps.one_f_one_b(2, 4), sgd),
        (ps.zb_h1(2, 4), sgd),
        (ps.gpipe(2, 2), adam),
        (ps.replicate(ps.one_f_one_b(2, 2), 2), sgd),  # data times pipeline times tensor
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_two_by_two_trains_to_the_weights_of_one_process(schedule, optimizer):
    stages = blocks(2)
    data = [tuple(t.float() for t in batch(8, width=8, seed=seed)) for seed in range(4)]
    result = ps.run(
        schedule, stages, data, optimizer=optimizer, tensor_parallel=2, tensor_plan=PLAN
    )
    model = nn.Sequential(*copy.deepcopy(stages))
    alone = optimizer(model.parameters())
    for x, y in data:
        alone.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        alone.step()
    for stage, state in zip(model, result.state_dicts, strict=True):
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
    assert len(result.losses) == 4 * schedule.m


def test_an_asynchronous_stage_stashes_its_slices():
    stages = blocks(2)
    data = [tuple(t.float() for t in batch(8, width=8, seed=seed)) for seed in range(3)]
    schedule = ps.pipedream(2, 4, batches=3)
    sliced = ps.run(
        schedule, stages, data, optimizer=sgd, tensor_parallel=2, tensor_plan=PLAN, history=True
    )
    whole = ps.run(schedule, stages, data, optimizer=sgd, history=True)
    assert sliced.trace.weight_versions == whole.trace.weight_versions == [2, 1]
    for ours, theirs in zip(sliced.history, whole.history, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            for name in b:
                torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6)


def test_each_process_holds_half_of_what_is_cut():
    size = sum(p.numel() * 4 for name, p in Block().named_parameters())
    shared = sum(p.numel() * 4 for name, p in Block().named_parameters() if "norm" in name)
    shared += 8 * 4  # the bias of a layer cut by rows
    data = [tuple(t.float() for t in batch(4, width=8))]
    result = ps.run(ps.gpipe(2, 2), blocks(2), data, tensor_parallel=2, tensor_plan=PLAN)
    assert result.trace.parameter_bytes == [shared + (size - shared) / 2] * 2


@pytest.mark.parametrize(("gpus", "backend"), [(4, "nccl"), (2, "gloo")])
def test_every_process_of_a_worker_has_a_gpu_of_its_own_where_nccl_is_used(
    monkeypatch, gpus, backend
):
    """NCCL refuses two processes on one GPU. No GPU is needed here: the jobs say who gets which."""
    jobs = []

    def look(plan, timeout, modules):
        jobs.extend(plan.job(process) for process in range(plan.processes))
        raise InterruptedError

    module = importlib.import_module("pipeschool.runtime.launch")
    monkeypatch.setattr(module, "on_this_machine", look)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    data = [tuple(t.float() for t in batch(4, width=8))]
    with pytest.raises(InterruptedError):
        ps.run(ps.gpipe(2, 2), blocks(2), data, tensor_parallel=2, tensor_plan=PLAN)
    assert [job.device for job in jobs] == [f"cuda:{n % gpus}" for n in range(4)]
    assert {job.backend for job in jobs} == {backend}


class Cold(Block):
    def forward(self, x):
        raise ValueError("the tea is cold")


def test_a_failure_names_the_worker():
    data = [tuple(t.float() for t in batch(4, width=8))]
    stages = [*blocks(1), Cold()]
    with pytest.raises(ps.RunError, match="worker 1 failed at 1F0 .*the tea is cold") as caught:
        ps.run(ps.gpipe(2, 2), stages, data, tensor_parallel=2, tensor_plan=PLAN)
    assert caught.value.worker == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tensor_plan": None}, "tensor_plan must map names of layers to styles of"),
        ({"tensor_plan": {"up": "columns"}}, "tensor_plan must map names of layers to styles of"),
        ({"tensor_plan": {"left": ColwiseParallel()}}, "names a layer 'left', which no stage has"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, not 0"),
        ({"tensor_parallel": 40}, "at most 64 workers, not 80"),
        ({"memory": True}, "tensor_parallel does not go with memory=True here"),
        ({"engine": "torch"}, "tensor_parallel does not go with engine='torch' here"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(wrong, message):
    data = [tuple(t.float() for t in batch(4, width=8))]
    arguments = {"tensor_parallel": 2, "tensor_plan": PLAN} | wrong
    with pytest.raises(ValueError, match=message):
        ps.run(ps.gpipe(2, 2), blocks(2), data, **arguments)


def test_without_parts_a_plan_changes_nothing():
    stages, data = linear_stages(2), [batch(4)]
    result = ps.run(ps.gpipe(2, 2), stages, data, tensor_plan=PLAN)
    expected = ps.run(ps.gpipe(2, 2), stages, data)
    assert result.losses == expected.losses
