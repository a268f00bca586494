"""While processes meet, before a run: nobody watches over them yet, and torch would let those who
have come wait for half an hour for one that was stopped, or whose machine has vanished."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

from pipeschool.runtime.cluster.heartbeat import TICK, Heartbeat
from pipeschool.runtime.stall import Seen

SILENT = 5.0  # seconds without a sign of life
ABSENT = 300.0  # seconds in which all must have come: a machine may be slow to import


class Meeting:
    """Inside, this process ends, with one sentence, when one of the others does not live."""

    def __init__(self, heartbeat: Heartbeat, world: int):
        self.heartbeat = heartbeat
        self.everybody = range(world)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.over.set()
        self.thread.join(2 * TICK)

    def _watch(self) -> None:
        seen, began = Seen(), time.monotonic()
        while not self.over.wait(TICK):
            try:
                sentence = self._trouble(seen, time.monotonic() - began)
            except RuntimeError:  # torch says on the main thread that the store has gone
                return
            if sentence and not self.over.is_set():
                print(f"pipeschool: {sentence}", file=sys.stderr, flush=True)
                os._exit(1)

    def _trouble(self, seen: Seen, waited: float) -> str:
        store = self.heartbeat.store
        here = [w for w in self.everybody if store.check([f"beat/{w}"])]
        if silent := self.heartbeat.silent(here, seen, SILENT):
            self.heartbeat.wake(silent)
            return (
                f"worker {silent[0]} is frozen at its start: its process was stopped or its "
                f"machine has gone, and nothing was heard of it for {SILENT:g} s"
            )
        if waited > ABSENT and len(here) < len(self.everybody):
            absent = next(w for w in self.everybody if w not in here)
            return f"worker {absent} has not come within {ABSENT:g} s: was its machine started?"
        return ""
