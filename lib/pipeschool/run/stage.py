"""One stage of the model: forward, backward and update of its share of the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeschool.run.weights import StageWeights, Version

Tensors = tuple[Tensor | None, ...]  # what travels between stages; None where there is no gradient
Loss = Callable[[Any, Any], Tensor]


class Stage:
    """The layers of one stage, and what its microbatches in flight wait for."""

    def __init__(self, index: int, module: nn.Module, weights: StageWeights):
        self.index = index
        self.module = module
        self.weights = weights
        self.in_flight: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    def forward(
        self, microbatch: int, version: Version, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """The stage's outputs for `inputs`, kept for the backward.

        What came from another stage is cut off from that stage's graph (it has none here), and
        asked for a gradient, which is what goes back.
        """
        leaves = tuple(as_leaf(x) if self.index else x for x in inputs)
        result = functional_call(self.module, version.parameters, leaves)
        outputs = as_tensors(result, f"stage {self.index}")
        self.in_flight[microbatch] = leaves, outputs
        return outputs

    def loss(self, microbatch: int, loss: Loss, target: Any) -> Tensor:
        """The last stage's loss, which takes the place of its outputs."""
        leaves, outputs = self.in_flight[microbatch]
        value = loss_of(loss, outputs, target)
        self.in_flight[microbatch] = leaves, (value,)
        return value

    def scale(self, microbatch: int, scale: float) -> Tensor:
        """Where the last stage's backward starts: the loss's weight in the loss of its update."""
        _, (loss,) = self.in_flight[microbatch]
        return torch.full_like(loss, scale)

    def backward(self, microbatch: int, version: Version, gradients: Tensors) -> Tensors:
        """Gradients of the stage's inputs, given those of its outputs; weights' are collected."""
        leaves, outputs = self.in_flight.pop(microbatch)
        pairs = [
            (out, gradient)
            for out, gradient in zip(outputs, gradients, strict=True)
            if out.requires_grad and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
        self.weights.collect(version)
        return tuple(leaf.grad for leaf in leaves)


def loss_of(loss: Loss, outputs: tuple[Tensor, ...], target: Any) -> Tensor:
    """The loss of a microbatch; ValueError in one sentence where it is not one number to train."""
    value = loss(outputs[0] if len(outputs) == 1 else outputs, target)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(f"the loss must be a tensor with one number, not {describe(value)}")
    if not value.requires_grad:
        raise ValueError("the loss does not depend on anything that can be trained")
    return value


def as_leaf(x: Tensor) -> Tensor:
    """`x` as the start of a new graph; asked for a gradient where it can have one."""
    x = x.detach()
    return x.requires_grad_() if x.is_floating_point() or x.is_complex() else x


def as_tensors(value: Any, source: str) -> tuple[Tensor, ...]:
    """A tensor, or a tuple or list of tensors, as a tuple; TypeError in one sentence otherwise."""
    items = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for item in items:
        if not isinstance(item, Tensor):
            raise TypeError(
                f"{source} must give a tensor or a tuple of tensors, not {describe(value)}"
            )
    return items


def describe(value: Any) -> str:
    """Shapes and types in short, for messages: ``(8, 32) float64``."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe(item) for item in value) + ")"
    return type(value).__name__
