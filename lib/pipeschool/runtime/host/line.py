"""The controller's end of a worker's control pipe.

What goes over it may be large, and a worker can be stopped or killed in the middle of it. So every
transfer has a thread of its own: a worker that stands still holds up nobody else, and the watch
over the run goes on.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Connection

SHORT = 0.05  # seconds in which most of what comes has come
LAST = 1.0  # seconds for a transfer to end, once its worker is gone


class Line:
    """Gives a worker its job, and takes its answers. `control` tells when one begins to come."""

    def __init__(self, control: Connection):
        self.control = control
        self.coming: threading.Thread | None = None
        self.giving: threading.Thread | None = None
        self.answer: bytes | None = None

    def give(self, data: bytes) -> None:
        """Start to send `data`. A worker that goes before it has arrived is seen to be gone."""

        def send() -> None:
            with suppress(OSError):
                self.control.send_bytes(data)

        self.giving = threading.Thread(target=send, daemon=True)
        self.giving.start()

    def take(self) -> bytes | None:
        """The answer that has begun to come; None while it is not whole. EOFError where the worker
        has gone."""
        if self.coming is None:

            def receive() -> None:
                with suppress(OSError, EOFError):
                    self.answer = self.control.recv_bytes()

            self.coming = threading.Thread(target=receive, daemon=True)
            self.coming.start()
        self.coming.join(SHORT)
        if self.coming.is_alive():
            return None
        self.coming, answer, self.answer = None, self.answer, None
        if answer is None:
            raise EOFError
        return answer

    def close(self) -> None:
        """Close the pipe. Its worker is gone, so nothing is on its way any more, unless a process
        that the worker started still holds its end."""
        for transfer in (self.giving, self.coming):
            if transfer is not None:
                transfer.join(LAST)
        self.control.close()
