"""What a mix costs: seconds of a step, bytes in memory, bytes on the wires."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from pipeschool.actions import Schedule
from pipeschool.cost import Cost
from pipeschool.mix.setup import (
    GB,
    Machine,
    Mix,
    Transformer,
    all_reduce_bytes,
    all_reduce_seconds,
    cut_layers,
    most,
)
from pipeschool.simulator import simulate
from pipeschool.text import columns
from pipeschool.trace import Trace


@dataclass(frozen=True)
class Estimate:
    """Predicted for one step of `mix`: one update of all weights.

    seconds: of the step, start to end. It is the sum of four, each a mean over the devices:
    compute; tensor, waiting for all-reduces of activations; bubble, waiting for another stage or
    for a message; data, waiting for the all-reduce of gradients.
    memory: bytes on the fullest device, of the `capacity` that it has.
    tensor_bytes, pipeline_bytes, data_bytes: what the busiest device sends in each of the three.
    """

    mix: Mix
    seconds: float
    compute: float
    tensor: float
    bubble: float
    data: float
    memory: float
    capacity: float
    tensor_bytes: float
    pipeline_bytes: float
    data_bytes: float
    trace: Trace = field(repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return self.memory <= self.capacity

    @property
    def bubble_of_total(self) -> float:
        """The share of the step for which a device waits for other stages."""
        return self.bubble / self.seconds


def stage_cost(model: Transformer, machine: Machine, mix: Mix) -> Cost:
    """Seconds and bytes of one pipeline's actions, on one device of each stage.

    Compute goes by the usual rule of 6 operations per weight and word: 2 in the forward and 4 in
    the backward; recomputation adds a forward. The product of queries and keys, which grows with
    the square of the sequence, is left out. Looking up the word vectors costs nothing; the product
    with them, at the other end, counts like any other weights.

    A layer needs 4 all-reduces of a boundary per microbatch, 2 forward and 2 backward, and waits
    for each (Shoeybi et al., Megatron-LM, 2019). The gradients' all-reduce is part of the update,
    and hidden behind nothing. Every device of a stage sends the whole boundary on.
    """
    schedule, t = mix.layout(), mix.tensor
    stages = schedule.stages
    if not schedule.trains or schedule.replicas:
        raise ValueError(
            f"{mix.schedule} is not in this cost model: it has two copies of the model, or does "
            "not train"
        )
    layers = cut_layers(model.layers, stages)
    words = mix.microbatch * model.sequence
    boundary = model.boundary_bytes(mix.microbatch)
    head, table = [0.0] * stages, [0.0] * stages
    head[-1] = model.ends
    table[0] = table[-1] = model.ends  # both ends hold a copy
    blocks = [float(n * model.layer_parameters) for n in layers]
    forward = [2 * (b + h) * words / (t * machine.flops) for b, h in zip(blocks, head, strict=True)]
    backward = [2 * seconds for seconds in forward]
    weights = [(b + e) / t * model.bytes_per_number for b, e in zip(blocks, table, strict=True)]
    once = all_reduce_seconds(boundary, t, machine.bandwidth(t, mix.devices), machine.latency)
    return Cost(
        forward=[f + 2 * n * once for f, n in zip(forward, layers, strict=True)],
        backward=[b + 2 * n * once for b, n in zip(backward, layers, strict=True)],
        update=[
            all_reduce_seconds(
                size, mix.data, machine.bandwidth(mix.data_span, mix.devices), machine.latency
            )
            for size in weights
        ],
        latency=machine.latency,
        bandwidth=machine.bandwidth(mix.devices, mix.devices),
        message_bytes=boundary,
        recompute=mix.recompute,
        parameter_bytes=weights,
        optimizer_bytes=[size / model.bytes_per_number * model.optimizer_bytes for size in weights],
        activation_bytes=[n * model.layer_activation_bytes(mix.microbatch, t) for n in layers],
    )


@lru_cache(maxsize=4096)
def estimate(model: Transformer, machine: Machine, mix: Mix) -> Estimate:
    """What a step of `mix` costs; ValueError where the machine or the model is too small for it.

    The schedule is simulated with `stage_cost`. A step is what one more batch adds, once the line
    is full: an asynchronous pipeline does not pay for filling, nor a zero-bubble one for what it
    does while the next batch fills.
    """
    if mix.devices > machine.devices:
        raise ValueError(f"{mix} needs {mix.devices} devices, and there are {machine.devices}")
    cost = stage_cost(model, machine, mix)
    schedule, p, m = mix.layout(), mix.pipeline, mix.m
    full = 1 if drains(schedule) else 1 + math.ceil(2 * p / m)  # batches until all are alike
    first = simulate(mix.build(), cost)
    some = first if full == 1 else simulate(mix.build(full), cost)
    more = simulate(mix.build(full + 1), cost)
    layers = cut_layers(model.layers, schedule.stages)
    all_reduces = (6 if mix.recompute else 4) * m  # of each layer
    boundary = model.boundary_bytes(mix.microbatch)
    once = all_reduce_seconds(
        boundary, mix.tensor, machine.bandwidth(mix.tensor, mix.devices), machine.latency
    )
    seconds = more.makespan - some.makespan
    busy = sum(first.busy) / p
    tensor = all_reduces * model.layers * once / p
    updates = [span.seconds for span in first.spans if span.action.kind == "U"]
    data = sum(updates) / p
    bubble = seconds - busy - data
    weights = [size.parameters for size in first.stage_bytes]
    return Estimate(
        mix,
        seconds=seconds,
        compute=busy - tensor,
        tensor=tensor,
        bubble=bubble if bubble > 1e-9 * seconds else 0.0,  # no more than rounding
        data=data,
        memory=fullest(more),
        capacity=machine.memory,
        tensor_bytes=most(schedule, layers) * all_reduces * all_reduce_bytes(boundary, mix.tensor),
        pipeline_bytes=max(sum(span.bytes for span in row) for row in first.rows),
        data_bytes=most(schedule, weights)
        * len(updates)
        / schedule.stages
        * all_reduce_bytes(1, mix.data),
        trace=first,
    )


def drains(schedule: Schedule) -> bool:
    """Whether the first stage is the last to end a batch, so that the next begins on idle workers.

    Not so without a flush, nor where weight halves of the backward fill the gaps at the end.
    """
    split = any(action.kind == "W" for row in schedule.workers for action in row)
    return schedule.synchronous and not split


def fullest(trace: Trace) -> float:
    """Bytes on the fullest worker. Gradients and the optimizer's state count all the time: large
    trainings set memory aside for them once."""
    totals = []
    for row, history in zip(trace.rows, trace.memory, strict=True):
        sizes = [trace.stage_bytes[stage] for stage in {span.action.stage for span in row}]
        fixed = sum(size.parameters + size.gradients + size.optimizer for size in sizes)
        totals.append(fixed + max(at.versions + at.activations + at.buffers for at in history))
    return max(totals)


def compare(model: Transformer, machine: Machine, mixes: Iterable[Mix]) -> list[Estimate]:
    """One estimate per mix, in the order given, whether it fits or not."""
    return [estimate(model, machine, mix) for mix in mixes]


def table(estimates: Iterable[Estimate]) -> str:
    """The estimates as lines of text, one mix each."""
    heads = "data x pipeline x tensor", "s/step", "compute", "bubble", "tensor", "data", "memory"
    rows = [[*heads, ""]]
    for e in estimates:
        shares = [f"{part / e.seconds:.0%}" for part in (e.compute, e.bubble, e.tensor, e.data)]
        fits = "" if e.fits else "does not fit"
        rows.append([str(e.mix), f"{e.seconds:.3g}", *shares, f"{e.memory / GB:.1f} GB", fits])
    return columns(rows, "<>>>>>><")
