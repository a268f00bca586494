"""Messages between processes of one machine: Unix sockets, and shared memory for large tensors.

Each link, which is one direction between two workers, has a socket of its own.

Why not torch.distributed here as well? Between processes of one machine a message over gloo takes
several times as long to wake up its receiver; `pipeschool bench` measures both.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Mapping

import torch

from pipeschool.actions import Action, Schedule
from pipeschool.runtime.clock import Clock
from pipeschool.runtime.errors import PeerLost
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.wire.packet import (
    INSIDE,
    PLACE,
    Header,
    Packed,
    copy_out,
    pack,
    read_header,
    write_header,
)
from pipeschool.runtime.wire.shared_memory import Slot, SlotsReceived, SlotsToSend
from pipeschool.runtime.wire.wire import Wire, as_stored

Link = tuple[int, int]  # from one process to another, both by their numbers
AVAILABLE = hasattr(socket, "AF_UNIX") and hasattr(socket, "send_fds")
ROOM = 16384  # bytes of the largest packet that holds tensors: these a socket carries quickly
LENGTH = struct.Struct("q")  # with which each packet starts
READ = 32768  # bytes asked of a socket at once
DESCRIPTORS = socket.CMSG_SPACE(4 * array("i").itemsize) if AVAILABLE else 0


class LocalWire(Wire):
    """Sends and receives over `links`: the sockets of this process, by link.

    process: the number of this one; with tensor parallelism a worker has several (`tensor_size`),
    and each talks to the same one of its peers.
    """

    def __init__(
        self,
        worker: int,
        schedule: Schedule,
        clock: Clock,
        device: torch.device,
        links: Mapping[Link, socket.socket],
        process: int,
        tensor_size: int = 1,
    ):
        super().__init__(worker, schedule, clock, device)
        rank = process % tensor_size
        self.sending: dict[int, SendingEnd] = {}
        self.receiving: dict[int, ReceivingEnd] = {}
        for (source, target), end in links.items():
            if source == process:
                self.sending[(target - rank) // tensor_size] = SendingEnd(end)
            else:
                self.receiving[(source - rank) // tensor_size] = ReceivingEnd(end)

    def pack(self, send: Action, tensors: Tensors) -> Packed:
        """Large tensors are copied into shared memory now."""
        header = write_header(self.due(send), tensors)
        packed = pack(header, as_stored(tensors), ROOM if self.device.type == "cpu" else 0)
        return self.sending[self.peers[send]].store(packed) if packed.rest else packed

    def post(self, send: Action, message: Packed, sent: float) -> None:
        """One write, unless the socket is full."""
        self.sending[self.peers[send]].post(message.stamp(sent), message.slot)

    def take(self, receive: Action) -> tuple[Header, Tensors]:
        """Large tensors are used where they are, in shared memory."""
        return self.receiving[self.peers[receive]].take()

    def flush(self) -> None:
        """Wait for the threads of sockets that were full."""
        for end in self.sending.values():
            end.flush()


class SendingEnd:
    """The end of a link that packets go into. Where the socket is full, a thread waits for room:
    the worker must not, since its peer may need something else of it first."""

    def __init__(self, end: socket.socket):
        self.socket = end
        self.slots = SlotsToSend()
        self.lock = threading.Lock()
        self.waiting: deque[tuple[memoryview, int]] = deque()  # packets, and their descriptors
        self.thread: threading.Thread | None = None

    def store(self, packed: Packed) -> Packed:
        """`packed` with its tensors in shared memory."""
        return packed._replace(rest=[], slot=self.slots.put(packed.rest))

    def post(self, packet: bytearray, slot: Slot | None) -> None:
        """Send a packet, now or as soon as there is room."""
        descriptor = -1
        if slot:  # messages need not leave in the order in which they were packed
            descriptor = self.slots.announce(slot)
            PLACE.pack_into(packet, 16, slot.segment, descriptor >= 0, slot.number, slot.start)
        data = memoryview(packet)
        with self.lock:
            if not self.waiting:
                data, descriptor = self._write(data, descriptor, socket.MSG_DONTWAIT)
            if data:
                self.waiting.append((data, descriptor))
                if self.thread is None:
                    self.thread = threading.Thread(target=self._write_waiting, daemon=True)
                    self.thread.start()

    def flush(self) -> None:
        """Wait until nothing waits any more."""
        if thread := self.thread:
            thread.join()

    def _write(self, data: memoryview, descriptor: int, flags: int) -> tuple[memoryview, int]:
        """Write as much of `data` as there is room for; what is left."""
        try:
            if descriptor < 0:
                return data[self.socket.send(data, flags) :], -1
            sent = socket.send_fds(self.socket, [data], [descriptor], flags)
        except BlockingIOError:
            return data, descriptor
        except OSError as error:
            raise PeerLost(f"the other end of a message has gone ({error})") from None
        os.close(descriptor)
        return data[sent:], -1

    def _write_waiting(self) -> None:
        try:
            while True:
                data, descriptor = self.waiting[0]
                while data:
                    data, descriptor = self._write(data, descriptor, 0)
                with self.lock:
                    self.waiting.popleft()
                    if not self.waiting:
                        self.thread = None
                        return
        except PeerLost:  # `waiting` stays as it is; who receives from that peer will notice too
            return


class ReceivingEnd:
    """The end of a link that packets come out of."""

    def __init__(self, end: socket.socket):
        self.socket = end
        self.slots = SlotsReceived()
        self.data = b""  # read, and not yet taken
        self.descriptors: deque[int] = deque()

    def take(self) -> tuple[Header, Tensors]:
        """Wait for the next packet; what it says, and its tensors."""
        while len(self.data) < LENGTH.size:
            self._read()
        (end,) = LENGTH.unpack_from(self.data)
        while len(self.data) < end:
            self._read()
        packet = memoryview(self.data)[:end]
        self.data = self.data[end:]
        header = read_header(packet)
        if header.place == INSIDE:
            return header, copy_out(packet, header)
        if header.fresh:
            self.slots.add(header.place, self.descriptors.popleft())
        slot = Slot(header.place, header.slot, header.start)
        return header, self.slots.tensors(slot, header.shapes)

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self.socket.recvmsg(READ, DESCRIPTORS)
        except OSError as error:
            raise PeerLost(f"the other end of a message has gone ({error})") from None
        if not data:
            raise PeerLost("the other end of a message has gone")
        self.data = self.data + data if self.data else data
        for _, _, descriptors in ancillary:
            self.descriptors += array("i", descriptors)
