"""What PyTorch's own engine cannot do, said before a worker starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pipeschool.actions import COMPUTE_KINDS, Schedule
from pipeschool.runtime.stages.tensors import Tensors, describe
from pipeschool.runtime.weights.ties import updates_last

if TYPE_CHECKING:
    from pipeschool.runtime.options import RunOptions


def refuse(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    inputs: Sequence[Tensors],
    targets: Sequence[Any],
    options: RunOptions,
    backend: str,
    devices: Sequence[str],
) -> None:
    """ValueError, in one sentence, for what PyTorch's engine cannot do.

    schedule: as the caller gave it, for all batches. inputs, targets: those of all microbatches.
    """
    if backend == "gloo" and devices[0] != "cpu":
        raise ValueError(
            "engine='torch' cannot share a GPU among workers: use device='cpu', or one GPU each"
        )
    if not schedule.synchronous:
        policy = getattr(schedule.weights, "__name__", schedule.weights)
        raise ValueError(
            f"engine='torch' runs only synchronous schedules, and {schedule.name} has "
            f"weights={policy!r}: PyTorch's engine trains with a flush after every batch"
        )
    if schedule.replicas:
        raise ValueError("engine='torch' runs one worker per stage: here several take turns")
    if schedule.lowered:
        raise ValueError(
            "engine='torch' adds sends and receives itself: give it the schedule without them"
        )
    if schedule.updates_every != schedule.m or one_batch(schedule).repeat(
        schedule.batches
    ).workers != updates_last(schedule):
        raise ValueError(
            f"engine='torch' does whole batches one after another, the same way each: "
            f"{schedule.name} must end every batch of m={schedule.m} in one update of each stage, "
            f"and only then go on"
        )
    if schedule.stages % schedule.p:
        raise ValueError(
            f"engine='torch' needs the same number of stages on every worker, and {schedule.name} "
            f"has {schedule.stages} on {schedule.p}"
        )
    splits = any(action.kind == "I" for row in schedule.workers for action in row)
    if splits and not any(weight.requires_grad for weight in stages[0].parameters()):
        raise ValueError(
            "engine='torch' gives no gradients to a stage whose input has none where a backward "
            f"is split, as in {schedule.name}, and stage 0 has nothing to train"
        )
    for name in ("nan_check", "recompute", "memory"):
        given = getattr(options, name)
        if given if isinstance(given, bool) else any(given):
            raise ValueError(f"engine='torch' has no {name}: leave it out")
    if options.latency > 0 or options.bandwidth < math.inf:
        raise ValueError("engine='torch' has no declared latency or bandwidth: leave them out")
    if not all(isinstance(target, Tensor) for target in targets):
        raise ValueError("engine='torch' needs targets that are one tensor, not several")
    for name, pieces in (("inputs", inputs), ("targets", targets)):
        kinds = list(dict.fromkeys(map(describe, pieces)))
        if len(kinds) > 1:
            raise ValueError(
                f"engine='torch' needs all microbatches alike, so that m={schedule.m} must divide "
                f"the samples of a batch, but there are {name} {kinds[0]} and {kinds[1]}"
            )


def one_batch(schedule: Schedule) -> Schedule:
    """The first batch of a synchronous schedule, without messages, updates at the end of a row."""
    rows = []
    for row in schedule.workers:
        work = [a for a in row if a.kind in COMPUTE_KINDS and a.microbatch < schedule.m]
        updates = sorted(a for a in row if a.kind == "U" and a.microbatch == 0)
        rows.append((*work, *updates))
    pairs = frozenset((a, b) for a, b in schedule.overlapped if a.microbatch < schedule.m)
    return replace(schedule, workers=tuple(rows), batches=1, overlapped=pairs)
