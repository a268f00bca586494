"""Random numbers of all three kinds: seeded per worker, the same again when a stage is recomputed,
and when a training goes on. And what a worker takes over from the caller's surroundings."""

from __future__ import annotations

import random

import numpy as np
import pipeschool as ps
import pytest
import torch
from pipeschool.runtime import reference
from pipeschool.runtime.stages.random_numbers import put_back, random_numbers, seed
from test_run import batch, linear_stages
from torch import nn

KINDS = ["python", "numpy", "torch"]


def draw(kind: str) -> float:
    if kind == "python":
        return random.gauss(0, 1)
    if kind == "numpy":
        return float(np.random.standard_normal())
    return torch.randn(()).item()


class Noise(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 6).double(), kind

    def forward(self, x):
        return self.layer(x) * draw(self.kind)


def noisy(kind):
    torch.manual_seed(0)
    return [Noise(kind) for _ in range(3)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_recomputed_stage_draws_the_same_again(kind, name):
    def run(recompute):
        schedule = ps.build(name, 3, 4)
        options = {"optimizer": sgd, "recompute": recompute}
        return ps.run(schedule, noisy(kind), [batch(8)] * 2, **options)

    plain, again = run(False), run(True)
    assert plain.losses == again.losses
    assert reference.max_error(plain.gradients, again.gradients) == 0
    assert reference.max_error(plain.state_dicts, again.state_dicts) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_and_the_worker_say_what_is_drawn(kind):
    def outputs(number):
        stage = nn.Sequential(Constant(kind))
        schedule = ps.forward_only(2, 3)
        result = ps.run(schedule, [stage, Adds(kind)], [(torch.zeros(3, 1), None)], seed=number)
        return torch.cat([out for (out,) in result.outputs])

    expected = []
    with put_back():
        for worker in range(2):
            seed(7 + worker)
            expected.append([draw(kind) for _ in range(3)])
    of_seven = outputs(7)
    torch.testing.assert_close(of_seven, torch.tensor(expected).T)
    assert torch.equal(of_seven, outputs(7))
    assert not torch.equal(of_seven, outputs(8))


class Constant(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return torch.full_like(x, draw(self.kind))


class Adds(Constant):
    def forward(self, x):
        return torch.cat([x, super().forward(x)], dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_legs_and_checkpoints_go_on_with_them(kind, tmp_path):
    data = [batch(8, seed=seed) for seed in range(3)]
    options = {"m": 4, "optimizer": sgd, "log": None}
    whole = ps.train("gpipe", noisy(kind), data, **options)
    assert ps.train("gpipe", noisy(kind), data, every=1, **options).losses == whole.losses

    class Breaks:
        def __iter__(self):
            yield data[0]
            raise KeyError

    options |= {"every": 1, "checkpoint": tmp_path / "tea.pt"}
    with pytest.raises(KeyError):
        ps.train("gpipe", noisy(kind), Breaks(), **options)
    again = ps.train("gpipe", noisy(kind), data, **options)
    assert again.losses == whole.losses
    assert reference.max_error(again.state_dicts, whole.state_dicts) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_a_shuffling_loader_follows_from_seed_and_epoch(kind):
    data = [batch(4, seed=seed) for seed in range(6)]
    seen: list[list[int]] = []

    class Shuffled:
        def __len__(self):
            return len(data)

        def __iter__(self):
            order = sorted(range(6), key=lambda _: draw(kind))
            seen.append(order)
            return iter([data[k] for k in order])

    for _ in range(2):
        ps.train("gpipe", linear_stages(2), Shuffled(), m=2, epochs=2, log=None)
        draw(kind)  # what the caller draws between makes no difference
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_callers_own_random_numbers_are_left_alone(kind):
    stages, data = linear_stages(2), [batch(4)]
    with put_back():
        seed(1)
        expected = [draw(kind) for _ in range(2)]
        seed(1)
        first = draw(kind)
        ps.train("gpipe", stages, data, m=2, log=None, check_loss=True)
        ps.profile(stages, data[0], 2)
        assert [first, draw(kind)] == expected


def test_what_is_kept_is_all_of_it():
    with put_back():
        seed(2**40 + 3)  # numpy takes its lowest 32 bits
        assert np.random.get_state(legacy=False)["state"]["key"].tolist() == (
            np.random.RandomState(3).get_state(legacy=False)["state"]["key"].tolist()
        )
        random.gauss(0, 1), np.random.standard_normal()  # each keeps a second one for later
        before = random_numbers()
        with put_back():
            inside = [draw(kind) for kind in KINDS]
        assert str(random_numbers()) == str(before)
        assert [draw(kind) for kind in KINDS] == inside


# The default dtype


def test_the_default_dtype_reaches_the_workers():
    class Makes(nn.Module):
        def forward(self, x):
            return x + torch.ones(6)

    x = torch.zeros(4, 6)
    try:
        torch.set_default_dtype(torch.float64)
        result = ps.run(ps.forward_only(2, 2), [Makes(), Makes()], [(x, None)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert {out.dtype for (out,) in result.outputs} == {torch.float64}


# Which dimension is cut


class Recurrent(nn.Module):
    def __init__(self, batch_first, turn=False, layer=nn.GRU):
        super().__init__()
        self.layer = layer(6, 6, batch_first=batch_first).double()
        self.turn = turn

    def forward(self, x):
        x = x.transpose(0, 1) if self.turn else x
        y = self.layer(x)[0] if isinstance(self.layer, nn.RNNBase) else self.layer(x, x, x)[0]
        return y.transpose(0, 1) if self.turn else y


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_layer_that_would_take_samples_for_time_is_refused(layer, stage):
    x = torch.randn(8, 5, 6, dtype=torch.float64)
    stages = [Recurrent(True), Recurrent(True)]
    stages[stage] = Recurrent(False, layer=layer)
    sentence = (
        rf"stage {stage} gives \(4, 5, 6\) float64 to its {layer.__name__}, which takes the first "
        "dimension for time, but a batch is cut along it: make the layer with batch_first=True, or "
        "transpose its input"
    )
    with pytest.raises(ps.RunError, match=sentence) as caught:
        ps.run(ps.gpipe(2, 2), stages, [(x, x)])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("stages", [[(True, False)] * 2, [(False, True)] * 2])
@pytest.mark.parametrize("length", [5, 4])  # 4 samples in a microbatch
def test_samples_first_is_right_however_a_layer_takes_them(stages, length):
    torch.manual_seed(0)
    modules = [Recurrent(*how) for how in stages]
    x = torch.randn(8, length, 6, dtype=torch.float64)
    found = ps.run(ps.gpipe(2, 2), modules, [(x, x.sin())])
    model = nn.Sequential(*modules)
    nn.functional.mse_loss(model(x), x.sin()).backward()
    expected = [{n: p.grad for n, p in stage.named_parameters()} for stage in modules]
    assert reference.max_error(found.gradients, expected) < 1e-12


def test_targets_that_agree_in_the_second_dimension_are_told_which_one_is_cut():
    x, y = torch.randn(5, 8, 6), torch.randn(3, 8, 6)
    with pytest.raises(ValueError, match="^a batch has 5 inputs, but 3 targets: samples go along "):
        ps.run(ps.gpipe(2, 2), linear_stages(2), [(x, y)])
    with pytest.raises(ValueError, match="^a batch has 5 inputs, but 3 targets$"):
        ps.run(ps.gpipe(2, 2), linear_stages(2), [(x, y[:, :4])])
