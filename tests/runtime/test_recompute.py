"""A stage that recomputes gives the same gradients, to the last bit."""

from __future__ import annotations

import pipeschool as ps
import pytest
import torch
from pipeschool.runtime import reference
from test_run import batch, linear_stages, sgd
from torch import nn


def with_dropout(p: int) -> list[nn.Module]:
    torch.manual_seed(p)
    return [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()).double() for _ in range(p)]


@pytest.mark.parametrize("build", [ps.gpipe, ps.one_f_one_b, ps.chimera])
def test_gradients_equal_one_process(build):
    stages, data = linear_stages(4), [batch(12), batch(12, seed=1)]
    result = ps.run(build(4, 4), stages, data, optimizer=sgd, recompute=True)
    replicas = [2] * 4 if build is ps.chimera else [1] * 4
    expected = reference.gradients(stages, data, 4, optimizer=sgd, replicas=replicas)
    assert reference.max_error(result.gradients, expected) == 0.0
    assert len(result.losses) == 8


@pytest.mark.parametrize("recompute", [True, [False, True, False]])
def test_dropout_drops_the_same_again(recompute):
    stages, data = with_dropout(3), [batch(12)]
    kept = ps.run(ps.one_f_one_b(3, 4), stages, data, seed=5)
    again = ps.run(ps.one_f_one_b(3, 4), stages, data, seed=5, recompute=recompute)
    assert reference.max_error(again.gradients, kept.gradients) == 0.0
    other = ps.run(ps.one_f_one_b(3, 4), stages, data, seed=6, recompute=recompute)
    assert reference.max_error(other.gradients, kept.gradients) > 1e-3  # it does drop something


def test_a_running_mean_counts_every_microbatch_once():
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double() for _ in range(2)]
    kept = ps.run(ps.gpipe(2, 4), stages, [batch(16)])
    again = ps.run(ps.gpipe(2, 4), stages, [batch(16)], recompute=True)
    for a, b in zip(again.state_dicts, kept.state_dicts, strict=True):
        assert a["1.num_batches_tracked"] == 4
        assert torch.equal(a["1.running_mean"], b["1.running_mean"])
    assert reference.max_error(again.gradients, kept.gradients) == 0.0


@pytest.mark.parametrize("weights", ["stash", "vertical_sync"])
def test_an_asynchronous_stage_goes_forward_again_on_the_version_it_used(weights):
    stages, data = linear_stages(3), [batch(8, seed=seed) for seed in range(3)]
    schedule = ps.pipedream(3, 4, batches=3)
    kept = ps.run(schedule, stages, data, optimizer=sgd, weights=weights)
    again = ps.run(schedule, stages, data, optimizer=sgd, weights=weights, recompute=True)
    assert again.losses == kept.losses
    for a, b in zip(again.state_dicts, kept.state_dicts, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_paced_backward_lasts_as_long_as_both():
    stages, data = linear_stages(2), [batch(4)]
    result = ps.run(ps.gpipe(2, 2), stages, data, pace=(0.02, 0.03), recompute=[True, False])
    seconds = {(span.action.kind, span.action.stage): span.seconds for span in result.trace.spans}
    declared = {("F", 0): 0.02, ("F", 1): 0.02, ("B", 0): 0.05, ("B", 1): 0.03}
    for key, least in declared.items():
        assert seconds[key] >= least - 1e-9
