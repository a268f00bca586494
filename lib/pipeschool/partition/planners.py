"""Planners: a profile and some workers give a plan.

All cut between consecutive layers, and agree on what is best: the slowest stage or boundary as fast
as can be, then the second slowest, and so on; of plans still equal, the one with the earlier cuts,
then the one with the fewer workers in front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from pipeschool.actions import Schedule
from pipeschool.arguments import number, numbers, per_item, whole_number
from pipeschool.cost import PerStage
from pipeschool.partition.cuts import equal_cuts, ranges_of
from pipeschool.partition.plan import (
    Plan,
    boundary_seconds,
    cut_at,
    speeds_of,
    stage_seconds,
)
from pipeschool.partition.profile import Profile, groups_of_layers
from pipeschool.schedules import build
from pipeschool.simulator import simulate

Groups = Iterable[Iterable[int]]


def equal(
    profile: Profile,
    p: int,
    *,
    speed: PerStage = 1.0,
    bandwidth: float = math.inf,
    latency: float = 0.0,
    keep_together: Groups | None = None,
) -> Plan:
    """`p` stages whose numbers of layers differ by one at most, the larger ones first.

    The other arguments as for `balanced`. ValueError where there are too few layers, or where an
    equal cut would part layers that belong together.
    """
    n, p = len(profile), whole_number("p", p)
    together = _together(profile, keep_together)
    _enough_pieces(n, p, together)
    cuts = equal_cuts(n, p)
    for cut in cuts:
        for group in together:
            if min(group) < cut <= max(group):
                raise ValueError(
                    f"equal stages would part {_named(group)}, which belong together: "
                    "plan with balanced"
                )
    return cut_at(profile, cuts, speed=speed, bandwidth=bandwidth, latency=latency)


def balanced(
    profile: Profile,
    p: int,
    speed: PerStage = 1.0,
    *,
    bandwidth: float = math.inf,
    latency: float = 0.0,
    memory_cap: PerStage | None = None,
    m: int | None = None,
    schedule: str = "one_f_one_b",
    keep_together: Groups | None = None,
) -> Plan:
    """`p` stages, one per worker, whose slowest stage or message is as fast as can be.

    speed: how fast a worker is, one number or one per worker; the workers stay in their order.
    bandwidth: bytes per second of a link, each way: a message across a cut takes output_bytes /
        bandwidth, while the workers compute. Latency does not occupy a link; it is for `cost`.
    memory_cap: bytes that a worker may hold, one number or one per worker, when batches of `m`
        microbatches go by `schedule`, the name of one with one stage per worker. See `peak_bytes`.
    keep_together: groups of layers that must stay on one stage; the profile's tied layers where
        not given, () to let them be apart. Then each stage has a copy of the parameter that they
        share, and a synchronous `run` gives all copies the sum of their gradients. That is the
        only way where the first layer shares one with the last, as an embedding may with an output
        layer: consecutive layers leave nothing to cut between the two. A V placement, such as that
        of ``ps.zb_v``, has first and last stage on one worker, so that the sum needs no message.

    Dynamic programming over (first layer, worker). ValueError where nothing fits.
    """
    n, p = len(profile), whole_number("p", p)
    speeds = speeds_of(speed, p)
    link = number("bandwidth", bandwidth, positive=True, infinite=True)
    together = _together(profile, keep_together)
    _enough_pieces(n, p, together)

    def boundary(cut: int) -> float:
        return boundary_seconds(profile, cut, link)

    if memory_cap is None:
        caps, bytes_on = [math.inf] * p, lambda layers, worker: 0.0
    else:
        caps = per_item("memory_cap", numbers("memory_cap", memory_cap), p, "worker")
        bytes_on = _bytes_on(profile, p, m, schedule)

    def seconds(layers: range, worker: int, _: int) -> float:
        if bytes_on(layers, worker) > caps[worker]:
            return math.inf
        return stage_seconds(profile, layers, speeds[worker])

    found = _search(n, p, 1, seconds, boundary, together)
    if found is None:
        frugal = _search(n, p, 1, lambda layers, w, _: bytes_on(layers, w), lambda _: 0.0, together)
        assert frugal is not None
        raise ValueError(
            f"no cut into {p} stages keeps to memory_cap={memory_cap!r} with {schedule} and m={m}: "
            f"the most even one needs {frugal.times[0]:.0f} bytes on its fullest worker"
        )
    return cut_at(profile, found.ends[:-1], speed=speeds, bandwidth=link, latency=latency)


def pipedream_plan(
    profile: Profile,
    workers: int,
    *,
    bandwidth: float = math.inf,
    latency: float = 0.0,
    m: int = 1,
    keep_together: Groups | None = None,
) -> Plan:
    """All `workers`, of equal speed, as stages of one or several of them that take turns.

    PipeDream's dynamic programme (Narayanan et al., SOSP 2019, section 3.1) for one level of
    links. For layers i to j on r workers, and for the boundary behind layer s:

        T(i, j, r) = 1/r max(sum of the layers' forward + backward seconds,
                             2 (r - 1) (sum of their parameter bytes) / bandwidth)
        boundary   = 2 (output bytes of layer s) / bandwidth

    so the all-reduce of the weights takes 2 (r - 1)/r of their bytes for each microbatch, while
    others compute; activations and gradients share a link, which `balanced` does not assume.
    The paper's published code differs: it adds the two terms of T, with 4 instead of 2.

    m: microbatches that share an update, and so an all-reduce; 1 as in the paper, the batch's own
        number with a flush. latency, keep_together: as for `balanced`.
    """
    n, workers = len(profile), whole_number("workers", workers)
    link = number("bandwidth", bandwidth, positive=True, infinite=True)
    every = whole_number("m", m)

    def seconds(layers: range, _: int, replicas: int) -> float:
        reduced = 2 * (replicas - 1) * profile.total("parameter_bytes", layers) / (link * every)
        return max(stage_seconds(profile, layers, 1), reduced) / replicas

    def boundary(cut: int) -> float:
        return 2 * boundary_seconds(profile, cut, link)

    found = _search(n, workers, workers, seconds, boundary, _together(profile, keep_together))
    assert found is not None  # all layers on all workers always is a plan
    ranges = ranges_of(found.ends)
    return Plan(
        profile,
        ranges,
        found.replicas,
        tuple(seconds(layers, 0, r) for layers, r in zip(ranges, found.replicas, strict=True)),
        tuple(boundary(end) for end in found.ends[:-1]),
        (1.0,) * len(ranges),
        link,
        number("latency", latency),
    )


def peak_bytes(profile: Profile, layers: range, in_flight: float, versions: int = 1) -> float:
    """The most bytes on a worker with these layers: `versions` of the weights, gradients, optimizer
    state, what `in_flight` microbatches keep with their inputs, and what one backward needs.

    It is what `simulate` predicts for 1F1B in its second batch, with m > p. It may be too much, by
    the gradients at most, where these are not there yet while most is in flight.
    """
    inputs = profile.layers[layers.start - 1].output_bytes if layers.start else 0.0
    return (
        versions * profile.total("parameter_bytes", layers)
        + profile.total("gradient_bytes", layers)
        + profile.total("optimizer_bytes", layers)
        + in_flight * (profile.total("activation_bytes", layers) + inputs)
        + profile.most("working_bytes", layers)
    )


class Found(NamedTuple):
    """What the search has found; smaller is better."""

    times: tuple[float, ...]  # of stages and boundaries, the slowest first
    ends: tuple[int, ...]
    replicas: tuple[int, ...]


def _search(
    layers: int,
    workers: int,
    most: int,
    seconds: Callable[[range, int, int], float],
    boundary: Callable[[int], float],
    together: Sequence[tuple[int, ...]],
) -> Found | None:
    """The best way to cut `layers` for all `workers`, up to `most` on a stage; None without any.

    seconds: of these layers, with this first worker, on so many; infinite where that may not be.
    boundary: of the messages across the cut before this layer.

    Adding the same time to two lists leaves the better one better, so the best plan ends in the
    best plan for the layers and workers that its first stage leaves.
    """
    barred = {cut for group in together for cut in range(min(group) + 1, max(group) + 1)}

    @cache
    def time(first: int, end: int, worker: int, replicas: int) -> float:
        return seconds(range(first, end), worker, replicas)

    @cache
    def best(first: int, worker: int) -> Found | None:
        """For the layers from `first` on, and the workers from `worker` on."""
        found: Found | None = None
        for replicas in range(1, min(most, workers - worker) + 1):
            last = worker + replicas == workers
            for end in [layers] if last else range(first + 1, layers):
                own = time(first, end, worker, replicas)
                if end in barred or own == math.inf or (found and own > found.times[0]):
                    continue
                if last:
                    candidate = Found((own,), (end,), (replicas,))
                elif rest := best(end, worker + replicas):
                    candidate = Found(
                        tuple(sorted((own, boundary(end), *rest.times), reverse=True)),
                        (end, *rest.ends),
                        (replicas, *rest.replicas),
                    )
                else:
                    continue
                if found is None or candidate < found:
                    found = candidate
        return found

    return best(0, 0)


def _bytes_on(profile: Profile, p: int, m: int | None, name: str) -> Callable[[range, int], float]:
    """`peak_bytes` of given layers on a given worker, under the schedule called `name`."""
    if m is None:
        raise ValueError("a memory cap needs m, the number of microbatches of a batch")
    schedule = _line(name, p, whole_number("m", m))
    trace = simulate(schedule)  # its times do not matter, its order does

    @cache
    def bytes_on(layers: range, worker: int) -> float:
        held, versions = trace.peak_activations[worker], trace.weight_versions[worker]
        return peak_bytes(profile, layers, held, versions)

    return bytes_on


def _line(name: str, p: int, m: int) -> Schedule:
    """The schedule called `name`, long enough for a stream to fill up; ValueError unless it has
    one stage per worker and trains."""
    schedule = build(name, p, m)
    if not schedule.trains or schedule.owners != tuple((worker,) for worker in range(p)):
        raise ValueError(f"a plan has one stage per worker, and {name} does not train so")
    return schedule if schedule.synchronous else build(name, p, m, batches=-(-p // m))


def _together(profile: Profile, groups: Groups | None) -> tuple[tuple[int, ...], ...]:
    if groups is None:
        return tuple(map(tuple, profile.tied))
    found = groups_of_layers("keep_together", groups, len(profile))
    return tuple(group for group in found if group)


def _enough_pieces(layers: int, p: int, together: Sequence[tuple[int, ...]]) -> None:
    """ValueError where that many stages cannot be had."""
    if p > layers:
        raise ValueError(f"a model of {layers} layers cannot be cut into {p} stages")
    barred = {cut for group in together for cut in range(min(group) + 1, max(group) + 1)}
    if p > layers - len(barred):
        raise ValueError(
            f"a model of {layers} layers cannot be cut into {p} stages where "
            f"{' and '.join(map(_named, together))} must be on one stage, with all between them: "
            "let them be apart with keep_together=(), or give each a weight of its own"
        )


def _named(group: Sequence[int]) -> str:
    return "layers " + " and ".join(map(str, group))
