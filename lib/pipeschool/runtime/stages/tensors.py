"""What goes into a stage and comes out of it: a tensor, or several."""

from __future__ import annotations

from typing import Any

from torch import Tensor

MOST_DESCRIBED = 4  # of the tensors of a tuple, in messages
Tensors = tuple[Tensor | None, ...]  # what travels between stages; None where there is no gradient


def as_tensors(value: Any, source: str) -> tuple[Tensor, ...]:
    """A tensor, or a tuple or list of tensors, as a tuple; TypeError in one sentence otherwise."""
    items = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for item in items:
        if not isinstance(item, Tensor):
            raise TypeError(
                f"{source} must give a tensor or a tuple of tensors, not {describe(value)}"
            )
    return items


def as_leaf(x: Tensor) -> Tensor:
    """`x` as the start of a new graph; asked for a gradient where it can have one."""
    x = x.detach()
    return x.requires_grad_() if x.is_floating_point() or x.is_complex() else x


def describe(value: Any) -> str:
    """Shapes and types in short, for messages: ``(8, 32) float64``."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        parts = [describe(item) for item in value[:MOST_DESCRIBED]]
        if len(value) > len(parts):
            parts.append(f"... {len(value)} in all")
        return "(" + ", ".join(parts) + ")"
    return type(value).__name__
