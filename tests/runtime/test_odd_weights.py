"""Weights that a stage reaches in an odd way: trained as in one process, or refused."""

from __future__ import annotations

import copy
import warnings

import pipeschool as ps
import pytest
import torch
from oracle import FORWARD
from pipeschool.runtime import reference
from pipeschool.runtime.host.serialize import deserialize, serialize
from test_run import batch, linear_stages
from torch import nn
from torch.nn.utils import parametrizations


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def alone(stages, data, optimizer=sgd):
    """The trained stages of plain PyTorch, batch by batch."""
    model = nn.Sequential(*copy.deepcopy(list(stages)))
    stepper = optimizer(model.parameters())
    for x, y in data:
        stepper.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        stepper.step()
    return model


def states(stages):
    return [stage.state_dict() for stage in stages]


# One layer or parameter under two names


class Twice(nn.Module):
    """The same layer, used twice under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6).double()
        self.second = self.first

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        inner = Twice()
        self.one = nn.Sequential(inner, nn.Tanh())
        self.other = nn.ModuleList([inner.first])

    def forward(self, x):
        return self.other[0](self.one(x))


class SharedParameter(nn.Module):
    """One parameter in two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6).double() for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def replay(policy, stages, stream):
    """The stages after every microbatch has made an update: plain autograd on models that have
    the versions which `policy` says."""
    p = len(stages)
    history = [copy.deepcopy(list(stages))]
    for k, (x, y) in enumerate(stream):
        versions = [FORWARD[policy](s, p, k, 1) for s in range(p)]
        used = [copy.deepcopy(history[t][s]) for s, t in enumerate(versions)]
        nn.functional.mse_loss(nn.Sequential(*used)(x), y).backward()
        newest = copy.deepcopy(history[-1])
        for stage, other in zip(newest, used, strict=True):
            for mine, theirs in zip(stage.parameters(), other.parameters(), strict=True):
                mine.grad = theirs.grad
            sgd(stage.parameters()).step()
            stage.zero_grad()
        history.append(newest)
    return history


@pytest.mark.parametrize("policy", ["stash", "vertical_sync"])
@pytest.mark.parametrize("kind", [Twice, Nested, SharedParameter])
def test_a_layer_reached_by_two_names_is_trained_once(kind, policy):
    torch.manual_seed(0)
    stages, (x, y) = [kind() for _ in range(3)], batch(6)
    schedule = ps.pipedream(3, 6)
    result = ps.run(
        schedule, stages, [(x, y)], optimizer=sgd, weights=policy, history=True, update_stages=False
    )
    expected = replay(policy, stages, list(zip(x.split(1), y.split(1), strict=True)))
    assert reference.max_error(result.state_dicts, states(expected[-1])) < 1e-14
    for noted, then in zip(result.history, expected, strict=True):
        for ours, stage in zip(noted, then, strict=True):
            assert reference.max_error([ours], [dict(stage.named_parameters())]) < 1e-14


@pytest.mark.parametrize("weights", ["latest", "double_buffer"])
def test_what_is_reported_of_such_a_layer_is_what_its_optimizer_made(weights):
    torch.manual_seed(0)
    stages = [Twice(), Twice()]
    builder = ps.pipedream_2bw if weights == "double_buffer" else ps.pipedream
    options = {"optimizer": sgd, "weights": weights, "history": True}
    result = ps.run(builder(2, 4), stages, [batch(8)], **options)
    for state, noted in zip(result.state_dicts, result.history[-1], strict=True):
        assert all(torch.equal(state[name], noted[name]) for name in noted)
        assert torch.equal(state["first.weight"], state["second.weight"])


def test_such_a_layer_is_reported_and_kept_once():
    stages = [Twice()]
    (stage,) = ps.run(ps.gpipe(1, 2), stages, [batch(4)], optimizer=sgd).state.stages
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    places = [stage.weights[name].data_ptr() for name in names]
    assert places[:2] == places[2:] and len(set(places)) == 2


def test_such_a_layer_goes_on_in_the_next_leg():
    torch.manual_seed(0)
    stages, data = [Twice(), Nested()], [batch(4, seed=seed) for seed in range(3)]
    options = {"m": 4, "optimizer": sgd, "log": None}
    result = ps.train("gpipe", stages, data, every=1, recompute=True, **options)
    assert reference.max_error(result.state_dicts, states(alone(stages, data))) < 1e-12


# Weights that the module does not know


class Listed(nn.Module):
    def __init__(self, registered=False):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()
        own = self.layer.weight if registered else nn.Parameter(torch.ones(6).double())
        self.scales = {"all": [own]}

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("schedule", [ps.gpipe(2, 4), ps.pipedream(2, 4)], ids=lambda s: s.name)
def test_parameters_in_a_plain_list_are_refused(schedule):
    stages = [linear_stages(1)[0], nn.Sequential(Listed())]
    with pytest.raises(ValueError, match="attribute 0.scales of stage 1 holds a tensor to be"):
        ps.run(schedule, stages, [batch(8)])
    assert ps.run(ps.forward_only(2, 4), stages, [batch(8)]).outputs


def test_a_second_way_to_a_parameter_is_refused_where_it_has_versions():
    stages = [linear_stages(1)[0], Listed(registered=True)]
    found = ps.run(ps.gpipe(2, 4), stages, [batch(8)]).gradients
    assert reference.max_error(found, reference.gradients(stages, [batch(8)], 4)) == 0
    with pytest.raises(ValueError, match="attribute scales of stage 1 holds a parameter outside"):
        ps.run(ps.pipedream(2, 4), stages, [batch(8)])


class ListOfLayers(nn.Module):
    """A plain list of layers, of which the module knows none, or all."""

    def __init__(self, registered):
        super().__init__()
        self.blocks = [nn.Linear(6, 6).double() for _ in range(2)]
        if registered:
            self.one, self.two = self.blocks

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Closure(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, scale = nn.Linear(6, 6).double(), nn.Parameter(torch.ones(6).double())
        self.activation = lambda x: scale * x

    def forward(self, x):
        return self.activation(self.layer(x))


@pytest.mark.parametrize("stage", [lambda: ListOfLayers(False), Closure])
def test_layers_in_a_plain_list_and_weights_in_a_function_are_refused(stage):
    with pytest.raises(ValueError, match="^attribute (blocks|activation) of stage 1 holds a tens"):
        ps.run(ps.gpipe(2, 4), [*linear_stages(1), stage()], [batch(8)])


def test_a_list_of_layers_that_the_module_knows_is_as_good():
    torch.manual_seed(0)
    stages, (x, y) = [ListOfLayers(True) for _ in range(2)], batch(4)
    result = ps.run(ps.pipedream(2, 4), stages, [(x, y)], optimizer=sgd)
    expected = replay("stash", stages, list(zip(x.split(1), y.split(1), strict=True)))
    assert reference.max_error(result.state_dicts, states(expected[-1])) < 1e-12


class Recurrent(nn.Module):
    """torch keeps a second list of an LSTM's weights, and keeps it up to date."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 6, batch_first=True).double()

    def forward(self, x):
        return self.layer(x.unsqueeze(1))[0].squeeze(1)


def test_an_lstm_may_have_versions():
    torch.manual_seed(0)
    stages, (x, y) = [Recurrent() for _ in range(2)], batch(4)
    result = ps.run(ps.pipedream(2, 4), stages, [(x, y)], optimizer=sgd)
    expected = replay("stash", stages, list(zip(x.split(1), y.split(1), strict=True)))
    assert reference.max_error(result.state_dicts, states(expected[-1])) < 1e-12


# Tensors in the same memory


def tied_by_data(stages):
    stages[1][0].weight.data = stages[0][0].weight.data


def rows_of_one(stages):
    whole = torch.randn(9, 6).double()
    stages[0][0].weight = nn.Parameter(whole[:6])
    stages[0][0].register_parameter("more", nn.Parameter(whole[3:]))


def buffer_on_a_parameter(stages):
    stages[0].register_buffer("seen", stages[0][0].weight.data[2])


@pytest.mark.parametrize("tie", [tied_by_data, rows_of_one, buffer_on_a_parameter])
def test_what_shares_memory_and_is_not_the_same_parameter_is_refused(tie):
    stages = linear_stages(2)
    tie(stages)
    sentence = (
        r"^\S+ of stage \d and \S+ of stage \d are two tensors in the same memory, which workers "
        "cannot share: let both places hold the same nn.Parameter$"
    )
    with pytest.raises(ValueError, match=sentence):
        ps.run(ps.gpipe(2, 4), stages, [batch(8)])


def test_pieces_of_one_matrix_that_do_not_meet_are_no_tie():
    stages, whole = linear_stages(2), torch.randn(6, 24).double()
    stages[0][0].weight = nn.Parameter(whole[:, :6])
    stages[1][0].weight = nn.Parameter(whole[:, 6:12])
    stages[0].register_buffer("one", whole[:, 12:18])
    stages[1].register_buffer("other", whole[:, 12:18])  # nobody trains either
    found = ps.run(ps.gpipe(2, 4), stages, [batch(8)]).gradients
    assert reference.max_error(found, reference.gradients(stages, [batch(8)], 4)) < 1e-14


# Buffers that a state_dict leaves out


class Counts(nn.Module):
    """Its outputs depend on how often it has been called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()
        self.layer.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.layer.calls = self.layer.calls + 1
        return self.layer(x) * self.layer.calls.sqrt()


def test_such_a_buffer_goes_on_in_the_next_leg_and_in_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    stages, data = [Counts(), Counts()], [batch(4, seed=seed) for seed in range(4)]
    options = {"m": 2, "optimizer": sgd, "log": None}
    whole = ps.train("gpipe", stages, data, **options)
    legs = ps.train("gpipe", stages, data, every=1, **options)
    assert legs.losses == whole.losses
    assert reference.max_error(legs.state_dicts, whole.state_dicts) == 0

    class Breaks:
        def __iter__(self):
            yield from data[:2]
            raise KeyError

    options |= {"every": 1, "checkpoint": tmp_path / "tea.pt"}
    with pytest.raises(KeyError):
        ps.train("gpipe", stages, Breaks(), **options)
    again = ps.train("gpipe", stages, data, **options)
    assert again.losses == whole.losses


def test_it_is_loaded_into_the_callers_stages_when_asked_for():
    stages = [Counts(), Counts()]
    ps.run(ps.gpipe(2, 4), stages, [batch(8)] * 3, update_stages=True)
    assert [stage.layer.calls.item() for stage in stages] == [12, 12]


# Parametrizations


def normed(kind):
    torch.manual_seed(1)
    return [nn.Sequential(kind(nn.Linear(6, 6).double()), nn.Tanh()) for _ in range(3)]


@pytest.mark.parametrize(
    "kind",
    [
        parametrizations.weight_norm,
        parametrizations.orthogonal,
        lambda layer: parametrizations.spectral_norm(layer.eval()),
        nn.utils.weight_norm,  # by hooks, as it was before
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_with_a_norm_of_their_weights_train_as_in_one_process(kind, recompute):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        stages = normed(kind)
        data = [batch(8, seed=seed) for seed in range(2)]
        result = ps.run(ps.one_f_one_b(3, 4), stages, data, optimizer=sgd, recompute=recompute)
        model = copy.deepcopy(stages) if kind is not nn.utils.weight_norm else normed(kind)
        stepper = sgd(nn.ModuleList(model).parameters())
        for x, y in data:
            stepper.zero_grad()
            nn.functional.mse_loss(nn.Sequential(*model)(x), y).backward()
            stepper.step()
        assert reference.max_error(result.state_dicts, states(model)) < 1e-12


def test_such_a_layer_has_versions_like_any_other():
    stages, (x, y) = normed(parametrizations.weight_norm), batch(4)
    result = ps.run(ps.pipedream(3, 4), stages, [(x, y)], optimizer=sgd)
    expected = replay("stash", stages, list(zip(x.split(1), y.split(1), strict=True)))
    assert reference.max_error(result.state_dicts, states(expected[-1])) < 1e-12


def test_such_a_layer_travels_whole():
    layer = parametrizations.weight_norm(nn.Linear(3, 2))
    again = deserialize(serialize(layer))
    assert torch.equal(again.weight, layer.weight)
    assert nn.utils.parametrize.is_parametrized(again, "weight")
    assert type(again).__name__ == "ParametrizedLinear"


# What is handed on may be changed


class HandsOn(nn.Module):
    """Uses a mask, and hands it on."""

    def __init__(self, uses=True):
        super().__init__()
        self.layer, self.uses = nn.Linear(6, 6).double(), uses

    def forward(self, x, mask=None):
        mask = (x > 0).long() if mask is None else mask
        return self.layer(x) * (1 + mask) if self.uses else self.layer(x), mask


class Flips(nn.Module):
    """Changes the mask that it gets in place."""

    def __init__(self, last=False):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6).double(), last

    def forward(self, x, mask):
        mask.neg_().add_(1)
        y = self.layer(x) * (1 + mask)
        return y if self.last else (y, mask)


@pytest.mark.parametrize("recompute", [False, True, [True, True, False, False], [False, True] * 2])
@pytest.mark.parametrize("name", ["zb_v", "interleaved", "gpipe"])
def test_an_integer_tensor_changed_by_the_next_stage_is_still_there_for_a_recomputation(
    name, recompute
):
    torch.manual_seed(0)
    middle = HandsOn()
    stages = [HandsOn(), middle, Flips(), Flips(last=True)]
    if any([recompute] if isinstance(recompute, bool) else recompute[2:]):
        stages[2:] = [HandsOn(), Last()]
    schedule = ps.build(name, 4 if name == "gpipe" else 2, 4)
    result = ps.run(schedule, stages, [batch(8)], recompute=recompute)
    model = [copy.deepcopy(stage) for stage in stages]
    x, y = batch(8)
    for stage in model:
        x = stage(*x) if isinstance(x, tuple) else stage(x)
    nn.functional.mse_loss(x, y).backward()
    expected = [{n: p.grad for n, p in stage.named_parameters()} for stage in model]
    assert reference.max_error(result.gradients, expected) < 1e-12


class Last(HandsOn):
    def forward(self, x, mask):
        return super().forward(x, mask)[0]


# Optimizers


def forgets(parameters):
    torch.optim.SGD(parameters, lr=0.1)


def another(parameters):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"optimizer": forgets},
            "optimizer must be a function that returns an optimizer, not NoneType: does it end in "
            "return?",
        ),
        (
            {"optimizer": lambda parameters: torch.optim.SGD},
            "optimizer must be a function that returns an optimizer, not type",
        ),
        (
            {"optimizer": another},
            "optimizer returned one that has none of the parameters it was given, so that nothing "
            "would be trained: make it from its argument",
        ),
        (
            {"optimizer": sgd, "scheduler": lambda optimizer: None},
            "scheduler must be a function that returns a scheduler of the learning rate, not "
            "NoneType: does it end in return?",
        ),
    ],
)
def test_an_optimizer_that_trains_nothing_is_refused(options, sentence):
    with pytest.raises(ps.RunError) as caught:
        ps.run(ps.gpipe(2, 4), linear_stages(2), [batch(8)], **options)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_optimizer_may_leave_parameters_out():
    stages, data = linear_stages(2), [batch(8)]

    def weights_only(parameters):
        return sgd([p for p in parameters if p.dim() > 1])

    result = ps.run(ps.gpipe(2, 4), stages, data, optimizer=weights_only)
    assert torch.equal(result.state_dicts[0]["0.bias"], stages[0][0].bias)
    expected = alone(stages, data, weights_only)
    assert reference.max_error(result.state_dicts, states(expected)) < 1e-12
