"""Several workers at a stage, for real: gradients and weights equal those of one process."""

from __future__ import annotations

import copy
import time

import pipeschool as ps
import pytest
import torch
from pipeschool.actions import Schedule
from pipeschool.runtime import reference
from test_run import batch, linear_stages, sgd
from torch import nn


@pytest.mark.parametrize(
    "schedule",
    [
        ps.replicate(ps.one_f_one_b(2, 3), 2),
        ps.replicate(ps.zb_v(2, 4), 2),
        ps.round_robin([2, 1], 4, weights="flush"),
        ps.round_robin([1, 2, 1], 4, weights="flush"),
    ],
    ids=lambda schedule: f"{schedule.name} {schedule.owners}",
)
def test_data_times_pipeline_equals_one_process_bit_by_bit(schedule):
    stages = linear_stages(schedule.stages)
    data = [batch(13), batch(13, seed=1), batch(13, seed=2)]
    result = ps.run(schedule, stages, data, optimizer=sgd)
    counts = [len(workers) for workers in schedule.owners]
    expected = reference.gradients(stages, data, schedule.m, optimizer=sgd, replicas=counts)
    assert reference.max_error(result.gradients, expected) == 0.0
    assert len(result.losses) == 3 * schedule.m


class OneWayOrTheOther(nn.Module):
    """Two layers of one shape; which of them a microbatch meets is up to its first number."""

    def __init__(self):
        super().__init__()
        self.positive = nn.Linear(6, 6).double()
        self.negative = nn.Linear(6, 6).double()
        self.unused = nn.Linear(6, 6).double()

    def forward(self, x):
        return self.positive(x) if x[0, 0] > 0 else self.negative(x)


def test_workers_whose_microbatches_met_different_layers_sum_what_belongs_together():
    torch.manual_seed(0)
    stage = OneWayOrTheOther()
    x, y = batch(4)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])  # worker 0 positive, worker 1 negative
    schedule = ps.replicate(ps.gpipe(1, 2), 2)
    result = ps.run(schedule, [stage], [(x, y)])
    assert set(result.gradients[0]) == {
        f"{a}.{b}" for a in ("positive", "negative") for b in ("weight", "bias")
    }
    loss = sum(nn.functional.mse_loss(stage(x[k : k + 1]), y[k : k + 1]) for k in range(4)) / 4
    loss.backward()
    for name, gradient in result.gradients[0].items():
        torch.testing.assert_close(gradient, stage.get_parameter(name).grad, rtol=0, atol=1e-12)


class SleepsAtNegative(nn.Linear):
    def forward(self, x):
        if x[0, 0] < 0:
            time.sleep(1000)
        return super().forward(x)


def test_who_holds_up_an_update_is_named_not_who_waits_there():
    x, y = batch(4)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, 1.0])
    stage = SleepsAtNegative(6, 6, dtype=torch.float64)
    with pytest.raises(ps.RunError, match=r"worker 1 is stuck at 0F1 ") as caught:
        ps.run(ps.replicate(ps.gpipe(1, 2), 2), [stage], [(x, y)], timeout=1.0)
    assert (caught.value.worker, caught.value.action) == (1, ps.F(0, 1))


def test_two_by_two_trains_to_the_weights_of_one_process():
    """Float32, plain torch, the whole batch at once."""
    stages = [stage.float() for stage in linear_stages(2)]
    data = [tuple(t.float() for t in batch(16, seed=seed)) for seed in range(5)]
    schedule = ps.replicate(ps.one_f_one_b(2, 4), 2)
    result = ps.run(schedule, stages, data, optimizer=sgd)
    model = nn.Sequential(*copy.deepcopy(stages))
    optimizer = sgd(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for stage, state in zip(model, result.state_dicts, strict=True):
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)


def versions_of(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(stage, microbatch) -> the updates that its worker had made before that forward."""
    used = {}
    for row in schedule.workers:
        made = 0
        for action in row:
            if action.kind == "U":
                made += 1
            elif action.kind == "F":
                used[action.stage, action.microbatch] = made
    return used


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [2, 1, 1], [1, 2, 1], [2, 2]])
def test_the_asynchronous_replicated_pipeline_equals_its_oracle(replicas, one_thread):
    """One process, microbatch by microbatch: every stage forward on the version that its worker had
    then, gradients summed per worker and then over workers, one step per `every` microbatches."""
    every, batches = 2, 6
    schedule = ps.round_robin(replicas, every, batches=batches)
    stages = linear_stages(len(replicas))
    data = [batch(4, seed=seed) for seed in range(batches)]
    result = ps.run(schedule, stages, data, optimizer=sgd, history=True)

    used = versions_of(schedule)
    newest = [copy.deepcopy(stage) for stage in stages]
    optimizers = [sgd(stage.parameters()) for stage in newest]
    history = [[copy.deepcopy(stage.state_dict()) for stage in newest]]
    inputs = [x for batch_x, _ in data for x in batch_x.split(2)]
    targets = [y for _, batch_y in data for y in batch_y.split(2)]
    for update in range(batches):
        sums: list[list[dict]] = [[{} for _ in range(count)] for count in replicas]
        for k in range(update * every, update * every + every):
            line = [copy.deepcopy(stage) for stage in stages]
            for s, stage in enumerate(line):
                stage.load_state_dict(history[used[s, k]][s])
            value = nn.functional.mse_loss(nn.Sequential(*line)(inputs[k]), targets[k])
            value.backward(torch.full_like(value, 1 / every))
            for s, stage in enumerate(line):
                mine = sums[s][k % replicas[s]]
                for name, parameter in stage.named_parameters():
                    seen = mine.get(name)
                    mine[name] = parameter.grad if seen is None else seen + parameter.grad
        for s, stage in enumerate(newest):
            for name, parameter in stage.named_parameters():
                parameter.grad = sum(mine[name] for mine in sums[s][1:]) + sums[s][0][name]
            optimizers[s].step()
        history.append([copy.deepcopy(stage.state_dict()) for stage in newest])

    assert any(used[s, k] < k // every for s, k in used)  # somebody is late
    for ours, oracle in zip(result.history, history, strict=True):
        for stage, expected in zip(ours, oracle, strict=True):
            for name, value in expected.items():
                assert torch.equal(stage[name], value)
