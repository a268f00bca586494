"""Charts of traces. `charts` has most of them, `live_bytes` the one of a worker's memory."""

from __future__ import annotations

from pipeschool.draw.charts import (
    BOX,
    COLOURS,
    IDLE,
    VERSIONS,
    Chart,
    compare,
    describe,
    gantt,
    memory,
    versions,
)
from pipeschool.draw.live_bytes import live_bytes

__all__ = [
    "BOX",
    "COLOURS",
    "IDLE",
    "VERSIONS",
    "Chart",
    "compare",
    "describe",
    "gantt",
    "live_bytes",
    "memory",
    "versions",
]
