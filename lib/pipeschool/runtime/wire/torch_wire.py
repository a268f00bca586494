"""Messages over torch.distributed: between machines, on GPUs with NCCL, where there is no
`LocalWire`.

Activations and gradients have a process group each: gloo's threads wait for each other on a
connection that is used both ways. With NCCL each has two, one for each direction: it does what a
pair of workers has in a group one after the other, so a receive would be held up behind a send that
waits. As it is, no send holds up anything, and a worker never waits for one.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeschool.actions import Action, Schedule
from pipeschool.dependencies import message_of, peer_of
from pipeschool.runtime.clock import Clock
from pipeschool.runtime.errors import or_peer_lost
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.weights.groups import Groups
from pipeschool.runtime.wire.outbox import Outbox
from pipeschool.runtime.wire.packet import (
    HEADER,
    INSIDE,
    SIZE,
    Header,
    Packed,
    copy_out,
    pack,
    read_header,
    write_header,
)
from pipeschool.runtime.wire.wire import Wire, as_stored


class TorchWire(Wire):
    """Sends and receives of one worker; `tensor_rank` out of `tensor_size` of it, which talks to
    the same one of its peers. backend: ``gloo``, which reads the host's memory, or ``nccl``, which
    reads the device's."""

    def __init__(
        self,
        worker: int,
        schedule: Schedule,
        clock: Clock,
        device: torch.device,
        backend: str,
        groups: Groups,
        tensor_rank: int = 0,
        tensor_size: int = 1,
    ):
        super().__init__(worker, schedule, clock, device)
        self.tensor_rank, self.tensor_size = tensor_rank, tensor_size
        self.memory = device if backend == "nccl" else torch.device("cpu")
        self.worker = worker
        self.groups: dict[tuple[str, bool], Any] = {}  # by letter, and whether to a later worker
        for letter, first in (("F", dist.group.WORLD), ("B", groups.new())):
            back = groups.new() if backend == "nccl" else first
            self.groups |= {(letter, True): first, (letter, False): back}
        polled = self.memory.type == "cuda"
        self.outboxes: defaultdict[int, Outbox] = defaultdict(partial(Outbox, polled=polled))
        if backend == "nccl":
            self.connect()

    def connect(self) -> None:
        """One number over each link that the schedule has. At the first message NCCL lets both
        ends wait for each other; here all processes take the links in the same order, so nobody
        waits in a circle."""
        links = {
            (source, peer_of(send, self.schedule), send.kind): send
            for source, row in enumerate(self.schedule.workers)
            for send in row
            if send.kind.startswith("SEND")
        }
        for (source, target, _), send in sorted(links.items()):
            number = torch.zeros(1, device=self.memory)
            if source == self.worker:
                process, group, tag = self._route(send)
                or_peer_lost(or_peer_lost(group.send, [number], process, tag).wait)
            elif target == self.worker:
                self._part(message_of(send), 0, number)

    def pack(self, send: Action, tensors: Tensors) -> Packed:
        """The packet, and the tensors that follow it, where the backend can read them."""
        header = write_header(self.due(send), tensors)
        payload = [t.to(self.memory) for t in as_stored(tensors)]
        return pack(header, payload, SIZE if self.memory.type == "cpu" else 0, SIZE)

    def post(self, send: Action, message: Packed, sent: float) -> None:
        """Start sending. The buffers are kept until they have gone."""
        packet = torch.frombuffer(message.stamp(sent), dtype=torch.uint8).to(self.memory)
        process, group, tag = self._route(send)
        works = [
            (or_peer_lost(group.send, [tensor], process, tag + part), tensor)
            for part, tensor in enumerate([packet, *message.rest])
        ]
        self.outboxes[process].add(works, large=bool(message.rest))

    def take(self, receive: Action) -> tuple[Header, Tensors]:
        """The packet first: it says how large the tensors are that follow."""
        packet = self._part(receive, 0, torch.empty(SIZE, dtype=torch.uint8, device=self.memory))
        memory = packet.cpu().numpy().data
        header = read_header(memory)
        if header.place == INSIDE:
            return header, copy_out(memory, header)
        tensors: list[torch.Tensor | None] = []
        part = 0
        for shape in header.shapes:
            if shape is None:
                tensors.append(None)
                continue
            part += 1
            empty = torch.empty(shape.dims, dtype=shape.dtype, device=self.memory)
            tensors.append(self._part(receive, part, empty))
        return header, tuple(tensors)

    def flush(self) -> None:
        """Wait for all sends."""
        for outbox in self.outboxes.values():
            outbox.flush()

    def _part(self, receive: Action, part: int, into: torch.Tensor) -> torch.Tensor:
        process, group, tag = self._route(receive)
        or_peer_lost(or_peer_lost(group.recv, [into], process, tag + part).wait)
        return into

    def _route(self, message: Action) -> tuple[int, Any, int]:
        """The process at the other end, the group, and the tag of the packet: a message has a tag
        of its own for each part."""
        kind, stage, microbatch = self.due(message)
        number = stage * self.schedule.microbatches + microbatch
        process = self.peers[message] * self.tensor_size + self.tensor_rank
        onward = (self.peers[message] > self.worker) == message.kind.startswith("SEND")
        return process, self.groups[kind[-1], onward], number * HEADER
