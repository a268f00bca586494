"""Memory that the two ends of a link share, for tensors that are too large for a packet.

The sender copies a message's tensors into a free slot; the receiver works on them where they are,
and gives the slot back when nobody uses them any more. Slots stay for the messages to come, so
memory is used for as many as are alive at once. It has no name: when both processes are gone, so is
the memory, whatever ended them.

When slots run out, a segment with as many as there are already is added: a thousand messages in
flight then need ten file descriptors, not a thousand. What is never written to takes no memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from pipeschool.runtime.stages.stage import Tensors
from pipeschool.runtime.wire.packet import Shape, aligned, read_tensors


class Slot(NamedTuple):
    """A place for one message."""

    segment: mmap.mmap
    start: int
    size: int


class SlotsToSend:
    """The slots of one link, at its sending end."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.free: list[int] = []

    def put(self, payload: Sequence[Tensor]) -> tuple[int, int]:
        """Copy `payload` into a free slot: (its number, the descriptor of the segment where the
        receiver does not have that yet, else -1)."""
        size = sum(aligned(tensor.nbytes) for tensor in payload)
        enough = [number for number in self.free if self.slots[number].size >= size]
        descriptor = -1
        if not enough:
            descriptor = self._add_segment(size)
            enough = self.free
        number = min(enough, key=lambda free: self.slots[free].size)
        self.free.remove(number)
        segment, start, _ = self.slots[number]
        shapes = [Shape(tensor.dtype, tuple(tensor.shape)) for tensor in payload]
        places = read_tensors(segment, start, shapes)
        for place, tensor in zip(places, payload, strict=True):
            if place is not None:
                place.copy_(tensor)
        return number, descriptor

    def _add_segment(self, size: int) -> int:
        """Let only slots of at least `size` be free, the lowest of them new; its descriptor."""
        for number in self.free:  # too small for what is sent now: let the system have their memory
            segment, start, length = self.slots[number]
            if hasattr(mmap, "MADV_REMOVE"):
                segment.madvise(mmap.MADV_REMOVE, start, length)
        descriptor, count = new_memory(), slots_in_next_segment(self.slots)
        os.ftruncate(descriptor, count * -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.free = add_slots(self.slots, mmap.mmap(descriptor, 0))
        return descriptor


class SlotsReceived:
    """The same slots, at the receiving end. `give_back` tells the sender that one is free."""

    def __init__(self, give_back: Callable[[int], None]):
        self.give_back = give_back
        self.slots: list[Slot] = []

    def add_segment(self, descriptor: int) -> None:
        """More slots."""
        add_slots(self.slots, mmap.mmap(descriptor, 0))
        os.close(descriptor)

    def tensors(self, number: int, shapes: Sequence[Shape | None]) -> Tensors:
        """The tensors in a slot. Once the memory of the last of them is free, so is the slot."""
        segment, start, _ = self.slots[number]
        found = tuple(read_tensors(segment, start, shapes))
        used = [t for t in found if t is not None and t.nbytes]
        alive = [len(used)]

        def gone() -> None:
            alive[0] -= 1
            if not alive[0]:
                self.give_back(number)

        for tensor in used:
            weakref.finalize(tensor.untyped_storage(), gone).atexit = False
        return found


def slots_in_next_segment(slots: Sequence[Slot]) -> int:
    """As many as there are. Both ends of a link count in the same way."""
    return max(1, len(slots))


def add_slots(slots: list[Slot], segment: mmap.mmap) -> list[int]:
    """Add those of `segment`, all of one size; their numbers."""
    first, count = len(slots), slots_in_next_segment(slots)
    size = len(segment) // count
    slots += [Slot(segment, number * size, size) for number in range(count)]
    return list(range(first, first + count))


def new_memory() -> int:
    """The descriptor of new memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pipeschool")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
