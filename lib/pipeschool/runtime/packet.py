"""What a message looks like on the wire: a packet of fixed size, and the tensors too large for it.

The packet starts with a header: when its sender was done with the message, what the message is, and
the dtype and shape of each tensor. So a stage may send anything, a smaller last microbatch needs no
special care, and a receiver notices when it gets somebody else's message. Small tensors ride in the
packet itself, which halves the time that a short message takes; larger ones follow, one by one.

A packet is made and read as bytes: for a few numbers, one call of torch costs more than all of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeschool.actions import MESSAGE_KINDS, Action
from pipeschool.runtime.stage import Tensors

SIZE = 4096  # bytes of a packet
HEADER = 128  # numbers of 8 bytes in its header, at most
ALIGN = 16  # bytes: where a tensor in a packet may start
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
NOTHING = -1  # stands for the dtype of a missing gradient


class Packed(NamedTuple):
    """A message ready to leave: its packet, and the tensors that follow it."""

    packet: bytearray
    rest: list[Tensor]
    bytes: int

    def stamp(self, left: float) -> Tensor:
        """The packet as a tensor, of a message that was done at `left` seconds."""
        struct.pack_into("q", self.packet, 0, int(left * 1e9))
        return torch.frombuffer(self.packet, dtype=torch.uint8)


class Shape(NamedTuple):
    """What a tensor looks like."""

    dtype: torch.dtype
    dims: tuple[int, ...]


class Unpacked(NamedTuple):
    """What a packet says."""

    left: float  # when the sender was done with it, on the clock of worker 0
    action: Action  # the receive that it is for
    shapes: list[Shape | None]  # of its tensors; None where there is no gradient
    tensors: Tensors | None  # None where they follow the packet


def pack(header: list[int], payload: list[Tensor], inline: bool) -> Packed:
    """Make a message, so that sending it later takes no time.

    header: what `write_header` gives. payload: the tensors of it that are there, as this process's
    memory holds them. inline: put them into the packet if they fit.
    """
    sizes = [tensor.nbytes for tensor in payload]
    at = aligned(8 * len(header))
    inline = inline and at + sum(map(aligned, sizes)) <= SIZE
    packet = bytearray(SIZE)
    struct.pack_into(f"{len(header)}q", packet, 0, 0, int(inline), *header[2:])
    if not inline:
        return Packed(packet, payload, sum(sizes))
    room = memoryview(packet)
    for tensor, size in zip(payload, sizes, strict=True):
        # Not `reshape`: it leaves one number of a column with the stride of that column.
        row = tensor.as_strided((tensor.numel(),), (1,))
        room[at : at + size] = row.view(torch.uint8).numpy().data
        at += aligned(size)
    return Packed(packet, [], sum(sizes))


def unpack(packet: Tensor) -> Unpacked:
    """Read a packet. Its tensors get memory of their own."""
    room = packet.numpy().data
    numbers = room.cast("q")
    action, shapes, end = read_header(numbers)
    left = numbers[0] / 1e9
    if not numbers[1]:
        return Unpacked(left, action, shapes, None)
    at = aligned(8 * end)
    tensors: list[Tensor | None] = []
    for shape in shapes:
        if shape is None:
            tensors.append(None)
            continue
        dtype, dims = shape
        size = math.prod(dims) * dtype.itemsize
        if size:
            raw = bytearray(room[at : at + size])
            tensors.append(torch.frombuffer(raw, dtype=dtype).reshape(dims))
        else:
            tensors.append(torch.empty(dims, dtype=dtype))
        at += aligned(size)
    return Unpacked(left, action, shapes, tuple(tensors))


def write_header(receive: Action, tensors: Tensors) -> list[int]:
    """The numbers at the head of a packet: when its sender was done with it and whether its tensors
    are in it (both filled in later), what it is, and the dtype and shape of each of its tensors."""
    numbers = [
        0, 0, MESSAGE_KINDS.index(receive.kind), receive.stage, receive.microbatch, len(tensors)
    ]  # fmt: skip
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
    return numbers


def read_header(numbers: Sequence[int]) -> tuple[Action, list[Shape | None], int]:
    """The inverse of `write_header`: the receive, the shape of each tensor, where the header
    ends."""
    kind, stage, microbatch, count = numbers[2:6]
    at = 6
    shapes: list[Shape | None] = []
    for _ in range(count):
        if numbers[at] == NOTHING:
            shapes.append(None)
            at += 1
        else:
            dims = numbers[at + 1]
            shapes.append(Shape(DTYPES[numbers[at]], tuple(numbers[at + 2 : at + 2 + dims])))
            at += 2 + dims
    return Action(MESSAGE_KINDS[kind], stage, microbatch), shapes, at


def aligned(at: int) -> int:
    """The first place from `at` on where a tensor may start."""
    return -(-at // ALIGN) * ALIGN
