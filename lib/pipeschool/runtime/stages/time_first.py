"""Layers that take time, and not the samples, along the first dimension of their input.

A batch is cut along its first dimension. torch's recurrent layers and its attention take that for
time unless they are told batch_first=True, and so the cut would go through the sequences, and
every number would be wrong.
"""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor, nn

from pipeschool.runtime.stages.tensors import describe

LAYERS = (nn.RNNBase, nn.MultiheadAttention)


class TimeFirst:
    """Looks on while such layers of `module` compute, and refuses where what they get has the
    samples first. Where there are as many samples as steps of time, one cannot tell."""

    def __init__(self, index: int, module: nn.Module):
        self.index = index
        self.shapes: set[Size] = set()
        layers = [m for m in module.modules() if isinstance(m, LAYERS) and not m.batch_first]
        self.looks = bool(layers)
        for layer in layers:
            layer.register_forward_pre_hook(self._look)

    def expect(self, inputs: tuple[Tensor, ...]) -> None:
        """These are what the stage gets next."""
        if not self.looks:
            return
        self.shapes = {x.shape[:2] for x in inputs if x.dim() > 1 and x.shape[0] != x.shape[1]}

    def _look(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        x = given[0] if given else None
        if isinstance(x, Tensor) and x.dim() == 3 and x.shape[:2] in self.shapes:
            raise ValueError(
                f"stage {self.index} gives {describe(x)} to its {type(layer).__name__}, which "
                "takes the first dimension for time, but a batch is cut along it: make the layer "
                "with batch_first=True, or transpose its input"
            )
