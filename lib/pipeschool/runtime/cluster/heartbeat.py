"""Signs of life: as long as a process lives, it counts in the store, and the others look.

A process that was stopped, or whose machine has vanished, cannot say so, and the connections to it
stay open. What tells is that its count stands still.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch.distributed as dist

from pipeschool.runtime.stall import Seen

TICK = 0.2  # seconds between two counts, and between two looks at the others
SHORTEST = 2.0  # seconds for which a process may always be silent: it may share its core


class Heartbeat:
    """Counts ``beat/3`` up, for worker 3, from its first run to the end of its process. `answers`
    are those of the store: when they stay away, it is the store that has gone.

    store: over a connection of its own. A wait on it, as for new groups, would hold up the count.
    """

    def __init__(self, store: dist.Store, rank: int):
        self.store = store
        self.rank = rank
        self.answers = 0
        self.over = threading.Event()
        store.set(f"home/{rank}", json.dumps([machine(), os.getpid()]))
        self._beat()
        self.thread = threading.Thread(target=self._count, daemon=True)
        self.thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """A process that ends while it asks the store is aborted."""
        self.over.set()
        self.thread.join(2 * TICK)

    def _count(self) -> None:
        while not self.over.wait(TICK):
            try:
                self._beat()
            except RuntimeError:  # the store has gone: who watches over a run will notice
                return

    def _beat(self) -> None:
        self.store.add(f"beat/{self.rank}", 1)
        self.answers += 1

    def silent(self, workers: Sequence[int], seen: Seen, limit: float) -> list[int]:
        """Those of `workers` that `seen` has not heard of for longer than `limit` seconds."""
        counts = self.store.multi_get([f"beat/{w}" for w in workers])
        stood = {w: seen.look(f"beat/{w}", n) for w, n in zip(workers, counts, strict=True)}
        return [w for w in workers if stood[w] > max(limit, SHORTEST)]

    def wake(self, workers: Iterable[int]) -> None:
        """Let those of `workers` that were stopped on this machine go on, to their end: a stopped
        process does not hear that its launcher ends it."""
        for worker in workers:
            where, process = json.loads(self.store.get(f"home/{worker}"))
            if where == machine() and hasattr(signal, "SIGCONT"):
                with suppress(OSError):
                    os.kill(process, signal.SIGCONT)


def machine() -> str:
    """The number of this machine's launcher."""
    return os.environ.get("GROUP_RANK", "0")
