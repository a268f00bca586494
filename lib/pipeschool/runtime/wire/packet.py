"""What a message looks like on the wire: a packet, and the tensors that are too large for it.

The packet starts with a header: when its sender handed the message over, what the message is, and
the dtype and shape of each tensor. So a stage may send anything, a smaller last microbatch needs no
special care, and a receiver notices when it gets somebody else's message. Small tensors ride in the
packet itself; for larger ones it says where they are.

A packet is made and read as bytes: for a few numbers, one call of torch costs more than all of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeschool.actions import MESSAGE_KINDS, Action
from pipeschool.runtime.stages.tensors import Tensors

SIZE = 4096  # bytes of a packet where all must be of one size
HEADER = 128  # numbers of 8 bytes in a header, at most
ALIGN = 64  # bytes: where a tensor may start
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
START = struct.Struct("11q")  # the numbers of a header before its shapes
SENT = struct.Struct("q")
PLACE = struct.Struct("4q")  # a segment, whether it comes with this packet, a slot of it, its start
NOTHING = -1  # stands for the dtype of a missing gradient
# Where the tensors are, in the third number of a header:
INSIDE = -1  # in the packet,
FOLLOWS = -2  # after it; or, from 0 on, in the segment of shared memory of that number.


class Packed(NamedTuple):
    """A message ready to leave: its packet, and the tensors that are not in it."""

    packet: bytearray
    rest: list[Tensor]
    bytes: int  # of all its tensors
    slot: Any = None  # of shared memory, where they are there

    def stamp(self, sent: float) -> bytearray:
        """The packet of a message that is handed over at `sent` seconds."""
        SENT.pack_into(self.packet, 8, int(sent * 1e9))
        return self.packet


class Shape(NamedTuple):
    """What a tensor looks like."""

    dtype: torch.dtype
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.dims) * self.dtype.itemsize


class Header(NamedTuple):
    """What a packet says."""

    sent: float  # when its sender handed it over, on the clock of worker 0
    place: int  # INSIDE, FOLLOWS, or a segment of shared memory
    fresh: bool  # that segment comes with this packet
    slot: int  # its number there
    start: int  # of that slot, in bytes
    receive: Action  # that it is for
    shapes: tuple[Shape | None, ...]  # of its tensors; None where there is no gradient
    end: int  # where the header ends, in bytes


def pack(header: list[int], payload: list[Tensor], room: int, size: int = 0) -> Packed:
    """Make a message, so that sending it later takes no time.

    header: what `write_header` gives. payload: the tensors of it that are there, as the memory of
    this process or of a device holds them. room: the largest packet that may hold tensors; 0 lets
    them follow in any case. size: of every packet, where all must be of one size.
    """
    start = aligned(8 * len(header))
    needed = start + sum(aligned(tensor.nbytes) for tensor in payload)
    inside = needed <= room or not any(tensor.nbytes for tensor in payload)
    packet = bytearray(size or (needed if inside else start))
    place = INSIDE if inside else FOLLOWS
    struct.pack_into(f"{len(header)}q", packet, 0, len(packet), 0, place, *header[3:])
    if inside:
        write_tensors(packet, start, payload)
    return Packed(packet, [] if inside else payload, sum(t.nbytes for t in payload))


def write_tensors(room: bytearray, at: int, payload: Iterable[Tensor]) -> None:
    """Copy the numbers of `payload` into `room`, from `at` on."""
    memory = memoryview(room)
    for tensor in payload:
        if not tensor.nbytes:
            continue
        # Not `reshape`: it leaves one number of a column with the stride of that column.
        row = tensor.as_strided((tensor.numel(),), (1,))
        memory[at : at + tensor.nbytes] = row.view(torch.uint8).numpy().data
        at += aligned(tensor.nbytes)


def read_tensors(room: Any, at: int, shapes: Iterable[Shape | None]) -> Iterator[Tensor | None]:
    """The tensors that lie in `room` from `at` on; they share its memory."""
    for shape in shapes:
        if shape is None:
            yield None
        elif not shape.nbytes:
            yield torch.empty(shape.dims, dtype=shape.dtype)
        else:
            count = math.prod(shape.dims)
            yield torch.frombuffer(room, dtype=shape.dtype, count=count, offset=at).view(shape.dims)
            at += aligned(shape.nbytes)


def copy_out(packet: memoryview, header: Header) -> Tensors:
    """The tensors inside a packet, each in memory of its own."""
    found: list[Tensor | None] = []
    at = aligned(header.end)
    for shape in header.shapes:
        size = shape.nbytes if shape else 0
        found += read_tensors(bytearray(packet[at : at + size]), 0, [shape])
        at += aligned(size)
    return tuple(found)


def write_header(receive: Action, tensors: Tensors) -> list[int]:
    """The numbers at the head of a packet: how long it is, when it was sent and where its tensors
    are (all filled in later), what it is, and the dtype and shape of each of its tensors."""
    kind = MESSAGE_KINDS.index(receive.kind)
    numbers = [0, 0, 0, 0, 0, 0, kind, receive.stage, receive.microbatch, len(tensors), 0]
    for tensor in tensors:
        if tensor is None:
            numbers.append(NOTHING)
        elif tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(
                f"cannot send a {tensor.dtype} tensor between stages: dense {allowed} can be"
            )
        else:
            numbers += (DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape)
    if len(numbers) > HEADER:
        raise ValueError(
            f"{len(tensors)} tensors are too many for one message: pack them into fewer"
        )
    numbers[10] = 8 * len(numbers)  # bytes of the header
    return numbers


def read_header(packet: memoryview) -> Header:
    """The inverse of `write_header`."""
    _, sent, place, fresh, slot, start, kind, stage, microbatch, count, end = START.unpack_from(
        packet
    )
    shapes = read_shapes(bytes(packet[START.size : end]), count)
    receive = Action(MESSAGE_KINDS[kind], stage, microbatch)
    return Header(sent / 1e9, place, bool(fresh), slot, start, receive, shapes, end)


@lru_cache(maxsize=256)  # most messages of a run look like the one before
def read_shapes(data: bytes, count: int) -> tuple[Shape | None, ...]:
    """The shapes of `count` tensors, as the rest of a header has them."""
    numbers: Sequence[int] = memoryview(data).cast("q")
    at = 0
    shapes: list[Shape | None] = []
    for _ in range(count):
        if numbers[at] == NOTHING:
            shapes.append(None)
            at += 1
        else:
            dims = numbers[at + 1]
            shapes.append(Shape(DTYPES[numbers[at]], tuple(numbers[at + 2 : at + 2 + dims])))
            at += 2 + dims
    return tuple(shapes)


@lru_cache(maxsize=256)
def bytes_of(shapes: tuple[Shape | None, ...]) -> int:
    """The size of tensors that look like this."""
    return sum(shape.nbytes for shape in shapes if shape)


def aligned(at: int) -> int:
    """The first place from `at` on where a tensor may start."""
    return -(-at // ALIGN) * ALIGN
