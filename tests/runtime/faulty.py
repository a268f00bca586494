"""Stages that fail on purpose, at one microbatch, in the forward or in the backward."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn


class _Trip(torch.autograd.Function):
    """Identity that calls `fault` in its forward or in its backward."""

    @staticmethod
    def forward(ctx, x: Tensor, fault: Callable[[Tensor], Tensor], where: str) -> Tensor:
        ctx.fault, ctx.where = fault, where
        return fault(x) if where == "F" else x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.fault(gradient) if ctx.where == "B" else gradient), None, None


class Faulty(nn.Module):
    """A linear stage whose `call`-th microbatch meets `fault`, in its forward or its backward."""

    def __init__(self, width: int, fault: Callable[[Tensor], Tensor], where: str, call: int):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.fault, self.where, self.call = fault, where, call
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.calls == self.call:
            y = _Trip.apply(y, self.fault, self.where)
        self.calls += 1
        return y


def raises(x: Tensor) -> Tensor:
    raise KeyError("the brew is off")


def killed(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def sleeps(x: Tensor) -> Tensor:
    time.sleep(10_000)
    return x


def exits(x: Tensor) -> Tensor:
    os._exit(3)


def wrong_shape(x: Tensor) -> Tensor:
    return x.new_zeros(len(x), x.shape[1] + 1)


def nan(x: Tensor) -> Tensor:
    return x * float("nan")
