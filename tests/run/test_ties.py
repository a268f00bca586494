"""One parameter in several stages: trained as one, to the weights of one process."""

from __future__ import annotations

import copy

import pipeschool as ps
import pytest
import torch
from pipeschool.run.ties import ties_of
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
