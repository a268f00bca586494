"""The clock: one for all workers, and what it tells of late wake-ups and of a busy machine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipeschool.runtime.clock import Clock, CoreWait
from pipeschool.runtime.cluster import time as cluster_time

SPIN = "while True: pass"


def test_worker_0_does_not_ask_itself_where_a_machine_has_no_boot_id(monkeypatch):
    monkeypatch.setattr(cluster_time, "BOOT", Path("no such file"))  # as on macOS
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert cluster_time.offset_to_worker_0() == 0.0
    finally:
        dist.destroy_process_group()


def test_a_clock_tells_the_time_of_worker_0():
    own, there = Clock(torch.device("cpu")), Clock(torch.device("cpu"), offset=-1000.0)
    before = time.perf_counter()
    moments = [own.now(), there.now() + 1000.0, own.seconds(own.mark()), there.mark() + 1000.0]
    after = time.perf_counter()
    assert all(before <= moment <= after for moment in moments)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux tells it alone")
def test_a_thread_that_shares_its_core_has_waited_for_it():
    code = f"import os; os.sched_setaffinity(0, {{0}})\n{SPIN}"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    found: list[float] = []

    def compete() -> None:
        import os

        os.sched_setaffinity(0, {0})  # of this thread alone
        wait = CoreWait()
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
        found.append(wait.since_last())
        found.append(wait.since_last())
        wait.close()

    try:
        time.sleep(0.5)
        thread = threading.Thread(target=compete)
        thread.start()
        thread.join()
    finally:
        for other in others:
            other.kill()
            other.wait()
    waited, at_once = found
    assert waited > 0.05  # a third of the core is its own, so about 0.4 s
    assert at_once < waited / 2
