"""A split backward gives the gradients of a whole one, bit for bit, and does its work once."""

from __future__ import annotations

from collections.abc import Callable

import pipeschool as ps
import pytest
import torch
from pipeschool.actions import Action
from pipeschool.runtime import reference
from pipeschool.runtime.stages.split_backward import SplitBackward
from test_run import batch, linear_stages, sgd
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


class Tied(nn.Module):
    """One layer used twice, with another in between."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.twice(torch.tanh(self.once(torch.relu(self.twice(x)))))


class TwoOutputs(nn.Module):
    """The second output does not depend on the input; the first is a view."""

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.layer(x).transpose(0, 1), (self.bias * 2).view(2, 4)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x):
        return x * self.scale + self.layer(torch.sin(x)) * self.scale


class Unused(nn.Module):
    """A weight that the forward never touches has no gradient."""

    def __init__(self):
        super().__init__()
        self.layer, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    return model


class TwiceInOneStep(nn.Module):
    """One operation that uses its weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        square = torch.addmm(self.weight, x.new_ones(8, 8) * x[:1], self.weight)
        return x @ square


class Crossing(nn.Module):
    """Two ways to one weight, which fork where another weight, used twice, is computed early."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        grown = self.one.exp()
        return x * (grown * self.two + grown) * self.two


class Sums(nn.Module):
    """One gradient for all: of the input, and of the weights that are added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Parameter(torch.randn(6, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one + (self.two + self.three)


class Hidden(nn.Module):
    """No weights, but something else that autograd follows."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.ones(8, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), self.hidden * 2


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a weight twice in one step": TwiceInOneStep,
    "layers": lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]),
    "one layer": lambda: nn.Linear(8, 8),
    "crossing ways": Crossing,
    "nothing but sums": Sums,
    "no bias": lambda: nn.Linear(8, 8, bias=False),
    "no weights": lambda: nn.Tanh(),
    "no weights, and yet a gradient": Hidden,
    "norms": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "tied": Tied,
    "two outputs": TwoOutputs,
    "residual": Residual,
    "unused weight": Unused,
    "frozen first layer": frozen_first,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 3), nn.Flatten()
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(0, (2, 3)),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    ),
}


def forward(model: nn.Module, needs_gradient: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Input, outputs, and gradients to start from."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 8, dtype=torch.float64, generator=generator, requires_grad=needs_gradient)
    y = model(x)
    outputs = [out for out in (y if isinstance(y, tuple) else (y,)) if out.requires_grad]
    gradients = [torch.randn(o.shape, dtype=o.dtype, generator=generator) for o in outputs]
    for weight in model.parameters():
        weight.grad = None
    return x, outputs, gradients


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_both_halves_give_the_gradients_of_the_whole(name, needs_gradient):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x, outputs, gradients = forward(model, needs_gradient)
    if outputs:
        torch.autograd.backward(outputs, gradients)
    of_input = x.grad
    of_weights = {n: w.grad for n, w in model.named_parameters()}

    x, outputs, gradients = forward(model, needs_gradient)
    halves = SplitBackward(outputs, gradients, [x], list(model.parameters()))
    assert equal(halves.inputs[0], of_input)
    halves.weight_half()
    for key, weight in model.named_parameters():
        assert equal(weight.grad, of_weights[key]), key
    # The input's gradient is on its way, and the weights' are added to: each in its own memory.
    found = [halves.inputs[0], *[w.grad for w in model.parameters()]]
    places = [g.untyped_storage().data_ptr() for g in found if g is not None]
    assert len(places) == len(set(places))


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def test_a_second_microbatch_is_added_to_the_first():
    torch.manual_seed(0)
    model = nn.Linear(8, 8).double()
    x, outputs, gradients = forward(model, True)
    SplitBackward(outputs, gradients, [x], list(model.parameters())).weight_half()
    first = model.weight.grad.clone()
    y = model(x.detach())
    SplitBackward([y], gradients, [x.detach()], list(model.parameters())).weight_half()
    assert torch.equal(model.weight.grad, first + first)


LAYERS, WIDTH, SAMPLES = 6, 8, 6
MATMUL = 2 * SAMPLES * WIDTH * WIDTH  # floating-point operations of one layer's product


def operations(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_the_halves_share_the_work_and_repeat_none_of_it():
    """One product per layer and half. Asking autograd twice would do the input path twice: 18."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    ).double()
    x, outputs, gradients = forward(model, True)
    whole = operations(lambda: torch.autograd.backward(outputs, gradients))
    assert whole == 2 * LAYERS * MATMUL
    x, outputs, gradients = forward(model, True)
    weights = list(model.parameters())
    halves: list[SplitBackward] = []
    first = operations(lambda: halves.append(SplitBackward(outputs, gradients, [x], weights)))
    second = operations(halves[0].weight_half)
    assert (first, second) == (LAYERS * MATMUL, LAYERS * MATMUL)


def test_on_the_first_stage_only_the_first_weight_changes_sides():
    """Its data needs no gradient, so the way down has one product less; the first layer's own takes
    its place."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    ).double()
    x, outputs, gradients = forward(model, False)
    weights = list(model.parameters())
    halves: list[SplitBackward] = []
    first = operations(lambda: halves.append(SplitBackward(outputs, gradients, [x], weights)))
    second = operations(halves[0].weight_half)
    assert (first, second) == (LAYERS * MATMUL, (LAYERS - 1) * MATMUL)


def delayed_weights(worker: int, p: int, m: int) -> list[Action]:
    """All forwards, all input halves, then all weight halves."""
    return [make(worker, k) for make in (ps.F, ps.I, ps.W) for k in range(m)]


def alternating(worker: int, p: int, m: int) -> list[Action]:
    """Every other backward is split."""
    row = [ps.F(worker, k) for k in range(m)]
    for k in range(m):
        row += [ps.I(worker, k), ps.W(worker, k)] if k % 2 else [ps.B(worker, k)]
    return row


@pytest.mark.parametrize("order", [delayed_weights, alternating])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_split_backward_on_real_workers_equals_one_process(order, recompute):
    stages, data = linear_stages(3), [batch(10), batch(10, seed=1)]
    schedule = ps.Schedule.from_workers(order, p=3, m=4)
    result = ps.run(schedule, stages, data, optimizer=sgd, recompute=recompute)
    expected = reference.gradients(stages, data, 4, optimizer=sgd)
    assert reference.max_error(result.gradients, expected) == 0.0
    kinds = {span.action.kind for span in result.trace.spans}
    assert kinds == (
        {"F", "I", "W", "U"} if order is delayed_weights else {"F", "B", "I", "W", "U"}
    )


def test_a_split_backward_keeps_the_weights_that_its_forward_used():
    """Asynchronous, with stashing: between I and W other updates come and go."""

    def order(worker: int, p: int, m: int) -> list[Action]:
        row = [ps.F(0, 0), ps.F(0, 1)]
        for k in range(m):
            row += [ps.I(0, k), *([ps.W(0, k - 1)] if k else [])]
            row += [ps.F(0, k + 2)] if k + 2 < m else []
        return [*row, ps.W(0, m - 1)]

    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    data = [batch(4, seed=n) for n in range(6)]
    halves = ps.Schedule.from_workers(order, p=1, m=1, batches=6, weights="stash")
    rows = [ps.B(0, a.microbatch) if a.kind == "W" else a for a in order(0, 1, 6) if a.kind != "I"]
    as_whole = ps.Schedule.from_workers(
        lambda worker, p, m: rows, p=1, m=1, batches=6, weights="stash"
    )
    split = ps.run(halves, [stage], data, optimizer=sgd)
    expected = ps.run(as_whole, [stage], data, optimizer=sgd)
    assert split.losses == expected.losses
    for name, value in expected.state_dicts[0].items():
        assert torch.equal(split.state_dicts[0][name], value)
