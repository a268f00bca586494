"""Sliders on top of the simulator: change p and m, and see what the schedule makes of them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import ipywidgets as w

from pipeschool import draw
from pipeschool.cost import Cost
from pipeschool.schedules import ALIASES, SCHEDULES, build
from pipeschool.simulator import simulate
from pipeschool.trace import Trace

NOTHING = "(nothing)"
WHOLE_NAME = {"description_width": "110px"}  # so that no name is cut off

ROWS = (
    ("makespan, units of cost", lambda trace: f"{trace.makespan:.4g}"),
    (
        "waiting of each worker, units of cost",
        lambda trace: ", ".join(f"{trace.makespan - busy:.4g}" for busy in trace.busy),
    ),
    ("bubble of total = idle / (p · makespan)", lambda trace: f"{trace.bubble_of_total:.4f}"),
    ("bubble of ideal = idle / m(tF + tB)", lambda trace: f"{trace.bubble_of_ideal:.4f}"),
    (
        "peak activations per worker, in A (one microbatch on one worker)",
        lambda trace: ", ".join(f"{peak:g}" for peak in trace.peak_activations),
    ),
)


class Explorer(w.VBox):
    """Controls, a chart and a table; see `explore`. `p`, `m`, `forward`, `backward`, `schedule`
    and `against` are its controls, `traces` what is shown now."""

    def __init__(
        self, schedules: Sequence[str], p: int, m: int, forward: float, backward: float
    ) -> None:
        self.p = _whole("stages p", p, 8)
        self.m = _whole("microbatches m", m, 32)
        self.forward = _time("forward", forward)
        self.backward = _time("backward", backward)
        first, second = (*schedules, NOTHING)[:2]
        names = list(SCHEDULES)
        self.schedule = w.Dropdown(
            options=names, value=first, description="schedule", style=WHOLE_NAME
        )
        self.against = w.Dropdown(
            options=[NOTHING, *names], value=second, description="against", style=WHOLE_NAME
        )
        self.traces: list[Trace] = []
        # An HTML widget and not an Output: its picture has alternative text, a redraw replaces it
        # at once, and no figure is ever left over.
        self._view = w.HTML()
        controls = [self.schedule, self.against, self.p, self.m, self.forward, self.backward]
        for control in controls:
            control.observe(self._redraw, names="value")
        self._redraw()
        rows = [w.HBox(controls[i : i + 2]) for i in range(0, len(controls), 2)]
        super().__init__([*rows, self._view])

    def _redraw(self, change: object = None) -> None:
        names = [name for name in (self.schedule.value, self.against.value) if name != NOTHING]
        try:
            cost = Cost(self.forward.value, self.backward.value)
            self.traces = [simulate(build(n, self.p.value, self.m.value), cost) for n in names]
            self._view.value = draw.gantt(*self.traces).to_html() + _table(self.traces)
        except ValueError as error:
            self.traces = []
            self._view.value = f"<p>{html.escape(str(error))}</p>"


def explore(
    schedules: Sequence[str] = ("naive", "gpipe"),
    p: int = 4,
    m: int = 8,
    forward: float = 1.0,
    backward: float = 2.0,
) -> Explorer:
    """Sliders for stages, microbatches and the times of a forward and a backward.

    schedules: the one to start with, or two to compare on one time axis.
    Raises ValueError where there is no such schedule, or no such pipeline.
    """
    chosen = [schedules] if isinstance(schedules, str) else list(schedules)
    if not 1 <= len(chosen) <= 2:
        raise ValueError(f"explore shows one schedule or two, not {len(chosen)}")
    for name in chosen:
        build(name, p, m)  # so that a wrong argument is an error here, not in the widget
    Cost(forward, backward)
    return Explorer([ALIASES.get(name, name) for name in chosen], p, m, forward, backward)


def _whole(name: str, value: int, highest: int) -> Any:
    return w.IntSlider(value, 1, max(highest, value), description=name, style=WHOLE_NAME)


def _time(name: str, value: float) -> Any:
    top = max(5, value)
    return w.FloatSlider(value, min=0.5, max=top, step=0.5, description=name, style=WHOLE_NAME)


def _table(traces: Sequence[Trace]) -> str:
    head = "".join(f'<th scope="col">{html.escape(trace.name)}</th>' for trace in traces)
    body = "".join(
        f'<tr><th scope="row" style="text-align: left">{label}</th>'
        + "".join(f'<td style="padding: 0 1em">{value(trace)}</td>' for trace in traces)
        + "</tr>"
        for label, value in ROWS
    )
    return f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>"
