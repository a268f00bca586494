"""Pieces that several schedules are made of: who holds which stages, and who takes turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeschool.actions import Action


def looped_stages(worker: int, p: int, v: int) -> list[int]:
    """The v stages of `worker` where the model goes round and round: stage s on worker s % p."""
    return list(range(worker, v * p, p))


def v_stages(worker: int, p: int) -> list[int]:
    """The two stages of `worker` where the model goes down the line and comes back up, like a V.

    Worker 0 holds the first stage and the last; worker p - 1 holds the two in the middle.
    """
    return [worker, 2 * p - 1 - worker]


def take_turns(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> list[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards left."""
    warm_up = min(warm_up, len(forwards))
    row = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return row + list(backwards[len(forwards) - warm_up :])


def phases(stages: Sequence[int], m: int, *plan: tuple[str, int]) -> list[Action]:
    """One worker's row, phase by phase: each is a group of cells and how often it is repeated.

    A cell is a kind and a chunk, such as ``F0``: the next microbatch's forward on the worker's
    first stage, stages[0]. ``W`` alone is the oldest weight half still due, on either stage.
    Microbatches from m on are left out, so that a plan which needs many serves for a smaller batch
    as well: microbatches do not depend on each other.

    >>> [str(action) for action in phases([3], 2, ("F0", 1), ("F0 I0", 1), ("I0 W", 1), ("W", 1))]
    ['3F0', '3F1', '3I0', '3I1', '3W0', '3W1']
    """
    row: list[Action] = []
    done: Counter[tuple[str, int]] = Counter()  # forwards and backwards of each stage
    due: list[Action] = []  # weight halves
    for cells, times in plan:
        for cell in cells.split() * times:
            kind, chunk = cell[0], cell[1:]
            if kind == "W":
                half = next(w for w in due if not chunk or w.stage == stages[int(chunk)])
                due.remove(half)
                row.append(half)
                continue
            stage, way = stages[int(chunk)], "F" if kind == "F" else "B"
            microbatch = done[way, stage]
            done[way, stage] += 1
            row.append(Action(kind, stage, microbatch))
            if kind == "I":
                due.append(Action("W", stage, microbatch))
    return [action for action in row if action.microbatch < m]
