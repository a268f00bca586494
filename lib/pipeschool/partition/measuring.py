"""Measure what each layer of a model costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from torch import nn

from pipeschool.arguments import per_item, whole_number
from pipeschool.partition.chain import Chain, Layers, layers_of, shared_parameters
from pipeschool.partition.profile import Layer, Profile
from pipeschool.runtime.measure import Measured, measure
from pipeschool.runtime.stages.loss import Loss
from pipeschool.runtime.weights.stage_weights import MakeOptimizer


def profile_layers(
    model: Layers,
    batch: tuple[Any, Any],
    m: int,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    rounds: int = 5,
) -> Profile:
    """What each layer of `model` costs for a microbatch of `batch` cut in `m`.

    Every layer is measured as a stage of its own, in this process on one thread; the model is not
    changed. After a round to warm up, 2 * `rounds` forwards and `rounds` backwards count. A short
    layer seems longer than it is inside a stage: some tens of microseconds of Python belong to
    each. The loss counts for the last layer. A parameter that layers share counts for each of them:
    on stages apart each has a copy; on one stage, once would do. `loss` and `optimizer` as for
    `run`.
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
