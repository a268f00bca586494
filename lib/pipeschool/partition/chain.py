"""Models that are a chain of layers: take them apart, measure them, make stages of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from torch import Tensor, nn

from pipeschool.actions import whole_number
from pipeschool.cost import per_item
from pipeschool.partition.plan import ranges_of
from pipeschool.partition.planners import equal_cuts
from pipeschool.partition.profile import Layer, Profile
from pipeschool.runtime.measure import Measured, measure
from pipeschool.runtime.stages.stage import Loss
from pipeschool.runtime.weights.stage_weights import MakeOptimizer

Model = nn.Sequential | nn.ModuleList | Sequence[nn.Module]


class Chain(nn.Sequential):
    """A stage of consecutive layers. As in `nn.Sequential`, each takes one argument: what the one
    before returned, be it a tensor or a tuple.

    Between stages the tensors of a tuple travel one by one, and become a tuple again here. So a
    skip connection crosses stages: every layer that it passes hands it on as part of a tuple.
    """

    def forward(self, *values: Tensor) -> Any:
        """What the last layer returns."""
        return super().forward(values[0] if len(values) == 1 else values)


def layers_of(model: Model) -> list[nn.Module]:
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


def split_layers(model: Model, p: int) -> list[Chain]:
    """`model` as `p` stages of consecutive layers; their numbers differ by one at most, the larger
    ones first. ValueError where there are fewer layers than stages."""
    whole_number("the number of stages", p)
    n = len(layers_of(model))
    if p > n:
        raise ValueError(f"a model of {n} layers cannot be cut into {p} stages")
    return stages_of(model, ranges_of([*equal_cuts(n, p), n]), n)


def stages_of(model: Model, ranges: Sequence[range], layers: int) -> list[Chain]:
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


def profile_layers(
    model: Model,
    batch: tuple[Any, Any],
    m: int,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    rounds: int = 5,
) -> Profile:
    """What each layer of `model` costs for a microbatch of `batch` cut in `m`.

    Every layer is measured as a stage of its own, by `run.measure`, in this process on one thread;
    the model is not changed. After a round to warm up, 2 * `rounds` forwards and `rounds`
    backwards count. A short layer seems longer than it is inside a stage: some tens of
    microseconds of Python belong to each. The loss counts for the last layer. A parameter that
    layers share counts for each of them: on stages apart each has a copy; on one stage, once would
    do. `loss` and `optimizer` as for `run`.
    """
    whole_number("m", m)
    whole_number("rounds", rounds)
    layers = layers_of(model)
    found = measure(
        [Chain(layer) for layer in layers],
        batch,
        m,
        loss or nn.functional.mse_loss,
        optimizer,
        rounds,
    )
    return Profile(
        [_layer(found, index, layer) for index, layer in enumerate(layers)],
        tied=sorted(set(shared_parameters(layers).values())),
        warm_up=found.warm_up,
    )


def _layer(found: Measured, index: int, layer: nn.Module) -> Layer:
    def measured(name: str) -> float:
        return per_item(name, getattr(found.cost, name), len(found.seconds["F"]), "layer")[index]

    forward, backward = (found.seconds[kind][index] for kind in ("F", "B"))
    return Layer(
        forward=median(forward),
        backward=median(backward),
        forward_spread=spread(forward),
        backward_spread=spread(backward),
        update=measured("update"),
        activation_bytes=measured("activation_bytes"),
        parameter_bytes=measured("parameter_bytes"),
        gradient_bytes=measured("gradient_bytes"),
        optimizer_bytes=measured("optimizer_bytes"),
        output_bytes=measured("message_bytes"),
        working_bytes=measured("working_bytes"),
        name=type(layer).__name__,
    )


def spread(times: Sequence[float]) -> float:
    """The interquartile range: from the first to the third quartile."""
    if len(times) < 2:
        return 0.0
    first, _, third = quantiles(times, n=4, method="inclusive")
    return third - first
