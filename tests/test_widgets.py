"""The explorer: sliders in, chart and table out, in the browser or without one."""

from __future__ import annotations

import gc
import re

import nbformat
import pipeschool as ps
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient
from pipeschool.widgets import NOTHING, Explorer, explore


def view(explorer: Explorer) -> str:
    return explorer.children[-1].value


def table(explorer: Explorer) -> dict[str, list[str]]:
    rows = re.findall(r"<tr><th scope=\"row\".*?>(.*?)</th>(.*?)</tr>", view(explorer))
    return {label: re.findall("<td.*?>(.*?)</td>", cells) for label, cells in rows}


def test_starts_with_two_schedules_and_the_numbers_of_both() -> None:
    assert table(explore()) == {
        "makespan, units of cost": ["96", "33"],
        "waiting of each worker, units of cost": ["72, 72, 72, 72", "9, 9, 9, 9"],
        "bubble of total = idle / (p · makespan)": ["0.7500", "0.2727"],
        "bubble of ideal = idle / m(tF + tB)": ["3.0000", "0.3750"],
        "peak activations per worker, in A (one microbatch on one worker)": [
            "1, 1, 1, 1",
            "8, 8, 8, 8",
        ],
    }


def test_every_control_changes_what_is_shown() -> None:
    explorer = explore(schedules=["gpipe", "one_f_one_b"], p=2, m=2)
    assert table(explorer)["makespan, units of cost"] == ["9", "9"]
    explorer.p.value = 3
    assert table(explorer)["makespan, units of cost"] == ["12", "12"]
    explorer.m.value = 6
    assert table(explorer)["makespan, units of cost"] == ["24", "24"]
    explorer.forward.value = 2
    assert table(explorer)["makespan, units of cost"] == ["32", "32"]
    explorer.backward.value = 1
    explorer.schedule.value = "naive"
    assert table(explorer)["makespan, units of cost"] == ["54", "24"]
    explorer.against.value = NOTHING
    assert table(explorer)["makespan, units of cost"] == ["54"]
    assert explorer.traces == [ps.simulate(ps.naive(p=3, m=6), ps.Cost(2, 1))]


def test_the_chart_has_alternative_text_that_follows() -> None:
    explorer = explore("1f1b", p=2, m=2)
    explorer.m.value = 3
    (alt,) = re.findall(r'<img alt="([^"]*)"', view(explorer))
    assert alt == ps.draw.gantt(ps.simulate(ps.one_f_one_b(p=2, m=3))).alt


def test_what_cannot_be_is_said_in_the_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    def even(p: int, m: int, batches: int = 1) -> ps.Schedule:
        if m % 2:
            raise ValueError(f"even needs an even m, & not <{m}>")
        return ps.gpipe(p, m, batches)

    monkeypatch.setitem(ps.SCHEDULES, "even", even)
    explorer = explore("even", p=2, m=2)
    explorer.m.value = 3
    assert view(explorer) == "<p>even needs an even m, &amp; not &lt;3&gt;</p>"
    assert explorer.traces == []
    explorer.m.value = 4
    assert table(explorer)["makespan, units of cost"] == ["15"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 0}, "p must be at least 1, not 0"),
        ({"m": 2.5}, "m must be a whole number"),
        ({"schedules": ["gpie"]}, "there is no schedule 'gpie'; choose one of naive, gpipe"),
        ({"schedules": []}, "one schedule or two, not 0"),
        ({"schedules": ["naive", "gpipe", "naive"]}, "one schedule or two, not 3"),
        ({"backward": -1}, "backward must be a number, 0 or more, not -1"),
    ],
)
def test_wrong_arguments_are_errors_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explore(**arguments)  # type: ignore[arg-type]


def test_sliders_reach_as_far_as_they_are_asked_to() -> None:
    explorer = explore("gpipe", p=12, m=40, forward=9)
    assert (explorer.p.max, explorer.m.max, explorer.forward.max) == (12, 40, 9)
    assert len(explorer.traces[0].rows) == 12


def test_redraws_leave_no_figure_behind() -> None:
    def figures() -> int:
        gc.collect()
        return sum(isinstance(thing, Figure) for thing in gc.get_objects())

    explorer = explore()
    before = figures()
    for m in range(1, 9):
        explorer.m.value = m
    assert figures() == before


def test_runs_in_a_notebook_without_a_browser() -> None:
    cell = (
        "import pipeschool as ps\nexplorer = ps.widgets.explore()\nexplorer.p.value = 2\nexplorer"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(notebook, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert "application/vnd.jupyter.widget-view+json" in output.data
