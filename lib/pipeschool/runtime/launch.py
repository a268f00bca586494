"""From the caller's arguments to jobs for the workers, and from their reports to a result."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipeschool.actions import Schedule
from pipeschool.runtime.cluster import torchrun
from pipeschool.runtime.errors import RunStopped, or_not_started
from pipeschool.runtime.host.fork_server import under_torchrun
from pipeschool.runtime.host.job import Report
from pipeschool.runtime.host.network import check_network
from pipeschool.runtime.host.pool import new_pool
from pipeschool.runtime.host.result import Result, State, load, put_together
from pipeschool.runtime.host.serialize import serialize
from pipeschool.runtime.host.watch import Watch
from pipeschool.runtime.interrupts import held_back
from pipeschool.runtime.options import ENGINES, RunOptions
from pipeschool.runtime.plan import Plan, plan_of
from pipeschool.runtime.weights.stage_weights import on_cpu


def launch(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    options: RunOptions,
    called: float,
    state: State | None = None,
) -> Result:
    """Check everything, start the workers, watch over them, put their reports together.

    With `state` the run goes on where an earlier one ended.
    """
    plan = plan_of(schedule, stages, batches, options, engine_of(options), state)
    # What is declared is no standstill.
    patience = options.timeout + max(max(times) for times in (plan.pace or {"": [0.0]}).values())
    if under_torchrun():
        same = {
            "backends": plan.backend,
            "models": fingerprints(plan.stages),
            "data": fingerprints([plan.inputs, plan.targets]),
        }
        reports = torchrun.take_part(plan.job, plan.schedule, patience, same)
    else:
        reports = on_this_machine(plan, patience, options.modules_for(plan.stages))
    result = put_together(
        plan.schedule, reports, plan.carrier, plan.devices, options.paced, called, plan.weights
    )
    if options.clip_norm is not None:
        over_model = bool(plan.norm_places)
        trace = replace(result.trace, updates_meet=over_model)
        result = replace(result, trace=trace, clipped_over="model" if over_model else "stage")
    if options.history:
        start = [on_cpu(dict(stage.named_parameters())) for stage in plan.stages]
        result.history.insert(0, start)
    if options.update_stages:
        load(stages, result.state)
    return result


def on_this_machine(plan: Plan, timeout: float, modules: Sequence[str]) -> list[Report]:
    """Start the workers as processes of this machine, and watch over them."""
    with ExitStack() as stack:
        rendezvous = ""
        if plan.meet:
            check_network()
            with or_not_started():
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeschool-"))
            rendezvous = str(Path(folder) / "rendezvous")
        jobs = [serialize(plan.job(n, rendezvous)) for n in range(plan.processes)]
        try:
            with or_not_started():
                pool = new_pool(len(jobs), plan.links, modules)
            stack.callback(pool.end)
            for line, packed in zip(pool.lines, jobs, strict=True):
                line.give(packed)
        except KeyboardInterrupt:
            raise RunStopped("stopped before the workers had begun: all have been ended") from None
        tensor_size, waits = plan.options.tensor_parallel, plan.sends_wait
        return Watch(pool, plan.schedule, timeout, tensor_size, waits).results()


@held_back()
def engine_of(options: RunOptions) -> type[Any]:
    """The class that the workers load: the caller's own, or one of ours by its name."""
    if not isinstance(options.engine, str):
        return options.engine
    module, name = ENGINES[options.engine]
    engine: type[Any] = getattr(importlib.import_module(module), name)
    return engine


def fingerprints(values: Sequence[Any]) -> list[float]:
    """The sum of all numbers in each of `values`, a module or nested tensors."""
    nested = [list(v.parameters()) if isinstance(v, nn.Module) else v for v in values]
    return [
        sum(float(t.detach().abs().double().sum()) for t in tree_leaves(v) if torch.is_tensor(t))
        for v in nested
    ]
