"""What a run must equal: one process that does the same arithmetic in the same order.

Equal to the last bit, that is, where both work on matrices of the same shapes, on the same machine,
with one thread, and data that begins at a multiple of 16 bytes (as inputs of an even width do, in
float64). Matrix libraries promise no more: three rows of ten may differ in the last digit from the
same three rows alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeschool.actions import Schedule
from pipeschool.runtime.stages.loss import Loss, no_loss
from pipeschool.runtime.stages.microbatches import Weigh, cut, shares
from pipeschool.runtime.stages.tensors import as_tensors
from pipeschool.runtime.weights.reduce import add_up
from pipeschool.runtime.weights.stage_weights import MakeOptimizer


def gradients(
    stages: Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    m: int,
    loss: Loss = nn.functional.mse_loss,
    optimizer: MakeOptimizer | None = None,
    replicas: Sequence[int] = (),
    weigh: Weigh | None = None,
) -> list[dict[str, Tensor]]:
    """The last batch's gradients, one dict per stage, accumulated microbatch by microbatch.

    Synchronous training without a pipeline: forward and backward of each of the `m` microbatches
    through all `stages` in turn, and after each batch an update. The modules are not changed.
    replicas: how many workers take turns at each stage: each sums its own microbatches, and the
    sums are added at the end. weigh: as for `run`.
    """
    stages = copy.deepcopy(list(stages))  # together, so that shared parameters stay shared
    parameters = [p for p in nn.ModuleList(stages).parameters() if p.requires_grad]  # each once
    stepper = optimizer(parameters) if optimizer else None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: another number may sum in another order
    try:
        for x, y in batches:
            schedule = Schedule("", 1, m, ())
            inputs, targets, weights = cut([(x, y)], schedule, weigh)
            scales = shares(weights, schedule)
            sums: dict[nn.Parameter, list[Tensor | None]] = {
                p: [None] * count
                for stage, count in zip(stages, replicas or [1] * len(stages), strict=True)
                for p in stage.parameters()
            }
            for k, (values, target, scale) in enumerate(zip(inputs, targets, scales, strict=True)):
                for parameter in parameters:
                    turns = sums[parameter]
                    parameter.grad = turns[k % len(turns)]
                for index, stage in enumerate(stages):
                    values = as_tensors(stage(*values), f"stage {index}")
                outputs = values[0] if len(values) == 1 else values
                value = loss(outputs, target) if scale else no_loss(outputs)
                value.backward(torch.full_like(value, scale))
                for parameter in parameters:
                    turns = sums[parameter]
                    # Two may be in the same memory, where the graph goes on to views of both
                    # weights, and the next microbatch's would be added to both.
                    grad = parameter.grad
                    turns[k % len(turns)] = None if grad is None else grad.clone()
            for parameter in parameters:
                there = [total for total in sums[parameter] if total is not None]
                parameter.grad = add_up(there) if there else None
            found = [
                {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
                for stage in stages
            ]
            if stepper:
                stepper.step()
    finally:
        torch.set_num_threads(threads)
    return found


def max_error(ours: Sequence[dict[str, Tensor]], theirs: Sequence[dict[str, Tensor]]) -> float:
    """The largest absolute difference between two lists of gradients; inf where names differ."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.keys() != b.keys():
            return float("inf")
        for name in a:
            if a[name].numel():
                difference = a[name].to_dense() - b[name].to_dense()  # an embedding's are sparse
                worst = max(worst, float(difference.abs().max()))
    return worst
