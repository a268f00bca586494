"""The benchmark: what it computes from what it measured. How long things take is no test."""

from __future__ import annotations

import json
from statistics import median

import pytest
from pipeschool import bench_report
from pipeschool.actions import B, F, U
from pipeschool.bench import (
    CLASS,
    OURS,
    RUNTIME,
    YARDSTICK,
    Benchmark,
    Case,
    all_cases,
    batch_seconds,
    bench,
)
from pipeschool.cli import main
from pipeschool.trace import Span, Trace

ENGINES = {OURS, CLASS, RUNTIME}
KEYS = {
    "paced.1f1b": ENGINES,
    "paced.gpipe": ENGINES,
    "slowly.1f1b": ENGINES,
    "slowly.gpipe": ENGINES,
    "sleeping.1f1b": ENGINES,
    "sleeping.gpipe": ENGINES,
    "message.1f1b": ENGINES | {YARDSTICK},
    "large.1f1b": ENGINES | {YARDSTICK},
    "overhead.1f1b": ENGINES,
    "overhead.gpipe": ENGINES,
    "start.1f1b": ENGINES,
    "epoch": {OURS, YARDSTICK},
    "simulator": {OURS},
    "chart": {OURS},
}


PACE = (0.002, 0.004)


def by_hand() -> Benchmark:
    rounds = {OURS: [1.0, 3.0, 2.0], CLASS: [4.0, 5.0, 3.5], RUNTIME: [8.0, 8.0, 9.0]}
    case = Case("paced.1f1b", "1F1B, paced", "time / ideal", dict.fromkeys(rounds), "", rounds)
    alone = Case("simulator", "simulator", "actions per second", {OURS: None}, "at least 300,000")
    alone.rounds[OURS] = [250_000.0]
    about = {
        "cpu": "abacus",
        "cores": 2,
        "threads": 4,
        "os": "none",
        "python": "3",
        "torch": "2",
        "date": "today",
        "load": [0.5],
        "load_after": [1.5],
    }
    return Benchmark(4, 16, (0.005, 0.010), about, [case, alone])


def test_medians_and_ratios_come_from_the_rounds():
    case, alone = by_hand().cases
    assert case.medians == {OURS: 2.0, CLASS: 4.0, RUNTIME: 8.0}
    assert case.ratios == {CLASS: 0.5, RUNTIME: 0.25}
    assert (alone.medians, alone.ratios) == ({OURS: 250_000.0}, {})


def test_every_round_asks_each_contestant_once_and_another_one_first():
    asked = []
    case = Case("", "", "", {name: lambda name=name: asked.append(name) or 1.0 for name in "abc"})
    for turn in range(3):
        case.measure(turn)
    assert "".join(asked) == "abcbcacab"
    assert case.rounds == dict.fromkeys("abc", [1.0] * 3)


def test_the_time_of_a_batch_leaves_out_the_first_batch_and_all_updates():
    spans = []
    for batch, seconds in enumerate((9.0, 4.0, 6.0, 5.0)):
        start = 100.0 * batch
        spans += [
            Span(0, F(0, batch), start, start + 1),
            Span(0, B(0, batch), start + seconds - 1, start + seconds),
            Span(0, U(0, batch), start + seconds, start + 50),
        ]
    assert batch_seconds(Trace("", 1, 1, 1, tuple(spans))) == 5.0


def test_a_case_is_measured_once_a_round_on_every_engine():
    cases = {case.key: case for case in all_cases(2, 2, PACE)}
    assert {key: set(case.contestants) for key, case in cases.items()} == KEYS
    paced = cases["paced.1f1b"]
    paced.measure(0)
    assert {engine: len(numbers) for engine, numbers in paced.rounds.items()} == dict.fromkeys(
        ENGINES, 1
    )
    assert min(paced.medians.values()) > 2 / 3  # as fast as its slowest worker, at the best


@pytest.mark.exhaustive
def test_everything_is_measured_and_comes_out_as_json():
    measured = bench(p=2, m=2, rounds=1, pace=PACE, progress=False)
    data = json.loads(json.dumps(measured.as_json()))
    assert data["settings"] == {"p": 2, "m": 2, "pace": [0.002, 0.004]}
    assert {"cpu", "cores", "os", "python", "torch", "date"} <= data["machine"].keys()
    assert {key: set(case["rounds"]) for key, case in data["cases"].items()} == KEYS
    for case in data["cases"].values():
        assert all(len(numbers) == 1 and numbers[0] > 0 for numbers in case["rounds"].values())
        for name, numbers in case["rounds"].items():
            assert case["medians"][name] == median(numbers)
        for name, ratio in case["ratios"].items():
            assert ratio == case["medians"][OURS] / case["medians"][name]
    # A paced or sleeping batch cannot be faster than its slowest worker's declared times.
    for key in ("paced.1f1b", "slowly.gpipe", "sleeping.1f1b", "sleeping.gpipe"):
        assert min(data["cases"][key]["medians"].values()) > 2 / 3


def test_table_and_page_show_medians_and_ratios():
    head, first, second = bench_report.text(by_hand()).splitlines()
    assert head.split("  ")[-1] == "aim"
    assert first.split("  ")[0] == "1F1B, paced"
    assert "4 (0.50)" in first and "8 (0.25)" in first
    assert "250,000" in second and second.endswith("at least 300,000")
    page = bench_report.page(by_hand())
    assert "| 1F1B, paced | 2 | 4 (0.50) | 8 (0.25) |  | time / ideal |  |" in page
    assert "abacus, 2 cores (4 threads)" in page
    assert "today; load average 0.5 before and 1.5 after" in page
    assert "p=4 workers, m=16 microbatches, medians of 3 rounds" in page


def test_the_chart_says_in_words_what_it_shows():
    chart = bench_report.chart(by_hand())
    assert "1F1B, paced: pipeschool 2, PyTorch, its own 4, PyTorch, our schedule 8." in chart.alt
    (axes,) = chart.axes
    assert [bar.get_width() for bar in axes.patches] == [2.0, 4.0, 8.0]


def test_the_command_writes_table_report_and_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("pipeschool.bench.bench", lambda p, m, rounds: by_hand())
    out, png = tmp_path / "report.md", tmp_path / "chart.png"
    assert main(["bench", "--out", str(out), "--png", str(png)]) == 0
    assert capsys.readouterr().out == bench_report.text(by_hand()) + "\n"
    assert out.read_text(encoding="utf-8") == bench_report.page(by_hand())
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == by_hand().as_json()


def test_fewer_microbatches_than_workers_are_refused(capsys):
    assert main(["bench", "-p", "4", "-m", "2"]) == 2
    assert "m must be at least p=4, not 2" in capsys.readouterr().err
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        bench(rounds=0)
