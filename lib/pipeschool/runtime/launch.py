"""From the caller's arguments to jobs for the workers, and from their reports to a result."""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipeschool.actions import Schedule
from pipeschool.checking import check
from pipeschool.cost import recompute_table
from pipeschool.dependencies import peer_of
from pipeschool.lowering import lower
from pipeschool.runtime.cluster import torchrun
from pipeschool.runtime.errors import RunStopped, or_not_started
from pipeschool.runtime.host.batches import fit_batches
from pipeschool.runtime.host.fork_server import under_torchrun
from pipeschool.runtime.host.job import Job, Report
from pipeschool.runtime.host.losses import check_mean, refuse_losses
from pipeschool.runtime.host.network import check_network
from pipeschool.runtime.host.pool import new_pool
from pipeschool.runtime.host.requirements import (
    MOST_WORKERS,
    check_stages,
    choose_device,
    pace_table,
    refuse_with_own_engine,
    refuse_with_rendezvous,
    refuse_with_tensor_parallel,
)
from pipeschool.runtime.host.result import Result, State, load, put_together
from pipeschool.runtime.host.serialize import serialize
from pipeschool.runtime.host.stage_checks import refuse_hidden_weights, refuse_shared_memory
from pipeschool.runtime.host.watch import Watch
from pipeschool.runtime.interrupts import held_back
from pipeschool.runtime.options import ENGINES, RunOptions
from pipeschool.runtime.stages.microbatches import cut, shares
from pipeschool.runtime.torch_engine.limits import refuse
from pipeschool.runtime.weights.clipping import over_model, places
from pipeschool.runtime.weights.sharding import check_plan
from pipeschool.runtime.weights.stage_weights import on_cpu
from pipeschool.runtime.weights.ties import refuse_ties, ties_of, updates_last
from pipeschool.runtime.wire import local_wire

LOCAL = ("local", "rendezvous")  # carriers between processes of one machine
MakeJob = Callable[[int, str], Job]  # for a process, and how all of them meet


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
    schedule, data = fit_batches(schedule, batches)
    check_stages(schedule, stages)
    if schedule.trains:
        refuse_hidden_weights(stages, schedule.synchronous)
        refuse_shared_memory(stages)
    ties = ties_of(stages) if schedule.trains else []
    refuse_ties(check(schedule), ties, options)
    clip_over_model = over_model(schedule, options)
    if ties or clip_over_model:  # nobody may wait for a gradient that is still to come from him
        schedule = replace(schedule, workers=updates_last(schedule))
    given = schedule
    processes = schedule.p * options.tensor_parallel
    if processes > MOST_WORKERS and not under_torchrun():
        raise ValueError(f"a run may have at most {MOST_WORKERS} workers, not {processes}")
    if state:
        stages = [copy.deepcopy(stage) for stage in stages]
        load(stages, state)
    inputs, targets, weights = cut(data, schedule, options.weigh)
    parts = shares(weights, schedule)
    if schedule.trains:
        loss = options.loss or nn.functional.mse_loss
        refuse_losses(loss, stages, targets, options.weigh is not None)
        if options.check_loss:
            first = slice(schedule.updates_every)
            check_mean(loss, stages, inputs[first], targets[first], parts[first])
    backend, devices = choose_device(options.device, processes)
    engine = engine_of(options)
    own_messages = getattr(engine, "own_messages", False)
    waits = options.matching == "rendezvous"
    if waits:
        refuse_with_rendezvous(backend, own_messages)
    # What is made here is right even if sends wait; what the caller has made is taken as it is.
    fuse = not given.lowered and (waits or (backend == "nccl" and not own_messages))
    schedule = check(lower(given, fuse), matching=options.matching)
    if own_messages:
        refuse(given, stages, inputs, targets, options, backend, devices)
    refuse_with_own_engine(options)
    if options.tensor_parallel > 1:
        check_plan(list(stages), options.tensor_plan)
        refuse_with_tensor_parallel(options, own_messages)
    if options.memory and under_torchrun():
        raise ValueError("memory=True does not go with torchrun here: leave it out")
    local = backend == "gloo" and local_wire.AVAILABLE and not under_torchrun()
    carrier = ("rendezvous" if waits else "local") if local and not own_messages else backend
    together = ties or schedule.replicas or options.tensor_parallel > 1 or clip_over_model
    meet = bool(together) or carrier not in LOCAL
    recompute = recompute_table(options.recompute, schedule)
    paces = pace_table(options.pace, recompute, schedule)

    def job(process: int, rendezvous: str = "") -> Job:
        worker = process // options.tensor_parallel
        mine = schedule.stages_of(worker)
        return Job(
            options=replace(options, weigh=None),  # done, and it may hold much
            schedule=schedule,
            # Copies made one by one no longer share parameters: each stage steps with its own.
            modules={s: copy.deepcopy(stages[s]) if ties else stages[s] for s in mine},
            inputs=inputs if worker in schedule.owners[0] else None,
            targets=targets if worker in schedule.owners[-1] else None,
            loss_weights=parts,
            recompute=recompute,
            pace=paces,
            restore={s: state.stages[s] for s in mine} if state else {},
            generator=state.generators[worker] if state else None,
            ties=ties,
            norm_places=places(stages) if clip_over_model else [],
            engine=engine,
            carrier=carrier,
            backend=backend,
            device=devices[process],
            rendezvous=rendezvous,
            default_dtype=torch.get_default_dtype(),
        )

    # What is declared is no standstill.
    patience = options.timeout + max(max(times) for times in (paces or {"": [0.0]}).values())
    if under_torchrun():
        same = {
            "backends": backend,
            "models": fingerprints(stages),
            "data": fingerprints([inputs, targets]),
        }
        reports = torchrun.take_part(job, schedule, patience, same)
    else:
        modules = options.modules_for(stages)
        links = links_of(schedule, options.tensor_parallel) if carrier in LOCAL else set()
        size = options.tensor_parallel
        reports = on_this_machine(job, schedule, patience, size, links, modules, meet, waits)
    result = put_together(schedule, reports, carrier, devices, options.paced, called, weights)
    if options.clip_norm is not None:
        trace = replace(result.trace, updates_meet=clip_over_model)
        over = "model" if clip_over_model else "stage"
        result = replace(result, trace=trace, clipped_over=over)
    if options.history:
        result.history.insert(0, [on_cpu(dict(stage.named_parameters())) for stage in stages])
    if options.update_stages:
        load(stages, result.state)
    return result


def on_this_machine(
    job: MakeJob,
    schedule: Schedule,
    timeout: float,
    tensor_size: int,
    links: Iterable[local_wire.Link],
    modules: Sequence[str],
    meet: bool,
    sends_wait: bool = False,
) -> list[Report]:
    """Start the workers as processes of this machine, and watch over them. meet: they have to find
    each other in torch.distributed. sends_wait: for their receivers."""
    with ExitStack() as stack:
        rendezvous = ""
        if meet:
            check_network()
            with or_not_started():
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeschool-"))
            rendezvous = str(Path(folder) / "rendezvous")
        jobs = [serialize(job(n, rendezvous)) for n in range(schedule.p * tensor_size)]
        try:
            with or_not_started():
                pool = new_pool(len(jobs), links, modules)
            stack.callback(pool.end)
            for line, packed in zip(pool.lines, jobs, strict=True):
                line.give(packed)
        except KeyboardInterrupt:
            raise RunStopped("stopped before the workers had begun: all have been ended") from None
        return Watch(pool, schedule, timeout, tensor_size, sends_wait).results()


@held_back()
def engine_of(options: RunOptions) -> type[Any]:
    """The class that the workers load: the caller's own, or one of ours by its name."""
    if not isinstance(options.engine, str):
        return options.engine
    module, name = ENGINES[options.engine]
    engine: type[Any] = getattr(importlib.import_module(module), name)
    return engine


def links_of(schedule: Schedule, tensor_size: int) -> set[local_wire.Link]:
    """(source, target) of all processes between which messages go."""
    workers = {
        (worker, peer_of(action, schedule))
        for worker, row in enumerate(schedule.workers)
        for action in row
        if action.kind.startswith("SEND")
    }
    return {
        (source * tensor_size + rank, target * tensor_size + rank)
        for source, target in workers
        for rank in range(tensor_size)
    }


def fingerprints(values: Sequence[Any]) -> list[float]:
    """The sum of all numbers in each of `values`, a module or nested tensors."""
    nested = [list(v.parameters()) if isinstance(v, nn.Module) else v for v in values]
    return [
        sum(float(t.detach().abs().double().sum()) for t in tree_leaves(v) if torch.is_tensor(t))
        for v in nested
    ]
