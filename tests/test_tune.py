"""The tuner against exhaustive sweeps."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pipeschool as ps
import pytest
from pipeschool.tune import (
    DoesNotFit,
    Probe,
    even_cuts,
    tune,
    tune_microbatches,
    tune_workers,
)

GROW = 0.25  # seconds that a sample adds to a forward
Curve = Callable[[int], float]


def simulated(name: str, p: int, samples: int, fixed: float, latency: float, uneven: bool) -> Curve:
    """Throughput by m: simulated, where a microbatch costs something however small it is.

    uneven: all microbatches last as long as the largest, so that the curve has teeth.
    """

    @cache
    def throughput(m: int) -> float:
        size = math.ceil(samples / m) if uneven else samples / m
        forward = fixed + GROW * size
        cost = ps.Cost(forward=forward, backward=2 * forward, latency=latency)
        return samples / ps.simulate(ps.build(name, p, m), cost).makespan

    return throughput


def noisy(curve: Curve, seed: int) -> Curve:
    """Off by 1% at most, always the same for the same m, as for a sweep that measures it once."""
    return lambda m: curve(m) * (1 + 0.01 * random.Random(f"{seed} {m}").uniform(-1, 1))


@pytest.mark.parametrize(
    ("p", "samples"),
    [(2, 16), (3, 20), (4, 32), pytest.param(8, 48, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_within_2_percent_of_a_sweep_in_half_of_its_runs(name: str, p: int, samples: int) -> None:
    sweep = range(1, samples + 1)
    interior = 0
    for fixed, latency, uneven in itertools.product((0, 0.1, 1, 10), (0, 2, 20), (False, True)):
        curve = simulated(name, p, samples, fixed, latency, uneven)
        best = max(map(curve, sweep))
        interior += curve(1) < best > curve(samples)
        for seed in (None, 0, 1, 2):
            measure = curve if seed is None else noisy(curve, seed)
            asked: list[int] = []

            def counted(m: int, measure: Curve = measure, asked: list[int] = asked) -> float:
                asked.append(m)
                return measure(m)

            candidates = even_cuts(samples) if uneven else sweep
            noise = 0.01 if seed is not None else 0
            found = tune(counted, 4 * p, samples, candidates=candidates, noise=noise)
            assert found.best.throughput is not None
            assert found.best.throughput >= 0.98 * max(map(measure, sweep))
            assert curve(found.best.value) >= 0.98 * best
            assert len(asked) == len(set(asked)) == found.runs <= found.sweep // 2
            assert found.sweep == samples
            assert asked == [probe.value for probe in found.probes]
            if not uneven:
                assert asked[0] == min(4 * p, samples)
    assert interior >= 12  # half of the curves are worth a search at all


def test_finds_the_least_of_the_formula() -> None:
    """p = 5, a = 1, b N = 64: the best m is sqrt(4 * 64) = 16, with (16 + 4)(1 + 4) = 100 s."""
    found = tune(lambda m: 64 / ((m + 4) * (1 + 64 / m)), 20, 64, noise=0)
    assert found.best.value in (15, 16, 17)
    assert found.best.throughput == pytest.approx(64 / 100, rel=0.002)


@pytest.mark.parametrize(
    ("curve", "best"),
    [
        (lambda m: 1.0, range(1, 65)),
        (lambda m: min(m, 24), range(24, 65)),
        (lambda m: -max(m, 6) + 100, range(1, 7)),
        (lambda m: m, {64}),
        (lambda m: 100 - m, {1}),
        (lambda m: 1.0 if 20 <= m <= 40 else 0.5, range(20, 41)),
    ],
    ids=["flat", "rises to a plateau", "falls from a plateau", "rises", "falls", "a table"],
)
def test_plateaus_and_ends(curve: Curve, best: set[int]) -> None:
    for start in (1, 5, 16, 64):
        found = tune(curve, start, 64, noise=0)
        if found.best.value not in best:  # the foot of a table is flat: nothing says where it is
            assert curve(found.best.value) >= 0.98 * curve(next(iter(best)))
        assert found.runs <= 32


def test_an_end_of_what_fits_is_found_exactly() -> None:
    """Fewer microbatches are larger: 640 / m bytes, 100 allowed, so that 7 is the first that fits.
    The throughput falls with m, so that it is the best as well."""
    asked = []

    def measure(m: int) -> tuple[float, float]:
        asked.append(m)
        return 100 / m, 640 / m

    found = tune(measure, 16, 64, cap=100)
    assert found.best[:3] == (7, 100 / 7, 640 / 7)
    refused = [probe for probe in found.probes if probe.throughput is None]
    assert [p.value for p in refused] == [m for m in asked if m < 7] != []
    assert all(p.why == "not accepted: measured above 100 bytes" and p.ran for p in refused)
    assert all(p.memory == 640 / p.value for p in found.probes)
    assert found.runs == len(asked)


@pytest.mark.parametrize("first", range(2, 65))
def test_wherever_that_end_is(first: int) -> None:
    found = tune(lambda m: (100 / m, 1 / m), 16, 64, cap=1 / first)
    assert found.best.value == first


def test_what_noise_may_have_hidden_is_looked_behind() -> None:
    """8 seems 1% worse than 16. Nobody knows, so that the search goes on to 4; 3% are a fact."""
    seen = {1: 0.8, 2: 1.0, 4: 1.2, 8: 0.99, 16: 1.0, 32: 0.9}
    assert tune(seen.__getitem__, 16, 32, candidates=seen, noise=0.01).best.value == 4
    seen[8] = 0.97
    found = tune(seen.__getitem__, 16, 32, candidates=seen, noise=0.01)
    assert [probe.value for probe in found.probes] == [16, 8, 32]


def test_no_run_is_spent_outside_of_the_bracket() -> None:
    """The throughput rises all the way: doubling to the end, and bisecting the last step."""
    found = tune(lambda m: m, 1, 64, noise=0)
    assert [probe.value for probe in found.probes] == [1, 2, 4, 8, 16, 32, 64, 45, 54]
    found = tune(lambda m: 1 / m, 64, 64, noise=0)
    assert [probe.value for probe in found.probes] == [64, 32, 16, 8, 4, 2, 1]


def test_predictions_do_not_count_as_runs() -> None:
    """Of 2, 1, 4 and 8, which the prediction refuses, none is one of the two runs."""
    found = tune(lambda m: 1 / m, 2, 64, cap=10, predict=lambda m: 100 / m, limit=2)
    assert [(probe.value, probe.ran) for probe in found.probes[:5]] == [
        (2, False), (1, False), (4, False), (8, False), (16, True),
    ]  # fmt: skip
    assert found.runs == 2


def test_what_is_predicted_not_to_fit_is_not_run() -> None:
    asked = []

    def measure(m: int) -> float:
        asked.append(m)
        return 100 / m

    found = tune(measure, 2, 64, cap=100, predict=lambda m: 640 / m)
    assert found.best.value == 7 and found.best.memory == 640 / 7
    assert min(asked) == 7
    refused = [probe for probe in found.probes if not probe.ran]
    assert [p.value for p in found.probes][:1] == [2] == [p.value for p in refused][:1]
    assert all(p.why == "not run: predicted above 100 bytes" for p in refused)
    assert found.runs == len(asked) == len(found.probes) - len(refused)
    assert " 2           -     320  not run: predicted above 100 bytes" in str(found)
    assert str(found).endswith(f"{len(asked)} runs; trying every m would take 64")


def test_memory_that_grows_with_the_value() -> None:
    """GPipe at a fixed size of microbatch: m of them are held, and 10 are allowed."""
    found = tune(lambda m: (m / (m + 3), m), 16, 64, cap=10)
    assert found.best.value == 10


def test_memory_is_only_noted_without_a_cap() -> None:
    assert tune(lambda m: (m, 1e9), 4, 4, predict=lambda m: 1 / 0).best == (4, 4, 1e9, True, "")


def test_nothing_fits() -> None:
    ran = []

    def measure(m: int) -> tuple[float, float]:
        ran.append(m)
        return 1.0, 640 / m

    with pytest.raises(DoesNotFit) as raised:
        tune(measure, 16, 64, cap=5)
    assert str(raised.value) == (
        "no m that was tried (8, 16, 32, 64) fits into 5 bytes: the least was 10, at 64"
    )
    assert raised.value.least == 10
    ran.clear()
    with pytest.raises(DoesNotFit):
        tune(measure, 16, 64, cap=5, predict=lambda m: 640 / m)
    assert ran == []


def test_one_candidate_is_measured_once() -> None:
    found = tune(lambda m: 5.0, 16, 1)
    assert [probe.value for probe in found.probes] == [1]
    found = tune(lambda m: 5.0, 16, 64, candidates=[7])
    assert [probe.value for probe in found.probes] == [7]
    assert tune(lambda m: 5.0, 16, 64, limit=1).runs == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"start": 0, "high": 4}, "start must be at least 1, not 0"),
        ({"start": 1, "high": 4, "low": 5}, "high must be at least 5, not 4"),
        ({"start": 1, "high": 4, "candidates": [9]}, "there is no candidate for m from 1 to 4"),
        ({"start": 1, "high": 4, "candidates": []}, "there is no candidate for m from 1 to 4"),
        ({"start": 1, "high": 4, "cap": -1}, "cap must be a number, 0 or more, not -1"),
        ({"start": 1, "high": 4, "noise": 0.5}, "noise must be below 0.5, not 0.5"),
        ({"start": 1, "high": 4, "limit": 0}, "limit must be at least 1, not 0"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as raised:
        tune(lambda m: 1.0, **arguments)  # type: ignore[arg-type]
    assert str(raised.value) == says


def test_a_throughput_must_be_a_number() -> None:
    with pytest.raises(ValueError, match="the throughput of 3 must be a number"):
        tune(lambda m: math.nan, 3, 3)


def test_even_cuts_of_12() -> None:
    """Largest microbatches of 12, 6, 4, 3, 2 and 1; with m = 5 the largest has 3, as with 4."""
    assert even_cuts(12) == [1, 2, 3, 4, 6, 12]
    assert even_cuts(10) == [1, 2, 3, 4, 5, 10]


def test_each_cut_left_out_takes_longer_than_one_that_stays() -> None:
    for samples in range(1, 60):
        largest = {m: math.ceil(samples / m) for m in range(1, samples + 1)}
        for m in set(largest) - set(even_cuts(samples)):
            assert any(k < m and largest[k] == largest[m] for k in even_cuts(samples))


# --- real runs -----------------------------------------------------------------------------------


def line(layers: int):  # noqa: ANN201  (torch comes later)
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    return model, (torch.randn(16, 4), torch.randn(16, 4))


def test_paced_runs() -> None:
    """p = 2, a = 8 ms, b = 1 ms, N = 16: 3 (m + 1)(8 + 16 / m) ms. A busy machine may take longer,
    and so another m may win, but no run is faster than declared."""
    model, batch = line(2)
    found = tune_microbatches(
        "1f1b",
        list(model),
        batch,
        pace=lambda n: (0.008 + 0.001 * n, 0.016 + 0.002 * n),
        repeats=1,
        noise=0.02,
    )
    assert found.probes[0].value == 8  # 4p
    assert 2 <= found.runs == len(found.probes) <= found.sweep // 2 == 8
    assert found.best.throughput == max(probe.throughput for probe in found.probes)
    for m, throughput, _, ran, why in found.probes:
        assert ran and not why
        assert 0 < throughput <= 16 / (0.003 * (m + 1) * (8 + 16 / m)) * 1.001


def test_a_cap_that_no_cut_keeps() -> None:
    model, batch = line(2)
    with pytest.raises(DoesNotFit, match="fits into 10 bytes: the least was"):
        tune_microbatches("1f1b", list(model), batch, cap=10, repeats=1)


def test_a_cap_is_checked_against_predicted_and_counted_bytes() -> None:
    """GPipe holds the whole batch whatever m is, but what a backward needs shrinks with m; so do
    1F1B's activations. The cap lies between what m = 16 and what m = 1 need."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    stages = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
    batch = torch.randn(64, 8), torch.randn(64, 8)
    peaks = {}
    for m in (1, 64):
        done = ps.run(ps.one_f_one_b(2, m), stages, [batch], memory=True)
        peaks[m] = max(done.trace.peak_bytes)
    assert peaks[64] < peaks[1]
    cap = (peaks[1] + peaks[64]) / 2
    found = tune_microbatches("1f1b", stages, batch, start=2, cap=cap, repeats=1, limit=4)
    assert 0 < found.best.memory <= cap
    assert any(probe.throughput is None for probe in found.probes)
    for probe in found.probes:
        assert (probe.memory > cap) == (probe.throughput is None) == (probe.why != "")
    m = found.best.value
    counted = ps.run(ps.one_f_one_b(2, m), stages, [batch], memory=True).trace.peak_bytes
    assert found.best.memory == max(counted)


def test_workers() -> None:
    """A stage costs 10 ms, and 0.05 ms per sample and layer, and twice that backward."""
    model, batch = line(4)
    found = tune_workers(
        "1f1b",
        model,
        batch,
        most=2,
        pace=lambda n, layers: (0.010 + 0.00005 * n * layers, 0.020 + 0.0001 * n * layers),
        repeats=1,
        limit=3,
    )
    assert sorted(found.inner) == [1, 2] == sorted(probe.value for probe in found.probes)
    rates = {p: tuning.best.throughput for p, tuning in found.inner.items()}
    assert found.best.throughput == max(rates.values()) == rates[found.best.value]
    assert found.runs == sum(tuning.runs for tuning in found.inner.values()) <= 6
    assert found.sweep == 2 * 16
    for p, tuning in found.inner.items():
        for m, throughput, *_ in tuning.probes:
            least = (m + p - 1) * (30 + 0.15 * 16 / m * 4 / p) / 1000
            assert throughput <= 16 / least * 1.001


def test_numbers_of_workers_without_a_schedule_are_skipped_and_named() -> None:
    """Chimera wants p to be even; 2 is then all there is up to 3, and m even as well."""
    model, batch = line(3)
    found = tune_workers("chimera", model, batch, repeats=1, limit=2)
    why = "not run: p must be even for chimera, not {}: half goes each way"
    assert found.probes[:2] == tuple(Probe(p, None, 0.0, False, why.format(p)) for p in (1, 3))
    assert [probe.value for probe in found.probes[2:]] == [2] == list(found.inner)
    assert found.best == found.probes[2] and found.best.throughput is not None
    assert found.sweep == 16
    assert "3           -       -  not run: p must be even for chimera" in str(found)


def test_a_schedule_without_any_number_of_workers_is_refused_as_it_refuses() -> None:
    model, batch = line(1)
    with pytest.raises(ValueError, match="^p must be even for chimera, not 1: half goes each way$"):
        tune_workers("chimera", model, batch)
    with pytest.raises(ValueError, match="^there is no schedule 'zigzag'"):
        tune_workers("zigzag", model, batch)


def test_pace_must_be_a_function() -> None:
    model, batch = line(2)
    with pytest.raises(ValueError, match="pace must be a function of the number of samples"):
        tune_microbatches("1f1b", list(model), batch, pace=(0.01, 0.02))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"start": 0}, "start must be at least 1, not 0"),
        ({"repeats": 0}, "repeats must be at least 1, not 0"),
        ({"p": 3}, "one_f_one_b has 3 stages, so it needs as many modules, not 2"),
    ],
)
def test_wrong_numbers_for_a_real_run(arguments: dict[str, int], says: str) -> None:
    model, batch = line(2)
    with pytest.raises(ValueError) as raised:
        tune_microbatches("1f1b", list(model), batch, **arguments)  # type: ignore[arg-type]
    assert str(raised.value) == says


def test_no_worker_is_no_pipeline() -> None:
    model, batch = line(2)
    with pytest.raises(ValueError, match="most must be at least 1, not 0"):
        tune_workers("1f1b", model, batch, most=0)


def test_only_what_a_schedule_can_do_is_tried() -> None:
    """Interleaved 1F1B wants m to be a multiple of p."""
    model, batch = line(4)
    found = tune_microbatches(
        lambda p, m, batches: ps.interleaved_1f1b(p=p, m=m, v=2, batches=batches),
        list(model),
        batch,
        p=2,
        repeats=1,
        limit=3,
    )
    assert found.runs >= 2
    assert all(probe.value % 2 == 0 for probe in found.probes)


def test_a_schedule_that_refuses_every_m() -> None:
    model, batch = line(2)
    with pytest.raises(ValueError, match="there is no schedule 'zigzag'"):
        tune_microbatches("zigzag", list(model), batch)


def test_the_search_needs_no_torch() -> None:
    code = (
        "import sys, pipeschool as ps\n"
        "print(ps.tune.tune(lambda m: m, 4, 8).best.value, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["8", "False"], done.stderr
