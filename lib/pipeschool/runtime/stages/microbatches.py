"""Cut batches into microbatches, and weigh their losses so that the batch's mean stays right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeschool.actions import Schedule
from pipeschool.runtime.stages.tensors import as_tensors, describe

TURN = (
    ": samples go along the first dimension, not the second, which .transpose(0, 1) makes the "
    "first (and batch_first=True lets an RNN take)"
)
Weigh = Callable[[Any], Any]  # from a microbatch's targets to the weight of its loss


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


def _second(value: Any) -> int | None:
    """The length of the second dimension, where all tensors have the same."""
    sizes = {t.shape[1] if t.dim() > 1 else None for t in as_tensors(value, "a batch")}
    return sizes.pop() if len(sizes) == 1 else None


def cut(
    batches: list[tuple[Any, Any]], schedule: Schedule, weigh: Weigh | None = None
) -> tuple[list[tuple[Tensor, ...]], list[Any], list[float]]:
    """(inputs, targets, weights) of all microbatches of all batches, in order.

    A weight is that of a microbatch's loss in the mean over several: what `weigh` says of its
    targets, or the number of its samples.
    """
    inputs: list[tuple[Tensor, ...]] = []
    targets: list[Any] = []
    weights: list[float] = []
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
            turned = _second(x) == _second(y) is not None
            raise ValueError(f"a batch has {n} inputs, but {samples(y)} targets{TURN * turned}")
        if n < schedule.m:
            raise ValueError(
                f"a batch of {n} samples cannot be cut into {schedule.m} microbatches: "
                f"m may be at most {n}"
            )
        pieces = pieces_of(x)
        inputs += [as_tensors(piece, "a batch") for piece in pieces]
        targets += [None] * schedule.m if y is None else pieces_of(y)
        if weigh and y is not None:
            weights += [_weight(weigh, target) for target in targets[-schedule.m :]]
        else:
            weights += [float(samples(piece)) for piece in pieces]
    return inputs, targets, weights


def shares(weights: Sequence[float], schedule: Schedule) -> list[float]:
    """The share of each microbatch's loss in the loss that its update minimises, which is the mean
    over that update's microbatches by their `weights`. ValueError where all of them are 0."""
    group = schedule.updates_every
    totals = [sum(weights[k : k + group]) for k in range(0, len(weights), group)]
    if 0 in totals and schedule.trains:
        k = totals.index(0) * group
        these = f"microbatch {k} is" if group == 1 else f"microbatches {k} to {k + group - 1} are"
        raise ValueError(
            f"weigh gives 0 for all targets of an update: {these} to be averaged, and there is "
            "nothing in them that counts"
        )
    return [weight / (totals[k // group] or 1.0) for k, weight in enumerate(weights)]


def _weight(weigh: Weigh, targets: Any) -> float:
    """What `weigh` says, as a number; ValueError where it is none, or below 0."""
    said = weigh(targets)
    try:
        weight = float(said)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        what = said if isinstance(said, (int, float)) else describe(said)
        raise ValueError(
            f"weigh must give the weight of a microbatch's targets, a number from 0 on such as "
            f"(y != -100).sum(), not {what}"
        )
    return weight
