"""Which modules a worker has to import for a model, and which files are the user's own."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType

NOT_A_MODELS = {"__main__", "torch", "pipeschool", *sys.stdlib_module_names}


def modules_of(objects: Iterable[object]) -> list[str]:
    """The modules that define the classes and functions of `objects`, as far as a worker would have
    to import them: not those of Python, torch or pipeschool, nor a notebook's own."""
    found: dict[str, None] = {}
    for name in (name for item in objects for name in names_of(item)):
        module = sys.modules.get(name)
        top = name.partition(".")[0]
        importable = getattr(module, "__spec__", None) is not None
        if importable and top not in NOT_A_MODELS:
            found[name] = None
    return sorted(found)


def names_of(item: object) -> set[str]:
    """The module that defines the class or function of `item`; of one in a script or a notebook
    also those that its code speaks of."""
    definition = item if isinstance(item, (type, FunctionType)) else type(item)
    module = definition.__module__
    if module != "__main__":
        return {module}
    own = [definition] if isinstance(definition, FunctionType) else vars(definition).values()
    names = {module}
    for function in own:
        if isinstance(function, FunctionType):
            for word in function.__code__.co_names:
                spoken_of = function.__globals__.get(word)
                if isinstance(spoken_of, ModuleType):
                    names.add(spoken_of.__name__)
                elif isinstance(spoken_of, (type, FunctionType)):
                    names.add(spoken_of.__module__)
    return names


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
