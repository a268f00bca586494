"""One parameter in several stages, such as an embedding that is also the output head.

Every worker trains a copy. The copies stay the same as long as each update takes the sum of all
their gradients, so the workers meet before it: an all-reduce between, say, the first and the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from pipeschool.actions import Action, Schedule

if TYPE_CHECKING:
    from pipeschool.runtime.options import RunOptions

Tie = tuple[tuple[int, str], ...]  # (stage, name there) of every copy of a parameter


def ties_of(stages: Sequence[nn.Module]) -> list[Tie]:
    """The trainable parameters that several stages share."""
    holders: defaultdict[int, dict[int, str]] = defaultdict(dict)
    for stage, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                holders[id(parameter)][stage] = name
    return [tuple(found.items()) for found in holders.values() if len(found) > 1]


def refuse_ties(schedule: Schedule, ties: Sequence[Tie], options: RunOptions) -> None:
    """ValueError where ties do not work."""
    if not ties:
        return
    first, second = ties[0][:2]
    per_stage = options.clip_over == "stage"
    shared = f"stages {first[0]} and {second[0]} share the parameter {first[1]}"
    for why, so in (
        ("needs an update in which all its gradients meet", not schedule.synchronous),
        ("does not go with several workers per stage", bool(schedule.replicas)),
        ("does not go with tensor_parallel", options.tensor_parallel > 1),
        ("does not go with engine='torch'", options.engine == "torch"),
        ("does not go with clip_over='stage'", bool(options.clip_norm) and per_stage),
    ):
        if so:
            raise ValueError(
                f"{shared}, which {why}: put the layers that share it on one stage, or give each a "
                "parameter of its own"
            )


def updates_last(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The rows, the updates of a batch put after its last action, in the order of the stages."""
    rows = []
    for row in schedule.workers:

        def place(action: Action) -> tuple[int, bool, int]:
            update = action.kind == "U"
            batch = action.microbatch if update else action.microbatch // schedule.updates_every
            return batch, update, action.stage if update else 0

        rows.append(tuple(sorted(row, key=place)))
    return tuple(rows)
