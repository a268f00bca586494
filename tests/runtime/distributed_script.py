"""Started by torchrun in the tests: train a small model, and write what came out to a file.

Arguments: output folder, checkpoint (or -), batches in an epoch, and a fault: kind:stage:call, or
seed, or -.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pipeschool as ps
import torch
from torch import nn

FOLDER, CHECKPOINT, BATCHES, FAULT = sys.argv[1:]
RANK = int(os.environ["RANK"])
CALLS = Counter()  # of the stages' forwards in this process, in all legs


class Faulty(nn.Module):
    """Raises, dies or hangs where it is told to; an identity otherwise."""

    def __init__(self, stage: int):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        CALLS[self.stage] += 1
        kind, *place = FAULT.split(":")
        if place == [str(self.stage), str(CALLS[self.stage])]:
            if kind == "raise":
                raise ValueError("the tea is cold")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "sleep":
                time.sleep(1000)
        return x


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


torch.manual_seed(RANK if FAULT == "seed" else 0)
stages = [
    nn.Sequential(Faulty(s), nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()).double() for s in range(4)
]
batches = [torch.randn(2, 16, 8, dtype=torch.float64).unbind() for _ in range(int(BATCHES))]
training = ps.train(
    ps.one_f_one_b,
    stages,
    batches,
    m=4,
    epochs=2,
    every=2,
    checkpoint=None if CHECKPOINT == "-" else f"{CHECKPOINT}.{os.environ['GROUP_RANK']}",
    optimizer=sgd,
    timeout=3.0,
)
torch.save(
    {"losses": training.losses, "states": training.state_dicts}, Path(FOLDER) / f"rank{RANK}.pt"
)
