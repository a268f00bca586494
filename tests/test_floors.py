"""Which module may import which: each only from floors below its own, so nothing goes in circles.

A module of a package, such as run/, is on the floor of its package, and may import its siblings.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "pipeschool"

FLOORS = {
    "actions": 0,
    "memory": 0,
    "schedules": 1,
    "lowering": 1,
    "formats": 1,
    "cost": 1,
    "trace": 1,
    "versions": 1,
    "checking": 2,
    "problem": 2,
    "simulator": 3,
    "greedy_schedule": 3,
    "runtime": 3,
    "text": 3,
    "mix": 4,
    "optimal": 4,
    "partition": 4,
    "draw": 4,
    "tune": 5,
    "stability": 4,
    "bench": 5,
    "bench_report": 6,
    "course_data": 5,
    "widgets": 5,
    "grade": 5,
    "cli": 7,
    "publish": 7,
}
MAY_NEED_TORCH = {"runtime"}  # of floors 0 to 3
WITHOUT_TORCH = {name for name, floor in FLOORS.items() if floor <= 3} - MAY_NEED_TORCH
HEAVY = {"torch", "numpy", "matplotlib"}


def module_of(file: Path) -> str:
    """Name of the module or package right under pipeschool that holds `file`."""
    return file.relative_to(LIBRARY).parts[0].removesuffix(".py")


FILES = sorted(LIBRARY.rglob("*.py"))
LIGHT_FILES = [file for file in FILES if module_of(file) in WITHOUT_TORCH | {"__init__"}]


def imports(source: str, here: str) -> Iterator[str]:
    """Full names of all that `source` imports, wherever in it. `here`: the package it is in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = here.split(".")
            base = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from pipeschool import trace` names a module as `import pipeschool.trace` does.
            names = [alias.name for alias in node.names] if module == "pipeschool" else [""]
            yield from (".".join(filter(None, [module, name])) for name in names)


def package_of(file: Path) -> str:
    return ".".join(["pipeschool", *file.relative_to(LIBRARY).parts[:-1]])


def faults(module: str, source: str, package: str = "pipeschool") -> list[str]:
    """One sentence for each import of `module` that does not come from a floor below.

    The top floor may come in through the front door: everything there is below it.
    """
    found = []
    for name in imports(source, package):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top != "pipeschool" or other == module:
            continue
        if other not in FLOORS:  # the front door itself, or a name taken from it
            if FLOORS[module] < max(FLOORS.values()):
                found.append(
                    f"{module} imports {name}, and so all floors: import from the module that has "
                    f"what it needs"
                )
        elif FLOORS[other] >= FLOORS[module]:
            found.append(
                f"{module} (floor {FLOORS[module]}) imports {other} (floor {FLOORS[other]}): "
                f"a module imports only from floors below it"
            )
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(LIBRARY)))
def test_module_imports_only_from_floors_below(file: Path) -> None:
    module = module_of(file)
    if module == "__init__":
        return  # the front door shows what all floors offer
    assert module in FLOORS, (
        f"{module} is on no floor yet: add it to FLOORS in {Path(__file__).name}"
    )
    assert not faults(module, file.read_text(encoding="utf-8"), package_of(file))


@pytest.mark.parametrize("file", LIGHT_FILES, ids=lambda file: str(file.relative_to(LIBRARY)))
def test_low_floors_do_not_name_torch(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    named = {name.partition(".")[0] for name in imports(source, package_of(file))}
    assert not named & HEAVY


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        (
            "lowering",
            "from pipeschool.checking import check",
            "lowering (floor 1) imports checking (floor 2)",
        ),
        ("lowering", "import pipeschool.cost", "lowering (floor 1) imports cost (floor 1)"),
        (
            "lowering",
            "def f():\n    from pipeschool import checking",
            "lowering (floor 1) imports checking",
        ),
        ("lowering", "from . import checking", "lowering (floor 1) imports checking (floor 2)"),
        (
            "lowering",
            "from .checking import check",
            "lowering (floor 1) imports checking (floor 2)",
        ),
        ("grade", "import pipeschool as ps", "grade imports pipeschool, and so all floors"),
        (
            "draw",
            "from pipeschool import Trace",
            "draw imports pipeschool.Trace, and so all floors",
        ),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, says: str) -> None:
    (fault,) = faults(module, source)
    assert fault.startswith(says)


def test_imports_of_floors_below_and_of_siblings_pass() -> None:
    assert not faults("cli", "import pipeschool as ps\nfrom pipeschool import draw")
    assert not faults("checking", "from pipeschool.lowering import lower\nimport math, torch")
    assert not faults(
        "runtime",
        "from pipeschool.runtime.pool import Pool\nfrom .pool import Pool",
        "pipeschool.runtime",
    )


def test_simulating_loads_neither_torch_nor_numpy_nor_matplotlib() -> None:
    code = (
        "import sys, pipeschool as ps\n"
        "schedule = ps.check(ps.build('1f1b', 4, 8, batches=2))\n"
        "print(ps.simulate(ps.lower(schedule)).metrics(), schedule)\n"
        f"print(sorted({HEAVY} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "makespan" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
