"""Build the notebooks: ``python -m pipeschool.publish [--check]``.

``solutions/NN_topic/topic.py`` (jupytext's percent format) is the one source. From it come
``solutions/NN_topic/topic.ipynb``, for instructors, and, through nbgrader as `nbgrader_config.py`
sets it up, ``course/NN_topic/topic.ipynb`` for students.

nbgrader's cell metadata is read off the cells, so that nothing is said twice. A cell that holds
``### BEGIN SOLUTION`` is the answer to the exercise that its first ``def`` names. A cell that holds
``### BEGIN HIDDEN TESTS`` grades the exercise that its first ``grade.check(name, points=...)``
names. The same source gives the same bytes on every machine and every time.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG = "nbgrader_config.py"
KERNEL = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},  # a version here would differ from machine to machine
}


class BuildError(Exception):
    """A source that cannot be built. The message is one sentence."""


def notebook_of(source: Path) -> str:
    """The text of the instructor's notebook that `source`, in percent format, describes."""
    import jupytext
    import nbformat

    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(KERNEL)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        graded = nbgrader_metadata(cell, source) if cell.cell_type == "code" else None
        if graded:
            cell.metadata["nbgrader"] = graded
        name = graded["grade_id"] if graded else hashlib.sha256(cell.source.encode()).hexdigest()
        cell.id = re.sub(r"[^\w-]", "-", name)[: 64 if graded else 12]
        seen[cell.id] += 1
        if seen[cell.id] > 1:  # the same text twice in one notebook
            cell.id = f"{cell.id}-{seen[cell.id]}"
    nbformat.validate(notebook)
    return str(nbformat.writes(notebook)) + "\n"


def nbgrader_metadata(cell: Any, source: Path) -> dict[str, Any] | None:
    """What nbgrader must know about a code cell; None where it need not know it."""
    text = cell.source
    common = {"schema_version": 3, "task": False}
    if "### BEGIN SOLUTION" in text:
        name = re.search(r"^def (\w+)", text, re.MULTILINE)
        if not name:
            raise BuildError(f"{source}: a solution cell defines no function:\n{text}")
        return {"grade_id": name[1], "grade": False, "solution": True, "locked": False, **common}
    if "### BEGIN HIDDEN TESTS" in text:
        call = re.search(r"grade\.check\((\w+), points=(\d+)\)", text)
        if not call:
            raise BuildError(
                f"{source}: a graded cell has no grade.check(name, points=...):\n{text}"
            )
        points: dict[str, Any] = {"points": int(call[2]), "grade_id": f"check-{call[1]}"}
        return {**points, "grade": True, "solution": False, "locked": True, **common}
    return None


def build(root: Path, target: Path) -> None:
    """Build everything under `root` into `target`, which gets its own solutions/ and course/."""
    shutil.copytree(root / "solutions", target / "solutions", ignore=_not_source)
    shutil.copy(root / CONFIG, target / CONFIG)
    units = []
    for source in sorted(target.glob("solutions/*/*.py")):
        source.with_suffix(".ipynb").write_text(notebook_of(source), encoding="utf-8", newline="\n")
        units.append(source.parent.name)
    if not units:
        raise BuildError(f"there is no solutions/NN_topic/topic.py under {root}")
    release(target, units)


def release(root: Path, units: list[str]) -> None:
    """Let nbgrader make the students' version of `units`, as the configuration in `root` says."""
    from nbgrader.converters import GenerateAssignment
    from nbgrader.coursedir import CourseDirectory
    from traitlets.config import PyFileConfigLoader

    config = PyFileConfigLoader(CONFIG, path=str(root)).load_config()
    for unit in units:
        course = CourseDirectory(config=config, assignment_id=unit)
        GenerateAssignment(coursedir=course, config=config, force=True).start()


def built_files(root: Path) -> Iterator[Path]:
    """What a build makes, relative to `root`: notebooks of both kinds, and all else in course/."""
    for found in sorted([*root.glob("solutions/*/*.ipynb"), *root.glob("course/**/*")]):
        if found.is_file() and not _is_litter(found):
            yield found.relative_to(root)


def drift(root: Path, built: Path) -> list[Path]:
    """The files that differ between `root` and a fresh build, or that only one of them has."""
    names = sorted({*built_files(root), *built_files(built)})
    return [
        name
        for name in names
        if not (root / name).is_file()
        or not (built / name).is_file()
        or not filecmp.cmp(root / name, built / name, shallow=False)
    ]


def worked_in(file: Path) -> bool:
    """Has somebody run cells of this student's notebook, and saved it? A build has no outputs."""
    if file.suffix != ".ipynb" or "course" not in file.parts or not file.is_file():
        return False
    try:
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError):
        return False
    return any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def main(arguments: list[str] | None = None) -> int:
    """Build, or with ``--check`` say what a build would change. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="pipeschool.publish", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 on drift")
    parser.add_argument("--force", action="store_true", help="overwrite notebooks with saved work")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where solutions/ lies")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder).resolve()
        try:
            build(options.root, fresh)
        except BuildError as problem:
            print(problem, file=sys.stderr)
            return 2
        drifted = drift(options.root, fresh)
        if not options.force:
            for name in filter(lambda name: worked_in(options.root / name), drifted):
                print(f"left alone: {name}, which has been worked in; --force overwrites it")
            drifted = [name for name in drifted if not worked_in(options.root / name)]
        for name in drifted:
            if options.check:
                print(f"drifted: {name}")
            elif (fresh / name).is_file():
                print(f"built: {name}")
                (options.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(fresh / name, options.root / name)
            else:  # it may be somebody's work
                print(f"left alone: {name}, which no source makes")
    if options.check and drifted:
        print("run `make course`, and commit what it builds together with the source")
    elif not drifted:
        print("nothing to do: the notebooks agree with their sources")
    return 1 if options.check and drifted else 0


def _is_litter(path: Path) -> bool:
    return any(part in (".ipynb_checkpoints", "__pycache__") for part in path.parts)


def _not_source(folder: str, names: list[str]) -> list[str]:
    """Leave behind notebooks built earlier, and litter."""
    return [name for name in names if name.endswith(".ipynb") or _is_litter(Path(name))]


if __name__ == "__main__":
    sys.exit(main())
