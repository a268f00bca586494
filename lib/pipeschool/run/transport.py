"""Point-to-point messages between workers, over torch.distributed.

A message starts with a packet of fixed size. Its header says what the message is, and the dtype
and shape of each tensor; so a stage may send anything, a smaller last microbatch needs no special
care, and a receiver notices when it gets somebody else's message. Small tensors ride in the packet
itself, which halves the time that a short message takes; larger ones follow, one by one.

On gloo a thread per incoming link takes messages off the wire while the worker computes, in the
order of the schedule; `receive` then only waits for what is not there yet.

Activations and gradients have a process group each, and packets are asked for ahead of time. So a
connection carries one direction only, and nobody takes its lock while the other side uses it: with
gloo, a thread that finds it taken spins, for milliseconds where cores are few. (NCCL, too, would
hold up a receive behind a send of the same pair.)
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeschool.actions import MESSAGE_KINDS, Action, Schedule
from pipeschool.lower import message_of, peer_of, sender_of
from pipeschool.run.stage import Tensors
from pipeschool.run.tensor import local
from pipeschool.run.ties import Tie

PACKET = 2048  # numbers of 8 bytes in a packet
HEADER = 128  # of them for the header
LEFT = HEADER - 1  # place of the time stamp, in nanoseconds
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
ON_THEIR_WAY = 2  # messages to a peer whose buffers are kept unasked
AHEAD = 64  # packets asked for ahead of time, per link
NOTHING = -1  # stands for the dtype of a missing gradient


made: list[Any] = []  # the process groups of the run under way


class PeerLost(RuntimeError):
    """The other end of a message is gone; why is for the controller to find out."""


class Packed(NamedTuple):
    """A message ready to leave: its packet, and the tensors that follow it."""

    packet: Tensor
    rest: list[Tensor]
    bytes: int


class Asked(NamedTuple):
    """A packet under way: the receive that it is for, its buffer, and the work to wait for."""

    action: Action
    packet: Tensor
    work: Any


class Arrived(NamedTuple):
    """A message that is there: what it is, its tensors, and when its sender was done with it."""

    action: Action
    tensors: Tensors
    left: float  # on the clock of worker 0


class Transport:
    """One worker's sends and receives. Tensors live on `device`, and travel through `wire`.

    With tensor parallelism this is `part` out of `parts` of the worker, and talks to the same part
    of the others.
    """

    def __init__(
        self,
        worker: int,
        schedule: Schedule,
        device: torch.device,
        backend: str,
        part: int = 0,
        parts: int = 1,
    ):
        self.part = part
        self.parts = parts
        self.schedule = schedule
        self.device = device
        self.wire = device if backend == "nccl" else torch.device("cpu")
        if self.wire != device:
            self.staging = torch.cuda.Stream(device)
        self.groups: dict[str, Any] = {"F": dist.group.WORLD, "B": new_group()}
        # Per peer, oldest first: work handles with the buffers they read.
        self.sending: defaultdict[int, deque[list[tuple[Any, Tensor]]]] = defaultdict(deque)
        self.inbox: dict[int, queue.SimpleQueue[Arrived | BaseException]] = {}
        # Of stages on several workers: groups are made by all workers, in the same order.
        groups = {
            (stage, other): new_group([w * parts + other for w in workers])
            for stage, workers in enumerate(schedule.owners)
            if len(workers) > 1
            for other in range(parts)
        }
        self.replicas = {stage: g for (stage, other), g in groups.items() if other == part}
        if backend == "gloo":
            self._start_inboxes(schedule.workers[worker])

    def pack(self, send: Action, tensors: Tensors) -> Packed:
        """Make a message of `tensors`, so that sending it later takes no time."""
        payload = self._on_wire([plain(t) for t in tensors if t is not None])
        size = sum(t.numel() * t.element_size() for t in payload)
        packet = torch.zeros(PACKET, dtype=torch.int64, device=self.wire)
        header = write_header(message_of(send), tensors)
        packet[: len(header)] = torch.tensor(header, device=self.wire)
        if size > inline_room():
            return Packed(packet, payload, size)
        room = packet[HEADER:].view(torch.uint8)
        at = 0
        for tensor in payload:
            raw = tensor.reshape(-1).view(torch.uint8)
            room[at : at + len(raw)] = raw
            at += len(raw)
        return Packed(packet, [], size)

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
                tensor.record_stream(stream)
        stream.synchronize()
        return copies

    def send(self, action: Action, message: Packed, left: float) -> None:
        """Start sending what was done at `left`. The buffers are kept until they have gone."""
        message.packet[LEFT] = int(left * 1e9)
        peer = peer_of(action, self.schedule)
        pieces = []
        for part, tensor in enumerate([message.packet, *message.rest]):
            tag = self._tag(message_of(action), part)
            work = guarded(self._group(action).send, [tensor], self._rank(peer), tag)
            pieces.append((work, tensor))
        self.sending[peer].append(pieces)
        self.let_go(ON_THEIR_WAY)

    def let_go(self, keep: int = 0) -> None:
        """Free the buffers of what was sent, but for the last `keep` messages to each peer.

        gloo's sends never say that they are done before somebody waits for them. That cannot
        block for long: whoever receives asks ahead of time, whatever its worker is doing. NCCL's
        do say so, and there a wait would hold up this worker's device.
        """
        for messages in self.sending.values():
            while len(messages) > keep and self._gone(messages[0]):
                messages.popleft()

    def _gone(self, parts: list[tuple[Any, Tensor]]) -> bool:
        if self.wire.type == "cuda":
            return all(work.is_completed() for work, _ in parts)
        for work, _ in parts:
            guarded(work.wait)
        return True

    def receive(self, action: Action) -> Arrived:
        """Wait for the message of `action`; its tensors are on this worker's device."""
        peer = peer_of(action, self.schedule)
        if peer in self.inbox:
            message = self.inbox[peer].get()
        else:
            message = self._take(self._ask(action, peer), peer)
        if isinstance(message, BaseException):
            raise message
        if message.action != action:
            raise ValueError(f"got {sender_of(message.action)} where {sender_of(action)} was due")
        tensors = tuple(
            t if t is None else t.to(self.device, non_blocking=True) for t in message.tensors
        )
        return message._replace(tensors=tensors)

    def sum_over_replicas(
        self, stage: int, gradients: dict[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> None:
        """Add to `gradients` those of the other workers that take turns at `stage`, if any do.

        Not all of its `parameters` need have one on every worker: a layer may have sent the
        microbatches of one another way than those of the others.
        """
        if not (group := self.replicas.get(stage)):
            return
        owners = torch.tensor([int(name in gradients) for name in parameters], device=self.wire)
        add_up(owners, group)
        for (name, parameter), count in zip(parameters.items(), owners.tolist(), strict=True):
            if count:
                if name not in gradients:
                    gradients[name] = torch.zeros_like(parameter)
                add_up(local(gradients[name]), group)

    def meet_for(self, ties: Sequence[Tie]) -> None:
        """Make a group for the workers of each of `ties`: all workers do, in the same order."""
        self.ties: list[Any] = []
        for tie in ties:
            workers = sorted({self.schedule.owner(stage, 0) for stage, _ in tie})
            self.ties.append(new_group(workers) if len(workers) > 1 else None)

    def sum_over_tie(self, number: int, gradient: Tensor) -> None:
        """Add to `gradient` that of the other workers that have this parameter."""
        if group := self.ties[number]:
            add_up(gradient, group)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for messages in self.sending.values():
            for work, _ in itertools.chain.from_iterable(messages):
                guarded(work.wait)
        self.sending.clear()

    def _start_inboxes(self, row: Sequence[Action]) -> None:
        expected: defaultdict[int, list[Action]] = defaultdict(list)
        for action in row:
            if action.kind in ("RECV_F", "RECV_B"):
                expected[peer_of(action, self.schedule)].append(action)
        for peer, actions in expected.items():
            self.inbox[peer] = queue.SimpleQueue()
            asked = deque(self._ask(action, peer) for action in actions[:AHEAD])
            more = iter(actions[AHEAD:])
            thread = threading.Thread(target=self._fill, args=(peer, asked, more), daemon=True)
            thread.start()

    def _fill(self, peer: int, asked: deque[Asked], more: Iterator[Action]) -> None:
        try:
            while asked:
                self.inbox[peer].put(self._take(asked.popleft(), peer))
                asked.extend(self._ask(action, peer) for action in itertools.islice(more, 1))
        except BaseException as error:  # handed to the worker, which waits for it
            self.inbox[peer].put(error)

    def _ask(self, action: Action, peer: int) -> Asked:
        """Start receiving the packet of a message."""
        packet = torch.empty(PACKET, dtype=torch.int64, device=self.wire)
        return Asked(action, packet, self._receive(packet, action, peer, 0))

    def _take(self, asked: Asked, peer: int) -> Arrived:
        """Wait for a packet, and for the tensors that follow it."""
        action, packet, work = asked
        guarded(work.wait)
        header = packet[:HEADER].tolist()
        came, shapes = read_header(header)
        room = packet[HEADER:].view(torch.uint8)
        sizes = [size_of(shape) for shape in shapes]
        inline = sum(sizes) <= inline_room()
        tensors: list[Tensor | None] = []
        part = 0
        for shape, size in zip(shapes, sizes, strict=True):
            if shape is None:
                tensors.append(None)
            elif inline:
                raw, room = room[:size].clone(), room[size:]
                tensors.append(raw.view(shape.dtype).reshape(shape.dims))
            else:
                part += 1
                tensor = torch.empty(shape.dims, dtype=shape.dtype, device=self.wire)
                guarded(self._receive(tensor, action, peer, part).wait)
                tensors.append(tensor)
        return Arrived(came, tuple(tensors), header[LEFT] / 1e9)

    def _receive(self, tensor: Tensor, action: Action, peer: int, part: int) -> Any:
        tag = self._tag(action, part)
        return guarded(self._group(action).recv, [tensor], self._rank(peer), tag)

    def _rank(self, worker: int) -> int:
        """The process of `worker` that this one talks to."""
        return worker * self.parts + self.part

    def _group(self, action: Action) -> Any:
        return self.groups[action.kind[-1]]

    def _tag(self, receive: Action, part: int) -> int:
        """A number of its own for every part of every message."""
        kind = MESSAGE_KINDS.index(receive.kind)
        number = (receive.stage * self.schedule.microbatches + receive.microbatch) * 4 + kind
        return number * HEADER + part


def plain(tensor: Tensor) -> Tensor:
    """`tensor` as memory holds it: torch conjugates and negates lazily, with a mark on a view."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


class Shape(NamedTuple):
    """What a tensor looks like."""

    dtype: torch.dtype
    dims: tuple[int, ...]


def inline_room() -> int:
    """Bytes of tensors that fit into a packet."""
    return (PACKET - HEADER) * 8


def size_of(shape: Shape | None) -> int:
    """Bytes of a tensor of that shape."""
    return 0 if shape is None else torch.Size(shape.dims).numel() * shape.dtype.itemsize


def new_group(ranks: Sequence[int] | None = None) -> Any:
    """A process group for this run: of all processes, or of these."""
    made.append(dist.new_group(ranks))
    return made[-1]


def end_groups() -> None:
    """Close the connections of a run that is over for everybody, where the process lives on."""
    while made:
        dist.destroy_process_group(made.pop())


def guarded(call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)``, where a failure of the connection is told apart from other errors."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise PeerLost(str(error).splitlines()[0]) from None


def add_up(tensor: Tensor, group: Any) -> None:
    """Let `tensor` be the sum of what all workers of `group` have in its place."""
    guarded(dist.all_reduce, tensor, dist.ReduceOp.SUM, group)


def write_header(receive: Action, tensors: Tensors) -> list[int]:
    """What a message is, and the dtype and shape of each of its tensors, as HEADER numbers."""
    numbers = [MESSAGE_KINDS.index(receive.kind), receive.stage, receive.microbatch, len(tensors)]
    for tensor in tensors:
        if tensor is None:
            numbers.append(NOTHING)
        elif tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(
                f"cannot send a {tensor.dtype} tensor between stages: dense {allowed} can be"
            )
        else:
            numbers += [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    if len(numbers) > LEFT:
        raise ValueError(
            f"{len(tensors)} tensors are too many for one message: pack them into fewer"
        )
    return numbers


def read_header(numbers: Sequence[int]) -> tuple[Action, list[Shape | None]]:
    """The inverse of `write_header`: the receive, and the shape of each tensor."""
    kind, stage, microbatch, count = numbers[:4]
    at = 4
    shapes: list[Shape | None] = []
    for _ in range(count):
        if numbers[at] == NOTHING:
            shapes.append(None)
            at += 1
        else:
            dims = numbers[at + 1]
            shapes.append(Shape(DTYPES[numbers[at]], tuple(numbers[at + 2 : at + 2 + dims])))
            at += 2 + dims
    return Action(MESSAGE_KINDS[kind], stage, microbatch), shapes
