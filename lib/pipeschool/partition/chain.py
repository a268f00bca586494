"""Models that are a chain of layers: take them apart, make stages of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipeschool.arguments import whole_number
from pipeschool.partition.cuts import equal_cuts, ranges_of

Layers = nn.Sequential | nn.ModuleList | Sequence[nn.Module]  # a model that is a chain


class Chain(nn.Sequential):
    """A stage of consecutive layers. As in `nn.Sequential`, each takes one argument: what the one
    before returned, be it a tensor or a tuple.

    Between stages the tensors of a tuple travel one by one, and become a tuple again here. So a
    skip connection crosses stages: every layer that it passes hands it on as part of a tuple.
    """

    def forward(self, *values: Tensor) -> Any:
        """What the last layer returns."""
        return super().forward(values[0] if len(values) == 1 else values)


def layers_of(model: Layers) -> list[nn.Module]:
    """The layers of a chain, in order. ValueError, saying what to do, where it is none."""
    if isinstance(model, (nn.Sequential, nn.ModuleList)) or (
        isinstance(model, Sequence) and all(isinstance(layer, nn.Module) for layer in model)
    ):
        layers = list(model)
        if layers:
            return layers
        raise ValueError("a model without layers cannot be cut")
    raise ValueError(
        f"{type(model).__name__} is no chain of layers, so nothing says where to cut it: write it "
        "as nn.Sequential (or a list) of layers, each of which takes what the one before returns; "
        "what skips layers is handed on by them as part of a tuple"
    )


def split_layers(model: Layers, p: int) -> list[Chain]:
    """`model` as `p` stages of consecutive layers; their numbers differ by one at most, the larger
    ones first. ValueError where there are fewer layers than stages."""
    whole_number("the number of stages", p)
    n = len(layers_of(model))
    if p > n:
        raise ValueError(f"a model of {n} layers cannot be cut into {p} stages")
    return stages_of(model, ranges_of([*equal_cuts(n, p), n]), n)


def stages_of(model: Layers, ranges: Sequence[range], layers: int) -> list[Chain]:
    """One module for each range of layers; ValueError where the model does not have as many
    `layers`. Stages may share a parameter: a synchronous `run` adds up its gradients."""
    found = layers_of(model)
    if len(found) != layers:
        raise ValueError(f"the plan is for {layers} layers, but this model has {len(found)}")
    return [Chain(*found[r.start : r.stop]) for r in ranges]


def shared_parameters(layers: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
    """The numbers of the layers that share a parameter to train, by its name in the model."""
    holders: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:  # one that stays as it is may be in several places
                holders[id(parameter)].append((index, name))
    return {
        f"{found[0][0]}.{found[0][1]}": tuple(index for index, _ in found)
        for found in holders.values()
        if len(found) > 1
    }
