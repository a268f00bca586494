"""The sending end of what goes to one peer: holds on to it until it has left."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pipeschool.runtime.errors import or_peer_lost

MANY = 32  # small messages that are kept unasked

Sent = tuple[Any, Tensor]  # work under way, and the buffer that it reads


class Outbox:
    """Buffers on their way to one peer.

    gloo's sends never say that they are done before somebody waits for them, and a worker must not
    wait: the peer may need something else of it first. So a thread does, once something large is
    on its way, or much. NCCL's sends do say so (`polled`), and there a wait would hold up the
    device.
    """

    def __init__(self, polled: bool):
        self.polled = polled
        self.kept: deque[Sent] = deque()
        self.leaving: queue.SimpleQueue[deque[Sent] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def add(self, message: Iterable[Sent], large: bool) -> None:
        """Hold on to the buffers of a message; large: not for longer than needed."""
        self.kept.extend(message)
        if self.polled:
            while self.kept and self.kept[0][0].is_completed():
                self.kept.popleft()
        elif large or len(self.kept) >= MANY:
            if self.thread is None:
                self.thread = threading.Thread(target=self._let_go, daemon=True)
                self.thread.start()
            self.leaving.put(self.kept)
            self.kept = deque()

    def flush(self) -> None:
        """Wait until everything has left."""
        if self.thread:
            self.leaving.put(None)
            self.thread.join()
            self.thread = None
        wait_for(self.kept)
        if self.error:
            raise self.error

    def _let_go(self) -> None:
        try:
            while (messages := self.leaving.get()) is not None:
                wait_for(messages)
        except BaseException as error:  # raised by `flush`
            self.error = error


def wait_for(sent: deque[Sent]) -> None:
    """Wait for one after the other, and let go of each at once."""
    while sent:
        or_peer_lost(sent[0][0].wait)
        sent.popleft()
