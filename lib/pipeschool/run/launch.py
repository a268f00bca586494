"""From the caller's arguments to jobs for the workers, and from their reports to a result."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeschool.actions import Schedule
from pipeschool.check import check
from pipeschool.cost import Cost
from pipeschool.lower import lower
from pipeschool.run.job import Job, Report
from pipeschool.run.microbatch import cut
from pipeschool.run.parcel import pack
from pipeschool.run.pool import Pool
from pipeschool.run.stage import Loss
from pipeschool.run.watch import Watch
from pipeschool.run.weights import MakeOptimizer
from pipeschool.trace import Span, Trace
from pipeschool.versions import policy_named

MOST_WORKERS = 64  # processes on one machine
Pace = tuple[float | Sequence[float], float | Sequence[float]]


@dataclass(frozen=True)
class Result:
    """What a run gave.

    trace: measured. losses: the mean loss of every microbatch, in order. state_dicts and
    gradients: one dict per stage, on the CPU; the gradients are those of the last update.
    backend: ``gloo`` or ``nccl``. device: where the stages computed. paced: True where stages
    waited out a declared time. start_seconds: from the call to the first action.
    """

    trace: Trace
    losses: list[float]
    state_dicts: list[dict[str, Tensor]]
    gradients: list[dict[str, Tensor]]
    backend: str
    device: str
    paced: bool
    start_seconds: float


def launch(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    *,
    loss: Loss,
    optimizer: MakeOptimizer | None,
    weights: str | None,
    pace: Pace | None,
    device: str,
    timeout: float,
    nan_check: bool,
    seed: int,
    update_stages: bool,
    called: float,
) -> Result:
    """Check everything, start the workers, watch over them, put their reports together."""
    schedule, data = fit_batches(schedule, batches)
    schedule = with_weights(schedule, weights)
    schedule = check(lower(check(schedule)))
    check_stages(schedule, stages)
    if schedule.p > MOST_WORKERS:
        raise ValueError(f"a run may have at most {MOST_WORKERS} workers, not {schedule.p}")
    inputs, targets, scales = cut(data, schedule)
    backend, devices = choose_device(device, schedule.p)
    paces = pace_table(pace, schedule)
    longest = max((max(times) for times in paces.values()), default=0.0) if paces else 0.0
    with tempfile.TemporaryDirectory(prefix="pipeschool-") as folder:
        jobs = [
            Job(
                schedule=schedule,
                modules={s: stages[s] for s in schedule.stages_of(worker)},
                inputs=inputs if schedule.placement[0] == worker else None,
                targets=targets if schedule.placement[-1] == worker else None,
                scales=scales,
                loss=loss,
                optimizer=optimizer,
                pace=paces,
                backend=backend,
                device=devices[worker],
                rendezvous=(Path(folder) / "rendezvous").as_uri(),
                nan_check=nan_check,
                seed=seed,
            )
            for worker in range(schedule.p)
        ]
        packed = [pack(job) for job in jobs]
        pool = Pool(schedule.p)
        try:
            for control, job in zip(pool.controls, packed, strict=True):
                control.send_bytes(job)
            reports = Watch(pool, schedule, timeout + longest).results()
        finally:
            pool.end()
    if update_stages:
        for report in reports:
            for index, state in report.state_dicts.items():
                stages[index].load_state_dict(state)
    return put_together(schedule, reports, backend, devices, paces is not None, called)


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

    trace = Trace(
        schedule.name,
        schedule.p,
        schedule.m,
        schedule.v,
        from_begin(itertools.chain.from_iterable(report.spans for report in reports)),
        label="measured, paced" if paced else "measured",
        messages=from_begin(itertools.chain.from_iterable(r.messages for r in reports)),
    )
    losses: dict[int, float] = {}
    states: dict[int, dict[str, Tensor]] = {}
    gradients: dict[int, dict[str, Tensor]] = {}
    for report in reports:
        losses |= report.losses
        states |= report.state_dicts
        gradients |= report.gradients
    staged = backend == "gloo" and devices[0].startswith("cuda")
    return Result(
        trace=trace,
        losses=[losses[k] for k in sorted(losses)],
        state_dicts=[states[s] for s in sorted(states)],
        gradients=[gradients[s] for s in sorted(gradients)],
        backend=backend,
        device=", ".join(dict.fromkeys(devices)) + (" (staged through the host)" if staged else ""),
        paced=paced,
        start_seconds=begin - called,
    )


def fit_batches(
    schedule: Schedule, batches: Iterable[tuple[Any, Any]]
) -> tuple[Schedule, list[tuple[Any, Any]]]:
    """The batches as a list, and the schedule for as many; a synchronous one repeats its batch."""
    wanted = schedule.batches
    repeats = schedule.synchronous and wanted == 1 and not schedule.lowered
    data = list(batches if repeats else itertools.islice(batches, wanted + 1))
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


def with_weights(schedule: Schedule, weights: str | None) -> Schedule:
    """`schedule` under the weight policy asked for."""
    if weights is None or weights == schedule.weights:
        return schedule
    policy_named(weights)
    if schedule.synchronous:
        raise ValueError(
            f"{schedule.name} is synchronous and needs weights='flush', not {weights!r}"
        )
    if weights == "flush":
        raise ValueError(f"{schedule.name} never flushes: weights='flush' is for synchronous ones")
    return replace(schedule, weights=weights)


def check_stages(schedule: Schedule, stages: Sequence[nn.Module]) -> None:
    """One module per stage, each a module."""
    if isinstance(stages, nn.Module) and not isinstance(stages, (nn.ModuleList, nn.Sequential)):
        raise ValueError("stages must be a list of modules, one per stage")
    if len(stages) != schedule.stages:
        raise ValueError(
            f"{schedule.name} has {schedule.stages} stages, so it needs as many modules, "
            f"not {len(stages)}"
        )
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ValueError(f"stage {index} must be a torch.nn.Module, not {type(stage).__name__}")


def choose_device(device: str, p: int) -> tuple[str, list[str]]:
    """(backend, device of each worker). NCCL needs a GPU per worker; fewer are shared over gloo."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be one of auto, cpu, cuda, not {device!r}")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda' needs a GPU that torch can use; there is none: use 'cpu'")
    if not gpus:
        return "gloo", ["cpu"] * p
    backend = "nccl" if gpus >= p and torch.distributed.is_nccl_available() else "gloo"
    return backend, [f"cuda:{worker % gpus}" for worker in range(p)]


def pace_table(pace: Pace | None, schedule: Schedule) -> dict[str, list[float]] | None:
    """Declared seconds per kind of action and stage."""
    if pace is None:
        return None
    if isinstance(pace, str) or not isinstance(pace, Sequence) or len(pace) != 2:
        raise ValueError(
            f"pace must be (forward, backward) in seconds, such as (0.005, 0.010), not {pace!r}"
        )
    try:
        table = Cost(forward=pace[0], backward=pace[1]).seconds(schedule)
    except ValueError as error:
        raise ValueError(f"pace must be (forward, backward) in seconds: {error}") from None
    return {kind: table[kind] for kind in ("F", "B")}
