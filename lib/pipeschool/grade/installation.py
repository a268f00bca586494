"""Does it run on this machine? One line per part of the installation, and how to mend it."""

from __future__ import annotations

import importlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata

REINSTALL = "close JupyterLab and run `make lab` again in the course's folder"

PACKAGES = {  # import name -> name on the package index
    "torch": "torch",
    "cloudpickle": "cloudpickle",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "ipywidgets": "ipywidgets",
    "jupyterlab_widgets": "jupyterlab_widgets",  # what shows the sliders in JupyterLab
    "nbgrader": "nbgrader",
}


def self_check() -> None:
    """A line for every part that the course needs: ok, or what is wrong and how to mend it."""
    broken = 0
    for name, look, mend in parts():
        try:
            print(f"ok      {name}: {look()}")
        except Exception as error:  # whatever it is, the learner gets a sentence
            broken += 1
            print(f"WRONG   {name}: {type(error).__name__}: {error}")
            print(f"        To mend it, {mend}.")
    if broken:
        print(f"\n{broken} of these need mending before you go on.")
    else:
        print("\nEverything works. Go on with unit 01.")


def parts() -> Iterator[tuple[str, Callable[[], str], str]]:
    """(name, a look that gives a few words or raises, how to mend it) of every part."""
    yield "Python", python_version, REINSTALL
    for module, package in PACKAGES.items():
        yield package, partial(version, module, package), REINSTALL
    yield "a chart", chart, REINSTALL
    yield (
        "two worker processes",
        workers,
        "restart the kernel and run this cell again; if it stays wrong, a firewall or a sandbox "
        "may keep processes on this machine from talking to each other",
    )
    yield "the same two, started again", workers, "restart the kernel and run this cell again"


def python_version() -> str:
    """The version of the Python that runs this notebook."""
    return f"{sys.version.split()[0]} in {sys.prefix}"


def version(module: str, package: str) -> str:
    """Import a package; its version."""
    importlib.import_module(module)
    return metadata.version(package)


def chart() -> str:
    """Draw a small chart."""
    from pipeschool import draw
    from pipeschool.schedules import gpipe
    from pipeschool.simulator import simulate

    picture = io.BytesIO()
    draw.gantt(simulate(gpipe(p=2, m=2))).savefig(picture, format="png")
    return f"drawn, {len(picture.getvalue()) // 1000} kB"


def workers() -> str:
    """Run two stages on two processes, and compare their gradients with those of this process."""
    import torch

    from pipeschool.runtime import run
    from pipeschool.runtime.reference import gradients, max_error
    from pipeschool.schedules import gpipe

    stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
    batches = [(torch.ones(6, 4), torch.zeros(6, 2))]
    called = time.perf_counter()
    result = run(gpipe(p=2, m=3), stages, batches)
    error = max_error(result.gradients, gradients(stages, batches, m=3))
    if not error < 1e-6:
        raise ArithmeticError(f"their gradients differ by {error:g} from those of one process")
    took = time.perf_counter() - called
    return f"ready in {result.start_seconds:.2f} s, done in {took:.2f} s, {result.backend}"
