"""Which module may import which: each only from floors below its own, so nothing goes in circles.

The modules and packages right under pipeschool have their floors in one table. A package may have a
table of its own for what is in it; without one its files may import each other, as long as no two
of them do so in a circle.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "pipeschool"

FLOORS = {
    "arguments": 0,
    "memory": 0,
    "actions": 1,
    "dependencies": 2,
    "formats": 2,
    "versions": 2,
    "cost": 2,
    "trace": 2,
    "lateness": 3,
    "schedules": 3,
    "checking": 3,
    "lowering": 4,
    "problem": 4,
    "simulator": 5,
    "greedy_schedule": 5,
    "runtime": 5,
    "text": 5,
    "mix": 6,
    "optimal": 6,
    "partition": 6,
    "draw": 6,
    "stability": 6,
    "tune": 7,
    "bench": 7,
    "course_data": 7,
    "widgets": 7,
    "grade": 7,
    "bench_report": 8,
    "cli": 9,
    "publish": 9,
}
# The same within a package: its files and the packages in it. An empty table asks for nothing.
RUNTIME_FLOORS = {
    "clock": 0,
    "described": 0,
    "errors": 0,
    "interrupts": 0,
    "keepable": 0,
    "own_modules": 0,
    "options": 1,
    "stall": 0,
    "checkpoint": 1,
    "weights": 2,
    "stages": 3,
    "identity": 4,
    "reference": 4,
    "wire": 4,
    "observers": 5,
    "measure": 6,
    "share": 6,
    "engine": 7,
    "torch_engine": 7,
    "host": 8,
    "changes": 9,
    "cluster": 9,
    "loader": 9,
    "book": 10,
    "launch": 10,
    "plan": 9,
    "training": 11,
}
FLOORS_WITHIN: dict[str, dict[str, int]] = {
    "pipeschool.actions": {"action": 0, "form": 1, "schedule": 2},
    "pipeschool.checking": {"together": 0, "rendezvous": 1, "rows": 1},
    "pipeschool.partition": {
        "cuts": 0,
        "profile": 0,
        "chain": 1,
        "measuring": 2,
        "plan": 2,
        "planners": 3,
    },
    "pipeschool.runtime": RUNTIME_FLOORS,
}

LIGHT = 5  # up to this floor a module starts without torch, numpy and matplotlib
MAY_NEED_TORCH = {"runtime"}
WITHOUT_TORCH = {name for name, floor in FLOORS.items() if floor <= LIGHT} - MAY_NEED_TORCH
HEAVY = {"torch", "numpy", "matplotlib"}


def module_name(file: Path) -> str:
    """What `file` is called in an import, such as ``pipeschool.draw.style``."""
    parts = ["pipeschool", *file.relative_to(LIBRARY).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(LIBRARY.rglob("*.py"))}
LIGHT_FILES = [
    name for name in FILES if name == "pipeschool" or name.split(".")[1] in WITHOUT_TORCH
]


def package_of(name: str) -> str:
    """The package that the module `name` is in; of a package, itself."""
    return name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]


def imports(source: str, package: str, typing_too: bool = True) -> Iterator[str]:
    """Full names of all that `source` imports, wherever in it. `package`: the one that it is in.

    typing_too: also what is imported under ``if TYPE_CHECKING:``, which never happens in a run.
    """
    tree = ast.parse(source)
    if not typing_too:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from pipeschool import trace` names a module as `import pipeschool.trace` does.
            yield from (f"{module}.{alias.name}" for alias in node.names)


# --- floors --------------------------------------------------------------------------------------


def faults(
    module: str,
    source: str,
    package: str = "pipeschool",
    within: str = "pipeschool",
    floors: Mapping[str, int] = FLOORS,
) -> list[str]:
    """One sentence for each import of `module` that does not come from a floor below.

    `floors` are those of the modules right under `within`. The top floor of the library may come
    in through its front door: everything there is below it.
    """
    at_the_top = within == "pipeschool" and floors[module] == max(floors.values())
    found = []
    for name in imports(source, package):
        if name != within and not name.startswith(f"{within}."):
            continue
        other = name.removeprefix(within).removeprefix(".").partition(".")[0]
        if other == module:
            continue
        if other not in floors:  # the front door itself, or a name taken from it
            if not at_the_top:
                found.append(
                    f"{module} imports {name}, and so all floors: import from the module that has "
                    f"what it needs"
                )
        elif floors[other] >= floors[module]:
            found.append(
                f"{module} (floor {floors[module]}) imports {other} (floor {floors[other]}): "
                f"a module imports only from floors below it"
            )
    return list(dict.fromkeys(found))


TABLES = {"pipeschool": FLOORS, **{package: t for package, t in FLOORS_WITHIN.items() if t}}
ON_A_FLOOR = [
    (name, within)
    for within in TABLES
    for name in FILES
    if name.startswith(f"{within}.")  # so without the front door, which shows what all floors offer
]


@pytest.mark.parametrize(("name", "within"), ON_A_FLOOR)
def test_module_imports_only_from_floors_below(name: str, within: str) -> None:
    floors = TABLES[within]
    module = name.removeprefix(f"{within}.").partition(".")[0]
    assert module in floors, (
        f"{module} is on no floor of {within} yet: add it to its table in {Path(__file__).name}"
    )
    source = FILES[name].read_text(encoding="utf-8")
    assert not faults(module, source, package_of(name), within, floors)


@pytest.mark.parametrize("within", TABLES)
def test_every_floor_has_its_module(within: str) -> None:
    assert {f"{within}.{module}" for module in TABLES[within]} <= FILES.keys()


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        (
            "checking",
            "from pipeschool.lowering import lower",
            "checking (floor 3) imports lowering (floor 4)",
        ),
        (
            "checking",
            "import pipeschool.schedules",
            "checking (floor 3) imports schedules (floor 3)",
        ),
        (
            "checking",
            "def f():\n    from pipeschool import lowering",
            "checking (floor 3) imports lowering",
        ),
        ("checking", "from . import lowering", "checking (floor 3) imports lowering (floor 4)"),
        (
            "checking",
            "from .lowering import lower",
            "checking (floor 3) imports lowering (floor 4)",
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
    assert not faults("lowering", "from pipeschool.checking import check\nimport math, torch")
    assert not faults(
        "runtime",
        "from pipeschool.runtime.pool import Pool\nfrom .pool import Pool",
        "pipeschool.runtime",
    )


SHOP_FLOORS = {"shelf": 0, "till": 1}  # a package that there is not, to try the mechanism with


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("from pipeschool.shop.till import pay", "shelf (floor 0) imports till (floor 1)"),
        ("from pipeschool.shop import till", "shelf (floor 0) imports till (floor 1)"),
        ("def f():\n    from .till import pay", "shelf (floor 0) imports till (floor 1)"),
        ("from . import Shop", "shelf imports pipeschool.shop.Shop, and so all floors"),
        ("import pipeschool.shop", "shelf imports pipeschool.shop, and so all floors"),
    ],
)
def test_a_wrong_import_inside_a_package_is_seen(source: str, says: str) -> None:
    (fault,) = faults("shelf", source, "pipeschool.shop", "pipeschool.shop", SHOP_FLOORS)
    assert fault.startswith(says)


def test_a_right_import_inside_a_package_passes() -> None:
    source = "from pipeschool.shop.shelf import take\nfrom pipeschool.shop.till.coins import change"
    inside = "pipeschool.shop.till"
    assert not faults("till", source, inside, "pipeschool.shop", SHOP_FLOORS)


# --- circles -------------------------------------------------------------------------------------


def library_graph() -> dict[str, set[str]]:
    """For each file of the library, by its name, those that it imports, also inside functions."""
    graph = {}
    for name, file in FILES.items():
        source = file.read_text(encoding="utf-8")
        found = {file_of(i) for i in imports(source, package_of(name), typing_too=False)}
        graph[name] = found - {"", name}
    return graph


def file_of(name: str) -> str:
    """The file that an import of `name` reads: its own, or the one that `name` is taken from; empty
    where it is none of the library's."""
    return name if name in FILES or not name else file_of(name.rpartition(".")[0])


def circle(graph: Mapping[str, set[str]]) -> str:
    """A circle of imports in `graph`, written out; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        imported_by = error.args[1]
        return " imports ".join(reversed(imported_by))
    return ""


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not circle(library_graph()), f"imports go in a circle: {circle(library_graph())}"


def test_a_circle_is_written_out() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == ""
    found = circle({"a": {"b"}, "b": {"c"}, "c": {"d", "e"}, "d": {"b"}, "e": set()})
    assert found in " imports ".join(["b", "c", "d"] * 2)
    assert found.count("imports") == 3


def test_imports_inside_functions_count_and_those_for_type_checkers_do_not() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from pipeschool.draw import Chart\n"
        "def f():\n    from .style import BOX\n"
    )
    found = {file_of(name) for name in imports(source, "pipeschool.draw", typing_too=False)}
    assert found == {"", "pipeschool.draw.style"}
    assert "pipeschool.draw.Chart" in imports(source, "pipeschool.draw")


# --- what is loaded ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIGHT_FILES)
def test_low_floors_do_not_name_torch(name: str) -> None:
    source = FILES[name].read_text(encoding="utf-8")
    named = {imported.partition(".")[0] for imported in imports(source, package_of(name))}
    assert not named & HEAVY


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
