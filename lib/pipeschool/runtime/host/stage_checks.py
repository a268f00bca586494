"""Modules whose weights a worker could not train as one process does, refused before it starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeschool.runtime.host.reach import reached

PART_OF_MODULES = {"_parameters", "_buffers", "_modules"}


def refuse_hidden_weights(stages: Sequence[nn.Module], one_version: bool) -> None:
    """ValueError for a tensor to be trained that a module holds without having registered it, or
    which it holds a second time where there are several versions of the registered one."""
    for index, stage in enumerate(stages):
        registered = {id(p) for p in stage.parameters()}
        for path, layer in stage.named_modules():
            for key, value in vars(layer).items():
                if key in PART_OF_MODULES or isinstance(layer, nn.RNNBase) and key.startswith("_"):
                    continue
                where = f"attribute {f'{path}.{key}'.lstrip('.')} of stage {index}"
                for tensor, in_module in reached(value):
                    if not tensor.is_leaf:  # it was computed from others, as a weight norm does
                        continue
                    if id(tensor) not in registered:
                        raise ValueError(
                            f"{where} holds a tensor to be trained that no optimizer gets: make it "
                            "a parameter of the module, a list an nn.ParameterList or nn.ModuleList"
                        )
                    if not (one_version or in_module):
                        raise ValueError(
                            f"{where} holds a parameter outside its place in the module, where it "
                            "keeps one version while the pipeline has several: use the module's own"
                        )


def refuse_shared_memory(stages: Sequence[nn.Module]) -> None:
    """ValueError for two parameters, or a parameter and a buffer, in the same memory, as ``.data``
    makes them: on their way to a worker each gets its own."""
    found: dict[int, tuple[str, Tensor]] = {}
    for index, stage in enumerate(stages):
        named = [*stage.named_parameters(), *stage.named_buffers()]
        found |= {id(t): (f"{name} of stage {index}", t) for name, t in named if _in_memory(t)}
    ranges = sorted((t.data_ptr(), _end(t), name, t) for name, t in found.values() if t.numel())
    last: list[tuple[int, int, str, Tensor]] = []  # that reach as far as the next one's start
    for start, end, name, tensor in ranges:
        last = [entry for entry in last if entry[1] > start]
        for *_, other_name, other in last:
            both_buffers = not any(isinstance(t, nn.Parameter) for t in (tensor, other))
            if not both_buffers and _overlap(tensor, other):
                raise ValueError(
                    f"{other_name} and {name} are two tensors in the same memory, which workers "
                    "cannot share: let both places hold the same nn.Parameter"
                )
        last.append((start, end, name, tensor))


def _in_memory(tensor: Tensor) -> bool:
    """Has it memory to look at?"""
    strided = tensor.layout == torch.strided and not isinstance(tensor, DTensor)
    return strided and tensor.device.type != "meta"


def _span(tensor: Tensor) -> int:
    """How many numbers of the storage it reaches over."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + _span(tensor) * tensor.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Have they a byte in common? Columns of one matrix reach over each other and have none."""
    if _span(one) == one.numel() and _span(other) == other.numel():
        return True  # as ranges without holes, which is known to meet
    return bool(set(_bytes(one)) & set(_bytes(other)))


def _bytes(tensor: Tensor) -> list[int]:
    """Where its numbers begin."""
    places = torch.zeros((), dtype=torch.int64) + tensor.data_ptr()
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dimension] = size
        steps = torch.arange(size) * stride * tensor.element_size()
        places = places + steps.reshape(shape)
    return [int(place) for place in places.flatten().tolist()]
