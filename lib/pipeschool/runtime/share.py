"""A worker's share of a run: all that an engine works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeschool.actions import Action, Schedule
from pipeschool.runtime.observers.observer import Observer, observed
from pipeschool.runtime.stages.loss import Loss, checked_loss, no_loss
from pipeschool.runtime.stages.stage import Stage
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.weights.stage_weights import on_cpu
from pipeschool.runtime.weights.sums import Sums
from pipeschool.runtime.wire.wire import Wire


@dataclass
class Share:
    """What an engine class is given, and where it leaves its results.

    An engine goes through `actions()`, which gives it the row action by action, and does each:

    ``F(s, k)``       `inputs_of(k)` on stage 0, elsewhere what came for it, through `stages[s]`;
                      on the last stage then the loss: `loss_of(k)` of the outputs
    ``B(s, k)``       from `loss_weight(k)` times the loss on the last stage, elsewhere from the
                      gradients that came: those of the weights are added up, those of the inputs
                      go on; ``I`` and ``W`` are its two halves
    ``SEND``, ``RECV``  ``wire.send(action, tensors)``, ``tensors = wire.receive(action)``; tensors
                      is always a tuple, with None where there is no gradient
    ``U(s, t)``       `update(action)`: gradients are summed where several have a share in a weight,
                      and the optimizer takes a step

    A `Stage` does the forward and backward work, with weight versions and recomputation. A class
    of your own may also work on ``stages[s].module`` with autograd as it is: what it leaves in the
    ``.grad`` of the parameters is what `update` takes, where a schedule flushes and no stage
    recomputes. Losses belong into `losses`, by microbatch.

    worker: the number of this one. schedule: lowered, for all batches. stages: those that are here,
    by number. inputs, targets: by microbatch, where the first or last stage is here. loss_weights:
    the weight of each microbatch's loss in the loss of its update. mail: what one action leaves for
    another, see `Engine`. losses, outputs: results, by microbatch.
    """

    worker: int
    schedule: Schedule
    stages: dict[int, Stage]
    inputs: Sequence[Tensors] | None
    targets: Sequence[Any] | None
    loss_weights: Sequence[float]
    loss: Loss
    wire: Wire
    sums: Sums | None
    device: torch.device
    observers: list[Observer] = field(default_factory=list)
    mail: dict[Action, Any] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Tensors] = field(default_factory=dict)

    @property
    def row(self) -> tuple[Action, ...]:
        """The actions of this worker, in order."""
        return self.schedule.workers[self.worker]

    @property
    def last_stage(self) -> int:
        """The number of the stage that the loss follows."""
        return self.schedule.stages - 1

    def actions(self) -> Iterator[Action]:
        """The row, action by action. What watches a run (its pace, its clock, a meter) is told
        before each, and after it, when the next one is asked for."""
        return observed(self.row, self.observers)

    def inputs_of(self, microbatch: int) -> Tensors:
        """What stage 0 gets."""
        assert self.inputs is not None
        return tuple(t if t is None else t.to(self.device) for t in self.inputs[microbatch])

    def loss_of(self, microbatch: int) -> Callable[[Any], Tensor]:
        """The caller's loss as a function of the outputs alone."""
        assert self.targets is not None
        if self.loss_weights[microbatch] == 0:
            return no_loss
        target = on_device(self.targets[microbatch], self.device)
        return lambda outputs: self.loss(outputs, target)

    def loss_weight(self, microbatch: int) -> float:
        """The weight of a microbatch's loss in the loss of its update: the gradient of the latter
        with respect to the former."""
        return self.loss_weights[microbatch]

    def note_result(self, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        """What the last stage has made: the loss where it trains, otherwise its outputs, and their
        loss where there are targets."""
        if self.schedule.trains:
            loss = outputs[0]
        else:
            self.outputs[microbatch] = on_cpu(outputs)
            if not self.targets or self.targets[microbatch] is None:
                return
            with torch.no_grad():
                loss = checked_loss(self.loss_of(microbatch), outputs)
        self.losses[microbatch] = loss.item()

    def update(self, action: Action) -> None:
        """New weights for a stage."""
        # What concerns several stages is summed at the first update here, when all are complete.
        together = self.sums is not None and self.sums.together
        ready = self.stages.values() if together else [self.stages[action.stage]]
        for stage in ready:
            left = stage.weights.collect_from_parameters()
            if left and (stage.recompute or not self.schedule.synchronous):
                what = "recomputes" if stage.recompute else "has several weight versions"
                raise ValueError(
                    f"stage {stage.index} {what}, which an engine gets from `stages[s].forward` "
                    "and `stages[s].backward` alone: this one has worked on the module directly"
                )
        if self.sums:
            self.sums.before(action)
        self.stages[action.stage].weights.update(action, self.sums.norm if self.sums else None)


def on_device(value: Any, device: torch.device) -> Any:
    """Nested tensors on `device`."""
    if device.type == "cpu":
        return value
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), value)
