"""The receiving end of what one peer sends, in the order in which this worker takes it."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeschool.actions import Action
from pipeschool.runtime import packet
from pipeschool.runtime.stage import Tensors

AHEAD = 64  # packets asked for ahead of time

Receive = Callable[[Action, Tensor, int], Callable[[], Any]]


class Arrived(NamedTuple):
    """A message that is there: what it is, its tensors, and when its sender was done with it."""

    action: Action
    tensors: Tensors
    left: float  # on the clock of worker 0


class Asked(NamedTuple):
    """A packet under way: the receive that it is for, its buffer, and how to wait for it."""

    action: Action
    packet: Tensor
    wait: Callable[[], Any]


class Inbox:
    """What comes from one peer.

    Packets are asked for ahead of time; so a message that fits into one is there as soon as it has
    been sent, whatever this worker is doing. What does not fit must be asked for once its packet
    has told how large it is. After the first such message, a thread does that while the worker
    computes. (Small messages do better without one: it would want the interpreter each time.)

    expected: the receives to come. receive: ``receive(action, buffer, part)`` asks for a part of a
    message (0 is the packet) and returns what waits for it. wire: the device of the buffers.
    ahead: whether the backend can be asked ahead of time. threaded: do not wait for a large message
    with the thread.
    """

    def __init__(
        self,
        expected: Iterable[Action],
        receive: Receive,
        wire: torch.device,
        ahead: bool,
        threaded: bool,
    ):
        self.coming = iter(expected)
        self.receive = receive
        self.wire = wire
        self.ahead = ahead
        self.asked: deque[Asked] = deque()
        self.fetched: queue.SimpleQueue[Arrived | BaseException] | None = None
        if ahead:
            self._ask(AHEAD)
        if threaded:
            self._start_thread()

    def take(self) -> Arrived:
        """Wait for the next message."""
        if self.fetched is None:
            return self._fetch()
        message = self.fetched.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def _ask(self, count: int) -> None:
        """Ask for `count` more packets, if so many are to come."""
        for action in itertools.islice(self.coming, count):
            buffer = torch.empty(packet.SIZE, dtype=torch.uint8, device=self.wire)
            self.asked.append(Asked(action, buffer, self.receive(action, buffer, 0)))

    def _fetch(self) -> Arrived:
        """Wait for a packet, and for the tensors that follow it."""
        if not self.asked:
            self._ask(1)
        expected, buffer, wait = self.asked.popleft()
        wait()
        left, action, shapes, tensors = packet.unpack(buffer.cpu())
        if self.ahead:
            self._ask(1)
        if tensors is None:
            tensors = tuple(self._rest(expected, shapes))
            if self.ahead and self.asked and self.fetched is None:
                self._start_thread()
        return Arrived(action, tensors, left)

    def _rest(self, action: Action, shapes: list[packet.Shape | None]) -> Iterable[Tensor | None]:
        part = 0
        for shape in shapes:
            if shape is None:
                yield None
            else:
                part += 1
                tensor = torch.empty(shape.dims, dtype=shape.dtype, device=self.wire)
                self.receive(action, tensor, part)()
                yield tensor

    def _start_thread(self) -> None:
        self.fetched = queue.SimpleQueue()
        threading.Thread(target=self._fetch_all, args=(self.fetched,), daemon=True).start()

    def _fetch_all(self, fetched: queue.SimpleQueue[Arrived | BaseException]) -> None:
        try:
            while self.asked:
                fetched.put(self._fetch())
        except BaseException as error:  # handed to the worker, which waits for it
            fetched.put(error)
