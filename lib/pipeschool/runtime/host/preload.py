"""What the fork server imports, so that no worker has to. Imported anywhere else it does nothing
but that: what ends a process or changes how it takes signals is for the server alone."""

from __future__ import annotations

import os
import signal

from pipeschool.runtime.host.fork_server import PRELOAD

asked = os.environ.pop(PRELOAD, None)
if asked is not None:  # from here on the stop button is for the caller
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it was started with it blocked

import atexit  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from contextlib import suppress  # noqa: E402

import pipeschool.runtime.host.process  # noqa: E402  # torch, and all that a worker needs


def serve(path: list[str], modules: list[str]) -> None:
    """Import `modules`, found on `path`, into the server."""
    sys.path[:] = path
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException:  # the worker that needs it will say what is wrong
            sys.modules.pop(name, None)
    if threading.active_count() > 1:
        # A thread that a module has started is not there after a fork, and the lock that it holds
        # is never let go. Where the server is gone, workers import these modules themselves.
        os._exit(1)


def sweep(caller: int) -> None:
    """Remove the server's socket and its folder, which `caller` does, unless it was killed."""
    from multiprocessing import forkserver

    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    time.sleep(0.1)  # a process that is being killed first closes what it has open
    if os.getppid() != caller and isinstance(address, str):
        with suppress(OSError):
            os.unlink(address)
            os.rmdir(os.path.dirname(address))


if asked is not None:
    atexit.register(sweep, os.getppid())
    serve(*json.loads(asked))

__all__ = ["pipeschool", "serve", "sweep"]
