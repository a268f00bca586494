"""Cut batches into microbatches, and weigh their losses so that the batch's mean stays right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeschool.actions import Schedule
from pipeschool.runtime.stages.stage import as_tensors, describe


def split(value: Any, m: int) -> list[Any]:
    """A tensor, or a tuple of tensors, cut along its first dimension into `m` pieces whose sizes
    differ by one sample at most, the larger ones first."""
    if isinstance(value, Tensor):
        return list(torch.tensor_split(value, m))
    return list(zip(*(torch.tensor_split(item, m) for item in value), strict=True))


def samples(value: Any) -> int:
    """The number of samples in a tensor or tuple of tensors; ValueError where they disagree."""
    sizes = {t.shape[0] if t.dim() else 0 for t in as_tensors(value, "a batch")}
    if len(sizes) != 1:
        raise ValueError(
            f"the tensors of a batch must agree in their first dimension, not {describe(value)}"
        )
    return sizes.pop()


def cut(
    batches: list[tuple[Any, Any]], schedule: Schedule
) -> tuple[list[tuple[Tensor, ...]], list[Any], list[float]]:
    """(inputs, targets, scales) of all microbatches of all batches, in order.

    A scale is the weight of a microbatch's mean loss in the loss that its update minimises: its
    share of the samples of that update's microbatches.
    """
    inputs: list[tuple[Tensor, ...]] = []
    targets: list[Any] = []
    sizes: list[int] = []
    known: dict[int, list[Any]] = {}  # of each batch, its pieces: one that comes again is sent once

    def pieces_of(value: Any) -> list[Any]:
        if id(value) not in known:
            known[id(value)] = split(value, schedule.m)
        return known[id(value)]

    for x, y in batches:
        n = samples(x)
        if y is None and schedule.trains:
            raise ValueError(
                "a batch without targets, (inputs, None), is for forward-only schedules: "
                f"{schedule.name} trains"
            )
        if y is not None and samples(y) != n:
            raise ValueError(f"a batch has {n} inputs, but {samples(y)} targets")
        if n < schedule.m:
            raise ValueError(
                f"a batch of {n} samples cannot be cut into {schedule.m} microbatches: "
                f"m may be at most {n}"
            )
        pieces = pieces_of(x)
        inputs += [as_tensors(piece, "a batch") for piece in pieces]
        targets += [None] * schedule.m if y is None else pieces_of(y)
        sizes += [samples(piece) for piece in pieces]
    group = schedule.updates_every
    totals = [sum(sizes[k - k % group : k - k % group + group]) for k in range(len(sizes))]
    return inputs, targets, [size / total for size, total in zip(sizes, totals, strict=True)]
