"""What a checkpoint can keep: values that `torch.load` reads back without running any code."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

AS_THEY_ARE = {type(None), bool, int, float, str}
DICTS = (OrderedDict, Counter, dict)  # one of another kind is kept as the last


def keepable(value: Any, what: str) -> Any:
    """`value` as it will be read again: numbers of numpy as Python's, its arrays as tensors, named
    tuples as tuples, and of every tensor its own memory alone.

    ValueError, naming `what`, where something in it could not be read.
    """
    if type(value) in AS_THEY_ARE:
        return value
    if type(value) in (Tensor, torch.nn.Parameter):
        return alone(value.detach().cpu())
    if isinstance(value, dict):
        kind = type(value) if type(value) in DICTS else dict
        return kind({keepable(k, what): keepable(v, what) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(keepable(item, what) for item in value)
    if type(value) in (list, tuple, set):
        return type(value)(keepable(item, what) for item in value)
    if isinstance(value, np.generic) and type(number := value.item()) in AS_THEY_ARE:
        return number
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except TypeError:  # of objects or of strings
            return keepable(value.tolist(), what)
    if not can_be_read(value):
        raise ValueError(
            f"a checkpoint cannot keep {what}, with a value of type {type(value).__name__} in it: "
            "only numbers, strings, tensors, and lists and dicts of them can be read again"
        )
    return value


def alone(tensor: Tensor) -> Tensor:
    """`tensor`, or where it is a piece of a larger one, its numbers without the others: torch would
    write all the memory that it is in."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.__dict__:
        return tensor
    once = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]  # if expanded
    if tensor.untyped_storage().nbytes() <= once.nbytes:
        return tensor
    return once.detach().clone().expand_as(tensor).requires_grad_(tensor.requires_grad)


def can_be_read(value: Any) -> bool:
    """Whether a checkpoint with `value` in it could be read again: tried in memory."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception:  # whatever it is that pickling, or reading, calls of the caller's
        return False
    return True
