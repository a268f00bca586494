"""From the caller's arguments to jobs for the workers, and from their reports to a result."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeschool.actions import COMPUTE_KINDS, Schedule
from pipeschool.checking import check
from pipeschool.cost import Cost, recompute_table
from pipeschool.lowering import lower
from pipeschool.memory import StageBytes
from pipeschool.runtime import torchrun
from pipeschool.runtime.job import Job, Link, Report
from pipeschool.runtime.microbatch import cut
from pipeschool.runtime.pool import Pool, under_torchrun
from pipeschool.runtime.serialize import pack
from pipeschool.runtime.stage import Loss, Tensors
from pipeschool.runtime.tensor import check_plan
from pipeschool.runtime.ties import ready_for_ties, ties_of
from pipeschool.runtime.torch_limits import refuse
from pipeschool.runtime.watch import Watch
from pipeschool.runtime.weights import Parameters, StageState, Update, on_cpu
from pipeschool.trace import Span, Trace

MOST_WORKERS = 64  # processes on one machine
MOST_UNCOUNTED = 1000  # batches of an iterable that does not say how many it has
Item = TypeVar("Item")
Pace = tuple[float | Sequence[float], float | Sequence[float]]


@dataclass(frozen=True)
class State:
    """Where a run ended: what the next one needs to go on from there."""

    stages: list[StageState]
    generators: list[Tensor | None]  # random numbers of each worker


@dataclass(frozen=True)
class Result:
    """What a run gave.

    trace: measured. losses: the mean loss of every microbatch, in order; empty where there were no
    targets. outputs: of a forward-only schedule, what the last stage gave for each microbatch, on
    the CPU; empty for others. gradients: one dict per stage, on the CPU, those of the last update.
    state: optimizers and all. history: where it was asked for, the parameters after each update:
    history[t][s] is a dict for stage s after t updates, history[0] the start. backend: ``gloo`` or
    ``nccl``. device: where the stages computed. paced: True where stages waited out a declared
    time. start_seconds: from the call to the first action.
    """

    trace: Trace
    losses: list[float]
    outputs: list[Tensors]
    gradients: list[Parameters]
    state: State
    history: list[list[Parameters]]
    backend: str
    device: str
    paced: bool
    start_seconds: float

    @property
    def state_dicts(self) -> list[dict[str, Tensor]]:
        """The trained weights and buffers: one state_dict per stage, on the CPU."""
        return [stage.weights for stage in self.state.stages]


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `pipeschool.runtime.run`, explained there."""

    loss: Loss
    update: Update
    pace: Pace | None
    device: str
    timeout: float
    nan_check: bool
    seed: int
    history: bool
    update_stages: bool
    recompute: bool | Sequence[bool] = False
    memory: bool = False
    latency: float = 0.0
    bandwidth: float = math.inf
    engine: str = "pipeschool"
    tensor_parallel: int = 1
    tensor_plan: Any = None


def launch(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    options: Options,
    called: float,
    state: State | None = None,
) -> Result:
    """Check everything, start the workers, watch over them, put their reports together.

    With `state` the run goes on where an earlier one ended.
    """
    schedule, data = fit_batches(schedule, batches)
    check_stages(schedule, stages)
    parts = options.tensor_parallel
    ties = ties_of(stages) if schedule.trains else []
    given = ready_for_ties(check(schedule), ties, options)
    schedule = check(lower(given))
    processes = schedule.p * parts
    if processes > MOST_WORKERS and not under_torchrun():
        raise ValueError(f"a run may have at most {MOST_WORKERS} workers, not {processes}")
    if state:
        stages = [copy.deepcopy(stage) for stage in stages]
        load(stages, state)
    inputs, targets, scales = cut(data, schedule)
    backend, devices = choose_device(options.device, processes)
    if options.engine != "pipeschool":
        refuse(given, stages, inputs, targets, options, backend, devices)
    recompute = recompute_table(options.recompute, schedule)
    paces = pace_table(options.pace, recompute, schedule)
    longest = max((max(times) for times in paces.values()), default=0.0) if paces else 0.0
    link = link_of(options)
    patience = options.timeout + longest  # what is declared is no standstill

    def job(worker: int, rendezvous: str = "", part: int = 0) -> Job:
        mine = schedule.stages_of(worker)
        return Job(
            schedule=schedule,
            # Copies made one by one no longer share parameters: each stage steps with its own.
            modules={s: copy.deepcopy(stages[s]) if ties else stages[s] for s in mine},
            inputs=inputs if worker in schedule.owners[0] else None,
            targets=targets if worker in schedule.owners[-1] else None,
            scales=scales,
            loss=options.loss,
            update=options.update,
            recompute=recompute,
            memory=options.memory,
            link=link,
            restore={s: state.stages[s] for s in mine} if state else {},
            generator=state.generators[worker] if state else None,
            history=options.history,
            pace=paces,
            backend=backend,
            device=devices[worker * parts + part],
            ties=ties,
            parts=parts,
            plan=plan,
            rendezvous=rendezvous,
            nan_check=options.nan_check,
            seed=options.seed,
            engine=options.engine,
        )

    plan = check_plan(list(stages), options.tensor_plan) if parts > 1 else {}
    if parts > 1:
        refuse_with_parts(options)
    if under_torchrun():
        same = {"backends": backend, "models": sums(stages), "data": sums([inputs, targets])}
        reports = torchrun.take_part(job, schedule, patience, same)
    else:
        reports = on_this_machine(job, schedule, patience, parts)
    paced = paces is not None or link is not None
    result = put_together(schedule, reports, backend, devices, paced, called)
    if options.history:
        result.history.insert(0, [on_cpu(dict(stage.named_parameters())) for stage in stages])
    if options.update_stages:
        load(stages, result.state)
    return result


def on_this_machine(
    job: Callable[[int, str, int], Job], schedule: Schedule, timeout: float, parts: int
) -> list[Report]:
    """Start the workers as processes of this machine, and watch over them."""
    with tempfile.TemporaryDirectory(prefix="pipeschool-") as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        packed = [pack(job(w, rendezvous, n)) for w in range(schedule.p) for n in range(parts)]
        pool = Pool(len(packed))
        try:
            for control, parcel in zip(pool.controls, packed, strict=True):
                control.send_bytes(parcel)
            return Watch(pool, schedule, timeout, parts).results()
        finally:
            pool.end()


def sums(values: Sequence[Any]) -> list[float]:
    """A fingerprint: the sum of all numbers in each of `values`, a module or nested tensors."""
    nested = [list(v.parameters()) if isinstance(v, nn.Module) else v for v in values]
    return [
        sum(float(t.detach().abs().double().sum()) for t in tree_leaves(v) if torch.is_tensor(t))
        for v in nested
    ]


def load(stages: Sequence[nn.Module], state: State) -> None:
    """Give the modules the weights of `state`."""
    for stage, saved in zip(stages, state.stages, strict=True):
        stage.load_state_dict(saved.weights)


def put_together(
    schedule: Schedule,
    reports: list[Report],
    backend: str,
    devices: list[str],
    paced: bool,
    called: float,
) -> Result:
    """One result out of the workers' reports, with times counted from the first action."""
    begin = min(span.start for report in reports for span in report.spans)

    def from_begin(spans: Iterable[Span]) -> tuple[Span, ...]:
        return tuple(s._replace(start=s.start - begin, end=s.end - begin) for s in spans)

    sizes = merged(report.parameter_bytes for report in reports)
    trace = Trace(
        schedule.name,
        schedule.p,
        schedule.m,
        schedule.v,
        from_begin(itertools.chain.from_iterable(report.spans for report in reports)),
        label="measured, paced" if paced else "measured",
        messages=from_begin(itertools.chain.from_iterable(r.messages for r in reports)),
        stage_bytes=tuple(StageBytes(parameters=size) for size in sizes),
        measured_memory=tuple(
            tuple(level._replace(time=max(level.time - begin, 0.0)) for level in report.memory)
            for report in reports
            if report.memory
        ),
    )
    gradients = merged(report.gradients for report in reports)
    states = merged(report.states for report in reports)
    histories = merged(report.history for report in reports)
    staged = backend == "gloo" and devices[0].startswith("cuda")
    return Result(
        trace=trace,
        losses=merged(report.losses for report in reports),
        outputs=merged(report.outputs for report in reports),
        gradients=gradients,
        state=State(states, [report.generator for report in reports]),
        history=[list(update) for update in zip(*histories, strict=True)],
        backend=backend,
        device=", ".join(dict.fromkeys(devices)) + (" (staged through the host)" if staged else ""),
        paced=paced,
        start_seconds=begin - called,
    )


def merged(parts: Iterable[dict[int, Item]]) -> list[Item]:
    """What all workers reported by stage or by microbatch, in order. Workers that take turns at a
    stage report the same weights; of buffers, such as a running mean, the last one's are kept."""
    whole = {key: item for part in parts for key, item in part.items()}
    return [whole[key] for key in sorted(whole)]


def fit_batches(
    schedule: Schedule, batches: Iterable[tuple[Any, Any]]
) -> tuple[Schedule, list[tuple[Any, Any]]]:
    """The batches as a list, and the schedule for as many; a synchronous one repeats its batch."""
    if not isinstance(batches, Iterable):
        raise ValueError(
            "batches must be a list, or any other iterable, of (inputs, targets) pairs, "
            f"not {type(batches).__name__}"
        )
    wanted = schedule.batches
    repeats = schedule.synchronous and wanted == 1 and not schedule.lowered
    if repeats:
        data = listed(batches, "batches", "give a list of as many as you want")
    else:
        data = list(itertools.islice(batches, wanted + 1))
    for batch in data:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"batches must give (inputs, targets) pairs, not {type(batch).__name__}: one batch "
                "is written [(inputs, targets)]"
            )
    if not data:
        raise ValueError("there is no batch: batches must give at least one (inputs, targets) pair")
    if repeats:
        return schedule.repeat(len(data)), data
    if len(data) != wanted:
        more = "more" if len(data) > wanted else str(len(data))
        raise ValueError(f"{schedule.name} was built with batches={wanted}, but there are {more}")
    return schedule, data


def listed(batches: Iterable[Item], name: str, advice: str) -> list[Item]:
    """All of `batches`; ValueError where they may never end, with `advice` what to give instead."""
    if operator.length_hint(batches, -1) >= 0:  # they have a length, and so an end
        return list(batches)
    data = list(itertools.islice(batches, MOST_UNCOUNTED + 1))
    if len(data) > MOST_UNCOUNTED:
        raise ValueError(
            f"{name} gave more than {MOST_UNCOUNTED} batches and has no length that says when it "
            f"will end: {advice}"
        )
    return data


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


def refuse_with_parts(options: Options) -> None:
    """ValueError for what does not go with tensor parallelism."""
    for name, asked in (
        ("memory=True", options.memory),
        ("engine='torch'", options.engine != "pipeschool"),
        ("torchrun", under_torchrun()),
    ):
        if asked:
            raise ValueError(f"tensor_parallel does not go with {name} here")


def link_of(options: Options) -> Link | None:
    """The declared link; None where messages take what they take."""
    declared = options.latency > 0 or options.bandwidth < math.inf
    return Link(options.latency, options.bandwidth) if declared else None


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
