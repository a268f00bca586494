"""What the fork server imports, so that no worker has to."""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the stop button is for the caller, from here on

import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402

import pipeschool.runtime.host.process  # noqa: E402  # torch, and all that a worker needs
from pipeschool.runtime.host.fork_server import PRELOAD  # noqa: E402

path, modules = json.loads(os.environ.pop(PRELOAD, "[[], []]"))
sys.path[:] = path or sys.path
for name in modules:
    try:
        importlib.import_module(name)
    except BaseException:  # the worker that needs it will say what is wrong
        sys.modules.pop(name, None)
if threading.active_count() > 1:
    # A thread that a module has started is not there after a fork, and the lock that it holds is
    # never let go. Where the server is gone, workers import these modules themselves.
    os._exit(1)

__all__ = ["pipeschool"]
