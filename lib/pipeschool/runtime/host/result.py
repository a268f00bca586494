"""What a run gave, put together from the reports of its workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from pipeschool.actions import Schedule
from pipeschool.memory import StageBytes
from pipeschool.runtime.host.job import Report
from pipeschool.runtime.stages.random_numbers import RandomNumbers
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.weights.stage_weights import Parameters, StageState
from pipeschool.trace import Span, Trace

Item = TypeVar("Item")


@dataclass(frozen=True)
class State:
    """Where a run ended: what the next one needs to go on from there."""

    stages: list[StageState]
    generators: list[RandomNumbers | None]  # random numbers of each worker


@dataclass(frozen=True)
class Result:
    """What a run gave.

    trace: measured. losses: the mean loss of every microbatch, in order; empty where there were no
    targets. loss_weights: what each of these counts in a mean: its samples, or what `weigh` says.
    outputs: of a forward-only schedule, what the last stage gave for each microbatch, on
    the CPU; empty for others. gradients: one dict per stage, on the CPU, those of the last update.
    state: optimizers and all. history: where it was asked for, the parameters after each update:
    history[t][s] is a dict for stage s after t updates, history[0] the start. backend: what
    messages went on: ``local`` (sockets and shared memory of this machine), ``gloo`` or ``nccl``.
    device: where the stages computed. paced: True where stages waited out a declared time.
    start_seconds: from the call to the first action. clipped_over: what had the norm that
    gradients were clipped by, ``model`` or ``stage``; empty where they were not.
    """

    trace: Trace
    losses: list[float]
    loss_weights: list[float]
    outputs: list[Tensors]
    gradients: list[Parameters]
    state: State
    history: list[list[Parameters]]
    backend: str
    device: str
    paced: bool
    start_seconds: float
    clipped_over: str = ""

    @property
    def batch_losses(self) -> list[float]:
        """The loss of each batch: the mean of its microbatches', by their weights."""
        m = self.trace.m
        return [
            mean(self.losses[k : k + m], self.loss_weights[k : k + m])
            for k in range(0, len(self.losses), m)
        ]

    @property
    def state_dicts(self) -> list[dict[str, Tensor]]:
        """The trained weights and buffers: one state_dict per stage, on the CPU."""
        return [stage.weights for stage in self.state.stages]


def mean(losses: Sequence[float], weights: Sequence[float]) -> float:
    """Of `losses`, by their `weights`; 0 where nothing counts."""
    total = sum(weights)
    return sum(x * w for x, w in zip(losses, weights, strict=True)) / total if total else 0.0


def load(stages: Sequence[nn.Module], state: State) -> None:
    """Give the modules the weights and buffers of `state`."""
    for stage, saved in zip(stages, state.stages, strict=True):
        stage.load_state_dict(saved.weights)
        for name, buffer in saved.buffers.items():
            path, _, key = name.rpartition(".")
            owner, device = stage.get_submodule(path), stage.get_buffer(name).device
            owner._buffers[key] = buffer.to(device, copy=True)


def put_together(
    schedule: Schedule,
    reports: list[Report],
    backend: str,
    devices: list[str],
    paced: bool,
    called: float,
    weights: list[float],
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
    staged = backend != "nccl" and devices[0].startswith("cuda")
    return Result(
        trace=trace,
        losses=merged(report.losses for report in reports),
        loss_weights=weights,
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
