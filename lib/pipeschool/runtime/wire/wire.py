"""What an engine knows of messages: pack, send, receive. Each carrier is one subclass, in one file.

`LocalWire` carries between processes of one machine, `TorchWire` over torch.distributed: between
machines, on GPUs with NCCL, and where a system has no Unix sockets. `RendezvousWire` is for trying
what NCCL would do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeschool.actions import Action, Schedule
from pipeschool.dependencies import message_of, peer_of, sender_of
from pipeschool.runtime.clock import Clock
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.wire.packet import Header, Packed, bytes_of


class Passed(NamedTuple):
    """A message that has just been sent or received."""

    peer: int  # the worker at the other end
    sent: float  # when its sender handed it over, on the clock of worker 0
    bytes: int


class Wire(ABC):
    """One worker's sends and receives. Tensors live on `device`.

    A send never waits for its receiver, but on a `RendezvousWire`. Messages of one link, which is
    one direction between two workers, arrive in the order in which they were sent. `last` is the
    message that was sent or received last.
    """

    def __init__(self, worker: int, schedule: Schedule, clock: Clock, device: torch.device):
        self.schedule = schedule
        self.clock = clock
        self.device = device
        self.peers = {a: peer_of(a, schedule) for a in schedule.workers[worker] if a.is_message}
        self.last = Passed(-1, 0.0, 0)

    @abstractmethod
    def pack(self, send: Action, tensors: Tensors) -> Packed:
        """Make the message of `send`, so that sending it later takes no time."""

    @abstractmethod
    def post(self, send: Action, message: Packed, sent: float) -> None:
        """Let a message go that is handed over at `sent`."""

    @abstractmethod
    def take(self, receive: Action) -> tuple[Header, Tensors]:
        """Wait for the next message of the link that `receive` names."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything sent has left this process."""

    def send(self, send: Action, message: Packed | Tensors) -> None:
        """Send the message of `send`: tensors, or what `pack` has made of them."""
        packed = message if isinstance(message, Packed) else self.pack(send, message)
        sent = self.clock.now()
        self.post(send, packed, sent)
        self.last = Passed(self.peers[send], sent, packed.bytes)

    def receive(self, receive: Action) -> Tensors:
        """Wait for the message of `receive`; its tensors are on this worker's device."""
        header, tensors = self.take(receive)
        if header.receive != receive:
            due, came = sender_of(receive), sender_of(header.receive)
            raise ValueError(f"got {came} where {due} was due")
        self.last = Passed(self.peers[receive], header.sent, bytes_of(header.shapes))
        if self.device.type == "cpu":
            return tensors
        return tuple(t if t is None else t.to(self.device, non_blocking=True) for t in tensors)

    def due(self, send: Action) -> Action:
        """The name that both ends have for the message of `send`: its receive."""
        return message_of(send)


def as_stored(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that are there, as memory holds them: torch conjugates and negates lazily, with a mark
    on a view."""
    return [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors if t is not None]
