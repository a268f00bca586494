"""Point-to-point messages between workers, over torch.distributed.

A message is a header of fixed size, then one tensor each. The header says what the message is and
which shapes and types follow, so a stage may send anything, and a smaller last microbatch needs no
special care. It also lets a receiver notice that it got somebody else's message.

On gloo a thread per incoming link takes messages off the wire while the worker computes, in the
order of the schedule; `receive` then only waits for what is not there yet.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeschool.actions import MESSAGE_KINDS, Action, Schedule
from pipeschool.lower import message_of, peer_of, sender_of
from pipeschool.run.stage import Tensors

HEADER = 256  # numbers in a header
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
NOTHING = -1  # stands for the dtype of a missing gradient


class PeerLost(RuntimeError):
    """The other end of a message is gone; why is for the controller to find out."""


class Transport:
    """One worker's sends and receives. Tensors live on `device`, and travel through `wire`."""

    def __init__(self, worker: int, schedule: Schedule, device: torch.device, backend: str):
        self.schedule = schedule
        self.device = device
        self.wire = device if backend == "nccl" else torch.device("cpu")
        self.sending: list[tuple[Any, Tensor]] = []  # work handles with the buffers they read
        self.inbox: dict[int, queue.SimpleQueue[Any]] = {}
        if backend == "gloo":
            self._start_inboxes(schedule.workers[worker])

    def send(self, action: Action, tensors: Tensors) -> int:
        """Start sending; returns the number of bytes. The buffers are kept until they have left."""
        peer = peer_of(action, self.schedule)
        payload = [t.detach().to(self.wire).contiguous() for t in tensors if t is not None]
        header = torch.tensor(write_header(message_of(action), tensors), device=self.wire)
        self.sending = [(work, t) for work, t in self.sending if not work.is_completed()]
        for part, tensor in enumerate([header, *payload]):
            work = self._guard(dist.isend, tensor, peer, tag=self._tag(message_of(action), part))
            self.sending.append((work, tensor))
        return sum(t.numel() * t.element_size() for t in payload)

    def receive(self, action: Action) -> Tensors:
        """Wait for the message of `action`, and return its tensors, on this worker's device."""
        peer = peer_of(action, self.schedule)
        if peer in self.inbox:
            message = self.inbox[peer].get()
        else:
            message = self._take(action, peer)
        if isinstance(message, BaseException):
            raise message
        came, tensors = message
        if came != action:
            raise ValueError(f"got {sender_of(came)} where {sender_of(action)} was due")
        return tuple(t if t is None else t.to(self.device) for t in tensors)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self.sending:
            self._guard(work.wait)
        self.sending = []

    def _start_inboxes(self, row: Sequence[Action]) -> None:
        expected: defaultdict[int, list[Action]] = defaultdict(list)
        for action in row:
            if action.kind in ("RECV_F", "RECV_B"):
                expected[peer_of(action, self.schedule)].append(action)
        for peer, actions in expected.items():
            self.inbox[peer] = queue.SimpleQueue()
            threading.Thread(target=self._fill, args=(peer, actions), daemon=True).start()

    def _fill(self, peer: int, actions: list[Action]) -> None:
        try:
            for action in actions:
                self.inbox[peer].put(self._take(action, peer))
        except BaseException as error:  # handed to the worker, which waits for it
            self.inbox[peer].put(error)

    def _take(self, action: Action, peer: int) -> tuple[Action, Tensors]:
        header = torch.empty(HEADER, dtype=torch.int64, device=self.wire)
        self._receive(header, peer, self._tag(action, 0))
        came, shapes = read_header(header.tolist())
        tensors: list[Tensor | None] = []
        for dtype, shape in shapes:
            if dtype is None:
                tensors.append(None)
                continue
            tensor = torch.empty(shape, dtype=dtype, device=self.wire)
            part = 1 + sum(t is not None for t in tensors)
            self._receive(tensor, peer, self._tag(action, part))
            tensors.append(tensor)
        return came, tuple(tensors)

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> None:
        work = self._guard(dist.irecv, tensor, peer, tag=tag)
        self._guard(work.wait)

    def _guard(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            raise PeerLost(str(error).splitlines()[0]) from None

    def _tag(self, receive: Action, part: int) -> int:
        """A number of its own for every part of every message."""
        kind = MESSAGE_KINDS.index(receive.kind)
        number = (receive.stage * self.schedule.microbatches + receive.microbatch) * 4 + kind
        return number * 64 + part


def write_header(receive: Action, tensors: Tensors) -> list[int]:
    """What a message is, and the dtype and shape of each of its tensors, as HEADER numbers."""
    numbers = [MESSAGE_KINDS.index(receive.kind), receive.stage, receive.microbatch, len(tensors)]
    for tensor in tensors:
        if tensor is None:
            numbers.append(NOTHING)
        elif tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(f"cannot send a {tensor.dtype} tensor between stages: use {allowed}")
        else:
            numbers += [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    if len(numbers) > HEADER:
        raise ValueError(f"{len(tensors)} tensors are too many for one message: pack them into fewer")
    return numbers + [0] * (HEADER - len(numbers))


def read_header(
    numbers: Sequence[int],
) -> tuple[Action, list[tuple[torch.dtype | None, tuple[int, ...]]]]:
    """The inverse of `write_header`: the receive action, and (dtype, shape) of each tensor."""
    kind, stage, microbatch, count = numbers[:4]
    at = 4
    shapes: list[tuple[torch.dtype | None, tuple[int, ...]]] = []
    for _ in range(count):
        if numbers[at] == NOTHING:
            shapes.append((None, ()))
            at += 1
        else:
            dims = numbers[at + 1]
            shapes.append((DTYPES[numbers[at]], tuple(numbers[at + 2 : at + 2 + dims])))
            at += 2 + dims
    return Action(MESSAGE_KINDS[kind], stage, microbatch), shapes
