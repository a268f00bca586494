"""Cut a model into stages."""

from __future__ import annotations

from torch import nn

from pipeschool.actions import whole_number


def split_layers(model: nn.Sequential, p: int) -> list[nn.Sequential]:
    """`model` as `p` stages of consecutive layers; their numbers differ by one at most, the larger
    ones first. ValueError where there are fewer layers than stages."""
    whole_number("the number of stages", p)
    layers = list(model)
    if p > len(layers):
        raise ValueError(f"a model of {len(layers)} layers cannot be cut into {p} stages")
    size, extra = divmod(len(layers), p)
    ends = [(s + 1) * size + min(s + 1, extra) for s in range(p)]
    return [nn.Sequential(*layers[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
