"""The loss of one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeschool.runtime.stages.tensors import as_tensors, describe

Loss = Callable[[Any, Any], Tensor]


def checked_loss(loss: Callable[[Any], Tensor], outputs: tuple[Tensor, ...]) -> Tensor:
    """The last stage's loss, which takes the place of its outputs."""
    value = loss(outputs[0] if len(outputs) == 1 else outputs)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(f"the loss must be a tensor with one number, not {describe(value)}")
    if value.is_complex():
        raise ValueError(
            f"the loss must be a real number, not {describe(value)}: take its abs() or its real "
            "part"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError("the loss does not depend on anything that can be trained")
    return value


def no_loss(outputs: Any) -> Tensor:
    """The loss of a microbatch whose targets weigh nothing: 0, and so are its gradients, whatever
    the loss itself would make of it (a mean over nothing is NaN)."""
    parts = [y.flatten()[:0].sum() for y in as_tensors(outputs, "the last stage")]
    return sum(parts[1:], start=parts[0]).real.double()
