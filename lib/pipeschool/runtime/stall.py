"""What both watchers know, that of one machine and that of several: who holds up a run?"""

from __future__ import annotations

from collections.abc import Mapping

from pipeschool.actions import Action

BUSY_SHARE = 0.2  # of a core: a worker below this is asleep or waiting, not computing
BUSY_FACTOR = 15  # how much longer a computing worker may take than a sleeping one


def suspect(at: Mapping[int, Action | None], sends_wait: bool = False) -> int:
    """Of workers that do not move, given what each is at, the one that holds up the others: one
    that computes, otherwise one at an update, where workers may wait for each other, and last one
    that waits for a message, or is at its start or end. sends_wait: for their receivers."""
    waits = {"U": 1, "RECV_F": 2, "RECV_B": 2}
    if sends_wait:
        waits |= {"SEND_F": 2, "SEND_B": 2}
    return min(at, key=lambda w: 2 if (action := at[w]) is None else waits.get(action.kind, 0))
