"""Profiles of real models, and their plans on real workers."""

from __future__ import annotations

import itertools
import os
import time
from statistics import median

import pipeschool as ps
import pytest
import torch
from pipeschool.partition import (
    Layer,
    Profile,
    balanced,
    cut_at,
    equal,
    pipedream_plan,
    profile_layers,
)
from pipeschool.partition.chain import Chain
from pipeschool.partition.measuring import spread
from pipeschool.runtime import reference
from torch import nn


def batch(samples: int, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(
        2, samples, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return x, y


def adam(parameters):
    return torch.optim.Adam(parameters)


def rising(*widths: int) -> nn.Sequential:
    """Linear layers with a Tanh behind each, from one width to the next."""
    torch.manual_seed(0)
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs])


# ---------------------------------------------------------------------------------------------
# Profiles


def test_a_profile_has_the_bytes_of_every_layer():
    """Microbatches of 4 samples; float32 numbers of 4 bytes."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
    profile = profile_layers(
        model, (torch.randn(12, 8), torch.randn(12, 4)), 3, optimizer=adam, rounds=1
    )
    weights = [4 * (8 * 16 + 16), 0, 4 * 16 * 4]
    assert [layer.name for layer in profile.layers] == ["Linear", "Tanh", "Linear"]
    assert [layer.parameter_bytes for layer in profile.layers] == weights
    assert [layer.gradient_bytes for layer in profile.layers] == weights
    # Adam: two moments, and for each parameter a count of steps.
    assert [layer.optimizer_bytes for layer in profile.layers] == [
        2 * weights[0] + 2 * 4,
        0,
        2 * weights[2] + 4,
    ]
    assert [layer.output_bytes for layer in profile.layers] == [4 * 4 * 16, 4 * 4 * 16, 0]
    outputs = [layer.activation_bytes for layer in profile.layers[:2]]
    assert outputs == [4 * 4 * 16, 4 * 4 * 16]  # each keeps its output
    assert profile.tied == ()


class Slow(nn.Module):
    """Sleeps in its forward; the first time for longer."""

    def __init__(self):
        super().__init__()
        self.first = True

    def forward(self, x):
        time.sleep(0.5 if self.first else 0.02)
        self.first = False
        return x


def test_a_profile_leaves_the_first_time_out_and_says_how_long_it_took():
    model = nn.Sequential(nn.Linear(6, 6), Slow(), nn.Linear(6, 6)).double()
    profile = profile_layers(model, batch(4), 2, rounds=2)
    assert profile.warm_up >= 0.5
    assert 0.02 <= profile.layers[1].forward < 0.5
    assert profile.layers[1].forward_spread < 0.48  # the first time is not among them
    assert model[1].first  # the model itself was not used


def test_the_spread_is_the_interquartile_range():
    assert spread([1, 2, 3, 4, 5]) == 2
    assert spread([5, 1, 100, 2, 3, 4, 0]) == 3
    assert spread([7]) == 0


def test_the_bytes_of_a_plan_are_those_of_its_stages():
    """Where every layer's output is kept anyway, what its stages keep is the sum of its layers."""
    model = rising(32, 64, 32, 16, 16, 8)
    data = (torch.randn(64, 32), torch.randn(64, 8))
    profile = profile_layers(model, data, 4, optimizer=adam, rounds=1)
    plan = cut_at(profile, [2, 3])
    cost, measured = plan.cost(), ps.profile(plan.stages(model), data, 4, optimizer=adam, rounds=1)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"):
        assert getattr(cost, name) == getattr(measured, name), name
    assert cost.message_bytes == measured.message_bytes == (16 * 32 * 4, 16 * 16 * 4, 0)


@pytest.mark.parametrize(
    "kind", [list, tuple, nn.ModuleList, lambda layers: nn.Sequential(*layers)]
)
def test_a_model_may_be_any_list_of_layers(kind):
    layers = list(rising(6, 6, 6, 6).double())
    profile = profile_layers(kind(layers), batch(4), 2, rounds=1)
    assert len(profile) == 3
    stages = balanced(profile, 2).stages(kind(layers))
    assert [layer for stage in stages for layer in stage] == layers


# ---------------------------------------------------------------------------------------------
# Plans that run


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_plan_trains_as_one_process_does(p):
    model = rising(6, 12, 3, 9, 6).double()
    profile = Profile([Layer(1, 2), Layer(3, 6), Layer(1, 2), Layer(1, 2)])
    plan, data = balanced(profile, p), [batch(8), batch(8)]
    stages = plan.stages(model)
    result = ps.run(plan.schedule(4), stages, data[:1])
    nn.functional.mse_loss(model(data[0][0]), data[0][1]).backward()
    found = [g for gradients in result.gradients for g in gradients.values()]
    for ours, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-10, atol=1e-14)


def test_a_plan_with_a_replicated_stage_trains_as_one_process_does():
    model, data = rising(6, 6, 6, 6).double(), [batch(8)]
    profile = Profile([Layer(1, 2, parameter_bytes=9), Layer(3, 6), Layer(1, 2, parameter_bytes=9)])
    plan = pipedream_plan(profile, 4, bandwidth=1)
    assert plan.replicas == (1, 2, 1)
    stages = plan.stages(model)
    result = ps.run(plan.schedule(4), stages, data)
    expected = reference.gradients(stages, data, 4)
    assert reference.max_error(result.gradients, expected) < 1e-15
    assert [len(row) > 0 for row in result.trace.rows] == [True] * 4


class Fork(nn.Module):
    """Hands on what came in, beside what its layer makes of it."""

    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x, self.layer(x)


class Beside(nn.Module):
    """A layer for the second of two tensors; the first passes by."""

    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, pair):
        skipped, x = pair
        return skipped, torch.tanh(self.layer(x))


class Join(nn.Module):
    """The end of the skip connection."""

    def forward(self, pair):
        skipped, x = pair
        return skipped + x


def test_a_skip_connection_goes_through_three_stages_as_part_of_a_tuple():
    """Over the boundaries between the stages, and over those inside of one."""
    torch.manual_seed(0)
    first = nn.Linear(6, 6)  # so that the skip connection has a gradient to bring back
    model = nn.Sequential(first, Fork(6), Beside(6), Beside(6), Join(), nn.Linear(6, 6)).double()
    data = batch(8)
    profile = profile_layers(model, data, 4, rounds=1)
    wide, narrow = 2 * 2 * 6 * 8, 2 * 6 * 8  # two samples of two or one tensor of six numbers
    assert [x.output_bytes for x in profile.layers] == [narrow, wide, wide, wide, narrow, 0]
    nn.functional.mse_loss(model(data[0]), data[1]).backward()
    for cuts in [(2, 3), (3, 4), (1, 4)]:
        plan = cut_at(profile, cuts)
        result = ps.run(plan.schedule(4), plan.stages(model), [data])
        found = [g for gradients in result.gradients for g in gradients.values()]
        for ours, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-10, atol=1e-14)


def test_a_stage_calls_its_layers_as_sequential_does():
    pair = torch.randn(2, 3, 6)
    layers = [Beside(6), Join()]
    assert torch.equal(Chain(*layers)(*pair), nn.Sequential(*layers)(tuple(pair)))


# ---------------------------------------------------------------------------------------------
# Models that cannot be cut anywhere


def tied_model() -> nn.Sequential:
    """The second layer and the fourth have the same weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(5)]).double()
    model[3].weight = model[1].weight
    return model


def test_layers_that_share_a_parameter_are_found_and_stay_on_one_stage():
    model, data = tied_model(), batch(8)
    profile = profile_layers(model, data, 4, optimizer=adam, rounds=1)
    assert profile.tied == ((1, 3),)
    size = 6 * 6 * 8
    assert [x.parameter_bytes for x in profile.layers] == [size] * 5  # stages apart: a copy each
    plan = balanced(profile, 3)
    assert plan.cuts == (1, 4)
    result = ps.run(plan.schedule(4), plan.stages(model), [data])
    nn.functional.mse_loss(model(data[0]), data[1]).backward()
    found = [g for gradients in result.gradients for g in gradients.values()]
    for ours, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-10, atol=1e-14)
    with pytest.raises(ValueError, match="into 4 stages where layers 1 and 3 must be on one stage"):
        balanced(profile, 4)


def test_layers_that_share_a_parameter_may_be_apart_where_that_is_asked_for():
    model, data = tied_model(), batch(8)
    profile = profile_layers(model, data, 4, rounds=1)
    plan = balanced(profile, 5, keep_together=())
    result = ps.run(plan.schedule(4), plan.stages(model), [data])
    nn.functional.mse_loss(model(data[0]), data[1]).backward()
    for gradients, layer in zip(result.gradients, model, strict=True):
        torch.testing.assert_close(gradients["0.weight"], layer.weight.grad, rtol=1e-10, atol=1e-14)


def test_a_parameter_that_is_not_trained_may_be_in_several_stages():
    model = tied_model()
    model[1].weight.requires_grad_(False)
    assert profile_layers(model, batch(8), 4, rounds=1).tied == ()
    assert len(cut_at(Profile([Layer()] * 5), [2]).stages(model)) == 2


class NoChain(nn.Module):
    """Only its forward knows the order."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.a(x) + self.b(x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: ps.partition.split_layers(NoChain(), 2),
            r"NoChain is no chain of layers, .* write it as nn.Sequential \(or a list\) of layers",
        ),
        (lambda: profile_layers(NoChain(), batch(4), 2), "NoChain is no chain of layers"),
        (lambda: profile_layers([nn.Tanh(), 3], batch(4), 2), "list is no chain of layers"),
        (lambda: profile_layers([], batch(4), 2), "a model without layers cannot be cut"),
        (
            lambda: equal(Profile([Layer()] * 3), 2).stages(rising(6, 6)),
            "the plan is for 3 layers, but this model has 1",
        ),
        (lambda: profile_layers(rising(6, 6), batch(4), 0), "m must be at least 1, not 0"),
        (lambda: profile_layers(rising(6, 6), batch(4), 2, rounds=0), "rounds must be at least 1"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_sentence(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------
# Time. Asked for alone: PIPESCHOOL_TIMES=1 pytest -s tests/runtime/test_plans.py -k throughput


@pytest.mark.skipif(
    os.environ.get("PIPESCHOOL_TIMES") != "1",
    reason="measures time, which needs a machine with nothing else to do: set PIPESCHOOL_TIMES=1",
)
def test_a_paced_plan_has_its_predicted_throughput_and_gain_over_equal_layers():
    """Layers that really differ, in width. Measured once, then all slower by the same factor, so
    that the pace decides, and not how many cores there are."""
    model = rising(256, 256, 256, 256, 512, 1024, 512, 256)
    data = (torch.randn(40 * 16, 256), torch.randn(40 * 16, 256))
    profile = profile_layers(model, data, 40, rounds=15)
    print(f"\n{profile}")
    slower = 0.040 / max(layer.seconds for layer in profile.layers)
    profile = Profile(
        [Layer(layer.forward * slower, layer.backward * slower) for layer in profile.layers]
    )
    plans = {"equal": equal(profile, 4), "balanced": balanced(profile, 4)}
    found = {name: [] for name in plans}
    for _ in range(5):
        for name, plan in plans.items():
            found[name].append(paced_throughput(plan, model, data))
    measured = {name: median(rates) for name, rates in found.items()}
    for name, plan in plans.items():
        print(plan)
        print(f"{name}: measured, paced: {measured[name]:.2f} microbatches/s of {found[name]}")
        assert measured[name] == pytest.approx(plan.throughput, rel=0.05)
    predicted = plans["balanced"].throughput / plans["equal"].throughput
    gain = measured["balanced"] / measured["equal"]
    print(f"gain: predicted {predicted:.3f}, measured, paced: {gain:.3f}")
    assert gain == pytest.approx(predicted, rel=0.05)
    assert gain > 1


def paced_throughput(plan, model, data) -> float:
    """Microbatches per second of a paced run, between the fifth backward of the first stage and the
    last but four: in steady state."""
    cost = plan.cost()
    schedule = plan.schedule(40, weights="stash")
    result = ps.run(schedule, plan.stages(model), [data], pace=(cost.forward, cost.backward))
    assert result.paced
    ends = [span.end for span in result.trace.rows[0] if span.action.kind == "B"][5:-4]
    return (len(ends) - 1) / (ends[-1] - ends[0])
