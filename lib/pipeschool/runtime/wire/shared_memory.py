"""Memory that the two ends of a link share, for tensors that are too large for a packet.

It comes in segments of slots, all slots of a segment of one size. The sender copies a message's
tensors into a free slot; the receiver works on them where they are. A byte at the head of the
segment says whether a slot is taken: the sender sets it, the receiver clears it when nobody uses
the tensors any more. So nothing has to be sent back, and nobody waits.

Segments stay for the messages to come: memory is used for as many messages as are alive at once.
Each new one has as many slots as there are already of that size, so a thousand messages in flight
need ten file descriptors, not a thousand; what is never written to takes no memory. Segments have
no name: when both processes are gone, so is the memory, whatever ended them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.wire.packet import Shape, aligned, read_tensors

HEAD = mmap.PAGESIZE  # bytes before the first slot, one for each slot
LEAST = 32768  # bytes of the smallest slot; others are larger by powers of two
MOST = 1 << 28  # bytes of a segment with several slots
FREE, TAKEN = 0, 1


@dataclass
class Segment:
    """Slots of one size. descriptor: of its memory, until the receiver has it; -1 from then on."""

    memory: mmap.mmap
    size: int
    count: int
    descriptor: int


class Slot(NamedTuple):
    """Where a message lies: the number of its segment, its own in there, and its first byte."""

    segment: int
    number: int
    start: int


class SlotsToSend:
    """The segments of one link, at its sending end."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.by_size: defaultdict[int, list[int]] = defaultdict(list)

    def put(self, payload: Sequence[Tensor]) -> Slot:
        """Copy `payload` into a free slot."""
        slot = self._take(sum(aligned(tensor.nbytes) for tensor in payload))
        shapes = [Shape(tensor.dtype, tuple(tensor.shape)) for tensor in payload]
        places = read_tensors(self.segments[slot.segment].memory, slot.start, shapes)
        for place, tensor in zip(places, payload, strict=True):
            if place is not None:
                place.copy_(tensor)
        return slot

    def announce(self, slot: Slot) -> int:
        """The descriptor that must go with the first message of a segment; -1 with any other."""
        segment = self.segments[slot.segment]
        descriptor, segment.descriptor = segment.descriptor, -1
        return descriptor

    def _take(self, size: int) -> Slot:
        size = max(LEAST, 1 << (size - 1).bit_length())
        for place in self.by_size[size]:
            segment = self.segments[place]
            number = segment.memory.find(bytes([FREE]), 0, segment.count)
            if number >= 0:
                break
        else:
            place, number = self._add(size), 0
        self.segments[place].memory[number] = TAKEN
        return Slot(place, number, HEAD + number * size)

    def _add(self, size: int) -> int:
        """One more segment with slots of `size`; its number."""
        alike = sum(self.segments[number].count for number in self.by_size[size])
        count = max(1, min(alike, HEAD, MOST // size))
        descriptor = new_memory()
        os.ftruncate(descriptor, HEAD + count * size)
        self.segments.append(Segment(mmap.mmap(descriptor, 0), size, count, descriptor))
        self.by_size[size].append(len(self.segments) - 1)
        return len(self.segments) - 1


class SlotsReceived:
    """The same segments, at the receiving end."""

    def __init__(self) -> None:
        self.segments: dict[int, mmap.mmap] = {}

    def add(self, number: int, descriptor: int) -> None:
        """A segment whose first message has come."""
        self.segments[number] = mmap.mmap(descriptor, 0)
        os.close(descriptor)

    def tensors(self, slot: Slot, shapes: Sequence[Shape | None]) -> Tensors:
        """The tensors in a slot. Once the memory of the last of them is free, so is the slot."""
        memory = self.segments[slot.segment]
        found = tuple(read_tensors(memory, slot.start, shapes))
        used = [t for t in found if t is not None and t.nbytes]
        alive = [len(used)]

        def gone() -> None:
            alive[0] -= 1
            if not alive[0]:
                memory[slot.number] = FREE

        for tensor in used:
            weakref.finalize(tensor.untyped_storage(), gone).atexit = False
        return found


def new_memory() -> int:
    """The descriptor of new memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pipeschool")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
