"""The build: what is committed is what the sources give, byte for byte, wherever and how often."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pipeschool import publish

pytestmark = pytest.mark.xdist_group("publish")  # they share a build

ROOT = Path(__file__).resolve().parents[2]

UNIT = '''# %% [markdown]
# # A unit

# %%
def double(x: int) -> int:
    """Twice x."""
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION


# %%
grade.check(double, points=3)
### BEGIN HIDDEN TESTS
grade.check(double, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %%
print("twice")

# %%
print("twice")
'''


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A small project with one unit and a picture, built."""
    root = tmp_path_factory.mktemp("built")
    unit = root / "solutions" / "09_doubling"
    unit.mkdir(parents=True)
    (unit / "doubling.py").write_text(UNIT, encoding="utf-8")
    (unit / "picture.png").write_bytes(b"a picture")
    shutil.copy(ROOT / publish.CONFIG, root)
    assert run(root) == 0
    return root


@pytest.fixture
def project(built, tmp_path):
    """A copy of it, to change."""
    return Path(shutil.copytree(built, tmp_path / "project"))


def run(root, *options):
    return publish.main(["--root", str(root), *options])


def notebook(root, where):
    place = root / where / "09_doubling" / "doubling.ipynb"
    return json.loads(place.read_text(encoding="utf-8"))


def test_committed_notebooks_agree_with_their_sources(capsys):
    drifted = run(ROOT, "--check")
    said = capsys.readouterr().out
    assert drifted == 0, f"run `make course` and commit what it builds:\n{said}"


def test_a_build_is_the_same_every_time(project, capsys):
    first = {name: (project / name).read_bytes() for name in publish.built_files(project)}
    assert {str(name) for name in first} == {
        "course/09_doubling/doubling.ipynb",
        "course/09_doubling/picture.png",
        "solutions/09_doubling/doubling.ipynb",
    }
    shutil.rmtree(project / "course")
    assert run(project) == 0
    assert {name: (project / name).read_bytes() for name in publish.built_files(project)} == first
    capsys.readouterr()
    assert run(project, "--check") == 0
    assert capsys.readouterr().out.startswith("nothing to do")


def test_drift_is_named_and_nothing_is_changed(project, capsys):
    source = project / "solutions" / "09_doubling" / "doubling.py"
    source.write_text(UNIT.replace("# A unit", "# The unit"), encoding="utf-8")
    before = notebook(project, "course")
    capsys.readouterr()
    assert run(project, "--check") == 1
    said = capsys.readouterr().out
    assert "drifted: course/09_doubling/doubling.ipynb" in said
    assert "drifted: solutions/09_doubling/doubling.ipynb" in said
    assert notebook(project, "course") == before


def test_saved_work_is_left_alone_until_forced(project, capsys):
    place = project / "course" / "09_doubling" / "doubling.ipynb"
    answered = notebook(project, "course")
    code = next(cell for cell in answered["cells"] if cell["cell_type"] == "code")
    code["source"] = ["def double(x): return x + x"]
    code["execution_count"] = 1
    place.write_text(json.dumps(answered), encoding="utf-8")
    assert run(project) == run(project, "--check") == 0
    assert "left alone: course/09_doubling/doubling.ipynb" in capsys.readouterr().out
    assert notebook(project, "course") == answered
    assert run(project, "--force") == 0
    assert notebook(project, "course") != answered


def test_an_edited_copy_is_drift_and_other_work_is_left_alone(project, capsys):
    edited = project / "course" / "09_doubling" / "doubling.ipynb"
    edited.write_text(edited.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    mine = project / "course" / "09_doubling" / "my_notes.ipynb"
    mine.write_text("{}", encoding="utf-8")
    assert run(project) == 0
    assert mine.exists()
    assert "built: course/09_doubling/doubling.ipynb" in (said := capsys.readouterr().out)
    assert "left alone: course/09_doubling/my_notes.ipynb" in said


def test_students_get_no_answers(built):
    text = json.dumps(notebook(built, "course"))
    assert "2 * x" not in text and "HIDDEN" not in text and "seed=" not in text
    assert "raise NotImplementedError" in text and "Twice x." in text
    assert not list((built / "course").rglob("*.py"))


def test_nbgrader_metadata_and_ids_come_from_the_source(built):
    solution, check = notebook(built, "solutions")["cells"][1:3]
    assert solution["id"] == "double" and check["id"] == "check-double"
    assert solution["metadata"]["nbgrader"]["solution"]
    assert check["metadata"]["nbgrader"]["grade"]
    assert check["metadata"]["nbgrader"]["points"] == 3
    twice = [cell["id"] for cell in notebook(built, "course")["cells"][3:]]
    assert twice[1] == twice[0] + "-2"


def test_nothing_in_a_notebook_depends_on_the_machine(built):
    for where in ("solutions", "course"):
        found = notebook(built, where)
        assert found["metadata"] == publish.KERNEL
        assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
        for cell in found["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize(
    "text, sentence",
    [
        (UNIT.replace("def double(x: int) -> int:", "double = 1"), "defines no function"),
        (UNIT.replace("points=3", "3"), "has no grade.check(name, points=...)"),
    ],
)
def test_a_source_that_cannot_be_built_is_named(project, capsys, text, sentence):
    source = project / "solutions" / "09_doubling" / "doubling.py"
    source.write_text(text, encoding="utf-8")
    assert run(project) == 2
    assert sentence in capsys.readouterr().err


def test_a_project_without_units_is_refused(tmp_path, capsys):
    (tmp_path / "solutions").mkdir()
    shutil.copy(ROOT / publish.CONFIG, tmp_path)
    assert run(tmp_path) == 2
    assert "there is no solutions/NN_topic/topic.py" in capsys.readouterr().err
