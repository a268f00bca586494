"""Bytes that a run has counted, against those predicted from a profile of one microbatch."""

from __future__ import annotations

import gc

import pipeschool as ps
import pytest
import torch
from pipeschool.runtime.observers.live_bytes import LiveBytes
from torch import nn

MB = 2**20


class Deep(nn.Module):
    """Little work, much to remember: every layer keeps its output."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.start = nn.LayerNorm(width)
        self.layers = nn.Sequential(*[nn.Tanh() for _ in range(layers)])

    def forward(self, x):
        return self.layers(self.start(x))


def deep(p: int, m: int, layers: int = 10, rows: int = 512, width: int = 1024):
    torch.manual_seed(0)
    batch = tuple(torch.randn(2, m * rows, width))
    return [Deep(width, layers) for _ in range(p)], batch


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def adam(parameters):
    return torch.optim.Adam(parameters)


def test_live_bytes_are_those_of_tensors_somebody_still_has():
    layer, x = nn.Linear(256, 256), torch.randn(1024, 256)
    with LiveBytes() as live:
        y = torch.tanh(layer(x))  # the product is free once tanh has its own
        assert (live.now, live.peak) == (1 * MB, 2 * MB)
        z = y.view(-1)[5:]
        assert live.now == 1 * MB  # a view has no memory of its own
        y.sum().backward()
        assert live.now == 1 * MB + 256 * 257 * 4  # and the gradients of weight and bias
        del y
        assert live.now >= 1 * MB  # the view holds on to it
        del z
        gc.collect()
        assert live.now == 256 * 257 * 4
        layer.zero_grad()
        assert live.now == 0


def test_a_profile_knows_what_a_stage_keeps():
    stages, batch = deep(2, 4)
    cost = ps.profile(stages, batch, 4, optimizer=adam, rounds=1)
    assert cost.message_bytes == (2 * MB, 0)
    assert cost.parameter_bytes == cost.gradient_bytes == (8192, 8192)
    # Ten outputs of tanh; on the last stage the loss keeps its difference, too. A norm keeps its
    # input, which counts as such, and two numbers per row.
    assert cost.activation_bytes == pytest.approx([20 * MB, 22 * MB], rel=0.001)
    assert cost.optimizer_bytes == (2 * 8192 + 8, 2 * 8192 + 8)


@pytest.mark.parametrize(
    ("build", "recompute"),
    [
        pytest.param(ps.gpipe, False, marks=pytest.mark.exhaustive),
        (ps.gpipe, True),
        (ps.one_f_one_b, False),
        pytest.param(ps.one_f_one_b, True, marks=pytest.mark.exhaustive),
    ],
)
def test_predicted_and_measured_peaks_agree_within_five_percent(build, recompute):
    """On stages whose activations are at least 20 MB for a microbatch."""
    stages, batch = deep(4, 6)
    cost = ps.profile(stages, batch, 6, optimizer=adam, recompute=recompute, rounds=1)
    assert min(cost.activation_bytes) >= 20e6
    schedule = build(4, 6)
    result = ps.run(schedule, stages, [batch], optimizer=adam, memory=True, recompute=recompute)
    predicted = ps.simulate(schedule, cost).peak_bytes
    assert result.trace.peak_bytes == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("build", [ps.gpipe, ps.one_f_one_b, ps.zb_h1, ps.pipedream_2bw])
def test_predicted_and_measured_peaks_agree_where_weights_are_most_of_it(build):
    """One sum of gradients, and while a backward runs, the gradient of one more weight."""
    torch.manual_seed(0)
    stages = [nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]) for _ in range(2)]
    data = [tuple(torch.randn(2, 64, 512)) for _ in range(2)]
    schedule = build(2, 8, batches=2) if build == ps.pipedream_2bw else build(2, 8).repeat(2)
    result = ps.run(schedule, stages, data, optimizer=sgd, memory=True)
    cost = ps.profile(stages, data[0], 8, optimizer=sgd, rounds=1)
    predicted = ps.simulate(schedule, cost).peak_bytes
    if build == ps.zb_h1:  # the weight that comes first has its gradient in the input half
        predicted = [predicted[0] + 512 * 512 * 4, predicted[1]]
    assert result.trace.peak_bytes == pytest.approx(predicted, rel=0.02)


def test_gpipe_against_1f1b_at_p_4_m_16_shows_the_predicted_ratio():
    """m against min(m, p - s) microbatches: 16 over 4, 3, 2 and 1 where activations are all."""
    stages, batch = deep(4, 16, rows=64)
    cost = ps.profile(stages, batch, 16, rounds=1)
    peaks = {}
    for build in (ps.gpipe, ps.one_f_one_b):
        result = ps.run(build(4, 16), stages, [batch], memory=True)
        peaks[build] = [max(level.activations for level in row) for row in result.trace.memory]
    ratios = [a / b for a, b in zip(peaks[ps.gpipe], peaks[ps.one_f_one_b], strict=True)]
    assert ratios == pytest.approx([16 / 4, 16 / 3, 16 / 2, 16 / 1], rel=0.05)
    predicted = [
        max(level.activations for level in row) for row in ps.simulate(ps.gpipe(4, 16), cost).memory
    ]
    assert peaks[ps.gpipe] == pytest.approx(predicted, rel=0.05)


def test_weight_versions_and_optimizer_state_are_told_apart():
    torch.manual_seed(0)
    stages = [nn.Linear(256, 256, bias=False) for _ in range(3)]
    data = [tuple(torch.randn(2, 8, 256)) for _ in range(2)]
    result = ps.run(ps.pipedream(3, 4, batches=2), stages, data, optimizer=adam, memory=True)
    size = 256 * 256 * 4
    for worker, row in enumerate(result.trace.memory):
        assert {level.weights for level in row} == {size}
        assert max(level.versions for level in row) == (2 - worker) * size
        assert row[-1].optimizer == 2 * size + 4  # two moments, and a count of steps


@pytest.mark.parametrize(("build", "in_flight"), [(ps.gpipe, 4), (ps.one_f_one_b, 2)])
def test_buffers_are_the_inputs_in_flight_and_the_gradient_that_has_just_come(build, in_flight):
    """On a worker in the middle; the last one gets no gradient, and the first no input."""
    stages, batch = deep(3, 4)
    trace = ps.run(build(3, 4), stages, [batch], memory=True).trace
    first, middle, last = (max(level.buffers for level in row) for row in trace.memory)
    assert first == 2 * MB
    assert middle == (in_flight + 1) * 2 * MB
    assert last == (4 if build is ps.gpipe else 1) * 2 * MB


def test_what_was_sent_is_let_go():
    """A stage that recomputes keeps nothing of its outputs: 1F1B holds no more at the end of a long
    batch than at its beginning."""
    stages, batch = deep(2, 24, layers=1, rows=64)
    result = ps.run(ps.one_f_one_b(2, 24), stages, [batch], memory=True, recompute=True)
    message = 64 * 1024 * 4
    for row in result.trace.memory:
        assert max(level.total for level in row) < 12 * message


def test_a_run_that_was_not_asked_counts_nothing():
    stages, batch = deep(1, 1, layers=1, rows=2)
    trace = ps.run(ps.gpipe(1, 1), stages, [batch]).trace
    assert trace.measured_memory == ()


def test_a_profile_draws_no_random_numbers_of_the_callers():
    batch, stages = tuple(torch.randn(2, 8, 4)), [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))]
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    ps.profile(stages, batch, 4, rounds=1)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_that_counted_no_bytes_gives_none():
    batch = tuple(torch.randn(2, 8, 4))
    trace = ps.run(ps.gpipe(2, 2), [nn.Linear(4, 4), nn.Linear(4, 4)], [batch]).trace
    assert trace.parameter_bytes == [80, 80]
    assert (trace.memory, trace.peak_bytes) == ([], [])
