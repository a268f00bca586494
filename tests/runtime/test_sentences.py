"""Whatever is wrong with a process, its machine or its arguments is said in one short sentence."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pipeschool as ps
import pytest
import torch
from pipeschool.actions import Action
from pipeschool.runtime.errors import MOST_MESSAGE, Frame, RunError, shortened, with_frames
from test_run import batch, linear_stages
from torch import nn

posix = pytest.mark.skipif(os.name != "posix", reason="needs fork")


# What stages raise


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def endless(x: torch.Tensor) -> torch.Tensor:
    return endless(x)


def mute(x: torch.Tensor) -> torch.Tensor:
    raise Mute


def talkative(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("start" + "z" * 100_000 + "end")


def nested(x: torch.Tensor) -> torch.Tensor:
    ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)])
    return x


class Calls(nn.Linear):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(6, 6, dtype=torch.float64)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(super().forward(x))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (endless, "RecursionError: maximum recursion depth exceeded"),
        (mute, r"Mute: \(it cannot say what: its __str__ fails\)"),
        (talkative, r"ValueError: startz+ \.\.\. z+end"),
        (nested, "ValueError: a worker, as any daemonic process .* cannot have workers of its own"),
    ],
)
def test_what_a_stage_raises_is_told_in_short(function, says):
    with pytest.raises(ps.RunError, match=f"^worker 1 failed at 1F0 .*: {says}") as caught:
        ps.run(ps.gpipe(2, 2), [*linear_stages(1), Calls(function)], [batch(4)])
    first, *lines = str(caught.value).splitlines()
    assert len(str(caught.value)) <= MOST_MESSAGE
    assert caught.value.action == Action("F", 1, 0)
    assert 1 <= len(lines) <= 6
    if function is not nested:
        assert len(first) < 300
    assert lines[-1].startswith(f"  {__file__}:")


def test_of_many_lines_the_first_and_the_last_are_shown():
    frames = [Frame("no_such_file.py", line, "f") for line in range(1, 101)]
    shown = with_frames("a sentence", frames).splitlines()
    assert shown == [
        "a sentence",
        "  no_such_file.py:1 in f",
        "  ... 95 more lines ...",
        *(f"  no_such_file.py:{line} in f" for line in range(97, 101)),
    ]


def test_a_message_is_never_longer_than_the_most():
    frames = [Frame("x" * 150, 1, "f")] * 6
    assert len(with_frames("y" * 600, frames)) <= MOST_MESSAGE
    assert len(str(RunError("z" * 5000))) == MOST_MESSAGE
    assert shortened("short") == "short"


# Processes that can have no workers, or seem not to


def sentence_of_a_run() -> str:
    try:
        return f"{len(ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)]).losses)} losses"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def say(pipe: object) -> None:
    pipe.send(sentence_of_a_run())
    if multiprocessing.current_process().name == "forked":
        from pipeschool.runtime.host.fork_server import stop_fork_server

        stop_fork_server()


@posix
@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_workers_of_its_own_unless_it_is_a_daemon(daemon):
    assert sentence_of_a_run() == "2 losses"  # so that there is a server to be forked with
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=say, args=(there,), daemon=daemon, name="forked")
    process.start()
    assert here.poll(60)
    said = here.recv()
    process.join()
    assert sentence_of_a_run() == "2 losses"
    if daemon:
        assert said == (
            "ValueError: a worker, as any daemonic process of multiprocessing, cannot have workers "
            "of its own: call this from a process that was started with daemon=False"
        )
    else:
        assert said == "2 losses"


def test_a_variable_left_over_from_torchrun_does_not_make_this_a_worker(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "yesterday")
    assert sentence_of_a_run() == "2 losses"


@posix
def test_a_working_directory_that_is_gone_is_told(tmp_path):
    sentence_of_a_run()
    before = os.getcwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    try:
        gone.rmdir()
        assert sentence_of_a_run() == (
            "ValueError: the working directory has been deleted, so no worker can start in it: "
            "change to one that is there"
        )
    finally:
        os.chdir(before)
    assert sentence_of_a_run() == "2 losses"


# Machines

RUN = """
import sys, torch, pipeschool as ps
p, replicas = int(sys.argv[1]), int(sys.argv[2])
schedule = ps.gpipe(p, 2)
if replicas > 1:
    schedule = ps.replicate(schedule, replicas)
stages = [torch.nn.Linear(3, 3) for _ in range(p)]
x = torch.ones(4, 3)
try:
    print(len(ps.run(schedule, stages, [(x, x)]).losses), "losses")
except (ValueError, ps.RunError) as error:
    print(type(error).__name__, error, sep=": ")
"""


def run_in(shell: str, p: int, replicas: int = 1) -> str:
    """What the script prints in a shell that `shell` has changed, and that it prints no more."""
    script = f'exec "{sys.executable}" -c "$RUN" {p} {replicas}'
    done = subprocess.run(
        ["bash", "-c", f"{shell}{script}"],
        env=os.environ | {"RUN": RUN},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.strip()


@posix
@pytest.mark.parametrize(
    ("files", "p", "says"),
    [
        (32, 2, "2 losses"),
        (
            64,
            16,
            "RunError: the workers could not be started: [Errno 24] Too many open files: allow "
            "more open files, such as with `ulimit -n 1024`, or take fewer workers",
        ),
    ],
)
def test_a_limit_on_open_files_is_told_where_it_is_reached(files, p, says):
    assert run_in(f"ulimit -n {files}; ", p) == says


def may_unshare(what: str) -> bool:
    """Can this user have a namespace of that kind?"""
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run(["unshare", what, "true"], capture_output=True).returncode
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(not may_unshare("-n"), reason="needs network namespaces")
def test_without_a_network_only_workers_that_need_one_are_refused():
    script = f'{sys.executable} -c "$RUN"'
    for p, replicas, says in [
        (2, 1, "2 losses"),
        (
            1,
            2,
            "ValueError: the workers of this run meet over the network, and no interface of this "
            "machine is up: start the loopback, such as with `ip link set lo up`",
        ),
    ]:
        assert run_in(f"exec unshare -n {script} {p} {replicas}; ", p) == says


@pytest.mark.exhaustive
@pytest.mark.skipif(not may_unshare("-m"), reason="needs mount namespaces")
def test_memory_that_cannot_be_written_is_told():
    script = f'mount -t tmpfs -o ro none /dev/shm && {sys.executable} -c \\"\\$RUN\\" 2 1'
    said = run_in(f'exec unshare -m bash -c "{script}"; ', 2)
    assert said.startswith("RunError: the workers could not be started: [Errno 30] Read-only file")
    assert said.endswith(": it must be possible to write there")
    assert len(said) < 300


# Arguments


def test_targets_that_are_no_tensors_are_told_in_short():
    x, _ = batch(64)
    with pytest.raises(TypeError) as caught:
        ps.run(ps.gpipe(2, 2), linear_stages(2), [(x, [1] * 64)])
    assert str(caught.value) == (
        "a batch must give a tensor or a tuple of tensors, not (int, int, int, int, ... 64 in all)"
    )
    assert caught.value._render_traceback_() == [f"TypeError: {caught.value}"]


def test_what_does_not_train_is_not_for_train():
    with pytest.raises(ValueError) as caught:
        ps.train("forward_only", linear_stages(2), [batch(4)], m=2)
    assert str(caught.value) == "forward_only does not train: ps.run takes it, train cannot"
