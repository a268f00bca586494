"""The same runs on GPUs: NCCL with one GPU per worker, gloo through the host where they share."""

from __future__ import annotations

import pipeschool as ps
import pytest
import torch
from pipeschool.runtime import reference
from pipeschool.runtime.clock import Clock
from pipeschool.runtime.launch import choose_device
from torch import nn

pytestmark = pytest.mark.xdist_group("alone")

GPUS = torch.cuda.device_count()


def run_on_gpus(p):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()).double() for _ in range(p)]
    x = torch.randn(16, 64, dtype=torch.float64)
    result = ps.run(ps.one_f_one_b(p=p, m=4), stages, [(x, x)], device="cuda")
    error = reference.max_error(result.gradients, reference.gradients(stages, [(x, x)], m=4))
    return result, error


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs for 2 workers over NCCL; torch sees {GPUS}")
def test_a_gpu_per_worker_runs_over_nccl():
    result, error = run_on_gpus(2)
    assert (result.backend, result.device) == ("nccl", "cuda:0, cuda:1")
    assert error < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason=f"needs a GPU; torch sees {GPUS}")
def test_workers_that_share_a_gpu_go_through_the_host_and_say_so():
    result, error = run_on_gpus(GPUS + 1)
    assert result.backend == "gloo"
    assert result.device.endswith("(staged through the host)")
    assert error < 1e-12


@pytest.mark.parametrize(
    ("gpus", "p", "expected"),
    [
        (0, 2, ("gloo", ["cpu", "cpu"])),
        (1, 2, ("gloo", ["cuda:0", "cuda:0"])),
        (2, 3, ("gloo", ["cuda:0", "cuda:1", "cuda:0"])),
        (4, 2, ("nccl", ["cuda:0", "cuda:1"])),
    ],
)
def test_the_device_follows_from_the_number_of_gpus(monkeypatch, gpus, p, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert choose_device("auto", p) == expected
    assert choose_device("cpu", p) == ("gloo", ["cpu"] * p)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason=f"needs a GPU; torch sees {GPUS}")
def test_the_device_tells_the_time_of_its_own_work():
    """A kernel that spins takes its time on the device; asking for it takes the host none."""
    cycles = 200_000_000
    device = torch.device("cuda:0")
    by_event, waiting = Clock(device, on_device=True), Clock(device, on_device=False)
    start, asked = by_event.mark(), waiting.mark()
    torch.cuda._sleep(cycles)
    end = by_event.mark()
    device_seconds = by_event.seconds(end) - by_event.seconds(start)
    assert waiting.mark() - asked >= device_seconds > 0.01


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason=f"needs a GPU; torch sees {GPUS}")
@pytest.mark.parametrize("build", [ps.zb_h1, ps.chimera, ps.interleaved_1f1b])
def test_split_backwards_copies_and_chunks_on_gpus(build):
    torch.manual_seed(0)
    schedule = build(p=4, m=8)
    stages = [
        nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.0), nn.Tanh()).double()
        for _ in range(schedule.stages)
    ]
    x = torch.randn(16, 64, dtype=torch.float64)
    result = ps.run(schedule, stages, [(x, x)], device="cuda", recompute=True)
    expected = reference.gradients(
        stages, [(x, x)], m=8, replicas=[len(workers) for workers in schedule.owners]
    )
    assert reference.max_error(result.gradients, expected) < 1e-12
