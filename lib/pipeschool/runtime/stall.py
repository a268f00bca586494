"""What both watchers know, that of one machine and that of several: who holds up a run?"""

from __future__ import annotations

import time
from collections.abc import Container, Hashable, Mapping

from pipeschool.actions import Action

BUSY_SHARE = 0.2  # of a core: a worker below this is asleep or waiting, not computing
BUSY_FACTOR = 15  # how much longer a computing worker may take than a sleeping one
LONGEST_LOOK = 1.0  # seconds between two looks, as far as they count


class Seen:
    """When has what this process looks at last changed, by a clock of its own?

    What others say about time is worth nothing once they are stopped. And where this process itself
    was stopped, as Ctrl-Z stops a watcher with its workers, that time does not count: of the time
    between two looks at most LONGEST_LOOK does.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.looked = time.monotonic()
        self.last: dict[Hashable, tuple[object, float]] = {}  # by name: a value, and since when

    def look(self, name: Hashable, value: object) -> float:
        """The seconds for which `name` has had this `value`; 0 where it has just changed."""
        now = time.monotonic()
        self.seconds += min(now - self.looked, LONGEST_LOOK)
        self.looked = now
        before = self.last.get(name)
        if before is None or before[0] != value:
            before = self.last[name] = value, self.seconds
        return self.seconds - before[1]


def suspect(
    at: Mapping[int, Action | None], frozen: Container[int] = (), sends_wait: bool = False
) -> int:
    """Of workers that do not move, given what each is at, the one that holds up the others: one
    whose process is `frozen`, otherwise one that computes, then one at an update, where workers may
    wait for each other, and last one that waits for a message, or is at its start or end.
    sends_wait: for their receivers."""
    waits = {"U": 1, "RECV_F": 2, "RECV_B": 2}
    if sends_wait:
        waits |= {"SEND_F": 2, "SEND_B": 2}

    def patience(worker: int) -> int:
        action = at[worker]
        return -1 if worker in frozen else 2 if action is None else waits.get(action.kind, 0)

    return min(at, key=patience)
