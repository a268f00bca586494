"""The schedules: one file per family, one pure function per schedule."""

from __future__ import annotations

from collections.abc import Callable

from pipeschool.actions import Schedule
from pipeschool.schedules.chimera import chimera
from pipeschool.schedules.forward_only import forward_only
from pipeschool.schedules.gpipe import gpipe
from pipeschool.schedules.naive import naive
from pipeschool.schedules.one_f_one_b import one_f_one_b
from pipeschool.schedules.pipedream import pipedream
from pipeschool.schedules.pipedream_2bw import pipedream_2bw

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
    "chimera": chimera,
    "forward_only": forward_only,
}
ALIASES = {"1f1b": "one_f_one_b"}


def build(name: str, p: int, m: int, batches: int = 1) -> Schedule:
    """The schedule called `name`; ValueError, naming those there are, where there is none."""
    builder = SCHEDULES.get(ALIASES.get(name, name))
    if builder is None:
        known = ", ".join([*SCHEDULES, *ALIASES])
        raise ValueError(f"there is no schedule {name!r}; choose one of {known}")
    return builder(p=p, m=m, batches=batches)


__all__ = [
    "ALIASES",
    "SCHEDULES",
    "build",
    "chimera",
    "forward_only",
    "gpipe",
    "naive",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
]
