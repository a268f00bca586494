"""Point-to-point messages between workers, and sums over some of them, over torch.distributed.

What a message looks like is `packet`'s matter; `inbox` and `outbox` are the two ends of a link.

Activations and gradients have a process group each, and gloo is asked for packets ahead of time. So
a connection carries one direction only, and nobody takes its lock while the other side uses it:
with gloo, a thread that finds it taken spins, for milliseconds where cores are few. (NCCL, too,
would hold up a receive behind a send of the same pair.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeschool.actions import Action, Schedule
from pipeschool.dependencies import message_of, peer_of, sender_of
from pipeschool.runtime import packet
from pipeschool.runtime.errors import guarded
from pipeschool.runtime.inbox import Arrived, Inbox
from pipeschool.runtime.outbox import Outbox
from pipeschool.runtime.packet import Packed
from pipeschool.runtime.reduce import add_up_over
from pipeschool.runtime.stage import Tensors
from pipeschool.runtime.ties import Tie

made: list[Any] = []  # the process groups of the run under way


class Route(NamedTuple):
    """How a message travels."""

    peer: int  # the worker at the other end
    process: int  # the one of it that this process talks to
    group: Any
    receive: Action  # the name that both ends have for it
    tag: int  # of its packet; the parts that follow count on


class Transport:
    """One worker's sends and receives. Tensors live on `device`, and travel through `wire`.

    With tensor parallelism this is `part` out of `parts` of the worker, and talks to the same part
    of the others. prompt: every worker takes all that comes off the wire at once, so that one may
    `settle` in the middle of a run.
    """

    def __init__(
        self,
        worker: int,
        schedule: Schedule,
        device: torch.device,
        backend: str,
        part: int = 0,
        parts: int = 1,
        prompt: bool = False,
    ):
        self.part = part
        self.parts = parts
        self.schedule = schedule
        self.device = device
        self.wire = device if backend == "nccl" else torch.device("cpu")
        if self.wire != device:
            self.staging = torch.cuda.Stream(device)
        self.groups: dict[str, Any] = {"F": dist.group.WORLD, "B": new_group()}
        self.outbox: defaultdict[int, Outbox] = defaultdict(
            partial(Outbox, polled=self.wire.type == "cuda")
        )
        # Of stages on several workers: groups are made by all workers, in the same order.
        groups = {
            (stage, other): new_group([w * parts + other for w in workers])
            for stage, workers in enumerate(schedule.owners)
            if len(workers) > 1
            for other in range(parts)
        }
        self.replicas = {stage: g for (stage, other), g in groups.items() if other == part}
        messages = [action for action in schedule.workers[worker] if action.is_message]
        self.routes = {message: self._route(message) for message in messages}
        expected: defaultdict[int, list[Action]] = defaultdict(list)
        for message in messages:
            if message.kind.startswith("RECV"):
                expected[self.routes[message].peer].append(message)
        gloo = backend == "gloo"
        self.inbox = {
            peer: Inbox(actions, self._ask, self.wire, gloo, gloo and prompt)
            for peer, actions in expected.items()
        }

    def pack(self, send: Action, tensors: Tensors) -> Packed:
        """Make a message of `tensors`, so that sending it later takes no time."""
        header = packet.write_header(self.routes[send].receive, tensors)
        payload = self._on_wire([plain(t) for t in tensors if t is not None])
        return packet.pack(header, payload, inline=self.wire.type == "cpu")

    def _on_wire(self, tensors: list[Tensor]) -> list[Tensor]:
        """`tensors` where the backend can read them. From a GPU to the host they go through pinned
        memory, on a stream of their own, so that the device computes on meanwhile."""
        if self.wire == self.device:
            return tensors
        stream = self.staging
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copies = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        stream.synchronize()
        return copies

    def send(self, action: Action, message: Packed, left: float) -> None:
        """Start sending what was done at `left`. The buffers are kept until they have gone."""
        peer, process, group, _, tag = self.routes[action]
        head = message.stamp(left)
        if self.wire.type == "cuda":
            head = head.to(self.wire)
        sent = [
            (guarded(group.send, [tensor], process, tag + part), tensor)
            for part, tensor in enumerate([head, *message.rest])
        ]
        self.outbox[peer].add(sent, large=bool(message.rest))

    def receive(self, action: Action) -> Arrived:
        """Wait for the message of `action`; its tensors are on this worker's device."""
        message = self.inbox[self.routes[action].peer].take()
        if message.action != action:
            raise ValueError(f"got {sender_of(message.action)} where {sender_of(action)} was due")
        if self.wire == self.device:
            return message
        tensors = tuple(
            t if t is None else t.to(self.device, non_blocking=True) for t in message.tensors
        )
        return message._replace(tensors=tensors)

    def sum_over_replicas(
        self, stage: int, gradients: dict[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> None:
        """Add to `gradients` those of the other workers that take turns at `stage`, if any do."""
        if group := self.replicas.get(stage):
            add_up_over(group, gradients, parameters, self.wire)

    def meet_for(self, ties: Sequence[Tie]) -> None:
        """Make a group for the workers of each of `ties`: all workers do, in the same order."""
        self.ties: list[Any] = []
        for tie in ties:
            workers = sorted({self.schedule.owner(stage, 0) for stage, _ in tie})
            self.ties.append(new_group(workers) if len(workers) > 1 else None)

    def sum_over_tie(
        self, number: int, gradients: dict[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> None:
        """Add to `gradients` that of the other workers that have this parameter."""
        if group := self.ties[number]:
            add_up_over(group, gradients, parameters, self.wire)

    def settle(self) -> None:
        """Wait until everything sent has left. In the middle of a run only if `prompt`."""
        for outbox in self.outbox.values():
            outbox.settle()

    def _ask(self, action: Action, tensor: Tensor, part: int) -> Callable[[], Any]:
        """Start receiving a part of the message of `action`; what is returned waits for it."""
        _, process, group, _, tag = self.routes[action]
        work = guarded(group.recv, [tensor], process, tag + part)
        return partial(guarded, work.wait)

    def _route(self, message: Action) -> Route:
        peer, receive = peer_of(message, self.schedule), message_of(message)
        process = peer * self.parts + self.part
        kind, stage, microbatch = receive
        number = stage * self.schedule.microbatches + microbatch
        # A tag of its own for every part of every message of a group.
        return Route(peer, process, self.groups[kind[-1]], receive, number * packet.HEADER)


def plain(tensor: Tensor) -> Tensor:
    """`tensor` as memory holds it: torch conjugates and negates lazily, with a mark on a view."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def new_group(ranks: Sequence[int] | None = None) -> Any:
    """A process group for this run: of all processes, or of these."""
    made.append(dist.new_group(ranks))
    return made[-1]


def end_groups() -> None:
    """Close the connections of a run that is over for everybody, where the process lives on."""
    while made:
        dist.destroy_process_group(made.pop())
