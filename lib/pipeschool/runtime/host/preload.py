"""What the fork server imports, so that no worker has to."""

from __future__ import annotations

import importlib
import json
import os
import sys

import pipeschool.runtime.host.process  # torch, and all that a worker needs
from pipeschool.runtime.host.fork_server import PRELOAD

path, modules = json.loads(os.environ.pop(PRELOAD, "[[], []]"))
sys.path[:] = path or sys.path
for name in modules:
    try:
        importlib.import_module(name)
    except BaseException:  # the worker that needs it will say what is wrong
        sys.modules.pop(name, None)

__all__ = ["pipeschool"]
