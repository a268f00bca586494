"""Faults at random places: every run ends within its limit and names the worker, nothing is left,
and the training goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pipeschool as ps
import pytest
import torch
import torch.distributed as dist
from conftest import worker_processes
from pipeschool.runtime.host.fork_server import start_fork_server
from pipeschool.runtime.host.pool import Pool, blank_main
from training_under_faults import BATCHES, WORKERS, Striker, be_elastic, hit, train

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("alone"),
    pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals"),
]
KINDS = ["SIGKILL", "SIGSTOP", "raise"]
EACH = 17
PATIENCE = 60  # seconds for one training, on a busy machine
SAYS = {
    "SIGKILL": "was killed by SIGKILL|was lost",
    "SIGSTOP": "is frozen",
    "raise": "failed at .*KeyError: 'the brew is off'",
}


@pytest.fixture
def folder_of_temporary_files(tmp_path_factory, monkeypatch) -> Path:
    """For these runs alone, so that one can see what they leave."""
    folder: Path = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def seconds(undisturbed, tmp_path_factory) -> float:
    """How long a training takes."""
    folder = tmp_path_factory.mktemp("timed")
    began = time.monotonic()
    train(folder)
    return time.monotonic() - began


def same(found, expected) -> bool:
    return all(
        torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b
    )


@pytest.mark.parametrize("kind", KINDS)
def test_on_one_machine(
    kind, tmp_path, monkeypatch, undisturbed, seconds, folder_of_temporary_files
):
    draw = random.Random(f"one machine {kind}")
    pools: list[Pool] = []
    start = Pool._start

    def noted(pool, context, rank):
        start(pool, context, rank)
        if rank == WORKERS - 1:
            pools.append(pool)

    monkeypatch.setattr(Pool, "_start", noted)
    struck = 0
    for case in range(EACH):
        folder = tmp_path / str(case)
        folder.mkdir()
        worker, leg = draw.randrange(WORKERS), draw.randrange(BATCHES)
        delay = 0.7 * draw.random() * seconds / BATCHES
        pools.clear()

        strikers: list[Striker] = []
        what = delay, kind, worker, folder, leg, strikers

        def when_started(pool, context, rank, what=what):
            delay, kind, worker, folder, leg, strikers = what
            noted(pool, context, rank)
            if rank == WORKERS - 1 and len(pools) == leg + 1:
                striker = Striker(delay, kind, worker, pool.processes[worker].pid, folder)
                striker.start()
                strikers.append(striker)

        with monkeypatch.context() as patch:
            patch.setattr(Pool, "_start", when_started)
            began = time.monotonic()
            try:
                found = train(folder)
            except ps.RunError as error:
                struck += 1
                assert error.worker == worker, f"case {case}: {error}"
                assert re.search(SAYS[kind], str(error)), f"case {case}: {error}"
            else:
                assert same(found, undisturbed)  # it came too late
            assert time.monotonic() - began < PATIENCE
            for striker in strikers:
                striker.over.set()
                striker.join()
        (folder / f"trip{worker}").unlink(missing_ok=True)
        assert worker_processes() == []
        assert same(train(folder), undisturbed), f"case {case}"
    assert struck > EACH // 6
    assert [*folder_of_temporary_files.iterdir()] == []


def elastic_training(folder: Path, fault=None, stop: int = -1) -> list[int]:
    """Exit statuses of workers that train under torchrun's variables. fault: how many checkpoints
    have been written when it strikes, and how many seconds later; its kind, and the worker.
    stop: a worker that is stopped while the processes meet."""
    temporary = os.environ["TMPDIR"]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = start_fork_server()
    with blank_main():
        processes = [
            context.Process(
                target=be_elastic, args=(rank, store.port, folder, temporary, stop), daemon=True
            )
            for rank in range(WORKERS)
        ]
        for process in processes:
            process.start()
    try:
        if fault:
            checkpoints, delay, kind, worker = fault
            wait_for_checkpoints(folder, checkpoints)
            time.sleep(delay)
            if processes[worker].is_alive():
                hit(kind, worker, processes[worker].pid, folder)
        deadline = time.monotonic() + PATIENCE
        for process in [p for w, p in enumerate(processes) if w not in (stop, (fault or [-1])[-1])]:
            process.join(max(deadline - time.monotonic(), 0.0))
        for process in processes:  # one that was stopped is not woken where the others have ended
            process.join(3.0)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def wait_for_checkpoints(folder: Path, number: int) -> None:
    """Every worker writes one after each leg."""
    seen, deadline = set(), time.monotonic() + PATIENCE
    while len(seen) < number and time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            seen.add((folder / "checkpoint").stat().st_mtime_ns)
        time.sleep(0.001)


def elastic_case(folder: Path, kind: str, fault, expected) -> tuple[int, str]:
    """(1 where the fault struck, what was wrong)"""
    folder.mkdir()
    checkpoints, delay, worker = fault
    statuses = elastic_training(folder, (checkpoints, delay, kind, worker))
    logs = "".join(path.read_text() for path in folder.glob("log*"))
    others = [status for w, status in enumerate(statuses) if w != worker]
    if None in others:
        return 1, f"{statuses} {logs}: did not end"
    struck = int(any(others))  # where they have all done their work, the fault came too late
    if struck:
        sentences = re.findall(r"^pipeschool: (.*)$", logs, flags=re.MULTILINE)
        # Where no connection was open, nobody can tell the one from the other.
        says = f"{SAYS[kind]}|{SAYS['SIGSTOP']}"
        named = [s for s in sentences if re.match(f"worker {worker} .*(?:{says})", s)]
        # One that was stopped, and goes on when the others have found that out in a later run than
        # it is in, adds what it has seen itself.
        most = 2 if kind == "SIGSTOP" else 1
        if not 1 <= len(sentences) <= most or len(named) != 1 or "Traceback" in logs:
            return struck, f"{statuses} {logs}"
        if 0 in others:
            return struck, f"{statuses} {logs}"
    (folder / f"trip{worker}").unlink(missing_ok=True)
    again = elastic_training(folder)
    results = [torch.load(folder / f"result{w}") for w in range(WORKERS)] if not any(again) else []
    if not results or not all(same(result, expected) for result in results):
        return struck, f"{again}: the resumed training differs"
    return struck, ""


def test_a_worker_that_is_stopped_while_all_meet_is_named(tmp_path, folder_of_temporary_files):
    began = time.monotonic()
    statuses = elastic_training(tmp_path, stop=1)
    assert statuses[0] == 1
    assert time.monotonic() - began < PATIENCE
    assert (tmp_path / "log0").read_text() == (
        "pipeschool: worker 1 is frozen at its start: its process was stopped or its machine has "
        "gone, and nothing was heard of it for 5 s\n"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_under_torchrun(kind, tmp_path, undisturbed, folder_of_temporary_files):
    draw = random.Random(f"torchrun {kind}")
    latest = WORKERS * BATCHES // 2
    faults = [
        (draw.randint(1, latest), draw.random() * 0.05, draw.randrange(WORKERS))
        for _ in range(EACH)
    ]
    cases = [(tmp_path / str(case), kind, fault, undisturbed) for case, fault in enumerate(faults)]
    with ThreadPoolExecutor(4) as at_once:
        found = list(at_once.map(lambda case: elastic_case(*case), cases))
    assert [wrong for _, wrong in found if wrong] == []
    assert sum(struck for struck, _ in found) > EACH // 6
    assert [*folder_of_temporary_files.iterdir()] == []
