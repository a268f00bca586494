"""As many batches as the schedule takes, as a list."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

from pipeschool.actions import Schedule

MOST_UNCOUNTED = 1000  # batches of an iterable that does not say how many it has
Item = TypeVar("Item")


def fit_batches(
    schedule: Schedule, batches: Iterable[tuple[Any, Any]]
) -> tuple[Schedule, list[tuple[Any, Any]]]:
    """The batches as a list, and the schedule for as many; a synchronous one repeats its batch."""
    if not isinstance(batches, Iterable):
        raise ValueError(
            "batches must be a list, or any other iterable, of (inputs, targets) pairs, "
            f"not {type(batches).__name__}"
        )
    wanted = schedule.batches
    repeats = schedule.synchronous and wanted == 1 and not schedule.lowered
    if repeats:
        data = listed(batches, "batches", "give a list of as many as you want")
    else:
        data = list(itertools.islice(batches, wanted + 1))
    for batch in data:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"batches must give (inputs, targets) pairs, not {type(batch).__name__}: one batch "
                "is written [(inputs, targets)]"
            )
    if not data:
        raise ValueError("there is no batch: batches must give at least one (inputs, targets) pair")
    if repeats:
        return schedule.repeat(len(data)), data
    if len(data) != wanted:
        more = "more" if len(data) > wanted else str(len(data))
        raise ValueError(f"{schedule.name} was built with batches={wanted}, but there are {more}")
    return schedule, data


def listed(batches: Iterable[Item], name: str, advice: str) -> list[Item]:
    """All of `batches`; ValueError where they may never end, with `advice` what to give instead."""
    if operator.length_hint(batches, -1) >= 0:  # they have a length, and so an end
        return list(batches)
    data = list(itertools.islice(batches, MOST_UNCOUNTED + 1))
    if len(data) > MOST_UNCOUNTED:
        raise ValueError(
            f"{name} gave more than {MOST_UNCOUNTED} batches and has no length that says when it "
            f"will end: {advice}"
        )
    return data
