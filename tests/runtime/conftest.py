"""Shared by the tests that start real workers."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import torch
from pipeschool.runtime.host import fork_server

sys.path.append(str(Path(__file__).parents[1]))  # `oracles`, which the folder above has, too


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fork server import all modules of these tests at its start: each of them that comes
    later, with a stage of its own, would have it started again."""
    modules = {path.stem for path in Path(__file__).parent.glob("*.py")} & sys.modules.keys()
    if len(session.items) > 1:
        fork_server.start_early(sorted(modules - {"conftest"}))


def worker_processes() -> list[psutil.Process]:
    """Every process below this one, except the two that multiprocessing keeps for its own use."""
    keepers = ("multiprocessing.forkserver import", "multiprocessing.resource_tracker import")
    found = []
    for child in psutil.Process().children():
        command = " ".join(child.cmdline())
        if "ipykernel" in command:  # a notebook's kernel; its tests look below it themselves
            continue
        if any(keeper in command for keeper in keepers):
            found += child.children(recursive=True)
        else:
            found.append(child)
    return found


@pytest.fixture
def one_thread():
    """Compute on one thread, as a worker does: several would cut a sum into other parts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_orphans():
    """No test may leave a worker behind."""
    yield
    assert worker_processes() == []
