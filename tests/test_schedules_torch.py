"""PyTorch's own schedule tables, an independent oracle for ours: order, makespan and peak.

Its schedule classes want real stages and processes; their tables need neither. So a table is made
by a bare object that has just the numbers which the table depends on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import Any

import pipeschool as ps
import pytest
from pipeschool import Action, Schedule

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 25)]


def table(kind: str, p: int, m: int, v: int) -> list[list[Any]]:
    """PyTorch's actions of each rank, idle cells left out."""
    torch_schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    maker = object.__new__(getattr(torch_schedules, f"Schedule{kind}"))
    maker.pp_group_size, maker.n_local_stages = p, v
    maker.num_stages = maker._num_stages = v * p
    maker._stages, maker._n_microbatches = range(v), m
    maker.number_of_rounds = max(1, m // p)
    maker.microbatches_per_round = m // maker.number_of_rounds
    rows = [maker._calculate_single_rank_operations(rank) for rank in range(p)]
    return [[action for action in row if action is not None] for row in rows]


def shipped(kind: str, p: int, m: int, v: int) -> Schedule:
    """PyTorch's table as one of our schedules, overlapped pairs one after the other."""
    rows = [
        [Action.parse(str(a)) for cell in row for a in cell.sub_actions or [cell]]
        for row in table(kind, p, m, v)
    ]
    return Schedule.from_workers(lambda worker, p, m: rows[worker], p, m, name=kind)


def interleaved_sizes() -> Iterator[tuple[int, int]]:
    """Those PyTorch takes: microbatches that can be shared out evenly among the rounds."""
    return ((p, m) for p, m in SIZES if m % max(1, m // p) == 0)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_1f1b_has_the_same_order(v: int) -> None:
    for p, m in interleaved_sizes():
        theirs = shipped("Interleaved1F1B", p, m, v)
        assert ps.interleaved_1f1b(p, m, v).workers == theirs.workers


def test_pytorchs_interleaved_1f1b_with_one_chunk_is_the_eager_one() -> None:
    for p, m in interleaved_sizes():
        assert ps.eager_1f1b(p, m).workers == shipped("Interleaved1F1B", p, m, 1).workers


def test_zb_h1_has_the_same_order() -> None:
    for p, m in SIZES:
        if m >= p:
            assert ps.zb_h1(p, m).workers == shipped("InterleavedZeroBubble", p, m, 1).workers


def test_dualpipe_v_has_the_same_order() -> None:
    for p, m in SIZES:
        if m >= 2 * p:
            assert ps.dualpipe_v(p, m).workers == shipped("DualPipeV", p, m, 2).workers


def test_zb_v_has_the_same_order() -> None:
    for p, m in SIZES:
        assert ps.zb_v(p, m).workers == shipped("ZBVZeroBubble", p, m, 2).workers


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_looped_bfs_has_the_same_makespan_and_peak(v: int) -> None:
    for p, m in SIZES:  # PyTorch's runs the backwards of a chunk in reverse
        schedules = ps.looped_bfs(p, m, v), shipped("LoopedBFS", p, m, v)
        ours, theirs = map(ps.simulate, schedules)
        assert ours.makespan == theirs.makespan
        assert ours.peak_activations == theirs.peak_activations


@pytest.mark.parametrize(("forward", "inputs", "weight"), [(1, 1, 1), (2, 2, 1), (3, 3, 2)])
def test_published_bubble_of_dualpipe_v_is_that_of_fused_pairs(
    forward: int, inputs: int, weight: int
) -> None:
    # With F&B = F + B, and every pair needing both of its inputs before it starts.
    seconds = {"F": forward, "I": inputs, "W": weight, "B": inputs + weight}
    for p in range(2, 9):
        m = 2 * p + 1
        bubble = fused_makespan(p, m, seconds) - 2 * m * (forward + inputs + weight)
        fused, backward = forward + inputs + weight, inputs + weight
        assert bubble == (p - 1) * (fused + backward - 3 * weight)


def fused_makespan(p: int, m: int, seconds: dict[str, int]) -> int:
    """The makespan of PyTorch's DualPipeV table with each overlapped pair as one action."""
    rows = [
        [tuple(Action.parse(str(a)) for a in cell.sub_actions or [cell]) for cell in row]
        for row in table("DualPipeV", p, m, 2)
    ]
    cell_of = {("B" if a.kind == "I" else a.kind, *a[1:]): c for r in rows for c in r for a in c}
    before: dict[tuple[Action, ...], set[tuple[Action, ...]]] = {}
    for row in rows:
        for previous, cell in zip([None, *row], row, strict=False):
            before[cell] = {previous} if previous else set()
            for kind, stage, k in cell:
                source = ("F", stage - 1, k) if kind == "F" else ("B", stage + 1, k)
                if kind != "W" and source in cell_of:
                    before[cell].add(cell_of[source])
    ends: dict[tuple[Action, ...], int] = {}
    for cell in TopologicalSorter(before).static_order():
        start = max((ends[c] for c in before[cell]), default=0)
        ends[cell] = start + sum(seconds[action.kind] for action in cell)
    return max(ends.values())
