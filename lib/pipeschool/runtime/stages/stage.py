"""One stage of the model: forward, backward and update of its share of the layers."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeschool.actions import B, F, I, W
from pipeschool.runtime.errors import LIBRARY, text_of
from pipeschool.runtime.stages.loss import checked_loss
from pipeschool.runtime.stages.random_numbers import go_on_from, put_back, random_numbers
from pipeschool.runtime.stages.split_backward import SplitBackward
from pipeschool.runtime.stages.tensors import Tensors, as_leaf, as_tensors, describe
from pipeschool.runtime.stages.time_first import TimeFirst
from pipeschool.runtime.weights.stage_weights import Parameters, StageWeights, Version
from pipeschool.runtime.weights.storage import addresses


@dataclass
class Flight:
    """A microbatch between its forward and the end of its backward."""

    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    again: Callable[[], tuple[Tensor, ...]] | None = None  # recompute: the forward once more
    halves: SplitBackward | None = None  # between the two halves of a split backward


class Shell(nn.Module):
    """Around a module: lets `functional_call` put weights into it for anything, not its forward
    alone."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``."""
        return function(*args)


def slots(module: nn.Module) -> dict[str, str]:
    """Every place in `module` that holds a parameter or buffer, by the name under which the module
    lists it. A layer reached by two names is one place; a parameter in two layers is in two."""
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    return {
        f"{path}.{key}".lstrip("."): names[id(tensor)]
        for path, layer in module.named_modules()  # each layer once
        for key, tensor in (*layer._parameters.items(), *layer._buffers.items())
        if tensor is not None
    }


class Stage:
    """The layers of one stage, and what its microbatches in flight wait for.

    recompute: keep only the input of a microbatch, and do its forward again for the backward.
    """

    def __init__(
        self, index: int, module: nn.Module, weights: StageWeights, recompute: bool = False
    ):
        self.index = index
        self.module = module
        self.weights = weights
        self.recompute = recompute
        self.shell = Shell(module)
        self.slots = slots(module)
        self.time_first = TimeFirst(index, module)
        self.has_buffers = next(module.buffers(), None) is not None
        self.in_flight: dict[int, Flight] = {}

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """The stage's outputs for `inputs`, kept for the backward; the `loss` of them, if given.

        What came from another stage is cut off from that stage's graph (it has none here), and
        asked for a gradient, which is what goes back. A loss takes the place of the outputs.
        """
        version = self.weights.use(F(self.index, microbatch))
        values = tuple(x for x in inputs if x is not None)
        self.time_first.expect(values)
        try:
            return self._forward(microbatch, version, values, loss)
        except Exception as error:
            explain(error, values)
            raise

    def _forward(
        self,
        microbatch: int,
        version: Version,
        inputs: tuple[Tensor, ...],
        loss: Callable[[Any], Tensor] | None,
    ) -> tuple[Tensor, ...]:
        leaves = tuple(as_leaf(x) if self.index else x for x in inputs)

        def compute(**buffers: Tensor) -> tuple[Tensor, ...]:
            outputs = self._call(version, leaves, buffers)
            return outputs if loss is None else (checked_loss(loss, outputs),)

        flight = self.in_flight[microbatch] = Flight(leaves)
        if self.recompute:
            flight.again = self._repeatable(compute)
            before = [leaf._version for leaf in leaves]
            with torch.no_grad():
                outputs = compute()
            if before != [leaf._version for leaf in leaves]:
                raise ValueError(
                    f"stage {self.index} changes its input in place, so it cannot be computed "
                    "again from it: use the operation that gives a new tensor, or recompute=False"
                )
            # What is handed on may be changed by who gets it; the input is still needed as it is.
            return tuple(y.clone() if addresses(leaves) & addresses([y]) else y for y in outputs)
        flight.outputs = compute()
        return flight.outputs

    def infer(self, microbatch: int, inputs: Tensors) -> tuple[Tensor, ...]:
        """The stage's outputs for `inputs`, with nothing kept: no backward will follow."""
        version = self.weights.use(F(self.index, microbatch))
        values = tuple(x for x in inputs if x is not None)
        self.time_first.expect(values)
        try:
            with torch.no_grad():
                return self._call(version, values)
        except Exception as error:
            explain(error, values)
            raise

    def backward(self, microbatch: int, gradients: Tensors | float) -> Tensors:
        """Gradients of the stage's inputs, given those of its outputs; weights' are collected.

        One number in place of the gradients: the weight of this loss in the loss of its update.
        """
        version = self.weights.use(B(self.index, microbatch))
        flight = self.in_flight.pop(microbatch)
        outputs, starts = matched(flight, gradients)
        self.weights.lend(version)
        if outputs:  # a checkpoint inside the module goes forward again, with the same weights
            self._having(version.parameters, torch.autograd.backward, outputs, starts)
        found = tuple(leaf.grad for leaf in flight.leaves)
        self.weights.collect(version, found)
        return found

    def backward_input(self, microbatch: int, gradients: Tensors | float) -> Tensors:
        """The first half of a split backward: gradients of the stage's inputs."""
        version = self.weights.use(I(self.index, microbatch))
        flight = self.in_flight[microbatch]
        starts = matched(flight, gradients)
        weights = list(version.parameters.values())
        flight.halves = self._having(
            version.parameters, SplitBackward, *starts, flight.leaves, weights
        )
        flight.outputs = ()
        return flight.halves.inputs

    def backward_weight(self, microbatch: int) -> None:
        """The second half: gradients of the weights, which are collected."""
        version = self.weights.use(W(self.index, microbatch))
        halves = self.in_flight.pop(microbatch).halves
        assert halves is not None
        self.weights.lend(version)
        self._having(version.parameters, halves.weight_half)
        self.weights.collect(version, halves.inputs)

    def _call(
        self, version: Version, inputs: tuple[Tensor, ...], buffers: Parameters | None = None
    ) -> tuple[Tensor, ...]:
        """The module's outputs with the weights of `version`, and other `buffers` than its own.

        A buffer among them is copied: the next forward may change it before it has been used.
        """
        state = version.parameters | buffers if buffers else version.parameters
        outputs = as_tensors(self._having(state, self.module, *inputs), f"stage {self.index}")
        if not self.has_buffers:
            return outputs
        kept = addresses(self.module.buffers())
        return tuple(out.clone() if kept & addresses([out]) else out for out in outputs)

    def _having(self, state: Parameters, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)`` while the module has the weights and buffers of `state`."""
        if state is self.weights.current:
            return function(*args)
        named = {
            f"module.{slot}": state[name] for slot, name in self.slots.items() if name in state
        }
        # torch would put a layer's weights in once for each of its names, and take out but one.
        return functional_call(self.shell, named, (function, *args), tie_weights=False)

    def _repeatable(self, compute: Callable[..., Any]) -> Callable[[], tuple[Tensor, ...]]:
        """`compute` once more later, with the same random numbers (a dropout must not change),
        and on copies of the buffers as they are now (what depends on them must not change, and a
        running mean must not count a microbatch twice)."""
        devices = sorted({p.device.index for p in self.module.parameters() if p.is_cuda})
        drawn = random_numbers(devices)
        buffers = {name: b.clone() for name, b in self.module.named_buffers()}

        def again() -> tuple[Tensor, ...]:
            with put_back(devices):
                go_on_from(drawn)
                outputs: tuple[Tensor, ...] = compute(**buffers)
                return outputs

        return again


def explain(error: Exception, inputs: tuple[Tensor, ...]) -> None:
    """Let an error of the learner's own forward say what the input was."""
    source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if source.is_relative_to(LIBRARY):  # a sentence of ours says what there is to say
        return
    error.add_note(f"the input was {describe(inputs)}")
    if "leaf Variable" in text_of(error):
        error.add_note("a stage must not change its input in place: leave inplace=True out")


def matched(
    flight: Flight, gradients: Tensors | float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The outputs that a backward starts from, and their gradients. A recomputing stage makes the
    outputs now."""
    outputs = flight.again() if flight.again else flight.outputs
    if not isinstance(gradients, tuple):
        gradients = tuple(torch.full_like(loss, gradients) for loss in outputs)
    pairs = [
        (out, gradient)
        for out, gradient in zip(outputs, gradients, strict=True)
        if out.requires_grad and gradient is not None
    ]
    return tuple(out for out, _ in pairs), tuple(gradient for _, gradient in pairs)
