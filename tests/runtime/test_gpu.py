"""The same runs on GPUs, all CUDA checks in this one file (``make test-gpu``): NCCL with one GPU
per worker, through the host where several share one."""

from __future__ import annotations

import pipeschool as ps
import pytest
import torch
from pipeschool.dependencies import needs
from pipeschool.runtime import reference
from pipeschool.runtime.clock import Clock
from pipeschool.runtime.host.requirements import choose_device
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
    assert result.backend == "local"
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


class Shapes(nn.Module):
    """Hands on a large tensor, a small one of whole numbers, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64).double()

    def forward(self, x, index=None, constant=None):
        index = torch.arange(len(x), device=x.device) if index is None else index
        constant = x.detach() if constant is None else constant
        return torch.tanh(self.layer(x)), index, constant


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64).double()

    def forward(self, x, index, constant):
        return self.layer(x)[index] + constant


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason=f"needs a GPU; torch sees {GPUS}")
@pytest.mark.parametrize("samples", [9, 3001])
@pytest.mark.parametrize("workers", [2, GPUS + 1])
def test_messages_of_any_kind_and_size_between_gpus(workers, samples):
    """Over NCCL where there are enough GPUs, else through shared memory of the host."""
    torch.manual_seed(0)
    stages = [*[Shapes() for _ in range(workers - 1)], Last()]
    data = [(torch.randn(samples, 64).double(), torch.randn(samples, 64).double())]
    schedule = ps.one_f_one_b(p=workers, m=3)
    result = ps.run(schedule, stages, data, device="cuda")
    assert result.backend == ("nccl" if workers <= GPUS else "local")
    expected = reference.gradients(stages, data, m=3)
    assert reference.max_error(result.gradients, expected) < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason=f"needs a GPU; torch sees {GPUS}")
@pytest.mark.parametrize("weights", ["stash", "vertical_sync"])
def test_asynchronous_training_on_gpus_equals_that_on_the_host(weights):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()).double() for _ in range(2)]
    data = [tuple(torch.randn(2, 8, 64).double()) for _ in range(6)]

    def trained(device):
        return ps.run(
            ps.pipedream(2, 1, batches=6),
            stages,
            data,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            weights=weights,
            device=device,
        ).state_dicts

    for ours, theirs in zip(trained("cuda"), trained("cpu"), strict=True):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason=f"needs a GPU; torch sees {GPUS}")
@pytest.mark.parametrize("options", [{}, {"pace": (0.005, 0.01)}, {"memory": True}])
def test_spans_on_gpus_come_after_what_they_need(options):
    torch.manual_seed(0)
    stages = [nn.Linear(64, 64) for _ in range(2)]
    schedule = ps.one_f_one_b(2, 6)
    x = torch.randn(24, 64)
    trace = ps.run(schedule, stages, [(x, x)], device="cuda", **options).trace
    ends = {span.action: span.end for span in trace.spans if span.action.kind != "U"}
    for row in trace.rows:
        assert all(a.end <= b.start for a, b in zip(row, row[1:], strict=False))
    for span in trace.spans:
        assert all(ends[need] <= span.start for need in needs(span.action, schedule))
