"""Which modules a worker has to import for a model, and which files are the user's own."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

NOT_A_MODELS = {"__main__", "torch", "pipeschool", *sys.stdlib_module_names}


def modules_of(objects: Iterable[object]) -> list[str]:
    """The modules that define the classes and functions of `objects`, as far as a worker would have
    to import them: not those of Python, torch or pipeschool, nor a notebook's own."""
    found: dict[str, None] = {}
    for item in objects:
        name = getattr(item, "__module__", None) or type(item).__module__
        module = sys.modules.get(name)
        top = name.partition(".")[0]
        importable = getattr(module, "__spec__", None) is not None
        if importable and top not in NOT_A_MODELS:
            found[name] = None
    return sorted(found)


def own_files() -> dict[str, float]:
    """The files that the user's own modules came from, each with the time of its last change.
    Those of Python and of installed packages are taken to stay as they are."""
    installed = [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]
    files = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith((*installed, sys.prefix)):
            try:
                files[file] = Path(file).stat().st_mtime
            except OSError:
                continue
    return files
