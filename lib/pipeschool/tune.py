"""Find the number of microbatches, or of workers, with the highest throughput, in few runs.

`tune` is the search, over anything that can be measured; the others measure real runs with it.

Why there is a best m at all: a batch of N samples in m microbatches on p equal workers takes
(m + p - 1)(a + b N / m) seconds, where a is what a microbatch costs however small it is. Few
microbatches are dear at the ends of the pipeline, many are dear in a. The sum has the form
c + d m + e / m, with its least value at m = sqrt((p - 1) b N / a). There d m + e / m is at most
half of it, so that an m which is r times too large or too small adds at most a share of
(cosh(ln r) - 1) / 2 to the time. Of two neighbours 1.2 apart one is at most the root of 1.2 away
from what is between them: 0.2%. A message takes time as well, and the last samples of an uneven
cut, so that real curves are less smooth.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeschool.actions import Schedule
from pipeschool.arguments import number, whole_number
from pipeschool.runtime import profile, run
from pipeschool.schedules import build
from pipeschool.simulator import simulate
from pipeschool.text import columns

if TYPE_CHECKING:
    from torch import nn

    from pipeschool.runtime.options import Pace

FINE = 1.2  # neighbours no further apart than by this factor need nothing between them


class DoesNotFit(ValueError):
    """Whatever is tried needs more memory than there may be; `least` bytes at least."""

    def __init__(self, message: str, least: float):
        super().__init__(message)
        self.least = least


class Probe(NamedTuple):
    """One value that the search looked at. `throughput` is None, and `why` says why, where it was
    not accepted. `memory` is 0 where nobody asked."""

    value: int
    throughput: float | None
    memory: float
    ran: bool
    why: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """What fits, by throughput; below it what does not, by how little memory it needs."""
        return (False, -self.memory) if self.throughput is None else (True, self.throughput)


@dataclass(frozen=True)
class Tuning:
    """What a search found. Print it for a table.

    probes: in the order in which they were looked at. sweep: how many runs it would take to try
    every value. inner: of `tune_workers`, for each number of workers the search for its m.
    """

    name: str
    probes: tuple[Probe, ...]
    sweep: int
    inner: dict[int, Tuning] = field(default_factory=dict, repr=False)

    @property
    def best(self) -> Probe:
        """The accepted probe of the highest throughput."""
        return max(self.probes, key=lambda probe: probe.rank)

    @property
    def runs(self) -> int:
        """How many values were measured; a prediction is no run."""
        inner = sum(tuning.runs for tuning in self.inner.values())
        return inner or sum(probe.ran for probe in self.probes)

    def __str__(self) -> str:
        rows = [[self.name, "throughput", "memory", ""]]
        for probe in self.probes:
            rate = "-" if probe.throughput is None else f"{probe.throughput:.5g}"
            memory = f"{probe.memory:.0f}" if probe.memory else "-"
            note = "best" if probe == self.best else probe.why
            rows.append([str(probe.value), rate, memory, note])
        runs = f"{self.runs} runs; trying every {self.name} would take {self.sweep}"
        return f"{columns(rows, '>>><')}\n{runs}"


def tune(
    measure: Callable[[int], float | tuple[float, float]],
    start: int,
    high: int,
    low: int = 1,
    *,
    candidates: Iterable[int] | None = None,
    cap: float | None = None,
    predict: Callable[[int], float] | None = None,
    limit: int | None = None,
    noise: float = 0.01,
    name: str = "m",
) -> Tuning:
    """The whole number from `low` to `high` with the highest throughput, or one close to it.

    measure: gives the throughput of a value, or (throughput, bytes of memory). It is never asked
        twice for the same value. It may raise `DoesNotFit`.
    start: where to begin; the candidate nearest to it is the first to be measured.
    candidates: the values that may be tried; all of them where not given.
    cap: bytes of memory that are allowed. Without it, memory is noted only.
    predict: the memory that a value will need: above `cap`, it is not measured.
    limit: the most measurements; half as many as there are values where not given.
    noise: by what share of itself a measured throughput may be off. Two that may be equal for all
        we know leave the values between and around them in the search.

    The throughput should rise to its best value and fall after it, with flat parts where it likes,
    and memory should only rise, or only fall. From `start` the search doubles or halves until the
    throughput falls on both sides, then bisects. Where the throughput follows the formula on top
    of this file, what it finds is within 1% of the best, plus what noise hides.

    Raises ValueError for arguments that do not fit, and `DoesNotFit` where nothing does.
    """
    whole_number("low", low)
    whole_number("high", high, at_least=low)
    whole_number("start", start)
    if cap is not None:
        number("cap", cap)
    if number("noise", noise) >= 0.5:
        raise ValueError(f"noise must be below 0.5, not {noise!r}")
    given = range(low, high + 1) if candidates is None else candidates
    allowed = sorted({v for v in given if low <= v <= high})
    if not allowed:
        raise ValueError(f"there is no candidate for {name} from {low} to {high}")
    sweep = high - low + 1
    most = max(sweep // 2, 1) if limit is None else whole_number("limit", limit)
    probes: dict[int, Probe] = {}
    value: int | None = _nearest(allowed, start)
    while value is not None and sum(probe.ran for probe in probes.values()) < most:
        probes[value] = _probe(value, measure, cap, predict)
        value = _next(allowed, probes, noise)
    tuning = Tuning(name, tuple(probes.values()), sweep)
    if tuning.best.throughput is None:
        raise DoesNotFit(
            f"no {name} that was tried ({', '.join(map(str, sorted(probes)))}) fits into "
            f"{cap:.0f} bytes: the least was {tuning.best.memory:.0f}, at {tuning.best.value}",
            tuning.best.memory,
        )
    return tuning


def _probe(
    value: int,
    measure: Callable[[int], float | tuple[float, float]],
    cap: float | None,
    predict: Callable[[int], float] | None,
) -> Probe:
    memory = predict(value) if predict and cap is not None else 0.0
    if cap is not None and memory > cap:
        return Probe(value, None, memory, False, f"not run: predicted above {cap:.0f} bytes")
    too_much = f"not accepted: measured above {cap or 0:.0f} bytes"
    try:
        measured = measure(value)
    except DoesNotFit as error:
        return Probe(value, None, error.least, True, too_much)
    throughput, memory = measured if isinstance(measured, tuple) else (measured, memory)
    number(f"the throughput of {value}", throughput)
    if cap is not None and memory > cap:
        return Probe(value, None, memory, True, too_much)
    return Probe(value, throughput, memory, True)


def _next(allowed: Sequence[int], probes: dict[int, Probe], noise: float) -> int | None:
    """The value to look at next; None where no other is worth it.

    The best may be between the nearest values on both sides of the best so far that are worse than
    it beyond doubt.
    """
    row = [probes[value] for value in sorted(probes)]
    best = max(row, key=lambda probe: probe.rank)
    at = row.index(best)
    worse = [i for i, probe in enumerate(row) if _surely_worse(probe, best, noise)]
    left = max((i for i in worse if i < at), default=None)
    right = min((i for i in worse if i > at), default=None)
    if left is None and row[0].value > allowed[0]:
        below = allowed[: bisect_left(allowed, row[0].value)]
        return _nearest(below, row[0].value / 2)
    if right is None and row[-1].value < allowed[-1]:
        above = allowed[bisect_left(allowed, row[-1].value) + 1 :]
        return _nearest(above, row[-1].value * 2)
    if best.throughput is None:  # nothing fits, not even where memory is least
        return None
    live = row[left or 0 : len(row) if right is None else right + 1]
    widest, middle = 1.0, None
    for a, b in zip(live, live[1:], strict=False):
        between = allowed[bisect_left(allowed, a.value) + 1 : bisect_left(allowed, b.value)]
        edge = (a.throughput is None) != (b.throughput is None)  # of what fits: find it exactly
        ratio = b.value / a.value
        if between and ratio > widest and (ratio > FINE or edge):
            widest, middle = ratio, _nearest(between, math.sqrt(a.value * b.value))
    return middle


def _surely_worse(probe: Probe, best: Probe, noise: float) -> bool:
    if probe.throughput is None or best.throughput is None:
        return probe.rank < best.rank
    return probe.throughput * (1 + noise) < best.throughput * (1 - noise)


def _nearest(values: Sequence[int], goal: float) -> int:
    """The one of `values` whose ratio to `goal` is closest to 1."""
    return min(values, key=lambda value: abs(math.log(value / goal)))


# --- what a search can measure -------------------------------------------------------------------


def even_cuts(samples: int) -> list[int]:
    """The numbers of microbatches worth trying for a batch: for each size of the largest
    microbatch the smallest m that has it. Any other m has more microbatches that last as long."""
    whole_number("the number of samples", samples)
    return sorted({math.ceil(samples / size) for size in range(1, samples + 1)})


def tune_microbatches(
    schedule: str | Callable[..., Schedule],
    stages: Sequence[nn.Module],
    batch: tuple[Any, Any],
    p: int | None = None,
    *,
    pace: Callable[[float], Pace] | None = None,
    start: int | None = None,
    cap: float | None = None,
    batches: int = 1,
    repeats: int = 3,
    limit: int | None = None,
    noise: float = 0.01,
    **options: Any,
) -> Tuning:
    """The m with which `batch` goes through the pipeline fastest, by real runs.

    schedule: a name such as ``1f1b``, or a function of p, m and batches that builds one; an m that
        it refuses is no candidate.
    p: number of workers; as many as there are `stages` where not given.
    pace: the declared (forward, backward) seconds of a stage for a microbatch of so many samples,
        such as ``lambda n: (0.002 + 0.001 * n, 0.004 + 0.002 * n)``, see `run`; microbatches that
        differ by a sample all have the pace of their mean. Without it, runs are not paced.
    start: 4p where not given: the bubble is then (p - 1) / (5p - 1) of the time, 20% at most.
    cap: bytes that each worker may have in memory. They are predicted from a `profile`, and
        counted in a run of their own, since counting takes time.
    batches: how many batches one run does. repeats: runs whose median makespan counts.
    limit, noise: see `tune`; a sweep would measure every m from 1 to the size of the batch.
    options: of `run`.

    Throughput is in samples per second, without the start of the workers.
    """
    whole_number("repeats", repeats)
    whole_number("batches", batches)
    p = whole_number("p", len(stages) if p is None else p)
    samples = _samples(batch)
    make = _maker(schedule, p, batches)
    rounds = [batch] * batches
    if pace is not None and not callable(pace):
        raise ValueError(f"pace must be a function of the number of samples, not {pace!r}")

    def predict(m: int) -> float:
        known = {key: options[key] for key in ("loss", "optimizer", "recompute") if key in options}
        cost = profile(stages, batch, m, rounds=1, **known)
        return max(simulate(make(m), cost, options.get("weights")).peak_bytes)

    def measure(m: int) -> tuple[float, float]:
        arguments = options | ({"pace": pace(samples / m)} if pace else {})
        memory = 0.0
        if cap is not None:
            counted = run(make(m), stages, rounds, **{**arguments, "memory": True})
            memory = max(counted.trace.peak_bytes)
            if memory > cap:
                raise DoesNotFit(f"m = {m} needs {memory:.0f} bytes", memory)
        done = [run(make(m), stages, rounds, **arguments) for _ in range(repeats)]
        return batches * samples / median(result.trace.makespan for result in done), memory

    return tune(
        measure,
        4 * p if start is None else start,
        samples,
        candidates=_buildable(make, even_cuts(samples)),
        cap=cap,
        predict=predict,
        limit=limit,
        noise=noise,
    )


def tune_workers(
    schedule: str | Callable[..., Schedule],
    model: nn.Sequential,
    batch: tuple[Any, Any],
    *,
    most: int | None = None,
    pace: Callable[[float, int], Pace] | None = None,
    cap: float | None = None,
    noise: float = 0.01,
    **options: Any,
) -> Tuning:
    """The number of workers, each with its best m, with which `batch` is done fastest.

    For each p, `model` is cut into as many stages by `partition.split_layers`. A p for which there
    is no such schedule, whatever m is, is not tried; its probe says why.
    most: the largest p to try; the number of layers where not given.
    pace: the declared (forward, backward) seconds of a stage, for a microbatch of so many samples
        and a stage of so many layers.
    options: as for `tune_microbatches`.
    """
    from pipeschool.partition import split_layers

    high = min(len(model) if most is None else whole_number("most", most), len(model))
    samples, batches = _samples(batch), options.get("batches", 1)
    skipped = _undefined(schedule, range(1, high + 1), samples, batches)
    defined = sorted({*range(1, high + 1)} - {probe.value for probe in skipped})
    inner: dict[int, Tuning] = {}

    def measure(p: int) -> tuple[float, float]:
        stages = split_layers(model, p)
        lengths = [len(stage) for stage in stages]

        def staged(samples: float) -> Pace:
            assert pace is not None
            forward, backward = zip(*(pace(samples, n) for n in lengths), strict=True)
            return list(forward), list(backward)

        found = inner[p] = tune_microbatches(
            schedule, stages, batch, p, pace=pace and staged, cap=cap, noise=noise, **options
        )
        assert found.best.throughput is not None
        return found.best.throughput, found.best.memory

    tuning = tune(
        measure, high, high, candidates=defined, cap=cap, limit=high, noise=noise, name="p"
    )
    return Tuning("p", (*skipped, *tuning.probes), len(defined) * samples, inner)


def _samples(batch: tuple[Any, Any]) -> int:
    from pipeschool.runtime.stages.microbatches import samples

    return samples(batch[0])


def _maker(
    schedule: str | Callable[..., Schedule], p: int, batches: int
) -> Callable[[int], Schedule]:
    if callable(schedule):
        return lambda m: schedule(p=p, m=m, batches=batches)
    return lambda m: build(schedule, p, m, batches=batches)


def _undefined(
    schedule: str | Callable[..., Schedule], workers: Sequence[int], samples: int, batches: int
) -> list[Probe]:
    """A probe for each of `workers` for which there is no m; its ValueError where that is all."""
    skipped, refusal = [], None
    for p in workers:
        try:
            _buildable(_maker(schedule, p, batches), even_cuts(samples))
        except ValueError as error:
            refusal = error
            skipped.append(Probe(p, None, 0.0, False, f"not run: {error}"))
    if refusal and len(skipped) == len(workers):
        raise refusal
    return skipped


def _buildable(make: Callable[[int], Schedule], candidates: Iterable[int]) -> list[int]:
    """The `candidates` of which `make` makes a schedule; its own ValueError where there is none."""
    found, refusal = [], None
    for m in candidates:
        try:
            make(m)
        except ValueError as error:
            refusal = refusal or error
        else:
            found.append(m)
    if refusal and not found:
        raise refusal
    return found
