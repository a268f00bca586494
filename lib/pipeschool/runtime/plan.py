"""All that is decided before a worker starts: what is refused, what each worker gets, and how
they reach each other."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipeschool.actions import Schedule
from pipeschool.checking import check
from pipeschool.cost import recompute_table
from pipeschool.dependencies import peer_of
from pipeschool.lowering import lower
from pipeschool.runtime.host.batches import fit_batches
from pipeschool.runtime.host.fork_server import under_torchrun
from pipeschool.runtime.host.job import Job
from pipeschool.runtime.host.losses import check_mean, refuse_losses
from pipeschool.runtime.host.requirements import (
    MOST_WORKERS,
    check_stages,
    choose_device,
    pace_table,
    refuse_with_own_engine,
    refuse_with_rendezvous,
    refuse_with_tensor_parallel,
)
from pipeschool.runtime.host.result import State, load
from pipeschool.runtime.host.stage_checks import refuse_hidden_weights, refuse_shared_memory
from pipeschool.runtime.options import RunOptions
from pipeschool.runtime.stages.microbatches import cut, shares
from pipeschool.runtime.torch_engine.limits import refuse
from pipeschool.runtime.weights.clipping import over_model, places
from pipeschool.runtime.weights.sharding import check_plan
from pipeschool.runtime.weights.ties import Tie, refuse_ties, ties_of, updates_last
from pipeschool.runtime.wire import local_wire

LOCAL = ("local", "rendezvous")  # carriers between processes of one machine


@dataclass(frozen=True)
class Plan:
    """A run that may begin.

    options: as the caller gave them. schedule: lowered, for all batches. stages: where an earlier
    run has left them, if there was one (`state`). inputs, targets, weights: of all microbatches;
    parts: the share of each loss in that of its update. ties, norm_places: what stages share, see
    `Job`. engine: the class that does the rows. backend, devices: of torch.distributed, and of each
    process. carrier: of messages. recompute: of every stage. pace: kind -> seconds of each.
    """

    options: RunOptions
    schedule: Schedule
    stages: Sequence[nn.Module]
    state: State | None
    inputs: list[tuple[torch.Tensor, ...]]
    targets: list[Any]
    weights: list[float]
    parts: list[float]
    ties: list[Tie]
    norm_places: list[int]
    engine: type[Any]
    backend: str
    devices: list[str]
    carrier: str
    recompute: list[bool]
    pace: dict[str, list[float]] | None

    @property
    def processes(self) -> int:
        """How many there are; with tensor parallelism several are one worker."""
        return self.schedule.p * self.options.tensor_parallel

    @property
    def sends_wait(self) -> bool:
        """Do sends wait for their receivers?"""
        return self.options.matching == "rendezvous"

    @property
    def meet(self) -> bool:
        """Must processes find each other in torch.distributed?"""
        several = self.schedule.replicas or self.options.tensor_parallel > 1
        return bool(self.ties or self.norm_places or several) or self.carrier not in LOCAL

    @property
    def links(self) -> set[local_wire.Link]:
        """(source, target) of all processes between which sockets carry messages."""
        size = self.options.tensor_parallel
        return links_of(self.schedule, size) if self.carrier in LOCAL else set()

    def job(self, process: int, rendezvous: str = "") -> Job:
        """The share of a process, and how all of them meet."""
        worker = process // self.options.tensor_parallel
        mine, held, state = self.schedule.stages_of(worker), self.stages, self.state
        return Job(
            options=replace(self.options, weigh=None),  # done, and it may hold much
            schedule=self.schedule,
            # Copies made one by one no longer share parameters: each stage steps with its own.
            modules={s: copy.deepcopy(held[s]) if self.ties else held[s] for s in mine},
            inputs=self.inputs if worker in self.schedule.owners[0] else None,
            targets=self.targets if worker in self.schedule.owners[-1] else None,
            loss_weights=self.parts,
            recompute=self.recompute,
            pace=self.pace,
            restore={s: state.stages[s] for s in mine} if state else {},
            generator=state.generators[worker] if state else None,
            ties=self.ties,
            norm_places=self.norm_places,
            engine=self.engine,
            carrier=self.carrier,
            backend=self.backend,
            device=self.devices[process],
            rendezvous=rendezvous,
            default_dtype=torch.get_default_dtype(),
        )


def plan_of(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    options: RunOptions,
    engine: type[Any],
    state: State | None,
) -> Plan:
    """The plan of a run with these arguments; ValueError or IllegalSchedule where there is none."""
    schedule, data = fit_batches(schedule, batches)
    check_stages(schedule, stages)
    given, ties = ready(check(schedule), stages, options)
    if state:
        stages = [copy.deepcopy(stage) for stage in stages]
        load(stages, state)
    inputs, targets, weights = cut(data, given, options.weigh)
    parts = shares(weights, given)
    judge_loss(given, stages, inputs, targets, parts, options)
    processes = given.p * options.tensor_parallel
    if processes > MOST_WORKERS and not under_torchrun():
        raise ValueError(f"a run may have at most {MOST_WORKERS} workers, not {processes}")
    backend, devices = choose_device(options.device, processes)
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
    recompute = recompute_table(options.recompute, schedule)
    return Plan(
        options=options,
        schedule=schedule,
        stages=stages,
        state=state,
        inputs=inputs,
        targets=targets,
        weights=weights,
        parts=parts,
        ties=ties,
        norm_places=places(stages) if over_model(schedule, options) else [],
        engine=engine,
        backend=backend,
        devices=devices,
        carrier=("rendezvous" if waits else "local") if local and not own_messages else backend,
        recompute=recompute,
        pace=pace_table(options.pace, recompute, schedule),
    )


def ready(
    schedule: Schedule, stages: Sequence[nn.Module], options: RunOptions
) -> tuple[Schedule, list[Tie]]:
    """`schedule` with its updates where all that they need is there, and what stages share.
    ValueError where weights could not be trained as in one process."""
    if schedule.trains:
        refuse_hidden_weights(stages, schedule.synchronous)
        refuse_shared_memory(stages)
    ties = ties_of(stages) if schedule.trains else []
    refuse_ties(schedule, ties, options)
    if ties or over_model(schedule, options):
        # Nobody may wait for a gradient that is still to come from him.
        schedule = replace(schedule, workers=updates_last(schedule))
    return schedule, ties


def judge_loss(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    inputs: Sequence[tuple[torch.Tensor, ...]],
    targets: Sequence[Any],
    parts: Sequence[float],
    options: RunOptions,
) -> None:
    """ValueError where the loss of a batch is not the mean of its microbatches' losses, as far as
    that can be known, or is found out on request."""
    if not schedule.trains:
        return
    loss = options.loss or nn.functional.mse_loss
    refuse_losses(loss, stages, targets, options.weigh is not None)
    if options.check_loss:
        first = slice(schedule.updates_every)
        check_mean(loss, stages, inputs[first], targets[first], parts[first])


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
