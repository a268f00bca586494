"""A small training, and faults that hit a worker of it at any moment: also for workers that a test
starts as torchrun does, but quickly."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pipeschool as ps
import torch
import torch.distributed as dist
from torch import nn

WORKERS = 2
BATCHES = 6
LIMIT = 1.0  # seconds without progress


class Tripping(nn.Module):
    """A stage that raises as soon as there is a file `trip`."""

    def __init__(self, trip: Path):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.2), nn.Tanh()).double()
        self.trip = trip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trip.exists():
            raise KeyError("the brew is off")
        return self.layers(x)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The weights after the training whose checkpoint is in `folder`."""
    torch.manual_seed(5)
    stages = [Tripping(folder / f"trip{worker}") for worker in range(WORKERS)]
    batches = [torch.randn(2, 8, 5, dtype=torch.float64).unbind() for _ in range(BATCHES)]
    return ps.train(
        "1f1b",
        stages,
        batches,
        m=4,
        every=1,
        checkpoint=folder / "checkpoint",
        optimizer=momentum,
        timeout=LIMIT,
        log=None,
    ).state_dicts


def hit(kind: str, worker: int, process: int, folder: Path) -> None:
    """Raise in that worker's stage from now on, or send its process a signal."""
    if kind == "raise":
        (folder / f"trip{worker}").touch()
    else:
        os.kill(process, getattr(signal, kind))


def be_elastic(rank: int, port: int, folder: Path, tmpdir: str, stop: int = -1) -> None:
    """One worker, as torchrun would have started it: in this process, to its end."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(rank),
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(WORKERS),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TMPDIR": tmpdir,
    }
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    log = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if rank == stop:
        dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        states = train(folder)
    except ps.RunError:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    torch.save(states, folder / f"result{rank}")


class Striker(threading.Thread):
    """Hits when its time has come, if there is still something to hit."""

    def __init__(self, delay: float, *what):
        super().__init__(daemon=True)
        self.delay, self.what = delay, what
        self.over = threading.Event()

    def run(self) -> None:
        if not self.over.wait(self.delay):
            try:
                hit(*self.what)
            except ProcessLookupError:
                return
