"""Messages that wait for each other, as NCCL's do, between processes of one machine.

On each link, in order and without tags: a send is done only when its receiver is at the receive,
and fused messages begin together. It is for trying schedules where there is no NCCL. A receiver
tells the sender that it is there with one byte, which goes back through the socket of the link.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable
from typing import Any

from pipeschool.actions import Action
from pipeschool.runtime.errors import PeerLost
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.wire.local_wire import LocalWire
from pipeschool.runtime.wire.packet import Header, Packed

HERE = b"\1"  # the receiver has come to the next message of the link


class RendezvousWire(LocalWire):
    """A `LocalWire` whose sends wait. Takes the same arguments.

    A group begins with its first message: the receiver of every message in it says that it is
    there. Its sends come first and are held until the last of them; then each leaves when its own
    receiver is there, whichever that is first. After that nothing can hold up its receives.
    waits_at: is told of the send that is waited for.
    """

    def __init__(self, worker: int, *args: Any):
        super().__init__(worker, *args)
        steps = list(self.schedule.steps_of(worker))
        self.step_of = {message: step for step in steps for message in step if message.is_message}
        self.begun: tuple[Action, ...] = ()  # the step under way
        self.to_send = 0  # sends of it that the engine has yet to hand over
        self.held: dict[int, deque[tuple[Action, Packed]]] = {}  # those that wait, by peer
        self.waits_at: Callable[[Action], object] = lambda send: None

    def post(self, send: Action, message: Packed, sent: float) -> None:
        """Returns when the receivers of all sends of the group are there, if this is the last."""
        self._begin(send)
        self.held.setdefault(self.peers[send], deque()).append((send, message))
        self.to_send -= 1
        if not self.to_send:
            self._send_held()

    def take(self, receive: Action) -> tuple[Header, Tensors]:
        """The receiver is there: its sender is told."""
        self._begin(receive)
        return super().take(receive)

    def _begin(self, message: Action) -> None:
        """Begin the step of `message`, if it has not begun."""
        step = self.step_of[message]
        if step is self.begun:
            return
        self.begun = step
        receives = [action for action in step if action.kind.startswith("RECV")]
        self.to_send = len(step) - len(receives)
        for receive in receives:
            try:
                self.receiving[self.peers[receive]].socket.sendall(HERE)
            except OSError as error:
                raise PeerLost(f"the other end of a message has gone ({error})") from None

    def _send_held(self) -> None:
        """Let each message go when its receiver is there."""
        while self.held:
            self.waits_at(next(iter(self.held.values()))[0][0])
            poll = select.poll()
            peer_of = {self.sending[peer].socket.fileno(): peer for peer in self.held}
            for descriptor in peer_of:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll():
                peer = peer_of[descriptor]
                try:
                    answer = self.sending[peer].socket.recv(len(HERE))
                except OSError:
                    answer = b""
                if not answer:
                    raise PeerLost("the other end of a message has gone")
                send, message = self.held[peer].popleft()
                if not self.held[peer]:
                    del self.held[peer]
                super().post(send, message, self.clock.now())
