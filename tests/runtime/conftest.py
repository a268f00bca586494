"""Shared by the tests that start real workers."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # `oracles`, which the folder above has, too


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
