"""Tensor parallelism inside a stage: several processes are one worker, on torch's DeviceMesh.

Rank w * tensor + t is part t of worker w. Each part holds its slices of the stage's weights, as
DTensors, and does the worker's whole row; the slices meet in the collectives that
`torch.distributed.tensor` puts between them. Messages go to the same part of the next worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

Plan = Mapping[str, ParallelStyle]  # a layer's name in its stage -> how its weights are sliced


def parallelize(
    modules: Mapping[int, nn.Module], workers: int, parts: int, plan: Plan, device: torch.device
) -> None:
    """Slice the weights of this worker's `modules` over its `parts` processes, as `plan` says."""
    mesh = init_device_mesh(device.type, (workers, parts), mesh_dim_names=("pipeline", "tensor"))
    for module in modules.values():
        parallelize_module(module, mesh["tensor"], dict(plan))


def local(tensor: Tensor) -> Tensor:
    """This process's slice of `tensor`; all of it where it is not sliced."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def move(parameter: Tensor) -> None:
    """Give `parameter` memory of its own; whoever shares the old one keeps it as it is."""
    if isinstance(parameter, DTensor):  # `data` sets the shell, not the slice in it
        parameter._local_tensor = parameter._local_tensor.clone()
    else:
        parameter.data = parameter.data.clone()


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`, gathered from the slices: every part of the worker must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_plan(stages: list[nn.Module], plan: Any) -> Plan:
    """`plan`, or ValueError where it is none, or names what is not there."""
    if not isinstance(plan, Mapping) or not all(
        isinstance(style, ParallelStyle) for style in plan.values()
    ):
        raise ValueError(
            "tensor_plan must map names of layers to styles of torch.distributed.tensor.parallel, "
            "such as {'up': ColwiseParallel(), 'down': RowwiseParallel()}, not " + repr(plan)
        )
    names = {name for stage in stages for name, _ in stage.named_modules()}
    for name in plan:
        if "*" not in name and name not in names:
            raise ValueError(f"tensor_plan names a layer {name!r}, which no stage has")
    return plan
