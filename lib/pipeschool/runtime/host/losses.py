"""Is a loss the mean over samples that a pipeline takes it for? What can be known of that before a
worker starts, and a check that computes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeschool.runtime.host.reach import is_own, reached
from pipeschool.runtime.stages.loss import Loss, checked_loss, no_loss
from pipeschool.runtime.stages.random_numbers import put_back
from pipeschool.runtime.stages.tensors import Tensors, as_tensors

# Losses of classes: their mean is one over the targets that are not ignored, by class weights.
OF_CLASSES = {"CrossEntropyLoss", "NLLLoss", "NLLLoss2d", "cross_entropy", "nll_loss"}
IGNORED = -100  # torch's ignore_index where nothing is said
CURE = "say with weigh= what it is a mean over"


class Known(NamedTuple):
    """What a loss of torch says of itself; of any other function, nothing."""

    name: str
    settings: Mapping[str, Any]


def refuse_losses(
    loss: Loss, stages: Sequence[nn.Module], targets: Sequence[Any], weighed: bool
) -> None:
    """ValueError, in one sentence, for a `loss` of which it can be known that the weighted mean of
    its microbatches is not what one process computes.

    targets: of all microbatches. weighed: does the caller say how to weigh them?
    """
    name, settings = known(loss)
    reduction = settings.get("reduction", "mean")
    if reduction in ("sum", "none"):
        raise ValueError(
            f"{name} has reduction={reduction!r}, and the loss of a batch is made from means: use "
            "reduction='mean'"
        )
    _refuse_parameters(name, loss, stages)
    if weighed or name not in OF_CLASSES:
        return
    if settings.get("weight") is not None:
        raise ValueError(
            f"{name} has class weights, so it is no mean over samples: {CURE}, such as "
            "weigh=lambda y: class_weights[y].sum()"
        )
    index = settings.get("ignore_index", IGNORED)
    if any(_integers(t) and bool((t == index).any()) for t in tree_leaves(list(targets))):
        raise ValueError(
            f"{name} ignores targets of {index}, and there are some, so it is no mean over "
            f"samples: {CURE}, such as weigh=lambda y: (y != {index}).sum()"
        )


def known(loss: Loss, depth: int = 2) -> Known:
    """What `loss` is called, and its settings, where it is one of torch's or calls one of them,
    itself or through `depth` functions."""
    settings: dict[str, Any] = {}
    function: Any = loss
    while isinstance(function, functools.partial):
        settings = {**function.keywords, **settings}
        function = function.func
    if isinstance(function, nn.Module):
        own = {n: getattr(function, n, None) for n in ("reduction", "weight", "ignore_index")}
        return Known(type(function).__name__, {n: v for n, v in own.items() if v is not None})
    name = getattr(function, "__name__", type(function).__name__)
    if is_own(function):
        code, used = function.__code__, inspect.getclosurevars(function)
        if _says("ignore_index", code):  # with what is for `check_loss` to find out
            return Known(name, settings)
        reached = [*used.nonlocals.values(), *used.globals.values()] if depth else []
        inner = [known(value, depth - 1) for value in reached]
        for called in (*inner, *(Known(n, {}) for n in code.co_names)):
            if called.name in OF_CLASSES:  # what becomes of a sum in there is not known
                return called._replace(settings={**called.settings, "reduction": "mean"})
    return Known(name, settings)


def _says(keyword: str, code: Any) -> bool:
    """Is `keyword` given in a call somewhere in `code`? Python keeps their names as constants."""
    return any(isinstance(c, tuple) and keyword in c for c in code.co_consts)


def _integers(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _refuse_parameters(name: str, loss: Loss, stages: Sequence[nn.Module]) -> None:
    """A worker has a copy of what a loss reaches: its gradient would be lost."""
    of_stages = {id(p): (s, n) for s, m in enumerate(stages) for n, p in m.named_parameters()}
    for tensor, _ in reached(loss):
        if place := of_stages.get(id(tensor)):
            raise ValueError(
                f"the loss {name} reaches parameter {place[1]} of stage {place[0]}, whose gradient "
                "would be lost: compute that part inside the stage (for an L2 penalty, there is "
                "the optimizer's weight_decay)"
            )
        raise ValueError(
            f"the loss {name} has parameters of its own, which no optimizer would train: put them "
            "into the last stage, or where they are to stay as they are, requires_grad_(False)"
        )


def check_mean(
    loss: Loss,
    stages: Sequence[nn.Module],
    inputs: Sequence[Tensors],
    targets: Sequence[Any],
    parts: Sequence[float],
) -> None:
    """Compute the loss of some microbatches in one process, at once and as the mean of theirs by
    the shares `parts`, and its gradients with respect to the outputs. ValueError, by how much it
    differs, where that is more than rounding.

    The outputs are those that the stages, as copies, give for each microbatch: what they do with
    a batch as a whole (such as a batch norm) is not what is judged.
    """
    import copy

    copies = copy.deepcopy(list(stages))
    pieces = []
    with put_back(), torch.no_grad():
        for values in inputs:
            for index, stage in enumerate(copies):
                values = as_tensors(stage(*values), f"stage {index}")
            pieces.append(tuple(values))
    try:
        whole = tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
        target = tree_map(lambda *parts: torch.cat(parts), *targets)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"check_loss cannot join the outputs of microbatches: {error}") from None
    at_once, slopes = _value_and_slopes(lambda y: loss(y, target), whole)
    mean, of_pieces = 0.0, []
    for piece, its_target, part in zip(pieces, targets, parts, strict=True):
        its_loss = functools.partial(_with, loss, its_target) if part else no_loss
        value, found = _value_and_slopes(its_loss, piece)
        mean += part * value
        of_pieces.append([part * slope for slope in found])
    joined = [torch.cat(found) for found in zip(*of_pieces, strict=True)]
    off = max(
        _difference([torch.tensor(mean)], [torch.tensor(at_once)]),
        _difference(joined, slopes),
    )
    rounding = max([torch.finfo(s.dtype).eps for s in slopes], default=1e-7) ** 0.5
    if not off <= rounding:  # nor is NaN
        raise ValueError(
            f"the loss of {len(parts)} microbatches is {at_once:.6g} at once, and {mean:.6g} as "
            f"the mean of theirs, and its gradients are off by {off:.2g} of their length: {CURE}, "
            "or use a loss that is a mean over samples"
        )


def _with(loss: Loss, target: Any, outputs: Any) -> Tensor:
    return loss(outputs, target)


def _value_and_slopes(
    loss: Callable[[Any], Tensor], outputs: Tensors
) -> tuple[float, list[Tensor]]:
    """The loss of `outputs`, and its gradients with respect to those that can have one."""
    leaves = [
        y.detach().requires_grad_() if y.is_floating_point() or y.is_complex() else y
        for y in outputs
        if y is not None
    ]
    with torch.enable_grad():
        value = checked_loss(loss, tuple(leaves))
        asked = [y for y in leaves if y.requires_grad]
        found = torch.autograd.grad(value, asked, allow_unused=True)
    slopes = [torch.zeros_like(y) if g is None else g for y, g in zip(asked, found, strict=True)]
    return value.item(), slopes


def _difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """By how much two lists of tensors differ, as a share of the length of the second."""
    length = sum(float(b.abs().square().sum()) for b in other) ** 0.5
    gap = sum(float((a - b).abs().square().sum()) for a, b in zip(one, other, strict=True)) ** 0.5
    return gap / length if length else gap
