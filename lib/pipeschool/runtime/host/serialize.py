"""Objects on their way to a worker and back: cloudpickle, so that notebook cells travel too."""

from __future__ import annotations

import copyreg
import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pipeschool.runtime.keepable import alone


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but code remembers the file it came from: an error in a worker can then point
    to the learner's own line. (cloudpickle writes ``<dynamic-code>`` instead.) Of a tensor that is
    a piece of a larger one, only the piece travels. And a layer with parametrizations, such as
    weight_norm, travels like any other: torch refuses that lest files be read by a torch with other
    ones, but here both ends are the same."""

    dispatch_table = ChainMap(
        {
            CodeType: lambda code: _code_with_file(code),
            Tensor: lambda tensor: alone(tensor).__reduce_ex__(2),
        },
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, obj: Any) -> Any:
        """How `obj` is taken apart, where that is not as usual."""
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), obj.__dict__  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _code_with_file(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _restore, (make, parts, code.co_filename)


def _restore(make: Callable[..., CodeType], parts: tuple[Any, ...], file: str) -> CodeType:
    return make(*parts).replace(co_filename=file)


def serialize(value: Any) -> bytes:
    """`value` as bytes; whatever cannot travel raises TypeError with one sentence."""
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(value)
    except Exception as error:
        raise TypeError(f"this cannot be sent to a worker process: {error}") from error
    return stream.getvalue()


def deserialize(data: bytes) -> Any:
    """The value that `serialize` made into `data`."""
    return cloudpickle.loads(data)
