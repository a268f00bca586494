"""Under torch's own launcher: this process is one worker, of one machine or of several.

torchrun starts as many processes as the schedule has workers, on all machines together, and each
runs the same script, which must make the same stages and batches in all: seed what is random. Here
a call of `run` does this process's row, and every process returns the whole result. There is no
controller; what the others should know about a failure goes through the launcher's store, which
outlives any worker:

``failure``  the first failure that has a cause of its own; nobody overwrites it
``lost/3``   worker 3 lost the connection to that worker, and lives
``ended/3``  worker 3 was ended by its launcher, because another one of its machine failed
``trouble``  one of these has happened
``place/3``  where worker 3 is, how often it has moved, and whether it computes
"""

from __future__ import annotations

import _thread
import copy
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import FrameType, TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from pipeschool.actions import Action, Schedule
from pipeschool.dependencies import peer_of
from pipeschool.runtime.cluster.heartbeat import SHORTEST, TICK, Heartbeat, machine
from pipeschool.runtime.cluster.meeting import Meeting
from pipeschool.runtime.cluster.time import offset_to_worker_0
from pipeschool.runtime.errors import Frame, RunError, with_frames
from pipeschool.runtime.host.failure import failure
from pipeschool.runtime.host.job import Failure, Job, Report
from pipeschool.runtime.host.worker import work
from pipeschool.runtime.stages.random_numbers import put_back
from pipeschool.runtime.stall import BUSY_FACTOR, BUSY_SHARE, Seen, suspect
from pipeschool.runtime.weights.groups import Groups

GRACE = 1.0  # seconds between the loss of a connection and the verdict


def rank() -> int:
    """The number of this process among all, on all machines."""
    return int(os.environ["RANK"])


def take_part(
    jobs: Callable[[int], Job], schedule: Schedule, timeout: float, same: dict[str, Any]
) -> list[Report]:
    """Do this process's row of `schedule`; the reports of all workers. RunError where one fails.

    `jobs` gives the job of a worker. `timeout`: seconds without progress that end the run. `same`:
    by name, what must be the same in all processes.
    """
    world = int(os.environ["WORLD_SIZE"])
    if world != schedule.p:
        raise ValueError(
            f"torchrun started {world} processes, but {schedule.name} needs {schedule.p}, one for "
            f"each worker: --nnodes times --nproc-per-node must be {schedule.p}"
        )
    session = join()
    job = jobs(rank())
    job = replace(job, modules=copy.deepcopy(job.modules))  # the caller's own are not trained
    session.runs += 1
    store = dist.PrefixStore(f"run/{session.runs}", session.store)
    detector = FailureDetector(store, session.heartbeat, schedule, timeout)
    groups = Groups()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for what, mine in same.items():
            refuse_difference(what, mine)
        with put_back(range(torch.cuda.device_count())):
            boards = detector.board, detector.on_link
            offset = session.offset
            report = work(rank(), job, *boards, {}, groups, dist.barrier, offset)
        reports: list[Report] = [report] * world
        dist.all_gather_object(reports, report)
        groups.close()
    except KeyboardInterrupt:
        if detector.verdict is None:
            raise
        raise detector.verdict from None
    except Exception as error:
        raise detector.explain(error) from None
    finally:
        detector.stop()
        torch.set_num_threads(threads)
    return reports


@dataclass
class Session:
    """What the processes share from the first run on.

    store: the launcher's. heartbeat: tells the others that this process lives. offset: what this
    process adds to its clock to tell the time of worker 0. told: whether this process has printed
    why a run failed. runs: how many there were; no store is asked, which may have gone.
    """

    store: dist.Store
    heartbeat: Heartbeat
    offset: float
    told: bool = False
    runs: int = 0


@cache
def join() -> Session:
    """Meet the other processes, once."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    prefix = f"pipeschool/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    meeting = dist.PrefixStore(f"{prefix}/groups", connect(serve=not hosted and rank() == 0))
    store = dist.PrefixStore(prefix, connect())  # torch may wait on the other connection
    if name := interface_towards(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    world, heartbeat = int(os.environ["WORLD_SIZE"]), Heartbeat(store, rank())
    with Meeting(heartbeat, world):
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo",
            store=meeting,
            rank=rank(),
            world_size=world,
        )
        offset = offset_to_worker_0()
    sys.excepthook = quiet_hook(sys.excepthook)
    return Session(store, heartbeat, offset)


def connect(serve: bool = False) -> dist.Store:
    """A connection to the launcher's store. serve: there is no launcher that has one."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=serve,
        wait_for_workers=False,
    )


def interface_towards(address: str) -> str | None:
    """The network interface through which this machine reaches `address`. gloo would look for the
    one that has this host's name, which on many machines is the wrong one, or none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            mine = probe.getsockname()[0]
    except OSError:
        return None
    several = int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"])
    if several and mine.startswith("127.") and not address.startswith("127."):
        return None  # the name of this machine leads home, and nowhere else
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, here in interfaces if mine in [a.address for a in here]), None)


def meet_and_refuse_difference(what: str, mine: Any) -> None:
    """`refuse_difference` outside a run, where nothing else watches over the processes."""
    session = join()
    with Meeting(session.heartbeat, int(os.environ["WORLD_SIZE"])):
        refuse_difference(what, mine)


def refuse_difference(what: str, mine: Any) -> None:
    """ValueError where the machines do not agree on `mine`, of which each has its own."""
    everybody: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    dist.all_gather_object(everybody, mine)
    if not all(alike(other, everybody[0]) for other in everybody):
        places = ", ".join(f"worker {w}: {other}" for w, other in enumerate(everybody))
        raise ValueError(
            f"the {what} of the machines differ: {places}. Give all the same: for random ones, set "
            "the same seed"
        )


def alike(a: Any, b: Any) -> bool:
    """Equal; numbers but for what different processors make of the same sum."""
    if isinstance(a, float) and isinstance(b, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


class FailureDetector:
    """Tells the others where this worker is, and finds out why a run has failed."""

    def __init__(self, store: dist.Store, heartbeat: Heartbeat, schedule: Schedule, timeout: float):
        self.store = store
        self.heartbeat = heartbeat
        self.schedule = schedule
        self.timeout = timeout
        self.rank = rank()
        self.board = [-1] * schedule.p
        self.on_link = [0] * schedule.p
        self.verdict: RunError | None = None
        self.main_knows = False  # the worker has found out by itself
        self.over = threading.Event()
        self.before = signal.signal(signal.SIGTERM, self._ended)
        self.threads = [
            threading.Thread(target=watch, daemon=True)
            for watch in (self._watch, self._watch_store)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """The run is over, one way or the other."""
        self.over.set()
        for thread in self.threads:  # a process that ends while it asks the store is aborted
            thread.join(2 * GRACE)
        signal.signal(signal.SIGTERM, self.before)

    def failed(self, own: Failure) -> RunError:
        """What to raise here, for a failure of this worker or of a connection of it."""
        self.main_knows = True
        try:
            if not own.secondary:
                at = own.action.describe() if own.action else "its start"
                said = f"worker {self.rank} failed at {at}: {own.error}"
                error = self._agree(with_frames(said, own.frames), own)
                self.store.set("trouble", "a failure")
                return error
            self.store.set(f"lost/{self.rank}", str(self._peer(own.action)))
            self.store.set("trouble", "a lost connection")
            return self._conclude(own)
        except RuntimeError:
            return self._store_gone(own.action)

    def _store_gone(self, action: Action | None, how: str = "has gone as well") -> RunError:
        """The store lives in the launcher of the first machine: nobody can say more than this."""
        at = f" at {action.describe()}" if action else ""
        error = RunError(
            f"worker {self.rank} lost its connections{at}, and the launcher on the first machine "
            f"{how}: what it printed says why",
            self.rank,
            action,
        )
        error.printed_elsewhere = os.environ["LOCAL_RANK"] != "0"
        return error

    def _conclude(self, own: Failure) -> RunError:
        """There is trouble: somebody names a cause, or somebody has fallen silent."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not self.store.check(["failure"]):
            time.sleep(TICK)
        if self.store.check(["failure"]):
            return self._agree("", own)
        everybody = range(self.schedule.p)
        speakers = [w for w in everybody if self.store.check([f"lost/{w}"])]
        named = {int(self.store.get(f"lost/{w}")): w for w in speakers}
        ended = [w for w in everybody if self.store.check([f"ended/{w}"])]
        silent = [w for w in everybody if w not in speakers and w not in ended]
        # In an all-reduce nobody knows whom he has lost; one silent among all is enough to tell.
        known = [w for w in named if w >= 0]
        lost = [w for w in silent if w in named] or (silent if len(silent) == 1 else known)
        speaker = next((named[w] for w in lost if w in named), min(speakers, default=-1))
        noticed = f", and worker {speaker} noticed" if speaker >= 0 else ""
        who = f"worker {lost[0]} was lost{self._place(lost[0])}" if lost else "a worker was lost"
        message = f"{who}: its process or its machine has gone{noticed}"
        return self._agree(message, own)

    def explain(self, error: Exception) -> RunError:
        """`failed` for an exception that this worker has raised."""
        row = self.schedule.workers[self.rank]
        position = self.board[self.rank]
        found = failure(row[position] if 0 <= position < len(row) else None, error)
        return self.failed(found)

    def _agree(self, message: str, own: Failure) -> RunError:
        """The first failure that anybody named, and whether it is for this process to print."""
        mine = {"worker": self.rank, "message": message, "action": own.action, "frames": own.frames}
        if message:
            self.store.compare_set("failure", "", json.dumps(mine))
        first = json.loads(self.store.get("failure"))
        action = Action(*first["action"]) if first["action"] else None
        frames = tuple(Frame(*frame) for frame in first["frames"])
        error = RunError(first["message"], first["worker"], action, None, frames)
        reporter = self.store.compare_set(f"reporter/{machine()}", "", str(self.rank))
        error.printed_elsewhere = int(reporter) != self.rank
        return error

    def _peer(self, action: Action | None) -> int:
        if action is not None and action.is_message:
            return peer_of(action, self.schedule)
        return -1

    def _place(self, worker: int) -> str:
        if not self.store.check([f"place/{worker}"]):
            return ""
        position = json.loads(self.store.get(f"place/{worker}"))["at"]
        row = self.schedule.workers[worker]
        return f" at {row[position].describe()}" if 0 <= position < len(row) else ""

    def _watch(self) -> None:
        """Publish where this worker is; end the run when others fail or nobody moves any more."""
        seen = Seen()
        last, moves, cpu = -1, 0, time.process_time()
        while not self.over.wait(TICK):
            position = self.board[self.rank]
            if position != last or self.on_link[self.rank]:
                last, moves, cpu = position, moves + 1, time.process_time()
            still = seen.look("this worker", moves)
            busy = time.process_time() - cpu > BUSY_SHARE * still
            place = {"at": position, "moves": moves, "busy": busy}
            try:
                self.store.set(f"place/{self.rank}", json.dumps(place))
                if self.store.check(["trouble"]):
                    nothing = Failure(None, "", (), secondary=True)
                    return self._wake_main(self._conclude(nothing))
                if still > TICK and (error := self._stalled(seen)):
                    return self._wake_main(error)
            except RuntimeError:
                return self._wake_main(self._store_gone(None))

    def _watch_store(self) -> None:
        """The store may have gone without a word: then every question to it waits for ever, also
        that of a main thread that knows of a failure. So this process ends."""
        seen = Seen()
        while not self.over.wait(TICK):
            silent = seen.look("the store", self.heartbeat.answers)
            if silent > max(self.timeout, SHORTEST) + GRACE:
                tell(self._store_gone(None, f"has not answered for {silent:.1f} s"))
                os._exit(1)

    def _wake_main(self, verdict: RunError) -> None:
        """Let the worker raise `verdict`, whatever it is waiting for."""
        if self.main_knows:
            return
        self.verdict = verdict
        _thread.interrupt_main()
        if not self.over.wait(2 * GRACE):  # it waits in the library, and does not hear us
            tell(verdict)
            os._exit(1)

    def _stalled(self, seen: Seen) -> RunError | None:
        """Why nothing moves anywhere, for longer than it may; None while somebody does."""
        everybody = range(self.schedule.p)
        here = [w for w in everybody if self.store.check([f"place/{w}"])]  # others have not begun
        texts = self.store.multi_get([f"place/{w}" for w in here])
        places = {w: json.loads(text) for w, text in zip(here, texts, strict=True)}
        silent = self.heartbeat.silent(everybody, seen, self.timeout)
        still = min(seen.look(f"place/{w}", places[w]["moves"]) for w in here)
        busy = any(place["busy"] for place in places.values())
        if still <= self.timeout * (BUSY_FACTOR if busy and not silent else 1):
            return None
        if len(here) < self.schedule.p and not silent:
            return None
        at = {w: self._action(w, places[w]["at"]) if w in here else None for w in everybody}
        stuck = suspect(at, silent)
        action = at[stuck]
        ended = stuck in here and places[stuck]["at"] >= 0
        where = action.describe() if action else "its end" if ended else "its start"
        for_long = f"nothing has moved for {still:.1f} s"
        limit = f"timeout= (now {self.timeout:g} s)"
        how, why = "is stuck", f"{for_long}. A slow stage needs a larger {limit}"
        if silent:
            how = "is frozen, last heard of"  # it says where it is a few times in a second
            why = f"its process was stopped or its machine has gone, and {for_long}, beyond {limit}"
        message = f"worker {stuck} {how} at {where}: {why}"
        error = self._agree(message, Failure(action, message, (), secondary=False))
        self.heartbeat.wake(silent)
        return error

    def _action(self, worker: int, position: int) -> Action | None:
        row = self.schedule.workers[worker]
        return row[position] if 0 <= position < len(row) else None

    def _ended(self, number: int, frame: FrameType | None) -> None:
        """The launcher ends this process because of another one: that is no cause."""
        self.main_knows = True
        try:
            self.store.set(f"ended/{self.rank}", "by its launcher")
            self.store.set("trouble", "an end")
            tell(self._conclude(Failure(None, "", (), secondary=True)))
            time.sleep(3 * GRACE)  # the launcher, whose store all need, lives until this one ends
        except RuntimeError:
            tell(self._store_gone(None))
        finally:
            os._exit(1)


def tell(error: RunError) -> None:
    """Print what has failed: once, in one process of each machine."""
    session = join()
    if not error.printed_elsewhere and not session.told:
        session.told = True
        print(f"pipeschool: {error}", file=sys.stderr, flush=True)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def quiet_hook(before: Hook) -> Hook:
    """One sentence for a failed run, from one process of each machine."""

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, RunError):
            before(kind, error, traceback)
        else:
            tell(error)

    return hook
