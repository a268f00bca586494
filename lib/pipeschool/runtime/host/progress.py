"""Does a run on this machine still move?"""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from pipeschool.runtime.host.pool import Pool
from pipeschool.runtime.stall import BUSY_FACTOR, BUSY_SHARE, Seen

START_LIMIT = 60.0  # seconds until all workers must have begun


class Progress:
    """For how long has no worker moved on, and are they at least computing?"""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.seen = Seen()
        self.held_up = 0  # looks at which a declared link held up a message: that moves
        self.still = 0.0  # seconds for which nothing has moved
        self.cpu: list[float] = []  # seconds of processor time per worker when it last moved

    def stalled(self, timeout: float) -> bool:
        """True when nothing has moved for `timeout` seconds and nobody computes, or for
        BUSY_FACTOR times as long whatever they do. Before all have begun, they may take
        START_LIMIT, unless a process is stopped."""
        self.held_up += any(self.pool.on_link)
        board = list(self.pool.board)
        self.still = self.seen.look("board", (board, self.held_up))
        if self.still == 0.0:
            self.cpu = self._cpu()
            return False
        if self.still <= timeout:
            return False
        if min(board) < 0:
            return self.still > START_LIMIT or bool(self.frozen(range(len(board))))
        used = max(now - then for then, now in zip(self.cpu, self._cpu(), strict=True))
        return used < BUSY_SHARE * self.still or self.still > BUSY_FACTOR * timeout

    def frozen(self, workers: Iterable[int]) -> list[int]:
        """Those of `workers` whose process somebody has stopped."""
        return [w for w in workers if self._status(w) == psutil.STATUS_STOPPED]

    def _status(self, worker: int) -> str:
        try:
            return psutil.Process(self.pool.processes[worker].pid).status()
        except psutil.Error:
            return ""

    def _cpu(self) -> list[float]:
        used = []
        for process in self.pool.processes:
            try:
                times = psutil.Process(process.pid).cpu_times()
                used.append(times.user + times.system)
            except psutil.Error:
                used.append(0.0)
        return used
