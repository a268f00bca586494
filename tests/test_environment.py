"""pyproject.toml says what the course needs; the lock, environment.yml and the README agree."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # where conda-forge differs
NOT_FROM_CONDA = {"ortools"}  # too old there; installing pipeschool itself by pip brings it

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def ranges(lines: list[str]) -> dict[str, SpecifierSet]:
    """`name -> range` of requirement lines such as `numpy>=2.0,<3`."""
    return {canonicalize_name(r.name): r.specifier for r in map(Requirement, lines)}


RUNTIME = ranges(PROJECT["dependencies"])
DIRECT = RUNTIME | ranges(PROJECT["optional-dependencies"]["dev"])


def locked() -> dict[str, Version]:
    """`name -> version` of the lock; every line but comments must be `name==public version`."""
    versions: dict[str, Version] = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([\w.-]+)==([0-9][0-9a-z.]*)", line)
        assert match, f"requirements.lock: {line!r} is not name==version"
        name = canonicalize_name(match[1])
        assert name not in versions, f"requirements.lock names {name} twice"
        versions[name] = Version(match[2])
    return versions


@pytest.mark.parametrize("name", DIRECT)
def test_range_has_both_ends(name: str) -> None:
    operators = {s.operator for s in DIRECT[name]}
    assert operators == {">=", "<"}, f"{name}: give a lower and an upper bound"


@pytest.mark.parametrize("name", DIRECT)
def test_locked_version_is_inside_the_range(name: str) -> None:
    versions = locked()
    assert name in versions, f"requirements.lock has no line for {name}"
    assert versions[name] in DIRECT[name], f"{name}=={versions[name]} is outside {DIRECT[name]}"


def test_conda_environment_has_the_same_ranges() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip_section = environment["dependencies"]
    assert pip_section == {"pip": ["-e ."]}, "environment.yml must install pipeschool itself, last"
    found = ranges(conda)
    assert found.pop("pip") == SpecifierSet()
    assert found.pop("python") == SpecifierSet(PROJECT["requires-python"])
    conda_names = {name: CONDA_NAMES.get(name, name) for name in RUNTIME.keys() - NOT_FROM_CONDA}
    assert found == {conda: RUNTIME[name] for name, conda in conda_names.items()}


def test_readme_has_one_line_for_each_dependency() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("## What it is built on")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| .+ \| .+ \|$", table, flags=re.MULTILINE)
    assert sorted(rows) == sorted(DIRECT)


def test_library_imports_only_what_is_declared() -> None:
    distributions = packages_distributions()
    for file in sorted((ROOT / "lib" / "pipeschool").rglob("*.py")):
        # Notebooks are built by contributors, who have the `dev` packages; learners need not.
        declared = DIRECT if file.name == "publish.py" else RUNTIME
        for module in imports(file) - sys.stdlib_module_names - {"pipeschool"}:
            names = {canonicalize_name(name) for name in distributions.get(module, [module])}
            assert names & declared.keys(), f"{file.name} imports {module}, an undeclared package"


def imports(file: Path) -> set[str]:
    """The top-level packages a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found
