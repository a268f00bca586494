"""A worker at work: put its share together, let the engine do it, and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step; a forked worker has it at once

from pipeschool.actions import U
from pipeschool.runtime.clock import Clock
from pipeschool.runtime.host.job import Job, Report
from pipeschool.runtime.observers.declared_link import DeclaredLink
from pipeschool.runtime.observers.history import History
from pipeschool.runtime.observers.meter import Meter
from pipeschool.runtime.observers.nan_check import NanCheck
from pipeschool.runtime.observers.observer import Observer
from pipeschool.runtime.observers.pace import Pace
from pipeschool.runtime.observers.packer import Packer
from pipeschool.runtime.observers.position import Position
from pipeschool.runtime.observers.recorder import Recorder
from pipeschool.runtime.share import Share
from pipeschool.runtime.stages.random_numbers import go_on_from, random_numbers, seed
from pipeschool.runtime.stages.stage import Stage
from pipeschool.runtime.weights.groups import Groups
from pipeschool.runtime.weights.sharding import parallelize
from pipeschool.runtime.weights.stage_weights import StageWeights, Update, on_cpu
from pipeschool.runtime.weights.sums import Sums
from pipeschool.runtime.wire.local_wire import LocalWire
from pipeschool.runtime.wire.rendezvous_wire import RendezvousWire
from pipeschool.runtime.wire.torch_wire import TorchWire
from pipeschool.versions import Ledger, Stash, ledger

LOCAL_WIRES = {"local": LocalWire, "rendezvous": RendezvousWire}  # between processes of one machine


def work(
    process: int,
    job: Job,
    board: MutableSequence[int],
    on_link: MutableSequence[int],
    links: Mapping[Any, Any],
    groups: Groups,
    meet: Callable[[], object],
    offset: float = 0.0,
) -> Report:
    """Do this process's row. With tensor parallelism, several processes are one worker.

    board: ``board[process]`` always says which action of the row is under way. on_link: 1 while the
    message that is needed has come, and is held back as a declared link would have done. links: the
    sockets of `LocalWire`. groups: makes process groups where they are needed. meet: returns
    when all processes are ready to begin. offset: of this machine's clock.
    """
    options, schedule = job.options, job.schedule
    device = torch.device(job.device)
    worker, tensor_rank = divmod(process, options.tensor_parallel)
    warm_up(device)
    torch.set_default_dtype(job.default_dtype)
    seed(options.seed + worker)
    if job.generator is not None:
        go_on_from(job.generator)
    for module in job.modules.values():
        module.to(device)
    if options.tensor_parallel > 1:
        plan = options.tensor_plan or {}
        parallelize(job.modules, schedule.p, options.tensor_parallel, plan, device)

    clock = Clock(device, on_device=not (job.pace or options.memory), offset=offset)
    stages = {index: make_stage(job, worker, index) for index in job.modules}
    weights = {index: stage.weights for index, stage in stages.items()}
    wire: Any = None  # a `Wire`; an engine with messages of its own has none
    own_messages = getattr(job.engine, "own_messages", False)
    if job.carrier in LOCAL_WIRES:
        wire = LOCAL_WIRES[job.carrier](
            worker, schedule, clock, device, links, process, options.tensor_parallel
        )
    elif not own_messages:
        ranks = tensor_rank, options.tensor_parallel
        wire = TorchWire(worker, schedule, clock, device, job.backend, groups, *ranks)
    sums = None
    if job.ties or schedule.replicas or job.norm_places:
        memory = device if job.backend == "nccl" else torch.device("cpu")
        ranks = tensor_rank, options.tensor_parallel
        sums = Sums(worker, schedule, job.ties, weights, groups, memory, *ranks, job.norm_places)
    share = Share(
        worker,
        schedule,
        stages,
        job.inputs,
        job.targets,
        job.loss_weights,
        options.loss or torch.nn.functional.mse_loss,
        wire,
        sums,
        device,
    )
    meter = Meter(stages, share.mail, clock) if options.memory else None
    history = History(weights)
    pace = Pace(job.pace or {})
    recorder = Recorder(worker, clock, weights, wire, pace.woken_late)
    position = Position(board, process, share.row)
    if isinstance(wire, RendezvousWire):
        wire.waits_at = position.before
    share.observers = [position, *([meter] if meter else []), recorder]
    if job.link and wire:
        share.observers.append(
            DeclaredLink(job.link, wire, clock, partial(on_link.__setitem__, process))
        )
    if job.pace:
        share.observers.append(pace)
    inner: list[Observer] = []
    if wire:
        inner.append(Packer(share.mail, wire))
    if options.nan_check:
        inner.append(NanCheck(share.mail, share.losses, share.outputs, share.last_stage))
    if options.history:
        inner.append(history)
    share.observers += inner

    engine = job.engine(share)
    meet()
    clock.start()
    with meter.live if meter else nullcontext():
        engine.run()
    refuse_unfinished(engine, share, recorder)
    position.move_to(len(share.row))
    if wire:
        wire.flush()
    return report_of(share, recorder, history, meter)


def make_stage(job: Job, worker: int, index: int) -> Stage:
    """Stage `index` with its weights, where an earlier run has left them if there was one."""
    module, row = job.modules[index], job.schedule.workers[worker]
    # Versions of a weight have no hooks, and halves of a backward would call them both.
    hooks_allowed = job.schedule.synchronous and not any(action.kind == "I" for action in row)
    options, book = job.options, ledger(job.schedule, index, worker)
    weights = StageWeights(module, options, book, hooks_allowed)
    if index in job.restore:
        weights.restore(job.restore[index])
    return Stage(index, module, weights, job.recompute[index])


def refuse_unfinished(engine: object, share: Share, recorder: Recorder) -> None:
    """ValueError where an engine has not done its whole row once, or has left no losses."""
    done = Counter(action for action, *_ in recorder.noted)
    name = type(engine).__name__
    for action in share.row:
        if share.wire is None and action.is_message:
            continue
        if done[action] != 1:
            times = f"{done[action]} times" if done[action] else "not"
            raise ValueError(f"{name} has {times} done {action}")
        lacks_loss = action.kind == "F" and action.stage == share.last_stage
        if lacks_loss and share.schedule.trains and action.microbatch not in share.losses:
            raise ValueError(f"{name} has left no loss of microbatch {action.microbatch}")


def report_of(share: Share, recorder: Recorder, history: History, meter: Meter | None) -> Report:
    """What the controller gets, on the CPU."""
    spans, messages = recorder.spans()
    return Report(
        spans=spans,
        messages=messages,
        losses=share.losses,
        outputs=share.outputs,
        gradients={s: on_cpu(stage.weights.last_gradients) for s, stage in share.stages.items()},
        states={s: stage.weights.state(stage.module) for s, stage in share.stages.items()},
        history=dict(history.after_updates),
        generator=random_numbers([share.device.index] if share.device.type == "cuda" else []),
        parameter_bytes={s: stage.weights.bytes for s, stage in share.stages.items()},
        memory=meter.levels if meter else [],
    )


def warm_up(device: torch.device) -> None:
    """One tiny microbatch there and back, so that the first action does not pay for torch's start
    and for the first touch of memory that a forked process shares."""
    update = Update(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()).to(device)
    weights = StageWeights(module, update, Ledger(Stash()))
    stage = Stage(1, module, weights)
    x = torch.ones(2, 2, device=device)
    for k in range(2):
        stage.forward(k, (x,), lambda y: torch.nn.functional.mse_loss(y, x))
        stage.backward(k, 1.0)
        weights.update(U(1, k))
