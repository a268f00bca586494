"""Gradients of one parameter that several workers, or several stages, have a share in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeschool.runtime.errors import or_peer_lost
from pipeschool.runtime.weights.sharding import local

KINDS = (torch.strided, torch.sparse_coo)  # as an embedding's may be


def add_up(gradients: Iterable[Tensor]) -> Tensor:
    """The sum, in memory of its own where there are several. Sparse ones come last: torch adds
    them to dense ones, not the other way round."""
    return reduce(torch.add, sorted(gradients, key=lambda g: g.is_sparse))


def add_up_over(
    group: Any, gradients: dict[str, Tensor], parameters: Mapping[str, Tensor], wire: torch.device
) -> None:
    """Let `gradients` be the sums of what all workers of `group` have in their place.

    Not all of the `parameters` need have one on every worker: a layer may have sent the
    microbatches of one another way than those of the others. What nobody has stays missing: an
    optimizer would take a zero for a gradient. A sparse one stays so unless somebody has it dense.
    wire: the device that the backend reads.
    """
    found = [gradients.get(name) for name in parameters]
    counts = torch.tensor(
        [[int(g is not None and g.layout == kind) for kind in KINDS] for g in found], device=wire
    )
    sum_over(group, counts)
    for (name, parameter), (dense, sparse) in zip(parameters.items(), counts.tolist(), strict=True):
        if not dense and not sparse:
            continue
        if name not in gradients:
            zero = torch.zeros_like(parameter)
            gradients[name] = zero if dense else zero.to_sparse(1)
        elif dense and gradients[name].is_sparse:
            gradients[name] = gradients[name].to_dense()
        sum_over(group, local(gradients[name]))


def sum_over(group: Any, tensor: Tensor) -> None:
    """Let `tensor` be the sum of what all workers of `group` have in its place."""
    or_peer_lost(dist.all_reduce, tensor, dist.ReduceOp.SUM, group)
