"""The process that workers are forked from: a model's modules are imported once, and anew when
their files have changed."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pipeschool as ps
import psutil
import pytest
import torch
from pipeschool.runtime.host import fork_server
from pipeschool.runtime.own_modules import modules_of, own_files
from test_run import batch, linear_stages

MODEL = """
import os
from pathlib import Path
import torch

with open({log!r}, "a") as log:
    log.write(f"{{os.getpid()}}\\n")

FACTOR = {factor}

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6).double()

    def forward(self, x):
        return FACTOR * self.layer(x)
"""

pytestmark = pytest.mark.skipif(not fork_server.AVAILABLE, reason="this system has no fork server")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's own, as it is written, and the file in which it notes its imports."""
    name = f"own_model_{os.getpid()}"
    log, file = tmp_path / "imports", tmp_path / f"{name}.py"

    def write(factor: float) -> None:
        file.write_text(MODEL.format(log=str(log), factor=factor))
        later = 1_000_000_000 * (2_000_000_000 + int(factor))  # another time than before
        os.utime(file, ns=(later, later))

    write(1.0)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name, log, write
    sys.modules.pop(name, None)
    # The server must not look for a module whose file is gone.
    fork_server.preloaded.modules.remove(name)
    fork_server.preloaded.files.clear()
    fork_server.stop_fork_server()


def test_a_models_module_is_imported_once_for_all_workers_of_all_runs(module):
    name, log, _ = module
    model = importlib.import_module(name)
    stages = [*linear_stages(3), model.Scaled()]
    for _ in range(3):
        ps.run(ps.gpipe(4, 4), stages, [batch(8)])
        imported = log.read_text().split()
        assert imported[0] == str(os.getpid())
        assert len(imported) == 2  # here, and in the server


@pytest.mark.parametrize("reload", [False, True])
def test_a_file_that_has_changed_is_read_again(module, reload):
    name, log, write = module
    model = importlib.import_module(name)
    stage = model.Scaled()
    x, _ = batch(4)

    def output() -> torch.Tensor:
        return torch.cat(
            [y for (y,) in ps.run(ps.forward_only(1, 2), [stage], [(x, None)]).outputs]
        )

    before = output()
    write(3.0)
    importlib.invalidate_caches()
    if reload:
        importlib.reload(model)
    assert torch.equal(output(), 3 * before)


def test_a_module_that_cannot_be_imported_there_is_left_to_the_workers(tmp_path, monkeypatch):
    name = f"shy_model_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(
        MODEL.format(log=str(tmp_path / "log"), factor=1.0)
        + f"\nif os.getpid() != {os.getpid()}:\n    raise SystemExit('not here')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    stages = [*linear_stages(1), importlib.import_module(name).Scaled()]
    with pytest.raises(ps.RunError, match="worker 1 failed at its start: SystemExit: not here"):
        ps.run(ps.gpipe(2, 2), stages, [batch(4)])
    fork_server.preloaded.modules.remove(name)
    fork_server.preloaded.files.clear()
    fork_server.stop_fork_server()
    ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)])


def test_only_modules_that_a_worker_would_have_to_import_are_named():
    def loss(a, b):
        return (a - b).abs().mean()

    loss.__module__ = "__main__"  # as in a notebook
    assert modules_of([torch.nn.Linear(2, 2), ps.gpipe, Path("x"), loss, None, 3]) == []
    assert modules_of([linear_stages, pytest.approx(1.0)]) == [
        type(pytest.approx(1.0)).__module__,
        "test_run",
    ]


def test_the_users_own_files_are_those_that_are_not_installed():
    files = own_files()
    assert __file__ in files
    assert pytest.__file__ not in files
    assert os.__file__ not in files


def test_a_server_that_was_killed_is_started_again():
    ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)])
    for child in psutil.Process().children():
        if "multiprocessing.forkserver import" in " ".join(child.cmdline()):
            child.kill()  # and not waited for: the next run may meet it dying
    ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)])


@pytest.mark.parametrize(
    ("at_import", "works"),
    [
        ("os._exit(3)", False),
        ("import threading, time\n    threading.Thread(target=time.sleep, args=(99,), daemon=True)"
         ".start()", True),
    ],
    ids=["ends its process", "starts a thread"],
)  # fmt: skip
def test_a_module_with_which_the_server_cannot_live_is_left_to_the_workers(
    tmp_path, monkeypatch, at_import, works
):
    name = f"rough_model_{os.getpid()}_{works}"
    (tmp_path / f"{name}.py").write_text(
        MODEL.format(log=str(tmp_path / "log"), factor=1.0)
        + f"\nif os.getpid() != {os.getpid()}:\n    {at_import}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    stages = [*linear_stages(1), importlib.import_module(name).Scaled()]
    for _ in range(2):
        if works:
            assert ps.run(ps.gpipe(2, 2), stages, [batch(4)]).losses
        else:
            with pytest.raises(ps.RunError, match="worker 1 exited with status 3"):
                ps.run(ps.gpipe(2, 2), stages, [batch(4)])
        ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)])  # innocent
    assert name in fork_server.preloaded.refused
    sys.modules.pop(name)


def test_workers_have_the_default_dtype_of_the_caller():
    class Adds(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.ones(6)

    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            stage = Adds(6, 6)
            x = torch.ones(2, 6)
            (y,) = ps.run(ps.forward_only(1, 1), [stage], [(x, None)]).outputs[0]
        finally:
            torch.set_default_dtype(torch.float32)
        assert y.dtype == dtype


def test_a_class_of_a_notebook_names_the_modules_that_its_code_speaks_of():
    cell: dict = {"__name__": "__main__", "psutil": psutil, "linear_stages": linear_stages}
    exec(
        "class Stage:\n"
        "    def forward(self, x):\n"
        "        return psutil.cpu_count() + linear_stages(x) + len(x)",
        cell,
    )
    assert modules_of([cell["Stage"]()]) == ["psutil", "test_run"]
