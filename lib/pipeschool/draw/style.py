"""How every chart looks, and what a chart is.

A chart is a matplotlib figure that knows its alternative text, looks the same whatever style the
caller has set, and can be told apart in grey print: forwards are light, backwards dark.
"""

from __future__ import annotations

import base64
import html
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Blue against orange survives every common colour blindness, light against dark a grey print. The
# halves of a split backward are as dark as the whole, and half-way.
COLOURS = {"F": "#93c9f0", "B": "#a23b00", "I": "#a23b00", "W": "#5fa04e", "U": "black"}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "U": "update",
}
INK = {"F": "black", "B": "white", "I": "white", "W": "black", "U": "black"}  # on these colours
IDLE = "#f4f4f4"
HATCH = "#c4c4c4"  # strokes over idle time, so that it shows on white paper
# Neighbouring versions differ in hue and lightness; all are light enough for black numbers.
VERSIONS = ("#8fc4ec", "#ffe08a", "#c4a6dc", "#c8efcf", "#ef9a86", "#efe9a0")
LANES = 1.4  # how much taller a row with two lanes is
BOX = 0.8  # height of a box; a row is 1
LINE = 3.0  # points: an update that is narrower is drawn as a line
BAR = 0.12  # and of the bar at the foot of a worker's last chunk

WIDTH = 10.0  # all lengths in inches
LEFT, RIGHT, BOTTOM, TOP = 0.85, 0.15, 0.6, 0.6
GAP = 0.75  # between two charts
FOOTER = 0.25  # of a line of text below all charts
POINTS = 72  # per inch
SMALLEST = 5.0  # points; numbers that would have to be smaller are left out

CJK = ("Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", "WenQuanYi Zen Hei", "SimHei")


class Chart(Figure):
    """A matplotlib figure with alternative text, `alt`. Notebooks show it as an image with it."""

    def __init__(self, alt: str, height: float):
        with house_style():
            super().__init__(figsize=(WIDTH, height), dpi=144)
            FigureCanvasAgg(self)
        self.alt = alt

    def draw(self, renderer: Any) -> None:
        """Draw; a glyph that no font has becomes a box, without a warning."""
        with house_style():
            super().draw(renderer)

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """Write to a file or file object, as any matplotlib figure does."""
        with house_style():
            super().savefig(fname, **kwargs)

    def to_html(self) -> str:
        """An <img> element with the picture inside it and the alternative text."""
        png = io.BytesIO()
        self.savefig(png, format="png", metadata={"Description": self.alt})
        data = base64.b64encode(png.getvalue()).decode()
        return (
            f'<img alt="{html.escape(self.alt)}" width="{self.get_figwidth() * 96:.0f}" '
            f'style="max-width: 100%" src="data:image/png;base64,{data}">'
        )

    def _ipython_display_(self) -> None:
        # As text/html because front ends show image/png without any alternative text.
        from IPython.display import display

        display({"text/html": self.to_html(), "text/plain": self.alt}, raw=True)


@contextmanager
def house_style() -> Iterator[None]:
    """Our own fonts and colours whatever the caller has set, and no warning about glyphs."""
    style: Any = {  # Any, because matplotlib 3.11 wants the literal names of all its settings
        "font.family": _fonts(),
        "text.usetex": False,
        "text.parse_math": False,  # a name may hold a dollar sign
        "text.color": "black",
        "axes.labelcolor": "black",
        "axes.titlecolor": "black",
        "axes.edgecolor": "black",
        "axes.facecolor": "white",
        "axes.grid": False,
        "hatch.linewidth": 0.6,
        "figure.facecolor": "white",
        "xtick.color": "black",
        "ytick.color": "black",
        "xtick.labelcolor": "black",
        "ytick.labelcolor": "black",
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


@cache
def _fonts() -> list[str]:
    available = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in CJK if name in available)]
