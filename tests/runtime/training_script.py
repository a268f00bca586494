"""A small training that a test can kill: ``python training_script.py FOLDER SECONDS SCHEDULE``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pipeschool as ps
import torch
from torch import nn


class Slow(nn.Module):
    """A stage that takes a while, with dropout and a buffer to make resuming harder."""

    def __init__(self, width: int, seconds: float):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.dropout(torch.tanh(self.norm(self.linear(x))))


def make(seconds: float = 0.0):
    """Stages, data loader and the options of the training."""
    torch.manual_seed(3)
    stages = [Slow(6, seconds).double() for _ in range(3)]
    x, y = torch.randn(2, 48, 6, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True
    )
    options = {
        "m": 4,
        "epochs": 2,
        "every": 1,
        "optimizer": lambda w: torch.optim.Adam(w, lr=0.01),
        "scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        "log": None,
    }
    return stages, loader, options


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    stages, loader, options = make(seconds=float(sys.argv[2]))
    print("training", flush=True)
    training = ps.train(sys.argv[3], stages, loader, checkpoint=folder / "checkpoint", **options)
    torch.save((training.losses, training.state_dicts), folder / "result")
