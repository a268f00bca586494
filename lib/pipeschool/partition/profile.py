"""A profile: what every layer of a model costs. Measured, or written down by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from pipeschool.arguments import number, whole_number


@dataclass(frozen=True)
class Layer:
    """One layer and one microbatch: seconds of its work, and bytes.

    forward, backward: seconds; of a measured layer the medians.
    forward_spread, backward_spread: from the first to the third quartile of what was measured.
    update: seconds of its optimizer update.
    activation_bytes: what its forward keeps for its backward, the output included and the input
        not, which is the output of the layer before.
    parameter_bytes, gradient_bytes, optimizer_bytes: of its weights; as many gradients as
        parameters where they are not given.
    output_bytes: what it hands on, and so the size of the message where a cut follows.
    working_bytes: what its backward needs for itself while it runs.
    """

    forward: float = 1.0
    backward: float = 2.0
    forward_spread: float = 0.0
    backward_spread: float = 0.0
    update: float = 0.0
    activation_bytes: float = 0.0
    parameter_bytes: float = 0.0
    gradient_bytes: float | None = None
    optimizer_bytes: float = 0.0
    output_bytes: float = 0.0
    working_bytes: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if self.gradient_bytes is None:
            object.__setattr__(self, "gradient_bytes", self.parameter_bytes)
        for field in fields(self):
            if field.name != "name":
                number(f"{field.name} of a layer", getattr(self, field.name))

    @property
    def seconds(self) -> float:
        """Forward and backward of a microbatch."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Profile:
    """The layers of a model, in order.

    tied: groups of layers, by their numbers, that share a parameter. Planners leave them together.
    warm_up: seconds of a first microbatch, there and back, which the layers' times leave out: it
        is slower, because memory is asked for and code is loaded.
    """

    layers: Sequence[Layer]
    tied: Sequence[Sequence[int]] = ()
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("a profile needs at least one layer, and this one has none")
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise ValueError(
                    f"a profile takes layers, such as ps.partition.Layer(forward=1, backward=2), "
                    f"not {layer!r}"
                )
        object.__setattr__(self, "tied", groups_of_layers("tied", self.tied, len(self)))

    def __len__(self) -> int:
        return len(self.layers)

    def total(self, name: str, layers: range) -> float:
        """The sum of attribute `name` over `layers`."""
        return math.fsum(getattr(self.layers[index], name) for index in layers)

    def most(self, name: str, layers: range) -> float:
        """The largest value of attribute `name` among `layers`."""
        return max(getattr(self.layers[index], name) for index in layers)

    def __str__(self) -> str:
        lines = [f"{len(self)} layers; warm-up round {self.warm_up:.4g} s, left out"]
        for index, layer in enumerate(self.layers):
            lines.append(
                f"layer {index} {layer.name:<12} | forward {layer.forward:.4g} s "
                f"(spread {layer.forward_spread:.2g}) | backward {layer.backward:.4g} s "
                f"(spread {layer.backward_spread:.2g}) | keeps {layer.activation_bytes:.4g}, "
                f"hands on {layer.output_bytes:.4g}, weights {layer.parameter_bytes:.4g} bytes"
            )
        return "\n".join(lines)


def groups_of_layers(
    name: str, groups: Iterable[Iterable[int]], layers: int
) -> tuple[tuple[int, ...], ...]:
    """`groups` as tuples of layer numbers; ValueError for a number that no layer has."""
    try:
        found = tuple(
            tuple(whole_number(f"a layer in {name}", index, at_least=0) for index in group)
            for group in groups
        )
    except TypeError:
        raise ValueError(
            f"{name} takes groups of layer numbers, such as [(0, 7)], not {groups!r}"
        ) from None
    for group in found:
        for index in group:
            if index >= layers:
                raise ValueError(f"{name} names layer {index}, but the last layer is {layers - 1}")
    return found
