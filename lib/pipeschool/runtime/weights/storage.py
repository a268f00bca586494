"""Which memory a tensor is in: views share theirs, and writing to one changes all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipeschool.runtime.weights.sharding import local


def dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    """What memory holds of `tensor`: itself; of a sparse one, as an embedding's gradient may be,
    the indices and the values. Of other layouts, nothing that one could look at."""
    if tensor.is_sparse:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout == torch.strided else ()


def address(tensor: Tensor) -> int:
    """The same number for all views of the same memory."""
    return int(tensor.untyped_storage()._cdata)


def addresses(tensors: Iterable[Tensor | None]) -> set[int]:
    """Of all `tensors`; of one that is sliced over several processes, the slice that is here."""
    return {address(part) for t in tensors if t is not None for part in dense_parts(local(t))}
