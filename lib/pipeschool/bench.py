"""Side by side with ``torch.distributed.pipelining``: the same work, in turn, in one run.

A round asks every contestant of every case once, each round in another order, so that a machine
that slows down slows all of them. What counts is the median over the rounds. The first round, in
which everything is imported and touched, is left out.
"""

from __future__ import annotations

import io
import os
import platform
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from pipeschool import draw
from pipeschool.arguments import whole_number
from pipeschool.dependencies import sender_of
from pipeschool.lateness import delays
from pipeschool.runtime.clock import sleep_until
from pipeschool.runtime.host.result import Result
from pipeschool.runtime.launch import launch
from pipeschool.runtime.options import RunOptions
from pipeschool.runtime.torch_engine.engine import Torch1F1B, TorchGPipe
from pipeschool.schedules import build
from pipeschool.simulator import simulate
from pipeschool.trace import Trace

OURS = "pipeschool"
RUNTIME = "PyTorch, our schedule"  # its runtime, from our schedule file
CLASS = "PyTorch, its own"  # the loops of Schedule1F1B and ScheduleGPipe
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}
CLASSES = {"1f1b": Torch1F1B, "gpipe": TorchGPipe}  # the engines that run PyTorch's loops
YARDSTICK = "yardstick"  # what a case names in its aim
PACE = (0.005, 0.010)  # seconds of a forward and of a backward
LAYER = 8  # width of a stage's only layer: next to no work
BATCHES = 3  # in a run; the first is not timed, and the median of the others counts
LARGE = 4_000_000  # bytes of a large message
SENDS = 40
EPOCH = 1600, 3125  # rows and columns of 4 bytes: 20 MB, from which 25 batches are cut
SIMULATED = 8, 2000  # workers and microbatches
DRAWN = 8, 32


@dataclass(frozen=True)
class Case:
    """One thing to measure: what each contestant does, and the numbers of all rounds."""

    key: str
    title: str
    unit: str
    contestants: dict[str, Callable[[], float]] = field(repr=False)
    target: str = ""
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, turn: int) -> None:
        """One number from each contestant, starting with another one each turn."""
        names = list(self.contestants)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            self.rounds.setdefault(name, []).append(self.contestants[name]())

    @property
    def medians(self) -> dict[str, float]:
        """Of each contestant's rounds, in the order of the contestants."""
        return {name: median(self.rounds[name]) for name in self.contestants}

    @property
    def ratios(self) -> dict[str, float]:
        """Our median over that of each other contestant."""
        ours = self.medians[OURS]
        return {name: ours / other for name, other in self.medians.items() if name != OURS}


@dataclass(frozen=True)
class Benchmark:
    """All cases with their numbers, and what they were measured on."""

    p: int
    m: int
    pace: tuple[float, float]
    machine: dict[str, object]
    cases: list[Case]

    def as_json(self) -> dict[str, object]:
        """Plain data: machine, settings, and of each case all rounds, medians and ratios."""
        return {
            "machine": self.machine,
            "settings": {"p": self.p, "m": self.m, "pace": list(self.pace)},
            "cases": {
                case.key: {
                    "title": case.title,
                    "unit": case.unit,
                    "target": case.target,
                    "rounds": case.rounds,
                    "medians": case.medians,
                    "ratios": case.ratios,
                }
                for case in self.cases
            },
        }


def bench(
    p: int = 4,
    m: int = 16,
    rounds: int = 5,
    pace: tuple[float, float] = PACE,
    progress: bool = True,
) -> Benchmark:
    """Measure everything: p workers, m microbatches, a median over `rounds`.

    pace: seconds of a forward and of a backward. progress: a bar on stderr.
    ValueError where m is below p, which PyTorch's 1F1B refuses.
    """
    p, m, rounds = whole_number("p", p), whole_number("m", m), whole_number("rounds", rounds)
    if m < p:
        raise ValueError(f"m must be at least p={p}, not {m}: PyTorch's 1F1B needs as many")
    started = machine()
    cases = all_cases(p, m, pace)
    for turn in tqdm(range(rounds + 1), disable=not progress, unit="round"):
        if turn == 1:
            for case in cases:
                case.rounds.clear()
        for case in cases:
            case.measure(turn)
    return Benchmark(p, m, pace, started | {"load_after": machine()["load"]}, cases)


def all_cases(p: int, m: int, pace: tuple[float, float]) -> list[Case]:
    """What is measured, and how."""
    cases = []
    slowly = (4 * pace[0], 4 * pace[1])

    def of_engines(
        key: str,
        title: str,
        unit: str,
        target: str,
        measure: Any,
        name: str,
        yardstick: Callable[[], float] | None = None,
    ) -> None:
        engines: dict[str, str | type[Any]] = {
            OURS: "pipeschool",
            CLASS: CLASSES[name],
            RUNTIME: "torch",
        }
        run: dict[str, Callable[[], float]] = {
            label: partial(measure, partial(run_on, engine, name, p, m))
            for label, engine in engines.items()
        }
        if yardstick:
            run[YARDSTICK] = yardstick
        cases.append(Case(f"{key}.{name}", title, unit, run, target))

    def ideal(pace: tuple[float, float]) -> float:
        return (m + p - 1) * sum(pace)

    def paced(run: Callable[..., Result], pace: tuple[float, float]) -> float:
        return batch_seconds(run(plain_stages(p), pace).trace) / ideal(pace)

    def sleeping(run: Callable[..., Result]) -> float:
        return batch_seconds(run([Sleeper(*pace) for _ in range(p)]).trace) / ideal(pace)

    def tiny(run: Callable[..., Result]) -> float:
        return 1000 * batch_seconds(run(plain_stages(p)).trace) / (2 * p * m)

    def small(run: Callable[..., Result]) -> float:
        return 1000 * delivery_seconds(run(plain_stages(p), pace).trace)

    def large(run: Callable[..., Result]) -> float:
        return 1000 * delivery_seconds(run([Wide(s, p) for s in range(p)], slowly).trace)

    def start(run: Callable[..., Result]) -> float:
        return run(plain_stages(p)).start_seconds

    aims = {"paced": (pace, "at most 1.05"), "slowly": (slowly, "at most 1.015")}
    for key, (seconds, aim) in aims.items():
        times = f"{1000 * seconds[0]:g}/{1000 * seconds[1]:g} ms"
        for name, title in SCHEDULES.items():
            measure = partial(paced, pace=seconds)
            of_engines(key, f"{title}, paced {times}", "time / ideal", aim, measure, name)
    for name, title in SCHEDULES.items():
        aim = "at most 1.08"
        of_engines("sleeping", f"{title}, stages that sleep", "time / ideal", aim, sleeping, name)
    aim = "at most 0.3, and half of the yardstick: one gloo send"
    of_engines("message", "small message", "ms to the next action", aim, small, "1f1b", gloo_ms)
    aim = "at most the yardstick: two copies and 0.3 ms"
    of_engines("large", "4 MB message", "ms to the next action", aim, large, "1f1b", two_copies_ms)
    for name, title in SCHEDULES.items():
        aim = "at most a third of PyTorch's own"
        of_engines("overhead", f"{title}, overhead", "ms per action", aim, tiny, name)
    aim = "at most 0.1"
    of_engines("start", "start-up", "seconds to the first action", aim, start, "1f1b")
    epoch: dict[str, Callable[[], float]] = {
        OURS: partial(start_of_epoch, copied=False),
        YARDSTICK: partial(start_of_epoch, copied=True),
    }
    title, unit = "start, 25 batches of one tensor", "seconds to the first action"
    cases.append(Case("epoch", title, unit, epoch, "as fast as the yardstick: copies"))
    fast = {OURS: simulated_per_second}
    cases.append(Case("simulator", "simulator", "actions per second", fast, "at least 300,000"))
    cases.append(Case("chart", "chart", "seconds to draw", {OURS: chart_seconds}))
    return cases


def run_on(
    engine: str | type[Any],
    name: str,
    p: int,
    m: int,
    stages: list[nn.Module],
    pace: tuple[float, float] | None = None,
) -> Result:
    """A run of BATCHES batches on tiny stages; `engine` as for `ps.run`."""
    called = time.perf_counter()
    options = RunOptions(pace=pace, device="cpu", engine=engine)
    batch = torch.ones(2 * m, LAYER)
    return launch(build(name, p, m), stages, [(batch, batch)] * BATCHES, options, called)


def plain_stages(p: int) -> list[nn.Module]:
    """Stages with next to nothing to do."""
    return [nn.Linear(LAYER, LAYER) for _ in range(p)]


class Sleeper(nn.Module):
    """A stage that takes its time by itself, whatever engine runs it: it computes, then sleeps
    until the seconds are over, in its forward as in its backward."""

    def __init__(self, forward_seconds: float, backward_seconds: float):
        super().__init__()
        self.layer = nn.Linear(LAYER, LAYER)
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        """The layer, between two marks that the backward passes first and last."""
        until = time.perf_counter() + self.forward_seconds
        over: list[float] = []  # when the backward will be
        if not x.requires_grad:  # on the first stage; without this its backward would end before
            x = x.detach().requires_grad_()
        x = InBackward.apply(x, lambda: sleep_until(over.pop()))
        y: Tensor = InBackward.apply(
            self.layer(x), lambda: over.append(time.perf_counter() + self.backward_seconds)
        )
        sleep_until(until)
        return y


class Wide(nn.Module):
    """A stage that hands on 4 MB for each microbatch, and gets 4 MB of gradients back."""

    def __init__(self, stage: int, stages: int):
        super().__init__()
        self.layer = nn.Linear(LAYER, LAYER)
        self.last = stage == stages - 1

    def forward(self, x: Tensor) -> Tensor:
        """The layer on the first columns; as many more as make the message large."""
        y: Tensor = self.layer(x[:, :LAYER])
        return y if self.last else y.repeat(1, LARGE // (2 * 4 * LAYER))  # 2 samples of 4 bytes


class BareGloo:
    """An engine that only passes messages: one number with a plain gloo send, to a worker that has
    waited for 5 ms."""

    own_messages = True

    def __init__(self, share: Any):
        self.share = share

    def run(self) -> None:
        """The forwards of stage 0 sleep, and what they would hand on is one number."""
        number = torch.zeros(1)
        for action in self.share.actions():
            if action.kind == "SEND_F":
                dist.send(number, 1)
            elif action.kind == "RECV_F":
                dist.recv(number, 0)
            elif action.kind == "F" and action.stage == 0:
                time.sleep(0.005)
            elif action.kind == "F":
                self.share.losses[action.microbatch] = 0.0  # a run has one of each


class InBackward(torch.autograd.Function):
    """Identity whose backward calls something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        """`x`."""
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient as it came."""
        ctx.call()
        return gradients[0], None


def batch_seconds(trace: Trace) -> float:
    """From the first start to the last end of a batch: the median over all batches but the first,
    in which memory and connections are touched for the first time."""
    found: dict[int, list[tuple[float, float]]] = {}
    for span in trace.spans:
        if span.action.kind != "U":
            batch = span.action.microbatch // trace.m
            found.setdefault(batch, []).append((span.start, span.end))
    del found[0]
    return median(max(e for _, e in times) - min(s for s, _ in times) for times in found.values())


def delivery_seconds(trace: Trace) -> float:
    """From the end of an action to the start of the one, on another worker, that waited for what it
    made: the median over a run, but for the first batch."""
    found = [
        delay.delivery
        for delay in delays(trace)
        if delay.delivery and delay.span.action.microbatch >= trace.m
    ]
    return median(found)


def gloo_ms() -> float:
    """One way with a bare gloo send, from its start to the end of the receive; milliseconds."""
    called = time.perf_counter()
    batch = torch.ones(SENDS, LAYER)
    options = RunOptions(device="cpu", engine=BareGloo)
    trace = launch(
        build("gpipe", 2, SENDS), plain_stages(2), [(batch, batch)], options, called
    ).trace
    times = {message.action: message for message in trace.messages}
    ways = [
        received.end - times[sender_of(action)].start
        for action, received in times.items()
        if action.kind == "RECV_F"
    ]
    return 1000 * median(ways)


def two_copies_ms() -> float:
    """Twice a copy of 4 MB, each after a pause, as a worker makes it; and 0.3 ms; milliseconds."""
    source = torch.ones(LARGE // 4)
    copy, times = torch.empty_like(source), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(SENDS):
            time.sleep(0.005)
            times.append(timeit.timeit(lambda: copy.copy_(source), number=1))
    finally:
        torch.set_num_threads(threads)
    return 2000 * median(times) + 0.3


def start_of_epoch(copied: bool) -> float:
    """Seconds to the first action of a run on 25 batches, cut from one tensor or copied from it."""
    called = time.perf_counter()
    whole = torch.ones(EPOCH)
    cuts = [rows.clone() if copied else rows for rows in whole.split(64)]
    batches = [(rows, rows[:, :LAYER].clone()) for rows in cuts]
    stages = [nn.Linear(EPOCH[1], LAYER), *plain_stages(1)]
    options = RunOptions(device="cpu")
    return launch(build("gpipe", 2, 8), stages, batches, options, called).start_seconds


def simulated_per_second() -> float:
    """Actions that the simulator does in a second, 1F1B with many microbatches."""
    schedule = build("1f1b", *SIMULATED)
    actions = sum(map(len, schedule.workers))
    return actions / timeit.timeit(lambda: simulate(schedule), number=1)


def chart_seconds() -> float:
    """Seconds from a trace to the picture of its chart."""
    trace = simulate(build("1f1b", *DRAWN))
    return timeit.timeit(lambda: draw.gantt(trace).savefig(io.BytesIO(), format="png"), number=1)


def machine() -> dict[str, object]:
    """What this runs on, and how busy that is with other things."""
    return {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": os.cpu_count(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
