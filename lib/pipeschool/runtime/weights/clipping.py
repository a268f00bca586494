"""The norm that a run's gradients are clipped by: the whole model's, or each stage's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeschool.actions import Schedule
from pipeschool.runtime.weights.sharding import local, whole

if TYPE_CHECKING:
    from pipeschool.runtime.options import RunOptions


def over_model(schedule: Schedule, options: RunOptions) -> bool:
    """Is the norm that of the whole model? ValueError where that cannot be known in time."""
    if options.clip_norm is None or options.clip_over == "stage":
        return False
    if schedule.synchronous:
        return True
    if options.clip_over == "model":
        raise ValueError(
            f"clip_over='model' needs an update in which the gradients of all stages meet, and "
            f"{schedule.name} updates each stage by itself: choose clip_over='stage'"
        )
    return False


def places(stages: Sequence[nn.Module]) -> list[int]:
    """Where each stage's parameters begin in a list of those of all; last, how many there are."""
    return [0, *itertools.accumulate(len(list(stage.parameters())) for stage in stages)]


def norm(gradient: Tensor) -> Tensor:
    """Of one gradient; where it is sliced over several processes, all of them must ask."""
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    return whole(torch.linalg.vector_norm(dense))


def clip(parameters: Iterable[Tensor], most: float, together: Tensor | None) -> None:
    """Shorten the gradients of `parameters` so that their norm is at most `most`, as
    ``torch.nn.utils.clip_grad_norm_`` does it, to the last bit. together: the norm that they have
    with those of other stages; None where these are all.
    """
    own = [p.grad for p in parameters if p.grad is not None]
    if not own:
        return
    if together is None:
        together = torch.stack([norm(gradient) for gradient in own]).norm()
    factor = (most / (together + 1e-6)).clamp(max=1.0)
    for gradient in own:
        local(gradient).mul_(factor.to(gradient.device))
