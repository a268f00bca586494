"""How many bytes of tensors are alive: counted as they are made, and as the last user lets go."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeschool.runtime.weights.storage import address, dense_parts


class LiveBytes(TorchDispatchMode):
    """Within ``with LiveBytes() as live:``, `live.now` counts what the operations of this thread
    have allocated and nobody has freed; `live.peak` is the most since it was last set.

    What is there before does not count, and a view counts nothing. It sees every operation, those
    that autograd does in a backward too, and slows each by some microseconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        given = {address(part) for t in leaves for part in dense_parts(t)}
        self.note((t for t in tree_leaves(result) if isinstance(t, Tensor)), given)
        return result

    def note(self, tensors: Iterable[Tensor], given: Iterable[int] = ()) -> None:
        """Count these tensors, as far as they are new, and not views of those `given`."""
        for part in itertools.chain.from_iterable(map(dense_parts, tensors)):
            storage = part.untyped_storage()
            place = storage._cdata
            if place in self.known or place in given:
                continue
            self.known.add(place)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, place, size).atexit = False

    def _gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def size_of(values: Iterable[Any]) -> int:
    """Bytes of the tensors among `values`."""
    dense = (part for t in values if isinstance(t, Tensor) for part in dense_parts(t))
    return sum(t.numel() * t.element_size() for t in dense)
