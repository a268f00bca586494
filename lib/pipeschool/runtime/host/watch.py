"""The controller's watch over a run: collect the reports, or find out what went wrong.

Of several signs of trouble the cause is named, not its consequences: when a worker dies, its
neighbours lose their connection, so the watch waits a moment for the better explanation.
"""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection, wait

from tqdm.auto import tqdm

from pipeschool.actions import Action, Schedule
from pipeschool.dependencies import peer_of
from pipeschool.runtime.errors import RunError, RunStopped, with_frames
from pipeschool.runtime.host.job import Failure, Ready, Report
from pipeschool.runtime.host.pool import Pool
from pipeschool.runtime.host.progress import Progress
from pipeschool.runtime.host.serialize import deserialize
from pipeschool.runtime.stall import suspect

GRACE = 0.4  # seconds between the first sign of trouble and the verdict


class Watch:
    """Waits for `pool` to do a lowered schedule; `timeout` seconds without progress end it.

    `tensor_size`: processes of each worker. `sends_wait`: for their receivers.
    Methods count processes; messages name workers.
    """

    def __init__(
        self,
        pool: Pool,
        schedule: Schedule,
        timeout: float,
        tensor_size: int = 1,
        sends_wait: bool = False,
    ):
        self.pool = pool
        self.sends_wait = sends_wait
        self.schedule = schedule
        self.tensor_size = tensor_size
        self.rows = [row for row in schedule.workers for _ in range(tensor_size)]
        self.timeout = timeout
        self.reports: dict[int, Report] = {}
        self.failures: dict[int, Failure] = {}
        self.dead: list[int] = []
        self.ready: set[int] = set()  # workers that could begin
        self.progress = Progress(pool)

    def results(self) -> list[Report]:
        """One report per worker, or `RunError`; `RunStopped` for the stop button."""
        verdict_at: float | None = None
        workers = range(len(self.rows))
        try:
            with tqdm(total=sum(map(len, self.rows)), delay=2, leave=False, unit="action") as bar:
                while len(self.reports) < len(self.rows):
                    self._listen()
                    moved = sum(self.pool.board) - bar.n
                    if moved > 0:
                        bar.update(moved)
                    now = time.monotonic()
                    if verdict_at is None and (self.dead or self.failures):
                        verdict_at = now + GRACE
                    if any(not failure.secondary for failure in self.failures.values()):
                        verdict_at = now
                    if verdict_at is not None and now >= verdict_at:
                        raise self._failed()
                    if verdict_at is None and self.progress.stalled(self.timeout):
                        raise self._stalled()
        except KeyboardInterrupt:
            places = "; ".join(f"{self._name(w)} was at {self._place(w)}" for w in workers)
            raise RunStopped(f"stopped: all workers have been ended ({places})") from None
        return [self.reports[w] for w in workers[:: self.tensor_size]]

    def _listen(self) -> None:
        """Take in whatever workers say, print or do within a tenth of a second."""
        controls = {
            line.control: w
            for w, line in enumerate(self.pool.lines)
            if not self._heard(w) and not line.coming
        }
        sentinels = {p.sentinel: w for w, p in enumerate(self.pool.processes) if w not in self.dead}
        for ready in wait([*controls, *self.pool.outputs, *sentinels], timeout=0.1):
            if isinstance(ready, int):
                self.dead.append(sentinels[ready])
            elif ready in controls:
                self._hear(controls[ready])
            else:
                assert isinstance(ready, Connection)
                self.pool.show_output(ready)
        for worker, line in enumerate(self.pool.lines):
            if line.coming:
                self._hear(worker)

    def _heard(self, worker: int) -> bool:
        return worker in self.reports or worker in self.failures or worker in self.dead

    def _hear(self, worker: int) -> None:
        try:
            data = self.pool.lines[worker].take()
        except EOFError:
            self.dead.append(worker)
            return
        if data is None:
            return
        answer = deserialize(data)
        if isinstance(answer, Ready):
            self.ready.add(worker)
            if len(self.ready) == len(self.rows):
                self._start()
        elif isinstance(answer, Report):
            self.reports[worker] = answer
        else:
            self.failures[worker] = answer

    def _start(self) -> None:
        """All are ready: let them begin together."""
        for line in self.pool.lines:
            try:
                line.control.send_bytes(b"start")
            except OSError:  # it is gone, and its control pipe will say so
                continue

    def _failed(self) -> RunError:
        own = [w for w, failure in self.failures.items() if not failure.secondary]
        if own:
            return self._raised(own[0])
        if self.dead:
            return self._died(self.dead[0])
        return self._raised(next(iter(self.failures)))

    def _raised(self, worker: int) -> RunError:
        failure = self.failures[worker]
        at = failure.action
        where = at.describe() if at else "its start"
        waiting = self._waiting_for(worker)
        said = f"{self._name(worker)} failed at {where}{waiting}: {failure.error}"
        message = with_frames(said, failure.frames)
        return RunError(message, worker // self.tensor_size, at, self._peer(worker), failure.frames)

    def _died(self, worker: int) -> RunError:
        process = self.pool.processes[worker]
        process.join(1)
        code = process.exitcode or 0
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with status {code}"
        )
        at = self._at(worker)
        where = f"at {at.describe()}" if at else "before its first action"
        message = f"{self._name(worker)} {how} {where}{self._waiting_for(worker)}"
        return RunError(message, worker // self.tensor_size, at, self._peer(worker))

    def _stalled(self) -> RunError:
        open_ = [w for w in range(len(self.rows)) if w not in self.reports]
        frozen = self.progress.frozen(open_)
        late = [w for w in open_ if w not in self.ready]
        worker = suspect({w: self._at(w) for w in (frozen or late or open_)}, (), self.sends_wait)
        at = self._at(worker)
        where = f"at {at.describe()}" if at else "before its first action"
        still = f"nothing has moved for {self.progress.still:.1f} s"
        how, why = (
            "stuck",
            f"{still}. A slow stage needs a larger timeout= (now {self.timeout:g} s)",
        )
        if frozen:
            how, why = "frozen", f"its process has been stopped, and {still}"
        message = f"{self._name(worker)} is {how} {where}{self._waiting_for(worker)}: {why}"
        return RunError(message, worker // self.tensor_size, at, self._peer(worker))

    def _name(self, process: int) -> str:
        return f"worker {process // self.tensor_size}"

    def _at(self, worker: int) -> Action | None:
        position = self.pool.board[worker]
        row = self.rows[worker]
        return row[min(position, len(row) - 1)] if position >= 0 else None

    def _place(self, worker: int) -> str:
        if self.pool.board[worker] >= len(self.rows[worker]):
            return "its end"
        return str(self._at(worker) or "its start")

    def _waits(self, worker: int, peer: int | None = None) -> bool:
        """Is `worker` in a receive (from `peer`, where that is given), or in a send that waits?"""
        at = self._at(worker)
        if at is None or not (at.is_message if self.sends_wait else at.kind.startswith("RECV")):
            return False
        return peer is None or peer_of(at, self.schedule) == peer // self.tensor_size

    def _peer(self, worker: int) -> int | None:
        """The other end of the message `worker` is at; else a worker that waits for it."""
        at = self._at(worker)
        if at and at.is_message:
            return peer_of(at, self.schedule)
        waiting = (w for w in range(len(self.rows)) if self._waits(w, worker))
        return next((w // self.tensor_size for w in waiting), None)

    def _waiting_for(self, worker: int) -> str:
        """Who is held up: `` (worker 2 waits for it at 2RECV_F3)``."""
        at = self._at(worker)
        held_up = [self._with(at)] if at and at.is_message else []
        held_up += [
            f"{self._name(w)} waits for it at {self._at(w)}"
            for w in range(len(self.rows))
            if self._waits(w, worker)
        ]
        return f" ({'; '.join(held_up)})" if held_up else ""

    def _with(self, message: Action) -> str:
        """Who is at the other end, and that it is waited for where that is so."""
        peer = f"worker {peer_of(message, self.schedule)}"
        waits = self.sends_wait and message.kind.startswith("SEND")
        return f"for {peer} to receive it" if waits else f"with {peer}"
