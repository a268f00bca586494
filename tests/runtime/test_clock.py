"""One clock for all workers, whatever their machines say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pipeschool as ps
import torch
import torch.distributed as dist
from pipeschool.runtime import clock
from pipeschool.runtime.torch_engine.shipped import Row


def test_worker_0_does_not_ask_itself_where_a_machine_has_no_boot_id(monkeypatch):
    monkeypatch.setattr(clock, "BOOT", Path("no such file"))  # as on macOS
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        clock.agree_on_time()
    finally:
        dist.destroy_process_group()
    assert clock.offset == 0.0


def test_a_paced_action_of_pytorchs_engine_goes_by_the_clock_of_worker_0(monkeypatch):
    monkeypatch.setattr(clock, "offset", -1000.0)  # another machine's clock
    job = SimpleNamespace(schedule=ps.gpipe(1, 1), pace={"F": [0.02]})
    row = Row(0, job, [-1], torch.device("cpu"))
    row.weights = {0: SimpleNamespace(ledger=SimpleNamespace(newest=0))}
    row.begin("F", 0, 0)
    row.end()
    ((_, start, end, _),) = row.marks
    assert 0.02 <= end - start < 10
