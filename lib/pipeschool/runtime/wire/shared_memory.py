"""Memory that the two ends of a link share, for tensors that are too large for a packet.

The sender copies a message's tensors into a free slot; the receiver works on them where they are,
and gives the slot back when nobody uses them any more. Slots stay for the messages to come, so
there are as many as messages are alive at once. They have no name: when both processes are gone, so
is the memory, whatever ended them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from pipeschool.runtime.stages.stage import Tensors
from pipeschool.runtime.wire.packet import Shape, aligned, read_tensors


class SlotsToSend:
    """The slots of one link, at its sending end."""

    def __init__(self) -> None:
        self.slots: list[mmap.mmap] = []
        self.free: list[int] = []

    def put(self, payload: Sequence[Tensor]) -> tuple[int, int]:
        """Copy `payload` into a free slot: (its number, the descriptor of its memory where the
        receiver does not have that yet, else -1)."""
        size = sum(aligned(tensor.nbytes) for tensor in payload)
        number, descriptor = self._slot_for(size)
        shapes = [Shape(tensor.dtype, tuple(tensor.shape)) for tensor in payload]
        for place, tensor in zip(read_tensors(self.slots[number], 0, shapes), payload, strict=True):
            assert place is not None
            place.copy_(tensor)
        return number, descriptor

    def _slot_for(self, size: int) -> tuple[int, int]:
        enough = [number for number in self.free if len(self.slots[number]) >= size]
        if enough:
            number = min(enough, key=lambda slot: len(self.slots[slot]))
            self.free.remove(number)
            return number, -1
        descriptor = new_memory(size)
        memory = mmap.mmap(descriptor, size)
        if not self.free:
            self.slots.append(memory)
            return len(self.slots) - 1, descriptor
        number = self.free.pop()  # too small for what is sent now: a larger one takes its place
        self.slots[number] = memory
        return number, descriptor


class SlotsReceived:
    """The same slots, at the receiving end. `give_back` tells the sender that one is free."""

    def __init__(self, give_back: Callable[[int], None]):
        self.give_back = give_back
        self.slots: dict[int, mmap.mmap] = {}

    def add(self, number: int, descriptor: int) -> None:
        """A new slot, or a larger one in the place of an old one."""
        self.slots[number] = mmap.mmap(descriptor, 0)
        os.close(descriptor)

    def tensors(self, number: int, shapes: Sequence[Shape | None]) -> Tensors:
        """The tensors in a slot. Once the memory of the last of them is free, so is the slot."""
        found = tuple(read_tensors(self.slots[number], 0, shapes))
        used = [t for t in found if t is not None and t.nbytes]
        alive = [len(used)]

        def gone() -> None:
            alive[0] -= 1
            if not alive[0]:
                self.give_back(number)

        for tensor in used:
            weakref.finalize(tensor.untyped_storage(), gone).atexit = False
        return found


def new_memory(size: int) -> int:
    """The descriptor of new memory without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pipeschool")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
