"""Which mix to take, and why: reasons are numbers first, and sentences made from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from pipeschool.arguments import whole_number
from pipeschool.mix.estimates import Estimate, drains, estimate, stage_cost
from pipeschool.mix.setup import Machine, Mix, Transformer, all_reduce_seconds, gigabytes, most
from pipeschool.schedules import build

SMALL = 0.1  # a bubble below this share of the step is small


class Reason(NamedTuple):
    """One true statement about a mix: `value` was worked out, and compared with `limit`."""

    kind: str
    value: float
    limit: float
    sentence: str


@dataclass(frozen=True)
class Recommendation:
    """The fastest mix that fits, and the reasons for it."""

    best: Estimate
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        lines = [f"{self.best.mix}: {self.best.seconds:.3g} s per step"]
        return "\n".join(lines + [f"- {reason.sentence}" for reason in self.reasons])


def mixes(
    model: Transformer,
    devices: int,
    batch: int,
    schedules: Sequence[str] = ("one_f_one_b",),
) -> Iterator[Mix]:
    """Every way to take `batch` sequences per step on `devices` devices, or on a divisor of them,
    with and without recomputation. No more stages than layers, nor more copies than sequences."""
    for name in schedules:
        build(name, 2, 2)  # an unknown name is an error, and not a mix that is left out
    for used, microbatch in product(_divisors(devices), _divisors(batch)):
        for data, pipeline in product(_divisors(used), _divisors(used)):
            if used % (data * pipeline) or batch % (data * microbatch):
                continue
            tensor, m = used // (data * pipeline), batch // (data * microbatch)
            # One stage has only one schedule.
            for name in schedules if pipeline > 1 else ("one_f_one_b",):
                mix = Mix(data, pipeline, tensor, m, microbatch, name)
                if _possible(mix, model):
                    yield mix
                    yield replace(mix, recompute=True)


def _possible(mix: Mix, model: Transformer) -> bool:
    try:
        return mix.layout().stages <= model.layers
    except ValueError:  # not every schedule is for every number of microbatches
        return False


def recommend(
    model: Transformer,
    machine: Machine,
    batch: int,
    devices: int | None = None,
    schedules: Sequence[str] = ("one_f_one_b",),
) -> Recommendation:
    """The fastest mix for `batch` sequences per step, of equally fast ones that with the fewest
    devices, then stages, then bytes. ValueError where nothing fits.

    devices: how many may be used; all of the machine where not given.
    """
    whole_number("batch", batch)
    devices = machine.devices if devices is None else whole_number("devices", devices)
    if devices > machine.devices:
        raise ValueError(f"there are {machine.devices} devices, not {devices}")
    best = _fastest(model, machine, mixes(model, devices, batch, schedules))
    if best is None:
        raise ValueError(
            f"nothing fits: {model.parameters / 1e9:.3g} billion weights on {devices} devices of "
            f"{gigabytes(machine.memory)}; take more devices, or a smaller model"
        )
    return Recommendation(best, reasons(model, machine, best.mix))


def reasons(model: Transformer, machine: Machine, mix: Mix) -> tuple[Reason, ...]:
    """All that speaks for `mix`, as far as it is true. The kinds:

    fits: the fullest device has the memory.
    one device suffices: the model is not cut at all, so there is no pipeline.
    must be cut: it does not fit on one device, even with recomputation and one sequence at a time.
    small bubble: there is a pipeline, and waiting is less than a tenth of the step.
    tensor inside the node: its all-reduces stay there, and would take longer between nodes.
    pipeline across nodes: the boundaries cross them, in less time than the all-reduces of as many
        tensor-parallel devices would take.
    recompute to fit: without it, it would not.
    faster than a pipeline: there is none, and the best one on as many devices takes longer.
    faster than data parallel: copies of the whole model fit, and yet would take longer.
    """
    found = estimate(model, machine, mix)
    return (
        *_of_memory(model, machine, found),
        *_of_the_bubble(found),
        *_against_others(model, machine, found),
        *_of_links(model, machine, found),
    )


def _of_memory(model: Transformer, machine: Machine, found: Estimate) -> Iterator[Reason]:
    """What fits, and what would not."""
    mix = found.mix
    if found.fits:
        yield Reason("fits", found.memory, found.capacity, f"It fits: {_size(found)}.")
    if found.fits and mix.pipeline == mix.tensor == 1:
        yield Reason(
            "one device suffices",
            found.memory,
            found.capacity,
            f"One device suffices for the whole model, {_size(found)}: no pipeline.",
        )
    alone = estimate(model, machine, Mix(recompute=True))
    if not alone.fits and mix.pipeline * mix.tensor > 1:
        yield Reason(
            "must be cut",
            alone.memory,
            alone.capacity,
            f"The model must be cut: on one device it takes {_size(alone)}.",
        )
    without = estimate(model, machine, replace(mix, recompute=False))
    if mix.recompute and found.fits and not without.fits:
        yield Reason(
            "recompute to fit",
            without.memory,
            without.capacity,
            f"Recomputation is needed: without it, it takes {_size(without)}.",
        )


def _of_the_bubble(found: Estimate) -> Iterator[Reason]:
    """Whether it matters."""
    share = found.bubble_of_total
    if found.mix.pipeline > 1 and share < SMALL:
        yield Reason("small bubble", share, SMALL, f"The bubble is small: {share:.1%} of the step.")


def _of_links(model: Transformer, machine: Machine, found: Estimate) -> Iterator[Reason]:
    """What the two kinds of link are used for."""
    mix = found.mix
    if mix.devices <= machine.devices_per_node:
        return  # there is only one kind
    if mix.tensor > 1 and machine.is_inside(mix.tensor, mix.devices):
        outside = replace(machine, inside=machine.between)
        seconds = estimate(model, outside, mix).tensor
        if found.tensor < seconds:
            yield Reason(
                "tensor inside the node",
                found.tensor,
                seconds,
                f"Tensor parallel stays inside the node: {found.tensor:.3g} s of a step go to its "
                f"all-reduces; between nodes it would be {seconds:.3g} s.",
            )
    if mix.pipeline > 1:
        boundary = model.boundary_bytes(mix.microbatch)
        message = found.pipeline_bytes / machine.between
        once = all_reduce_seconds(boundary, mix.pipeline, machine.between, machine.latency)
        instead = 4 * model.layers * mix.m * once
        if message < instead:
            yield Reason(
                "pipeline across nodes",
                message,
                instead,
                f"The pipeline crosses the nodes: a device sends its neighbours {message:.3g} s of "
                f"messages per step; {mix.pipeline} tensor-parallel devices would send each other "
                f"{instead:.3g} s.",
            )


def _against_others(model: Transformer, machine: Machine, found: Estimate) -> Iterator[Reason]:
    """Would it be faster with a pipeline, or with copies of the whole model?"""
    if not found.fits:
        return
    mix = found.mix
    others = [o for o in mixes(model, mix.devices, mix.batch) if o.devices == mix.devices]
    if mix.pipeline == 1:
        piped = _fastest(model, machine, (o for o in others if o.pipeline > 1))
        if piped and found.seconds < piped.seconds:
            yield Reason(
                "faster than a pipeline",
                found.seconds,
                piped.seconds,
                f"A pipeline is not worth it: {piped.mix} would take {piped.seconds:.3g} s per "
                f"step, this takes {found.seconds:.3g} s.",
            )
    if mix.pipeline * mix.tensor > 1:
        copies = _fastest(model, machine, (o for o in others if o.data == o.devices))
        if copies and found.seconds < copies.seconds:
            yield Reason(
                "faster than data parallel",
                found.seconds,
                copies.seconds,
                f"It is faster than {mix.devices} copies of the whole model, which would take "
                f"{copies.seconds:.3g} s per step, {copies.data:.3g} s of it for gradients.",
            )


def _fastest(model: Transformer, machine: Machine, candidates: Iterator[Mix]) -> Estimate | None:
    """The best of those that fit; None where none does."""
    best: Estimate | None = None
    for floor, mix in _by_floor(model, machine, candidates):
        if best and floor > best.seconds * (1 + 1e-9):
            break  # and so are all that follow
        found = estimate(model, machine, mix)
        if found.fits and (best is None or _rank(found) < _rank(best)):
            best = found
    return best


def _by_floor(
    model: Transformer, machine: Machine, candidates: Iterator[Mix]
) -> list[tuple[float, Mix]]:
    """Mixes whose weights alone fit, with seconds that they cannot beat, the lowest first.

    A worker does all its work. Where the line drains, the stages in front of its first one do a
    forward before it, and a backward after it.
    """
    found = []
    for mix in candidates:
        schedule, cost = mix.layout(), stage_cost(model, machine, mix)
        sizes = cost.stage_bytes(schedule)
        fixed = most(schedule, [s.parameters + s.gradients + s.optimizer for s in sizes])
        if fixed <= machine.memory:
            times = cost.seconds(schedule)
            floors = []
            for worker in range(schedule.p):
                mine = schedule.stages_of(worker)
                work = mix.m * sum(times["F"][s] + times["B"][s] for s in mine)
                others = range(min(mine)) if drains(schedule) else ()
                floors.append(work + sum(times["F"][s] + times["B"][s] for s in others))
            found.append((max(floors) + min(times["U"]), mix))
    return sorted(found, key=lambda pair: pair[0])


def _rank(found: Estimate) -> tuple[float, ...]:
    """Fast first; what takes equally long by how much it takes, then by how simple it is."""
    mix = found.mix
    return (float(f"{found.seconds:.9g}"), mix.devices, mix.pipeline, found.memory)


def _size(found: Estimate) -> str:
    return f"{gigabytes(found.memory)} of {gigabytes(found.capacity)}"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
