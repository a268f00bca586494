"""What is to be trained and can be reached from a value that a module or a loss holds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

MOST = 1000  # items of a list that are looked at


class Reached(NamedTuple):
    """A tensor to be trained. in_module: as a parameter of a module that was reached."""

    tensor: Tensor
    in_module: bool


def reached(value: Any, depth: int = 3) -> Iterator[Reached]:
    """From a module its parameters, from a list or a dict its items, from a function what it has
    with it: arguments, its object, what it has closed over, and the globals that it names; `depth`
    of these within each other."""
    if isinstance(value, nn.Module):
        yield from (Reached(p, True) for p in value.parameters() if p.requires_grad)
    elif isinstance(value, Tensor):
        if value.requires_grad:
            yield Reached(value, False)
    elif depth == 0:
        return
    elif isinstance(value, (list, tuple, set)):
        for item in list(value)[:MOST]:
            yield from reached(item, depth - 1)
    elif isinstance(value, dict):
        yield from reached(list(value.values()), depth)
    elif isinstance(value, functools.partial):
        yield from reached([value.func, *value.args, *value.keywords.values()], depth)
    elif inspect.ismethod(value):
        yield from reached([value.__func__, value.__self__], depth)
    elif is_own(value):
        used = inspect.getclosurevars(value)
        own = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        yield from reached([*own, *used.nonlocals.values(), *used.globals.values()], depth)


def is_own(function: Any) -> bool:
    """Is it a function of the caller's, into which one may look?"""
    return inspect.isfunction(function) and not str(function.__module__).startswith("torch.")
