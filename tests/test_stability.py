"""Every fault shows, and its cure cures: against numbers worked out another way."""

from __future__ import annotations

import math

import numpy as np
import pipeschool as ps
import pytest
import torch
from pipeschool import course_data, stability
from torch import nn


def small_line() -> tuple[list[nn.Module], tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return [*stages, nn.Linear(8, 2)], (torch.randn(16, 8), torch.randn(16, 2))


def test_undivided_gradients_lengthen_the_steps_of_sgd_alone() -> None:
    """Microbatches are equal, so the sum of their mean losses is m times that of the batch. Adam's
    first step is lr in each weight, whatever the gradient's size."""
    rows = stability.undivided_gradients((1, 2, 4, 8, 16))
    assert [row.m for row in rows] == [1, 2, 4, 8, 16]
    for m, sgd, adam, cured in rows:
        assert sgd == pytest.approx(m, rel=1e-12)
        assert adam == pytest.approx(1, abs=1e-5)
        assert cured == pytest.approx(1, rel=1e-12)


def test_shares_of_samples_cure_uneven_microbatches_too() -> None:
    """16 samples in 3 microbatches: 6, 5 and 5 of them."""
    (row,) = stability.undivided_gradients((3,))
    assert row.sgd_cured == pytest.approx(1, rel=1e-12)
    assert abs(row.sgd - 1) > 1


def test_a_real_run_takes_the_cured_step() -> None:
    stages, batch = small_line()
    one, many = (ps.run(ps.gpipe(4, m), stages, [batch], device="cpu").gradients for m in (1, 8))
    for a, b in zip(one, many, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-7)


def test_batch_norm_alone_depends_on_microbatches() -> None:
    for norm, m, error, memory in stability.norms((1, 2, 4, 8)):
        sees_batch = norm in ("batch", "batch, momentum")
        assert (error > 0.1) if sees_batch and m > 1 else (error < 1e-12)
        kept = {"batch": 0.9**m, "batch, momentum": 0.9, "batch, frozen": 1.0}.get(norm)
        assert memory == (None if kept is None else pytest.approx(kept, rel=1e-12))


def test_batch_norm_gradient_by_hand() -> None:
    """The same error where the normalisation is written out."""
    rows = {(r.norm, r.m): r.gradient_error for r in stability.norms((2, 4))}
    model, (x, y) = stability._regression()
    gain = torch.ones(8, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    parameters = [*model[0].parameters(), *model[2].parameters(), gain, bias]

    def gradient(parts: int) -> list[torch.Tensor]:
        total = torch.zeros(())
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            hidden = model[0](a)
            scaled = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
            total = total + ((model[2](scaled * gain + bias) - b) ** 2).mean() / parts
        return list(torch.autograd.grad(total, parameters))

    whole = gradient(1)
    for m in (2, 4):
        worst = max(float((a - b).abs().max()) for a, b in zip(gradient(m), whole, strict=True))
        assert rows["batch", m] == pytest.approx(worst, rel=1e-9)


def test_dropout_needs_its_random_numbers_back() -> None:
    row = stability.dropout_recompute(0.5)
    assert row.new_numbers > 0.1
    assert row.restored == 0
    assert row.run == 0
    assert stability.dropout_recompute(0.0) == (0, 0, 0)  # without dropout there is no fault


# --- delays --------------------------------------------------------------------------------------


def spectral_radius(rate: float, delay: int) -> float:
    """Of w(t+1) = w(t) - rate w(t - delay): the largest root of z^(d+1) - z^d + rate."""
    if delay == 0:
        return abs(1 - rate)
    return float(max(abs(np.roots([1, -1, *[0] * (delay - 1), rate]))))


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 7, 15])
def test_the_stable_rate_is_where_the_largest_root_leaves_the_unit_circle(delay: int) -> None:
    bound = stability.stable_rate(delay)
    assert spectral_radius(bound, delay) == pytest.approx(1, abs=1e-9)
    assert spectral_radius(0.99 * bound, delay) < 1 < spectral_radius(1.01 * bound, delay)
    assert stability.stable_rate(delay, curvature=4) == bound / 4


def test_known_stable_rates() -> None:
    assert stability.stable_rate(0) == pytest.approx(2)
    assert stability.stable_rate(1) == pytest.approx(1)
    assert stability.stable_rate(2) == pytest.approx((math.sqrt(5) - 1) / 2)  # 2 sin 18 degrees


@pytest.mark.parametrize("delay", [0, 1, 3, 7])
@pytest.mark.parametrize("curvature", [1.0, 5.0])
def test_descent_converges_below_the_bound_and_not_above(delay: int, curvature: float) -> None:
    bound = stability.stable_rate(delay, curvature)
    assert stability.final_distance(0.95 * bound, delay, 5000, curvature) < 1e-6
    assert stability.final_distance(1.05 * bound, delay, 5000, curvature) > 1e6


def test_the_table_of_delays() -> None:
    rows = stability.late_gradients(rates=(0.1, 0.9), delays=(0, 3), steps=400)
    assert [(row.delay, row.rate) for row in rows] == [(0, 0.1), (0, 0.9), (3, 0.1), (3, 0.9)]
    assert [row.distance < 1e-6 for row in rows] == [True, True, True, False]
    assert rows[3].distance > 1e6
    for row in rows:
        assert (row.rate < row.bound) == (row.distance < 1)


def test_one_step_by_hand() -> None:
    """Delay 1, rate 0.5, from 1, 1: 0.5, then 0.5 - 0.5 * 1 = 0."""
    assert stability.final_distance(0.5, 1, steps=1) == 1
    assert stability.final_distance(0.5, 1, steps=2) == 0.5
    assert stability.final_distance(0.5, 1, steps=3) == 0.25  # 0 and 0 - 0.5 * 0.5


def test_the_rate_for_a_delay_rises_from_its_share_to_all() -> None:
    factor = stability.delayed_rate(3, 100)
    assert [factor(step) for step in (0, 50, 100, 1000)] == [0.25, 0.5, 1, 1]
    assert stability.delayed_rate(0, 100)(0) == 1


def test_digits_suffer_from_the_synchronous_rate_and_cures_help() -> None:
    seeds = range(2)
    found = stability.delayed_training(
        course_data.digit_stages(4, seeds, width=32),
        course_data.digit_stream(120, 32, seeds),
        rate=0.3,
        loss=course_data.loss_of_all,
    )
    loss = {row.case: row.loss / len(seeds) for row in found}
    guess = math.log(10)  # cross entropy of a guess among ten digits
    assert loss["no delay"] < guess / 2
    assert loss["delay"] > 2 * loss["no delay"]
    assert loss["delay, rate / p"] < loss["delay"]
    assert loss["delay, clipped"] < loss["delay"]


# --- clipping ------------------------------------------------------------------------------------


def test_clipping_each_stage_turns_the_gradient() -> None:
    """Norms 3 and 4, clipped to 1: to 1 and 1, or all by 1/5."""
    gradients = [{"w": torch.tensor([3.0, 0.0])}, {"a": torch.zeros(2), "b": torch.tensor([4.0])}]
    rows = stability.clip_factors(gradients, 1.0)
    assert rows == [(0, 3, pytest.approx(1 / 3), 0.2), (1, 4, pytest.approx(1 / 4), 0.2)]
    assert stability.direction(rows) == pytest.approx(7 / (5 * math.sqrt(2)))
    assert stability.direction(rows, together=True) == pytest.approx(1)
    assert [row[2:] for row in stability.clip_factors(gradients, 10.0)] == [(1, 1), (1, 1)]
    assert stability.clip_factors([{}], 1.0) == [(0, 0, 1, 1)]


@pytest.mark.parametrize(("over", "kind"), [("stage", "per_stage"), ("model", "together")])
def test_clip_factors_are_those_of_torch_and_of_a_run(over: str, kind: str) -> None:
    stages, batch = small_line()
    result = ps.run(
        ps.one_f_one_b(4, 4),
        stages,
        [batch],
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        clip_norm=0.2,
        clip_over=over,
        device="cpu",
    )
    unclipped = ps.run(ps.one_f_one_b(4, 4), stages, [batch], device="cpu").gradients
    rows = stability.clip_factors(unclipped, 0.2)
    assert stability.direction(rows) < 0.99
    before = [stage.state_dict() for stage in stages]
    for row, old, new, g in zip(rows, before, result.state_dicts, unclipped, strict=True):
        for name in old:
            expected = old[name] - getattr(row, kind) * g[name]
            torch.testing.assert_close(new[name], expected, rtol=1e-4, atol=1e-6)
    parameters = [nn.Parameter(torch.zeros_like(g)) for stage in unclipped for g in stage.values()]
    values = [g for stage in unclipped for g in stage.values()]
    for parameter, g in zip(parameters, values, strict=True):
        parameter.grad = g.clone()
    nn.utils.clip_grad_norm_(parameters, 0.2)
    assert parameters[0].grad is not None
    torch.testing.assert_close(parameters[0].grad, rows[0].together * values[0], rtol=1e-4, atol=0)


# --- fewer bits ----------------------------------------------------------------------------------


def test_bfloat16_halves_the_messages_and_keeps_the_loss() -> None:
    """3 boundaries, both ways, 16 samples of 8 numbers: 3 * 2 * 16 * 8 * 4 = 3072 bytes."""
    stages, batch = small_line()
    full, half = stability.mixed_precision(stages, batch, 4)
    assert (full.message_bytes, half.message_bytes) == (3072, 1536)
    assert 0 < abs(full.loss - half.loss) < 0.02 * full.loss  # 8 bits of mantissa
    x, y = batch
    with torch.no_grad():
        for stage in stages:
            x = stage(x)
    assert full.loss == pytest.approx(float(nn.functional.mse_loss(x, y)), rel=1e-5)


def test_scaling_the_loss_saves_small_gradients_until_they_overflow() -> None:
    rows = stability.underflow((1.0, 2.0**16, 2.0**40))
    gradients = torch.cat([g.flatten() for g in stability._small_gradients().values()]).numpy()
    gradients = np.abs(gradients[gradients != 0]).astype(np.float64)
    for scale, numbers, zeros, infinite in rows:
        assert numbers == len(gradients)
        assert zeros == (gradients * scale <= 2.0**-25).sum()  # half of the least subnormal
        assert infinite == (gradients * scale >= 65520).sum()  # what rounds beyond 65504
    assert rows[0].zeros > 0.1 * rows[0].numbers and rows[0].infinite == 0
    assert rows[1].zeros < 0.01 * rows[1].numbers and rows[1].infinite == 0
    assert rows[2].infinite > 0


def test_the_table_has_a_heading_and_columns() -> None:
    rows = [stability.Clipped(0, 3.0, 1 / 3, 0.2), stability.Clipped(1, 4.0, 0.25, 0.2)]
    assert stability.table(rows) == (
        "stage  norm  per_stage  together\n"
        "    0     3     0.3333       0.2\n"
        "    1     4       0.25       0.2"
    )
