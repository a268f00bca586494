"""Mixes of data, pipeline and tensor parallelism: what they cost, and which one to take."""

from __future__ import annotations

from pipeschool.mix.estimates import Estimate, compare, estimate, stage_cost, table
from pipeschool.mix.recommendation import Reason, Recommendation, mixes, reasons, recommend
from pipeschool.mix.setup import (
    GB,
    GIB,
    MIB,
    Machine,
    Mix,
    Transformer,
    all_reduce_bytes,
    gigabytes,
)

__all__ = [
    "GB",
    "GIB",
    "MIB",
    "Estimate",
    "Machine",
    "Mix",
    "Transformer",
    "Reason",
    "Recommendation",
    "all_reduce_bytes",
    "compare",
    "estimate",
    "gigabytes",
    "mixes",
    "reasons",
    "recommend",
    "stage_cost",
    "table",
]
