"""Objects in short plain words that are the same in every process: to see whether one has changed.

Of a function its name and a checksum of its code, of an object its class and what it holds. No
description has an address in memory in it.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterable
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEEPEST = 4  # objects within objects that are looked into
MOST = 100  # items of a list or a dict that are
LONGEST = 60  # characters of a description in a sentence
NO_SETTING = {"training", "forward"}  # of a module
SETTINGS = (  # what they may be
    type(None), bool, int, float, complex, str, tuple, list, dict, torch.dtype, FunctionType,
    BuiltinFunctionType, functools.partial,
)  # fmt: skip
CHECKSUM = re.compile(r"#[0-9a-f]{8}")


def described(value: Any, depth: int = 0) -> str:
    """`value` in words. Two that behave alike have the same, as far as one can see from outside."""
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, (float, complex, np.generic)):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return f"array {value.shape}{_checksum(value.tobytes())}"
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, type):
        return value.__qualname__
    if depth == DEEPEST:
        return type(value).__qualname__
    if isinstance(value, FunctionType):
        name = value.__qualname__.rpartition("<locals>.")[2]
        return f"{name}{_checksum(_behaviour(value, depth + 1))}"
    if isinstance(value, MethodType):
        return f"{described(value.__self__, depth + 1)}.{value.__name__}"
    if isinstance(value, BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, functools.partial):
        return f"{described(value.func, depth)}{_listed((value.args, value.keywords), depth)}"
    if isinstance(value, dict):
        items = [f"{key}={described(v, depth + 1)}" for key, v in islice(value.items(), MOST)]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return _listed(value, depth)
    if isinstance(value, (set, frozenset)):
        items = sorted(described(item, depth + 1) for item in value)
        return f"{{{', '.join(items[:MOST])}}}"
    if isinstance(value, nn.Module):
        parts = [_listed(module_settings(value).items(), depth), described(value.state_dict())]
        return f"{type(value).__qualname__}{_checksum(parts)}"
    return f"{type(value).__qualname__}{_checksum(described(_held(value), depth + 1))}"


def module_settings(module: nn.Module) -> dict[str, str]:
    """What the layers of `module` are set to, such as ``1.p`` of a dropout that is called 1."""
    return {
        f"{name}.{key}".lstrip("."): described(value)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if isinstance(value, SETTINGS) and not key.startswith("_") and key not in NO_SETTING
    }


def was_is(old: str, new: str) -> tuple[str, str]:
    """Both descriptions as a sentence can show them: short, and with checksums only where they
    would look the same without."""
    bare = [CHECKSUM.sub("", text) for text in (old, new)]
    if bare[0] == bare[1]:
        bare = [old, new]
    if len(bare[0]) > LONGEST or len(bare[1]) > LONGEST:  # from where they differ
        same = next(
            (i for i, (a, b) in enumerate(zip(*bare, strict=False)) if a != b), min(map(len, bare))
        )
        bare = [_cut(text, max(0, same - LONGEST // 4)) for text in bare]
    return bare[0], bare[1]


def _cut(text: str, start: int) -> str:
    shown = text[start : start + LONGEST]
    return f"{'...' if start else ''}{shown}{'...' if start + LONGEST < len(text) else ''}"


def _tensor(value: Tensor) -> str:
    kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value.is_meta or value.layout != torch.strided:
        return kind
    value = value.detach().cpu()
    if value.numel() == 1:
        return repr(value.item())
    return f"{kind}{_checksum(value.reshape(-1).view(torch.uint8).numpy().tobytes())}"


def _listed(values: Iterable[Any], depth: int) -> str:
    items = [described(value, depth + 1) for value in islice(values, MOST)]
    return f"({', '.join(items)})"


def _held(value: object) -> dict[str, Any]:
    names = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return getattr(value, "__dict__", {}) | slots


def _behaviour(function: FunctionType, depth: int) -> str:
    """All that decides what a function does, as far as it is its code or a plain value."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not filled in yet
            cells.append(None)
    spoken_of = (function.__globals__.get(name) for name in function.__code__.co_names)
    constants = [value for value in spoken_of if isinstance(value, (int, float, str))]
    given = (function.__defaults__, function.__kwdefaults__, cells, constants)
    return f"{_code(function.__code__)}{_listed(given, depth)}"


def _code(code: CodeType) -> str:
    constants = [_code(c) if isinstance(c, CodeType) else described(c) for c in code.co_consts]
    return f"{code.co_code.hex()}{constants}{code.co_names}{code.co_varnames}"


def _checksum(value: object) -> str:
    data = value if isinstance(value, bytes) else str(value).encode(errors="replace")
    return f"#{zlib.crc32(data):08x}"
