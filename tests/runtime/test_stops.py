"""Workers that are stopped, folders with odd names, and the stop button at the worst moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pipeschool as ps
import psutil
import pytest
import torch
from pipeschool.runtime import interrupts
from pipeschool.runtime.host.pool import Pool
from pipeschool.runtime.stall import LONGEST_LOOK, Seen
from test_run import batch, linear_stages
from torch import nn

exhaustive = pytest.mark.exhaustive
posix = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
MEGABYTE = 1 << 20


def run_script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a script does that has a process group of its own."""
    return subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | environment,
        start_new_session=True,
    )


# Workers that are stopped


class Large(nn.Linear):
    """Its job does not fit into any pipe."""

    def __init__(self, megabytes: int):
        super().__init__(6, 6, dtype=torch.float64)
        self.register_buffer("ballast", torch.zeros(megabytes * MEGABYTE, dtype=torch.uint8))


class Stops(nn.Linear):
    """Its process stops, as if somebody had sent it SIGSTOP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(x)


def hit(monkeypatch: pytest.MonkeyPatch, worker: int, number: int) -> None:
    """Send the signal `number` to a worker as soon as it is there, before it has its job."""
    start: Callable[..., None] = Pool._start

    def start_and_hit(pool: Pool, context: object, rank: int) -> None:
        start(pool, context, rank)
        if rank == worker:
            os.kill(pool.processes[rank].pid, number)

    monkeypatch.setattr(Pool, "_start", start_and_hit)


@posix
@pytest.mark.parametrize("megabytes", [0, 100])
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGSTOP, "is frozen before its first action: its process has been stopped"),
        (signal.SIGKILL, "was killed by SIGKILL before its first action"),
    ],
)
def test_a_worker_that_is_hit_while_it_gets_its_job_is_named(monkeypatch, megabytes, number, says):
    stages = [*linear_stages(2), Large(megabytes)]
    with monkeypatch.context() as patch:
        hit(patch, 2, number)
        with pytest.raises(ps.RunError, match=f"^worker 2 {says}") as caught:
            ps.run(ps.gpipe(3, 2), stages, [batch(4)], timeout=1.0)
    assert (caught.value.worker, caught.value.action) == (2, None)
    assert ps.run(ps.gpipe(3, 2), linear_stages(3), [batch(4)]).losses


@posix
@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_that_is_stopped_in_its_row_is_named(worker):
    stages = linear_stages(3)
    stages[worker] = Stops(6, 6, dtype=torch.float64)
    with pytest.raises(ps.RunError, match=f"^worker {worker} is frozen at {worker}F0 ") as caught:
        ps.run(ps.gpipe(3, 2), stages, [batch(4)], timeout=1.0)
    assert len(str(caught.value)) < 300


class StopsTheLast(nn.Linear):
    """Stops the worker that was started last, which waits for this one by then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        workers = [child.pid for child in psutil.Process().parent().children()]
        os.kill(max(workers), signal.SIGSTOP)
        return super().forward(x)


@posix
def test_a_worker_that_is_stopped_while_it_waits_is_named_not_another_that_waits():
    stages = [StopsTheLast(6, 6, dtype=torch.float64), *linear_stages(2)]
    with pytest.raises(ps.RunError, match="^worker 2 is frozen at 2RECV_F0 "):
        ps.run(ps.gpipe(3, 2), stages, [batch(4)], timeout=1.0)


def test_time_in_which_the_watcher_was_stopped_itself_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    seen = Seen()
    assert seen.look("place", 1) == 0.0
    now += 0.25
    assert seen.look("place", 1) == 0.25
    now += 3600.0  # the lid was closed
    assert seen.look("place", 1) == 0.25 + LONGEST_LOOK
    assert seen.look("place", 2) == 0.0
    now += 0.5
    assert seen.look("another", 1) == 0.0
    assert seen.look("place", 2) == 0.5


# Folders

BOTH_WAYS_TO_MEET = """
import torch, pipeschool as ps
x = torch.ones(4, 3)
for schedule in (ps.gpipe(2, 2), ps.replicate(ps.gpipe(1, 2), 2)):
    stages = [torch.nn.Linear(3, 3) for _ in range(schedule.stages)]
    print(len(ps.run(schedule, stages, [(x, x)], timeout=3.0).losses))
"""


@pytest.mark.parametrize(
    "name",
    ["Tee-Küche mit %20", *(pytest.param(n, marks=exhaustive) for n in ("sharp#?", "x" * 130))],
)
def test_temporary_folders_may_have_any_name(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    done = run_script(BOTH_WAYS_TO_MEET, TMPDIR=str(folder))
    assert (done.stdout.split(), done.stderr) == (["2", "4"], "")
    assert [f for f in folder.iterdir() if not f.name.startswith("torch")] == []  # theirs stays


# The stop button

INTERRUPTED_IMPORT = """
import os, signal, sys
import pipeschool as ps
signal.signal(signal.SIGINT, signal.default_int_handler)
pressed = []
def press(event, arguments):
    if event == "import" and arguments[0] == {module!r} and not pressed:
        pressed.append(True)
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(press)
def run():
    schedule = ps.gpipe(2, 2)
    return {call}
try:
    run()
except KeyboardInterrupt:
    print("stopped")
import torch
x = torch.ones(4, 3)
stages = [torch.nn.Linear(3, 3) for _ in range(2)]
print(len(ps.run(ps.gpipe(2, 2), stages, [(x, x)]).losses))
"""


@posix
@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("sympy", "ps.run(schedule, [], [])"),
        pytest.param("torch.distributed", "ps.run(schedule, [], [])", marks=exhaustive),
        pytest.param("sympy", "ps.train('gpipe', [], [], m=2)", marks=exhaustive),
        pytest.param("torch._dynamo", "ps.train('gpipe', [], [], m=2)", marks=exhaustive),
    ],
)
def test_the_stop_button_during_the_first_imports_leaves_nothing_half_imported(module, call):
    done = run_script(INTERRUPTED_IMPORT.format(module=module, call=call))
    assert (done.stdout.split(), done.stderr) == (["stopped", "2"], "")


STOPPED_SERVER = """
import os, signal, time
import pipeschool as ps, torch
from pipeschool.runtime.host.fork_server import start_early, stop_fork_server
signal.signal(signal.SIGINT, lambda *_: None)
x = torch.ones(4, 3)
for delay in (0.0, 0.05, 0.2):
    start_early()
    time.sleep(delay)
    os.killpg(0, signal.SIGINT)
    print(len(ps.run(ps.gpipe(2, 2), [torch.nn.Linear(3, 3) for _ in range(2)], [(x, x)]).losses))
    stop_fork_server()
"""


@exhaustive
@posix
def test_ctrl_c_while_the_fork_server_starts_is_not_for_the_server():
    done = run_script(STOPPED_SERVER)
    assert (done.stdout.split(), done.stderr) == (["2"] * 3, "")


@posix
def test_an_interrupt_that_is_held_back_comes_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts.held_back():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")
    assert done == ["all of it"]
    with interrupts.held_back():  # nobody pressed
        pass
