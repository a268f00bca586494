"""What ``import pipeschool`` offers: all of it is listed, none of it hides a module."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pipeschool as ps
import pytest

MODULES = [module.name for module in pkgutil.walk_packages(ps.__path__, "pipeschool.")]


@pytest.mark.parametrize("name", MODULES)
def test_no_function_hides_a_module(name: str) -> None:
    parent, _, child = name.rpartition(".")
    module = importlib.import_module(name)
    if parent == "pipeschool.schedules":
        return  # a file there is called as its one function, and the function is what is meant
    assert getattr(importlib.import_module(parent), child) is module


def test_dir_lists_everything() -> None:
    assert {*ps.__all__, *ps._LATER} <= set(dir(ps))
    assert set(ps.partition.__all__) <= set(dir(ps.partition))
    assert all(getattr(ps, name) is not None for name in dir(ps))


def test_type_checkers_see_the_modules_that_load_later() -> None:
    tree = ast.parse(Path(ps.__file__).read_text(encoding="utf-8"))
    (for_checkers,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname
        for node in for_checkers.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert ast.unparse(for_checkers.test) == "TYPE_CHECKING"
    assert seen == ps._LATER


def test_a_tab_completes_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, rlcompleter, pipeschool as ps\n"
        "print(rlcompleter.Completer({'ps': ps}).attr_matches('ps.part'))\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['ps.partition']", "[]"]


def test_what_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="^module 'pipeschool' has no attribute 'gantt'$"):
        ps.gantt  # noqa: B018


def test_importing_all_of_it_ends_nothing_and_leaves_signals_alone() -> None:
    code = (
        "import importlib, signal, sys, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "before = [signal.getsignal(n) for n in sorted(signal.valid_signals())]\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(before == [signal.getsignal(n) for n in sorted(signal.valid_signals())])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *MODULES], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
