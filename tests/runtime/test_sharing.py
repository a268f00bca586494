"""Memory that two tensors share, and weights that somebody else listens to or uses again."""

from __future__ import annotations

import copy

import pipeschool as ps
import pytest
import torch
from pipeschool.runtime import reference
from pipeschool.runtime.stages.stage import Stage
from pipeschool.runtime.weights.stage_weights import StageWeights, Update
from pipeschool.versions import Ledger, OneVersion, Policy, Stash
from test_run import batch, linear_stages, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Positions(nn.Module):
    """Input and weight meet as views: their gradients come out in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(2, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.transpose(0, 1) + self.position.transpose(0, 1))


class TwoPositions(nn.Module):
    """Two weights meet as views."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(2, 6).double()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.one.view(12) + self.two.view(12)).view(2, 6)


@pytest.mark.parametrize("ledger", [OneVersion(Policy()), Ledger(Stash())], ids=["own", "versions"])
@pytest.mark.parametrize("split", [False, True])
def test_the_next_microbatch_does_not_change_a_gradient_on_its_way(ledger, split, one_thread):
    torch.manual_seed(0)
    module = Positions()
    stage = Stage(1, module, StageWeights(module, Update(), copy.deepcopy(ledger)))
    passed_on, expected = [], []
    for k in range(3):
        x = batch(2, seed=k)[0]
        (y,) = stage.forward(k, (x,))
        if split:
            passed_on += stage.backward_input(k, (torch.ones_like(y),))
            stage.backward_weight(k)
        else:
            passed_on += stage.backward(k, (torch.ones_like(y),))
        x.requires_grad_()
        expected += torch.autograd.grad(module(x).sum(), [x])
    assert all(map(torch.equal, passed_on, expected))
    assert torch.equal(stage.weights.gradients["position"], expected[0] + expected[1] + expected[2])


@pytest.mark.parametrize("build", [ps.gpipe, ps.zb_h1, ps.pipedream_2bw])
def test_weights_that_meet_as_views_keep_their_gradients_apart(build):
    torch.manual_seed(0)
    stages, (x, y) = [TwoPositions(), *linear_stages(1)], batch(8)
    model, schedule = nn.Sequential(*stages), build(2, 4)
    sums = [torch.zeros(2, 6, dtype=torch.float64) for _ in range(2)]
    for part, target in zip(x.split(2), y.split(2), strict=True):
        loss = nn.functional.mse_loss(model(part), target) / 4
        weights = [stages[0].one, stages[0].two]
        for total, gradient in zip(sums, torch.autograd.grad(loss, weights), strict=True):
            total += gradient
    result = ps.run(schedule, stages, [(x, y)])
    alone = reference.gradients(stages, [(x, y)], 4)
    for found in (result.gradients[0], alone[0]):
        torch.testing.assert_close(found["one"], sums[0], rtol=1e-12, atol=1e-15)
        assert torch.equal(found["one"], found["two"])


class Counts(nn.Module):
    """Hands on a buffer that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()
        self.register_buffer("calls", torch.ones(700, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.layer(x), self.calls[:600].view(100, 6)


class Weighs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor, calls: Tensor) -> Tensor:
        return self.layer(x) * calls[: len(x)]


@pytest.mark.parametrize(
    "schedule", [ps.looped_bfs(1, 4, v=2), ps.gpipe(2, 4)], ids=["on one worker", "on two"]
)
def test_a_buffer_handed_on_is_the_one_of_its_microbatch(schedule):
    torch.manual_seed(0)
    stages, (x, y) = [Counts(), Weighs()], batch(8)
    result = ps.run(schedule, stages, [(x, y)])
    expected = reference.gradients(stages, [(x, y)], 4)
    assert reference.max_error(result.gradients, expected) == 0.0


def test_a_buffer_handed_on_in_inference_is_the_one_of_its_microbatch(one_thread):
    torch.manual_seed(0)
    stages, (x, _) = [Counts(), Weighs()], batch(8)
    result = ps.run(ps.forward_only(1, 4, tokens=2), stages, [(x, None)])
    for (found,), part in zip(result.outputs, x.split(2), strict=True):
        assert torch.equal(found, stages[1](*stages[0](part)))


class Saves(nn.Module):
    """Two layers; keeps nothing of them but their input, if asked, as torch does it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.two = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def layers(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.layers(x)
        if self.how == "reentrant" and not x.requires_grad:
            x = x.clone().requires_grad_()
        return checkpoint(self.layers, x, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("weights", ["stash", "vertical_sync"])
def test_a_checkpoint_inside_a_stage_is_computed_again_with_the_weights_of_its_forward(
    weights, how
):
    data = [batch(2, seed=seed) for seed in range(6)]

    def trained(how: str) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        stages = [Saves(how) for _ in range(3)]
        schedule = ps.pipedream(3, 1, batches=6)
        return ps.run(schedule, stages, data, optimizer=sgd, weights=weights).state_dicts

    for found, expected in zip(trained(how), trained("plain"), strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class Hooked(nn.Module):
    """Puts a hook on its weight when it is first used: hooks themselves do not travel."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.layer, self.after, self.first = nn.Linear(6, 6).double(), after, True

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.first = False
            if self.after:
                self.layer.weight.register_post_accumulate_grad_hook(halve)
            else:
                self.layer.weight.register_hook(lambda gradient: gradient * 3)
        return self.layer(x)


def halve(weight: Tensor) -> None:
    weight.grad *= 0.5


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("build", [ps.gpipe, ps.one_f_one_b])
def test_a_hook_on_a_weight_is_called_once_per_backward(build, after):
    torch.manual_seed(0)
    stages, data = [Hooked(after), *linear_stages(1)], [batch(8), batch(8, seed=1)]
    result = ps.run(build(2, 4), stages, data, optimizer=sgd)
    expected = reference.gradients(stages, data, 4, optimizer=sgd)
    assert reference.max_error(result.gradients, expected) == 0.0


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("build", [ps.zb_h1, ps.pipedream])
def test_a_hook_that_would_be_called_twice_or_not_at_all_is_refused(build, after):
    stages = [Hooked(after), *linear_stages(1)]
    with pytest.raises(ps.RunError, match=r"parameter layer\.weight of stage 0 has a hook on its"):
        ps.run(build(2, 2), stages, [batch(4)], optimizer=sgd)
