"""The sending end of what goes to one peer: holds on to it until it has left."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pipeschool.run.errors import PeerLost, guarded

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
        self.waited_for: queue.Queue[deque[Sent] | None] | None = None
        self.error: PeerLost | None = None

    def add(self, message: Iterable[Sent], large: bool) -> None:
        """Hold on to the buffers of a message; large: not for longer than needed."""
        self.kept.extend(message)
        if self.polled:
            while self.kept and self.kept[0][0].is_completed():
                self.kept.popleft()
        elif large or len(self.kept) >= MANY:
            if self.waited_for is None:
                self.waited_for = queue.Queue()
                threading.Thread(target=self._wait_on, args=(self.waited_for,), daemon=True).start()
            self.waited_for.put(self.kept)
            self.kept = deque()

    def settle(self) -> None:
        """Wait until everything has left; the thread goes, too: a process may run many times."""
        if self.waited_for:
            self.waited_for.put(None)
            self.waited_for.join()
            self.waited_for = None
        wait_for(self.kept)
        if self.error:
            raise self.error

    def _wait_on(self, messages: queue.Queue[deque[Sent] | None]) -> None:
        for sent in iter(messages.get, None):
            try:
                wait_for(sent)
            except PeerLost as error:
                self.error = error
            messages.task_done()
        messages.task_done()  # of None


def wait_for(sent: deque[Sent]) -> None:
    """Wait for one after the other, and let go of each at once."""
    while sent:
        guarded(sent[0][0].wait)
        sent.popleft()
