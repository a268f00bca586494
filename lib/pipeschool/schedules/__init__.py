"""The schedules: one file per family, one pure function per schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from pipeschool.actions import Schedule
from pipeschool.arguments import whole_number
from pipeschool.schedules.chimera import chimera
from pipeschool.schedules.dualpipe_v import dualpipe_v
from pipeschool.schedules.eager_1f1b import eager_1f1b
from pipeschool.schedules.forward_only import forward_only
from pipeschool.schedules.gpipe import gpipe
from pipeschool.schedules.interleaved_1f1b import interleaved_1f1b
from pipeschool.schedules.looped_bfs import looped_bfs
from pipeschool.schedules.naive import naive
from pipeschool.schedules.one_f_one_b import one_f_one_b
from pipeschool.schedules.pipedream import pipedream
from pipeschool.schedules.pipedream_2bw import pipedream_2bw
from pipeschool.schedules.replicate import replicate
from pipeschool.schedules.round_robin import round_robin
from pipeschool.schedules.zb_h1 import zb_h1
from pipeschool.schedules.zb_h2 import zb_h2
from pipeschool.schedules.zb_v import zb_v

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
    "chimera": chimera,
    "forward_only": forward_only,
}
ALIASES = {"1f1b": "one_f_one_b", "interleaved": "interleaved_1f1b"}


def build(name: str, p: int, m: int, batches: int = 1, v: int | None = None) -> Schedule:
    """The schedule called `name`; ValueError, naming those there are, where there is none.

    v: chunks per worker; the schedule's own number where it is not given. ValueError where the
    schedule has another number and no choice.
    """
    name = ALIASES.get(name, name)
    builder = SCHEDULES.get(name)
    if builder is None:
        known = ", ".join([*SCHEDULES, *ALIASES])
        raise ValueError(f"there is no schedule {name!r}; choose one of {known}")
    if v is None:
        return builder(p=p, m=m, batches=batches)
    v = whole_number("v", v)
    if "v" in inspect.signature(builder).parameters:
        return builder(p=p, m=m, v=v, batches=batches)
    schedule = builder(p=p, m=m, batches=batches)
    if schedule.v != v:
        raise ValueError(f"v must be {schedule.v} for {name}, not {v}")
    return schedule


__all__ = [
    "ALIASES",
    "SCHEDULES",
    "build",
    "chimera",
    "forward_only",
    "dualpipe_v",
    "eager_1f1b",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "naive",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "replicate",
    "round_robin",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
