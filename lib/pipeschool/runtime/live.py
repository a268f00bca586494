"""How many bytes of tensors are alive: counted as they are made, and as the last user lets go."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeschool.memory import MemorySample
from pipeschool.runtime.stage import Stage, Tensors
from pipeschool.runtime.storage import address, parts


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
        given = {address(part) for t in leaves for part in parts(t)}
        self.note((t for t in tree_leaves(result) if isinstance(t, Tensor)), given)
        return result

    def note(self, tensors: Iterable[Tensor], given: Iterable[int] = ()) -> None:
        """Count these tensors, as far as they are new, and not views of those `given`."""
        for part in itertools.chain.from_iterable(map(parts, tensors)):
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


class Meter:
    """Reads off `live`, after every action of a worker, what its bytes are for."""

    def __init__(self, stages: Mapping[int, Stage], mail: Mapping[Any, Tensors]):
        self.live = LiveBytes()
        self.stages = stages
        self.mail = mail
        weights = [stage.weights for stage in stages.values()]
        self.live.note(w for own in weights for w in own.current.values())
        self.live.peak = self.live.now
        self.spare = 0
        self.levels = [self._level(0.0)]

    def note(self, start: float, end: float) -> None:
        """One level from `start` on, at the height of the action just done, and one for its end."""
        before = self.levels[-1]
        working = self.live.peak - self.spare - before.total
        self.levels.append(before._replace(time=start, working=max(working, 0.0)))
        self.levels.append(self._level(end))
        self.live.peak = self.live.now

    def _level(self, time: float) -> MemorySample:
        weights = [stage.weights for stage in self.stages.values()]
        held = sum(w.bytes * w.held for w in weights)
        one = sum(w.bytes for w in weights)
        gradients = sum(size_of(w.gradients.values()) for w in weights)
        optimizer = sum(
            size_of(tree_leaves(list(w.optimizer.state.values()))) for w in weights if w.optimizer
        )
        received = [
            flight.leaves
            for stage in self.stages.values()
            if stage.index
            for flight in stage.in_flight.values()
        ]
        buffers = sum(map(size_of, [*received, *self.mail.values()]))
        # Those of the update before are kept for the caller alone: training does without them.
        self.spare = sum(size_of(w.last_gradients.values()) for w in weights)
        others = held + gradients + optimizer + buffers + self.spare
        return MemorySample(
            time,
            weights=one,
            versions=held - one,
            gradients=gradients,
            optimizer=optimizer,
            activations=self.live.now - others,
            buffers=buffers,
            working=0.0,
        )


def size_of(values: Iterable[Any]) -> int:
    """Bytes of the tensors among `values`."""
    dense = (part for t in values if isinstance(t, Tensor) for part in parts(t))
    return sum(t.numel() * t.element_size() for t in dense)
