"""What a run must equal: one process that does the same arithmetic in the same order."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeschool.actions import Schedule
from pipeschool.run.microbatch import cut
from pipeschool.run.stage import Loss, as_tensors
from pipeschool.run.weights import MakeOptimizer


def gradients(
    stages: Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    m: int,
    loss: Loss = nn.functional.mse_loss,
    optimizer: MakeOptimizer | None = None,
    copies: int = 1,
) -> list[dict[str, Tensor]]:
    """The last batch's gradients, one dict per stage, accumulated microbatch by microbatch.

    Synchronous training without a pipeline: forward and backward of each of the `m` microbatches
    through all `stages` in turn, and after each batch an update. The modules are not changed.
    With `copies` of the model, microbatch k is added to the sum of copy k % copies, and the sums
    are added at the end.
    """
    stages = [copy.deepcopy(stage) for stage in stages]
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    stepper = optimizer(parameters) if optimizer else None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: the order of sums must not differ
    try:
        for x, y in batches:
            inputs, targets, scales = cut([(x, y)], Schedule("", 1, m, ()))
            sums: list[dict[nn.Parameter, Tensor]] = [{} for _ in range(copies)]
            for k, (values, target, scale) in enumerate(zip(inputs, targets, scales, strict=True)):
                give(parameters, sums[k % copies])
                for index, stage in enumerate(stages):
                    values = as_tensors(stage(*values), f"stage {index}")
                value = loss(values[0] if len(values) == 1 else values, target)
                value.backward(torch.full_like(value, scale))
                take(parameters, sums[k % copies])
            total = sums[0]
            for other in sums[1:]:
                total = {p: total[p] + other[p] for p in total}
            give(parameters, total)
            found = [
                {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
                for stage in stages
            ]
            if stepper:
                stepper.step()
    finally:
        torch.set_num_threads(threads)
    return found


def give(parameters: Sequence[nn.Parameter], gradients: dict[nn.Parameter, Tensor]) -> None:
    """Let the parameters have these gradients, and no others."""
    for parameter in parameters:
        parameter.grad = gradients.get(parameter)


def take(parameters: Sequence[nn.Parameter], gradients: dict[nn.Parameter, Tensor]) -> None:
    """Put the gradients of the parameters into `gradients`."""
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[parameter] = parameter.grad


def max_error(ours: Sequence[dict[str, Tensor]], theirs: Sequence[dict[str, Tensor]]) -> float:
    """The largest absolute difference between two lists of gradients; inf where names differ."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.keys() != b.keys():
            return float("inf")
        for name in a:
            if a[name].numel():
                worst = max(worst, float((a[name] - b[name]).abs().max()))
    return worst
