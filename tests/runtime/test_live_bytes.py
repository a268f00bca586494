"""Bytes that a run counts are those that its prediction counts, over several updates."""

from __future__ import annotations

from functools import partial

import pipeschool as ps
import pytest
import torch
from torch import nn

SAMPLES, WIDTH, M = 32, 128, 8
COPY = (WIDTH * WIDTH + WIDTH) * 4  # bytes of a stage's weights


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "pipedream"])
def test_peaks_over_two_batches_are_as_predicted(name):
    """Neither gradients of an update before nor weights that nobody uses any more count.

    Messages on their way count as well, but those are small here, so that a copy of the weights
    too many would be seen.
    """
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    batches = [(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)) for _ in range(2)]
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    schedule = ps.build(name, p=3, m=M, batches=2)
    ran = ps.run(schedule, stages, batches, optimizer=sgd, memory=True).trace
    cost = ps.profile(stages, batches[0], m=M, optimizer=sgd)
    predicted = ps.simulate(schedule, cost)
    for worker in range(3):
        gap = ran.peak_bytes[worker] - predicted.peak_bytes[worker]
        assert abs(gap) < COPY / 2, f"worker {worker}: {gap:+.0f}"
        for kind in ("weights", "versions", "gradients", "optimizer"):
            counted, foreseen = (
                max(getattr(level, kind) for level in trace.memory[worker])
                for trace in (ran, predicted)
            )
            assert counted == foreseen, kind
