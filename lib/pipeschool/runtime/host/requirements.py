"""What a run needs of its arguments, said in one sentence where something is missing."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from pipeschool.actions import COMPUTE_KINDS, Schedule
from pipeschool.cost import Cost
from pipeschool.runtime.engine import Engine
from pipeschool.runtime.host.fork_server import under_torchrun
from pipeschool.runtime.options import Pace, RunOptions
from pipeschool.runtime.wire import local_wire

MOST_WORKERS = 64  # processes on one machine


def check_stages(schedule: Schedule, stages: Sequence[nn.Module]) -> None:
    """One module per stage, each a module."""
    if not isinstance(stages, (Sequence, nn.ModuleList, nn.Sequential)):
        raise ValueError(
            f"stages must be a list of modules, one per stage, not {type(stages).__name__}"
        )
    if len(stages) != schedule.stages:
        raise ValueError(
            f"{schedule.name} has {schedule.stages} stages, so it needs as many modules, "
            f"not {len(stages)}"
        )
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ValueError(f"stage {index} must be a torch.nn.Module, not {type(stage).__name__}")


def choose_device(device: str, processes: int) -> tuple[str, list[str]]:
    """(backend, device of each process). NCCL needs a GPU for each; fewer are shared over gloo."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be one of auto, cpu, cuda, not {device!r}")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda' needs a GPU that torch can use; there is none: use 'cpu'")
    if not gpus:
        return "gloo", ["cpu"] * processes
    if under_torchrun() and gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return "nccl", [
            f"cuda:{os.environ['LOCAL_RANK']}"
        ] * processes  # each machine counts its own
    backend = "nccl" if gpus >= processes and torch.distributed.is_nccl_available() else "gloo"
    return backend, [f"cuda:{number % gpus}" for number in range(processes)]


def refuse_with_own_engine(options: RunOptions) -> None:
    """ValueError for what looks into our engine's mail, where the caller's is not based on it."""
    engine = options.engine
    own_messages = getattr(engine, "own_messages", False)
    if isinstance(engine, str) or issubclass(engine, Engine) or own_messages:
        return
    for name, asked in (("nan_check", options.nan_check), ("memory", options.memory)):
        if asked:
            raise ValueError(
                f"{name}=True looks at what passes through `Engine`, and {engine.__name__} "
                "is an engine of its own: leave it out, or base the class on "
                "pipeschool.runtime.engine.Engine"
            )


def refuse_with_rendezvous(backend: str, own_messages: bool) -> None:
    """ValueError for what carries its messages otherwise than `RendezvousWire` does."""
    for name, asked in (
        ("engine='torch'", own_messages),
        ("torchrun", under_torchrun()),
        ("NCCL, which does so by itself", backend == "nccl"),
        ("this system, which has no Unix sockets", not local_wire.AVAILABLE),
    ):
        if asked:
            raise ValueError(f"matching='rendezvous' does not go with {name}: leave it out")


def refuse_with_tensor_parallel(options: RunOptions, own_messages: bool) -> None:
    """ValueError for what does not go with tensor parallelism."""
    for name, asked in (
        ("memory=True", options.memory),
        ("engine='torch'", own_messages),
        ("torchrun", under_torchrun()),
    ):
        if asked:
            raise ValueError(f"tensor_parallel does not go with {name} here")


def pace_table(
    pace: Pace | None, recompute: Sequence[bool], schedule: Schedule
) -> dict[str, list[float]] | None:
    """Declared seconds per kind of action and stage."""
    if pace is None:
        return None
    if isinstance(pace, str) or not isinstance(pace, Sequence) or len(pace) != 2:
        raise ValueError(
            f"pace must be (forward, backward) in seconds, such as (0.005, 0.010), not {pace!r}"
        )
    try:
        cost = Cost(forward=pace[0], backward=pace[1], recompute=recompute)
        table = cost.seconds(schedule)
    except ValueError as error:
        raise ValueError(f"pace must be (forward, backward) in seconds: {error}") from None
    return {kind: table[kind] for kind in COMPUTE_KINDS}
