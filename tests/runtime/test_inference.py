"""Forward-only schedules on real workers: outputs of one process, and nothing kept."""

from __future__ import annotations

import pipeschool as ps
import pytest
import torch
from test_run import batch, linear_stages
from torch import nn


def test_outputs_equal_one_process_and_come_in_order(one_thread):
    stages, (x, _) = linear_stages(3), batch(10)
    result = ps.run(ps.forward_only(3, 4), stages, [(x, None)])
    # Microbatch by microbatch: ten rows at once may be rounded in another way.
    expected = [nn.Sequential(*stages)(part) for part in x.split([3, 3, 2, 2])]
    assert [len(out) for (out,) in result.outputs] == [3, 3, 2, 2]
    assert all(torch.equal(out, e) for (out,), e in zip(result.outputs, expected, strict=True))
    assert result.losses == []
    assert not any(out.requires_grad for (out,) in result.outputs)


def test_with_targets_the_losses_are_those_of_an_evaluation():
    stages, (x, y) = linear_stages(2), batch(8)
    losses = ps.run(ps.forward_only(2, 4), stages, [(x, y)]).losses
    outputs = nn.Sequential(*stages)(x)
    expected = [
        nn.functional.mse_loss(a, b).item()
        for a, b in zip(outputs.split(2), y.split(2), strict=True)
    ]
    assert losses == pytest.approx(expected, rel=1e-12)


def test_token_by_token_each_microbatch_goes_down_the_line_several_times():
    """Three tokens: the same two stages three times over, on the same two workers."""
    stages, (x, _) = linear_stages(2), batch(4)
    schedule = ps.forward_only(2, 4, tokens=3)
    assert schedule.placement == (0, 1, 0, 1, 0, 1)
    result = ps.run(schedule, [*stages] * 3, [(x, None)])
    line = nn.Sequential(*stages)
    outputs = torch.cat([out for (out,) in result.outputs])
    torch.testing.assert_close(outputs, line(line(line(x))), rtol=1e-12, atol=1e-14)


def test_a_training_schedule_needs_targets():
    with pytest.raises(ValueError, match="a batch without targets, .inputs, None., is for"):
        ps.run(ps.gpipe(2, 2), linear_stages(2), [(batch(4)[0], None)])


def test_no_memory_is_kept_for_a_backward():
    stages, (x, _) = linear_stages(2), batch(64)
    row = ps.run(ps.forward_only(2, 8), stages, [(x, None)], memory=True).trace.memory[0]
    message = x[:8].numel() * 8
    assert all(level.activations <= 3 * message + 16384 * 3 for level in row)
