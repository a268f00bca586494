"""One parameter in several stages: trained as one, to the weights of one process."""

from __future__ import annotations

import copy

import pipeschool as ps
import pytest
import torch
from pipeschool.runtime import reference
from pipeschool.runtime.weights.ties import ties_of
from test_run import batch, linear_stages, sgd
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel


def tied_stages(p: int, pairs: list[tuple[int, int]]) -> list[nn.Module]:
    stages = linear_stages(p)
    for one, other in pairs:
        stages[other][0].weight = stages[one][0].weight
    return stages


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize(
    ("schedule", "pairs"),
    [
        (ps.one_f_one_b(3, 4), [(0, 2)]),
        (ps.gpipe(4, 4), [(0, 3), (1, 2)]),
        (ps.gpipe(4, 4), [(0, 1), (0, 3)]),  # three copies
        (ps.zb_v(2, 4), [(0, 3)]),  # both on worker 0
        (ps.interleaved_1f1b(2, 4, v=2), [(0, 3)]),
        (ps.zb_v(2, 4), [(0, 2), (1, 3)]),  # two between the same workers
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_tied_model_trains_to_the_weights_of_one_process(schedule, pairs, optimizer):
    stages = tied_stages(schedule.stages, pairs)
    data = [batch(8, seed=seed) for seed in range(4)]
    result = ps.run(schedule, stages, data, optimizer=optimizer)
    model = nn.Sequential(*copy.deepcopy(nn.ModuleList(stages)))
    assert len(list(model.parameters())) == 2 * len(stages) - len(pairs)  # still tied
    alone = optimizer(model.parameters())
    for x, y in data:
        alone.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        alone.step()
    for stage, state in zip(model, result.state_dicts, strict=True):
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
    trained = [state["0.weight"] for state in result.state_dicts]
    for one, other in pairs:  # the copies have not drifted apart by a bit
        assert torch.equal(trained[one], trained[other])


class Scaled(nn.Module):
    """A layer, and a weight that it may use or not."""

    def __init__(self, uses: bool):
        super().__init__()
        self.layer, self.uses = nn.Linear(6, 6).double(), uses
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale if self.uses else self.layer(x)


@pytest.mark.parametrize("uses", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("schedule", [ps.gpipe(2, 2), ps.looped_bfs(1, 2, v=2)])
def test_a_tied_parameter_that_no_stage_uses_has_no_gradient_and_does_not_decay(schedule, uses):
    torch.manual_seed(0)
    stages = [Scaled(use) for use in uses]
    stages[1].scale = stages[0].scale

    def decaying(parameters):
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)

    data = [batch(4, seed=seed) for seed in range(2)]
    result = ps.run(schedule, stages, data, optimizer=decaying)
    expected = reference.gradients(stages, data, 2, optimizer=decaying)
    assert reference.max_error(result.gradients, expected) == 0.0
    for state, found in zip(result.state_dicts, result.gradients, strict=True):
        assert ("scale" in found) is any(uses)
        assert torch.equal(state["scale"], stages[0].scale) is not any(uses)


def test_the_reference_keeps_shared_parameters_shared():
    stages, data = tied_stages(3, [(0, 2)]), [batch(8), batch(8, seed=1)]
    expected = reference.gradients(stages, data, 4, optimizer=sgd)
    model = nn.Sequential(*copy.deepcopy(nn.ModuleList(stages)))
    optimizer = sgd(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for stage, gradients in zip(model, expected, strict=True):
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
    found = ps.run(ps.gpipe(3, 4), stages, data, optimizer=sgd).gradients
    assert reference.max_error(found, expected) < 1e-12


def test_only_what_is_trained_and_shared_is_a_tie():
    stages = tied_stages(4, [(0, 3), (0, 1)])
    assert ties_of(stages) == [((0, "0.weight"), (1, "0.weight"), (3, "0.weight"))]
    stages[0][0].weight.requires_grad_(False)
    assert ties_of(stages) == []


@pytest.mark.parametrize(
    ("schedule", "options", "why"),
    [
        (ps.pipedream(2, 4), {}, "needs an update in which all its gradients meet"),
        (ps.replicate(ps.gpipe(2, 2), 2), {}, "does not go with several workers per stage"),
        (ps.gpipe(2, 4), {"engine": "torch"}, "does not go with engine='torch'"),
        # Stages of other norms would shorten the same gradient by other factors.
        (
            ps.gpipe(2, 4),
            {"clip_norm": 0.1, "clip_over": "stage"},
            "does not go with clip_over='stage'",
        ),
        (
            ps.gpipe(2, 4),
            {"tensor_parallel": 2, "tensor_plan": {"0": ColwiseParallel()}},
            "does not go with tensor_parallel",
        ),
    ],
)
def test_where_ties_do_not_work_one_sentence_says_so(schedule, options, why):
    stages = tied_stages(2, [(0, 1)])
    with pytest.raises(
        ValueError, match=f"stages 0 and 1 share the parameter 0.weight, which {why}"
    ):
        ps.run(schedule, stages, [batch(4)], **options)
