"""Every way in which a run can fail ends it with one message and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pipeschool as ps
import psutil
import pytest
import torch
from faulty import Faulty, exits, killed, nan, raises, sleeps, wrong_shape
from pipeschool.actions import Action
from pipeschool.runtime import reference
from torch import nn

P, M, WIDTH = 4, 6, 5
PLACES = [("F", 0, 0), ("F", 2, 3), ("B", 1, 2), ("B", 3, 5)]


def stages_with(fault=None, where="F", worker=0, microbatch=0):
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH).double() for _ in range(P)]
    if fault:
        stages[worker] = Faulty(WIDTH, fault, where, microbatch)
    return stages


X = torch.randn(2 * M, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def failure(fault, place, **options):
    """The error of a run that meets `fault` at `place`; the run after it must be right."""
    where, worker, microbatch = place
    stages = stages_with(fault, where, worker, microbatch)
    with pytest.raises(ps.RunError) as caught:
        ps.run(ps.one_f_one_b(p=P, m=M), stages, [(X, X)], **options)
    healthy = stages_with()
    result = ps.run(ps.one_f_one_b(p=P, m=M), healthy, [(X, X)])
    expected = reference.gradients(healthy, [(X, X)], M)
    assert reference.max_error(result.gradients, expected) == 0.0
    return caught.value


def names_its_place(error, place):
    kind, worker, microbatch = place
    action = Action(kind, worker, microbatch)
    assert (error.worker, error.action, error.microbatch) == (worker, action, microbatch)
    assert f"worker {worker} " in str(error)
    assert str(action) in str(error)
    assert f"of microbatch {microbatch} on stage {worker}" in str(error)
    return True


@pytest.mark.parametrize("place", PLACES)
def test_a_stage_that_raises_is_named_with_the_learners_own_line(place):
    error = failure(raises, place)
    assert names_its_place(error, place)
    assert "KeyError: 'the brew is off'" in str(error)
    last = error.frames[-1]
    assert (last.file.endswith("faulty.py"), last.function) == (True, "raises")
    assert str(error).splitlines()[-1].endswith('in raises: raise KeyError("the brew is off")')


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_is_killed_is_named_not_the_neighbours_that_lost_it(place):
    error = failure(killed, place)
    assert names_its_place(error, place)
    assert "was killed by SIGKILL" in str(error)


@pytest.mark.parametrize("place", PLACES[1:3])
def test_a_worker_that_exits_by_itself_is_named_with_its_status(place):
    error = failure(exits, place)
    assert names_its_place(error, place)
    assert "exited with status 3" in str(error)


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_sleeps_for_ever_is_named_and_so_is_who_waits_for_it(place):
    error = failure(sleeps, place, timeout=1.0)
    assert names_its_place(error, place)
    assert "is stuck" in str(error)
    kind, worker, microbatch = place
    held_up = Action(f"RECV_{kind}", worker + (1 if kind == "F" else -1), microbatch)
    assert f"worker {held_up.stage} waits for it at {held_up}" in str(error)
    assert error.peer in (worker - 1, worker + 1)


@pytest.mark.parametrize("place", PLACES[:2])
def test_a_wrong_shape_is_named_where_it_does_not_fit_with_the_shape(place):
    error = failure(wrong_shape, place)
    kind, worker, microbatch = place
    assert names_its_place(error, (kind, worker + 1, microbatch))
    assert f"the input was ((2, {WIDTH + 1}) float64)" in str(error)


@pytest.mark.parametrize("place", PLACES)
def test_a_nan_stops_the_run_where_it_arises_on_request(place):
    error = failure(nan, place, nan_check=True)
    assert names_its_place(error, place)
    assert f"{error.action} gave NaN" in str(error)


def test_a_nan_passes_where_nobody_asked():
    result = ps.run(ps.gpipe(p=P, m=M), stages_with(nan, "F", 1, 2), [(X, X)])
    assert [loss != loss for loss in result.losses] == [k == 2 for k in range(M)]


@pytest.mark.parametrize(("worker", "microbatch"), [(1, 0), (2, 3), (3, 1)])
def test_receives_in_the_wrong_order_are_refused_before_launch(worker, microbatch):
    lowered = ps.lower(ps.gpipe(p=P, m=M))
    row = list(lowered.workers[worker])
    a = row.index(Action("RECV_F", worker, microbatch))
    b = row.index(Action("RECV_F", worker, microbatch + 1))
    row[a], row[b] = row[b], row[a]
    rows = (*lowered.workers[:worker], tuple(row), *lowered.workers[worker + 1 :])
    wrong = ps.Schedule("wrong", P, M, rows)
    with pytest.raises(ps.IllegalSchedule) as caught:
        ps.run(wrong, stages_with(), [(X, X)])
    assert (caught.value.worker, caught.value.microbatch) in [
        (worker, microbatch),
        (worker, microbatch + 1),
    ]


def test_a_worker_that_computes_for_long_is_not_taken_for_stuck():
    def busy(x):
        end = time.perf_counter() + 1.5
        while time.perf_counter() < end:
            pass
        return x

    stages = stages_with(busy, "F", 1, 1)
    result = ps.run(ps.gpipe(p=P, m=M), stages, [(X, X)], timeout=0.5)
    assert len(result.losses) == M


def test_a_loss_that_is_no_number_is_named():
    with pytest.raises(ps.RunError, match="the loss must be a tensor with one number") as caught:
        ps.run(ps.gpipe(p=P, m=M), stages_with(), [(X, X)], loss=lambda out, y: out - y)
    assert caught.value.action == Action("F", P - 1, 0)


def test_an_optimizer_that_raises_is_named_at_the_update():
    def optimizer(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.step = lambda: 1 / 0
        return optimizer

    with pytest.raises(ps.RunError, match=r"0U0 \(optimizer update number 0 on stage 0\)"):
        ps.run(
            ps.naive(p=1, m=1), [nn.Linear(WIDTH, WIDTH).double()], [(X, X)], optimizer=optimizer
        )


SLEEPER = """
import signal, subprocess, sys, time, torch, pipeschool as ps
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore it
class Sleepy(torch.nn.Linear):
    def forward(self, x):
        subprocess.Popen(["sleep", "1000"])
        print("asleep", flush=True)
        time.sleep(1000)
x = torch.ones(4, 3)
schedule = ps.replicate(ps.gpipe(p=1, m=2), 2)  # they meet in torch.distributed
ps.run(schedule, [Sleepy(3, 3)], [(x, x)], timeout=500)
"""


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_its_controller(how, tmp_path):
    script = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    for _ in range(2):
        assert "asleep" in script.stdout.readline()
    family = psutil.Process(script.pid).children(recursive=True)
    assert len(family) >= 5  # workers, what each has started, and what multiprocessing keeps
    assert [p.name() for p in family].count("sleep") == 2
    script.send_signal(how)
    _, err = script.communicate(timeout=30)
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    if how == signal.SIGINT:
        assert "RunStopped: stopped: all workers have been ended (worker 0 was at 0F0" in err
    assert [f.name for f in tmp_path.iterdir() if not f.name.startswith("torch")] == []
