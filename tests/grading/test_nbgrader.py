"""One class, three hand-ins, the whole way through nbgrader: release, autograde, feedback."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

pytestmark = pytest.mark.xdist_group("nbgrader")  # they share a class

ROOT = Path(__file__).resolve().parents[2]
UNIT, TOPIC = "01_synchronous_bubble", "synchronous_bubble"

# What the third student wrote: one answer right, one partly, one wrong, one that raises, one that
# only prints and warns too much, and a cell above the exercises that fails for its own reasons.
PARTLY = {
    "naive_order": "return [kind(worker, k) for k in range(m) for kind in (ps.F, ps.B)]",
    "split_batch": "return [samples // m] * m",
    "loss_weights": "return sizes[len(sizes)]",
    "bubble_of_total": "return (p - 1) / m",
    "bubble_of_ideal": "import warnings\n    print(p, m)\n    warnings.warn('careful')\n"
    "    return (p - 1) / m",
}
EARNED = {
    "check-naive_order": 2.0,
    "check-split_batch": 1.0,
    "check-bubble_of_ideal": 1.0,
}


def nbgrader(course, *arguments):
    """Run nbgrader as an instructor does; fail with all it said where it fails."""
    lib = os.pathsep.join(filter(None, [str(ROOT / "lib"), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": lib,
        "PIPESCHOOL_SEED": "tests",
        "JUPYTER_CONFIG_DIR": str(course / "jupyter"),
        "IPYTHONDIR": str(course / "ipython"),
    }
    command = [sys.executable, "-m", "nbgrader", *arguments]
    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def submit(course, student, notebook):
    place = course / "grading" / "submitted" / student / UNIT
    place.mkdir(parents=True)
    nbformat.write(notebook, place / f"{TOPIC}.ipynb")


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """A course directory in which the hand-in that is partly right has been graded."""
    course = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "solutions", course / "solutions")
    shutil.copy(ROOT / "nbgrader_config.py", course)
    nbgrader(course, "generate_assignment", UNIT)
    release = nbformat.read(course / "course" / UNIT / f"{TOPIC}.ipynb", as_version=4)
    for cell in release.cells:
        answer = PARTLY.get(cell.metadata.get("nbgrader", {}).get("grade_id"))
        if answer:
            cell.source = re.sub(r"raise NotImplementedError.*", answer, cell.source)
    submit(course, "partly", release)
    nbgrader(course, "autograde", UNIT)
    nbgrader(course, "generate_feedback", UNIT)
    return course


@pytest.fixture(scope="module")
def all_graded(graded):
    """The same after two more hand-ins: one solved, and one as it was given out."""
    for student, where in (("solved", "solutions"), ("untouched", "course")):
        place = graded / where / UNIT / f"{TOPIC}.ipynb"
        submit(graded, student, nbformat.read(place, as_version=4))
    nbgrader(graded, "autograde", UNIT)
    nbgrader(graded, "generate_feedback", UNIT)
    return graded


def scores(course, student):
    """{grade id: (score, maximum)}"""
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course / 'grading' / 'gradebook.db'}") as book:
        return {
            grade.name: (grade.auto_score, grade.max_score)
            for notebook in book.find_submission(UNIT, student).notebooks
            for grade in notebook.grades
        }


def cells(course, student):
    place = course / "grading" / "autograded" / student / UNIT / f"{TOPIC}.ipynb"
    return nbformat.read(place, as_version=4).cells


def feedback(course, student):
    page = course / "grading" / "feedback" / student / UNIT / f"{TOPIC}.html"
    text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
    return text.replace("&#39;", "'").replace("&gt;", ">").replace("&lt;", "<")


def test_release_is_what_the_repository_holds(graded):
    for unit in sorted((ROOT / "course").iterdir()):
        if unit.name == UNIT:
            for file in unit.iterdir():
                assert (graded / "course" / UNIT / file.name).read_bytes() == file.read_bytes()
    assert not list((graded / "course").rglob("*.py"))


@pytest.mark.exhaustive
def test_a_solved_hand_in_earns_everything(all_graded):
    earned = scores(all_graded, "solved")
    assert len(earned) >= 7
    for name, (score, maximum) in earned.items():
        assert score == maximum, name
        assert 1 <= maximum <= 5
    for cell in cells(all_graded, "solved"):
        for output in cell.get("outputs", []):
            assert output.output_type != "error", output
            assert output.get("name") != "stderr", output


@pytest.mark.exhaustive
def test_an_untouched_hand_in_earns_nothing_and_fails_only_in_graded_cells(all_graded):
    assert {score for score, _ in scores(all_graded, "untouched").values()} == {0}
    for cell in cells(all_graded, "untouched"):
        failed = [o for o in cell.get("outputs", []) if o.output_type == "error"]
        is_graded = cell.metadata.get("nbgrader", {}).get("grade", False)
        assert bool(failed) == is_graded, cell.source
    page = feedback(all_graded, "untouched")
    assert "gpipe_order is not written yet" in page
    assert "Your gpipe_order does not pass its checks yet" in page


def test_a_partly_right_hand_in_earns_part_of_the_points(graded):
    earned = scores(graded, "partly")
    assert earned.keys() > EARNED.keys()
    for name, (score, _) in earned.items():
        assert score == EARNED.get(name, 0), name


def test_feedback_can_be_read(graded):
    page = feedback(graded, "partly")
    for said in (
        "split_batch: 1 of 2 points. Right where m divides the batch, not yet where it does not.",
        "smallest failing case: split_batch(samples=3, m=2)",
        "IndexError: list index out of range",
        "in loss_weights: return sizes[len(sizes)]",
        "smallest failing case: bubble_of_total(p=2, m=1)",
    ):
        assert said in page
    for hidden in ("Traceback (most recent call last)", "pipeschool/grade", "CheckFailed:"):
        assert hidden not in page
    assert "careful" not in page.replace("warnings.warn('careful')", "")
