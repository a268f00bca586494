"""The notebooks: their shape, what students get, and that they run from top to bottom."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest
from pipeschool import publish
from pipeschool.grade.core import EXERCISES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(ROOT.glob("solutions/*/*.ipynb"))
# A learner's saved work is no fault of the course; in a commit it would be one.
RELEASED = [
    path
    for path in sorted(ROOT.glob("course/*/*.ipynb"))
    if os.environ.get("CI") or not publish.worked_in(path)
]
FIRST_TIER = "01_synchronous_bubble"  # the one unit that `make test` runs
SECONDS = 180  # that a cell may take before it counts as stuck


def read(path):
    return nbformat.read(path, as_version=4)


def name(path):
    return f"{path.parts[-3]}-{path.parent.name}"


def text(notebook, kind):
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def nbgrader(cell):
    return cell.metadata.get("nbgrader", {})


def test_every_unit_has_both_versions():
    assert [p.relative_to(ROOT / "solutions") for p in SOURCES] == [
        p.relative_to(ROOT / "course") for p in sorted(ROOT.glob("course/*/*.ipynb"))
    ]
    assert len(SOURCES) >= 2


@pytest.mark.parametrize("path", SOURCES + RELEASED, ids=name)
class TestShape:
    def test_one_title_with_what_time_and_needs(self, path):
        prose = text(read(path), "markdown")
        lines = "\n".join(prose).split("\n")
        assert [line for line in lines if line.startswith("# ")] == lines[:1]
        assert "minutes" in prose[0] and "**You need**" in prose[0]

    def test_a_summary_and_three_questions_with_folded_answers(self, path):
        last = text(read(path), "markdown")[-1]
        assert "## Summary" in last
        questions, _, answers = last.partition("## Check yourself")[2].partition("<details>")
        assert len(re.findall(r"^\d\. .*\?", questions, re.MULTILINE)) == 3
        assert len(re.findall(r"^\d\. ", answers, re.MULTILINE)) == 3
        assert "</details>" in answers

    def test_no_outputs(self, path):
        for cell in read(path).cells:
            assert not cell.get("outputs") and cell.get("execution_count") is None

    def test_ids_are_unique(self, path):
        cells = read(path).cells
        assert len({cell.id for cell in cells}) == len(cells)
        grade_ids = [nbgrader(cell)["grade_id"] for cell in cells if nbgrader(cell)]
        assert len(set(grade_ids)) == len(grade_ids)

    def test_every_exercise_has_a_stub_with_an_example_and_a_check_with_points(self, path):
        cells = [cell for cell in read(path).cells if nbgrader(cell)]
        stubs = {nbgrader(c)["grade_id"]: c for c in cells if nbgrader(c)["solution"]}
        checks = {nbgrader(c)["grade_id"]: c for c in cells if nbgrader(c)["grade"]}
        assert checks.keys() == {f"check-{exercise}" for exercise in stubs}
        for exercise, stub in stubs.items():
            check = checks[f"check-{exercise}"]
            points = nbgrader(check)["points"]
            assert exercise in EXERCISES
            assert 1 <= points <= 5
            assert f"grade.check({exercise}, points={points})" in check.source
            assert "Example: " in stub.source and '"""' in stub.source
            assert re.search(rf"def {exercise}\(.*?\) -> ", stub.source, re.DOTALL)

    def test_points_are_told_to_the_learner(self, path):
        for cell in text(read(path), "markdown"):
            for heading in re.findall(r"^### Exercise.*", cell, re.MULTILINE):
                assert re.search(r"\(\d points?( each)?\)$", heading), heading

    def test_folds_are_closed(self, path):
        for cell in text(read(path), "markdown"):
            assert cell.count("<details>") == cell.count("</details>") == cell.count("<summary>")


@pytest.mark.parametrize("path", RELEASED, ids=name)
def test_students_get_no_answers(path):
    for cell in read(path).cells:
        assert "BEGIN SOLUTION" not in cell.source and "HIDDEN TESTS" not in cell.source
        if nbgrader(cell).get("solution"):
            assert "raise NotImplementedError" in cell.source
    assert not list(path.parent.glob("*.py"))


@pytest.mark.parametrize("path", RELEASED, ids=name)
def test_links_lead_somewhere(path):
    for cell in text(read(path), "markdown"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", cell):
            assert (path.parent / target).exists(), target


def test_unit_01_has_exercises_enough():
    (path,) = (p for p in SOURCES if p.parent.name == "01_synchronous_bubble")
    points = [nbgrader(c)["points"] for c in read(path).cells if nbgrader(c).get("grade")]
    assert len(points) >= 7


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.parent.name == FIRST_TIER else pytest.mark.exhaustive)
        for path in SOURCES
    ],
    ids=name,
)
def test_solutions_run_from_top_to_bottom(path, tmp_path, monkeypatch):
    lib = os.pathsep.join(filter(None, [str(ROOT / "lib"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", lib)
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises where a cell does
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", f"{cell.source}\n{output.text}"
            if "image/png" in output.get("data", {}):
                pytest.fail(f"a picture without alternative text:\n{cell.source}")
            if "<img" in output.get("data", {}).get("text/html", ""):
                assert re.search(r'<img alt="[^"]{40,}"', output.data["text/html"])
