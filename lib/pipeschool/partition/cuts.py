"""Cuts of a chain of layers into stages: each is the number of the first layer behind it."""

from __future__ import annotations

from collections.abc import Sequence


def equal_cuts(layers: int, p: int) -> list[int]:
    """The cuts of `layers` into `p` stages of equal number, the larger ones first."""
    size, extra = divmod(layers, p)
    return [s * size + min(s, extra) for s in range(1, p)]


def ranges_of(ends: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, given the number of the first layer behind it."""
    return tuple(range(a, b) for a, b in zip([0, *ends], ends, strict=False))
