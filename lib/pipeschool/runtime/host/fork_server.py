"""The process that workers are forked from: it has torch, pipeschool and the model's modules.

So a worker is ready in a few hundredths of a second, and every run has new ones: nothing of one run
can spoil the next. Where there is no fork server (Windows) workers are spawned, which takes
seconds.

The server is started anew when a model comes with a module that it has not imported, or when a
file of the user's own has changed since: a worker must never compute with yesterday's code. What it
has imported for one model it keeps for the next.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pipeschool.runtime.errors import or_not_started
from pipeschool.runtime.interrupts import blocked_for_children, held_back
from pipeschool.runtime.own_modules import own_files

AVAILABLE = "forkserver" in multiprocessing.get_all_start_methods()
LONGEST = 70  # bytes of a temporary folder in which a socket can have its name
PRELOAD = "PIPESCHOOL_PRELOAD"  # environment variable: what `preload` imports
if AVAILABLE:
    from multiprocessing import forkserver, resource_tracker, util


TORCHRUNS = {  # environment variables; some of them alone are left over from something else
    *("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}


def under_torchrun() -> bool:
    """Has torchrun started this process, as one of the workers?"""
    return os.environ.keys() >= TORCHRUNS


def start_early(modules: Iterable[str] = ()) -> None:
    """Where workers are ours to start: let the server import while the caller does something else,
    such as importing torch."""
    if not under_torchrun():
        with or_not_started():
            start_fork_server(modules)


class Preloaded:
    """What the server of this process has imported beside torch and pipeschool."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.refused: set[str] = set()  # with which the server did not live
        self.process = os.getpid()  # a child that was forked has a server of its own
        self.files: dict[str, float] = {}  # the user's own, and when they were changed last


preloaded = Preloaded()


def start_fork_server(modules: Iterable[str] = ()) -> Any:
    """The context that makes processes. Its server starts importing now, if it is not there yet,
    and starts again if it has not imported `modules` as they are now.

    That takes seconds the first time, so a caller who has torch to import can do both at once.
    """
    refuse_odd_processes()
    if not AVAILABLE:
        return multiprocessing.get_context("spawn")
    context: Any = multiprocessing.get_context("forkserver")
    with held_back():
        if preloaded.process != os.getpid():
            leave_to_parent()
        renew(modules)
        context.set_forkserver_preload(["pipeschool.runtime.host.preload"])
        os.environ[PRELOAD] = json.dumps([sys.path, preloaded.modules])
        try:
            choose_short_folder()
            # The tracker is started first: to start it lets interrupts through again.
            resource_tracker.ensure_running()
            with blocked_for_children():
                forkserver.ensure_running()
        finally:
            os.environ.pop(PRELOAD, None)
    return context


def renew(modules: Iterable[str]) -> None:
    """End a server that has not imported `modules` as they are now."""
    more = [name for name in modules if name not in preloaded.refused]
    wanted = list(dict.fromkeys([*preloaded.modules, *more]))
    files = own_files() if wanted else {}
    known = {name: files.get(name) for name in preloaded.files}
    if wanted != preloaded.modules or known != preloaded.files:
        stop_fork_server()
        preloaded.modules, preloaded.files = wanted, files


def refuse_odd_processes() -> None:
    """RunError or ValueError where this process can have no workers."""
    if multiprocessing.current_process().daemon:
        raise ValueError(
            "a worker, as any daemonic process of multiprocessing, cannot have workers of its own: "
            "call this from a process that was started with daemon=False"
        )
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ValueError(
            "the working directory has been deleted, so no worker can start in it: change to one "
            "that is there"
        ) from None


def leave_to_parent() -> None:
    """This process was forked from one that has a server. It must neither use nor end that one."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server.__init__()  # as in a process that has none
    preloaded.__init__()  # type: ignore[misc]


def choose_short_folder() -> None:
    """Where TMPDIR is too long for the name of a socket, let `multiprocessing` put the server's
    into a folder that it makes elsewhere, and removes at the end. It keeps to its first choice."""
    given = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        others = ("/tmp", "/var/tmp", "/dev/shm")
        tempfile.tempdir = next((o for o in others if os.access(o, os.W_OK)), given)
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = given


def start_again() -> None:
    """The server has gone: somebody killed it, or a module did that it was to import. None that it
    had is imported there again."""
    preloaded.refused.update(preloaded.modules)
    preloaded.modules, preloaded.files = [], {}
    stop_fork_server()


def stop_fork_server() -> None:
    """End the server; the next one is started when it is needed. Python has no public way to do
    that: where its private one has gone, workers import a model's modules themselves."""
    stop = getattr(forkserver._forkserver, "_stop", None)
    if stop is not None:
        with suppress(OSError):  # it may have ended by itself
            stop()
