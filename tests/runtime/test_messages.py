"""Messages: what a packet holds, and the two ends of a link, here without a wire."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeschool.actions import Action
from pipeschool.runtime.errors import PeerLost
from pipeschool.runtime.inbox import AHEAD, Inbox
from pipeschool.runtime.wire import packet
from pipeschool.runtime.wire.outbox import MANY, Outbox
from torch import Tensor

CPU = torch.device("cpu")
RECEIVE = Action("RECV_F", 2, 3)
ROOM = packet.SIZE - 80  # for one matrix: its header has 10 numbers of 8 bytes


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    """Some numbers of that dtype."""
    return (torch.arange(torch.Size(shape).numel()) % 7 - 2).to(dtype).reshape(shape)


def there_and_back(*tensors: Tensor | None) -> tuple[packet.Packed, packet.Unpacked]:
    """A message of `tensors`, written and read."""
    payload = [t for t in tensors if t is not None]
    packed = packet.pack(packet.write_header(RECEIVE, tensors), payload, inline=True)
    return packed, packet.unpack(packed.stamp(12.5))


@pytest.mark.parametrize("dtype", packet.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1, 2, 3, 1)], ids=str)
def test_a_packet_gives_back_what_was_put_in(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    first, last = of(dtype, *shape), of(torch.int8, 3)
    packed, read = there_and_back(first, None, last)
    assert (read.left, read.action) == (12.5, RECEIVE)
    assert packed.bytes == first.nbytes + 3
    assert read.tensors is not None
    assert read.tensors[1] is None
    for sent, came in ((first, read.tensors[0]), (last, read.tensors[2])):
        assert came is not None
        assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
        assert came.equal(sent)


@pytest.mark.parametrize("dtype", packet.DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1])
def test_a_column_of_one_number_or_none_is_as_good_as_any_tensor(
    dtype: torch.dtype, rows: int
) -> None:
    column, spread = of(dtype, 2, 3)[:rows, 1], of(dtype, 1)[0].expand(rows, 1)
    _, read = there_and_back(column, spread)
    assert read.tensors is not None
    assert [t.tolist() for t in read.tensors if t is not None] == [column.tolist(), spread.tolist()]


def test_what_comes_out_of_a_packet_has_memory_of_its_own() -> None:
    packed, read = there_and_back(of(torch.float32, 4), of(torch.float32, 4))
    assert read.tensors is not None
    first, second = read.tensors
    assert first is not None and second is not None
    assert first.untyped_storage().nbytes() == 16
    packed.packet[:] = bytes(packet.SIZE)
    first.zero_()
    assert second.tolist() == [-2, -1, 0, 1]


@pytest.mark.parametrize(("size", "inline"), [(ROOM, True), (ROOM + 1, False)])
def test_what_does_not_fit_into_a_packet_follows_it(size: int, inline: bool) -> None:
    tensor = of(torch.uint8, 1, size)
    packed, read = there_and_back(tensor)
    assert (read.tensors is not None) is inline
    assert [t is tensor for t in packed.rest] == ([] if inline else [True])
    assert read.shapes == [packet.Shape(torch.uint8, (1, size))]


def test_a_backend_may_want_all_tensors_apart() -> None:
    tensor = of(torch.float32, 2)
    packed = packet.pack(packet.write_header(RECEIVE, (tensor,)), [tensor], inline=False)
    assert packed.rest == [tensor]
    assert packet.unpack(packed.stamp(0.0)).tensors is None


def test_too_many_tensors_are_refused() -> None:
    most = (packet.HEADER - 6) // 2
    there_and_back(*[torch.tensor(1.0)] * most)
    with pytest.raises(ValueError, match=r"^62 tensors are too many for one message"):
        there_and_back(*[torch.tensor(1.0)] * (most + 1))


class Wire:
    """Messages that a peer has sent; notes in which order their parts are asked for."""

    def __init__(self, *tensors: Tensor) -> None:
        self.receives = [Action("RECV_F", 1, k) for k in range(len(tensors))]
        self.packed = [
            packet.pack(packet.write_header(receive, (t,)), [t], inline=True)
            for receive, t in zip(self.receives, tensors, strict=True)
        ]
        self.asked: list[tuple[int, int]] = []  # (microbatch, part)
        self.waited: dict[tuple[int, int], str] = {}  # by which thread

    def receive(self, action: Action, buffer: Tensor, part: int) -> Callable[[], Any]:
        """What `Transport` gives to an inbox."""
        self.asked.append((action.microbatch, part))

        def wait() -> None:
            packed = self.packed[action.microbatch]
            source = packed.stamp(1.0) if part == 0 else packed.rest[part - 1]
            buffer.copy_(source)
            self.waited[action.microbatch, part] = threading.current_thread().name

        return wait


SMALL, LARGE = of(torch.float32, 2, 3), of(torch.float32, 50, 60)
HERE = threading.current_thread().name


def take_all(receives: list[Action], inbox: Inbox) -> list[Tensor | None]:
    """All messages, in the order of the receives."""
    found = []
    for receive in receives:
        message = inbox.take()
        assert message.action == receive
        found += message.tensors
    return found


def test_small_messages_are_asked_for_ahead_and_need_no_thread() -> None:
    wire = Wire(*[SMALL] * (AHEAD + 5))
    inbox = Inbox(wire.receives, wire.receive, CPU, ahead=True, threaded=False)
    assert wire.asked == [(k, 0) for k in range(AHEAD)]
    inbox.take()
    assert wire.asked[AHEAD:] == [(AHEAD, 0)]
    assert all(t is not None and t.equal(SMALL) for t in take_all(wire.receives[1:], inbox))
    assert set(wire.waited.values()) == {HERE}


def test_after_a_large_message_a_thread_takes_the_rest() -> None:
    sent = [SMALL, LARGE, SMALL, LARGE]
    wire = Wire(*sent)
    found = take_all(
        wire.receives, Inbox(wire.receives, wire.receive, CPU, ahead=True, threaded=False)
    )
    assert all(t is not None and t.equal(s) for t, s in zip(found, sent, strict=True))
    by_thread = {key for key, name in wire.waited.items() if name != HERE}
    assert by_thread == {(2, 0), (3, 0), (3, 1)}


def test_an_inbox_may_take_everything_at_once() -> None:
    wire = Wire(LARGE, LARGE)
    inbox = Inbox(wire.receives, wire.receive, CPU, ahead=True, threaded=True)
    take_all(wire.receives, inbox)
    assert HERE not in wire.waited.values()


def test_a_backend_that_keeps_an_order_is_asked_when_it_is_time() -> None:
    wire = Wire(LARGE, SMALL)
    inbox = Inbox(wire.receives, wire.receive, CPU, ahead=False, threaded=False)
    assert wire.asked == []
    take_all(wire.receives, inbox)
    assert wire.asked == [(0, 0), (0, 1), (1, 0)]
    assert set(wire.waited.values()) == {HERE}


def test_what_goes_wrong_in_the_thread_is_raised_by_take() -> None:
    wire = Wire(LARGE, LARGE)
    del wire.packed[1]
    inbox = Inbox(wire.receives, wire.receive, CPU, ahead=True, threaded=False)
    inbox.take()
    with pytest.raises(IndexError):
        inbox.take()


class Work:
    """A send under way: done once `gone` is set. Only gloo's may be waited for."""

    def __init__(self, error: Exception | None = None, polled: bool = False) -> None:
        self.gone = threading.Event()
        self.error = error
        self.polled = polled

    def wait(self) -> None:
        """Blocks."""
        assert not self.polled
        self.gone.wait()
        if self.error:
            raise self.error

    def is_completed(self) -> bool:
        """Does not; gloo never says yes."""
        return self.polled and self.gone.is_set()


def alive(buffers: list[weakref.ref[Tensor]]) -> int:
    """How many of them somebody holds on to."""
    gc.collect()
    return sum(buffer() is not None for buffer in buffers)


def sent(outbox: Outbox, work: Work, large: bool) -> weakref.ref[Tensor]:
    """Put a message into `outbox` that nobody else holds on to."""
    buffer = torch.empty(4)
    outbox.add([(work, buffer)], large)
    return weakref.ref(buffer)


def until(condition: Callable[[], bool]) -> bool:
    """Wait for another thread to do its part; False where it has not after a long time."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_large_buffer_is_freed_once_it_has_left_and_nobody_waits_for_that() -> None:
    outbox, works = Outbox(polled=False), [Work(), Work()]
    buffers = [sent(outbox, work, large=True) for work in works]  # returns: nothing has left
    assert alive(buffers) == 2
    works[0].gone.set()
    assert until(lambda: alive(buffers) == 1)
    works[1].gone.set()
    outbox.settle()
    assert alive(buffers) == 0


def test_small_buffers_are_kept_up_to_a_number() -> None:
    outbox = Outbox(polled=False)
    works = [Work() for _ in range(MANY + 3)]
    for work in works:
        work.gone.set()
    buffers = [sent(outbox, work, large=False) for work in works]
    assert until(lambda: alive(buffers) == 3)
    outbox.settle()
    assert alive(buffers) == 0


def test_an_outbox_goes_on_after_it_has_settled_and_leaves_no_thread() -> None:
    before = threading.active_count()
    outbox, work = Outbox(polled=False), Work()
    work.gone.set()
    for _ in range(3):
        sent(outbox, work, large=True)
        outbox.settle()
        assert threading.active_count() == before


def test_a_polled_outbox_never_waits() -> None:
    outbox, works = Outbox(polled=True), [Work(polled=True) for _ in range(3)]
    buffers = [sent(outbox, work, large=True) for work in works[:2]]
    works[0].gone.set()
    buffers.append(sent(outbox, works[2], large=True))
    assert alive(buffers) == 2


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (RuntimeError("connection closed\nand a long trace"), PeerLost, "^connection closed$"),
        (RuntimeError(), PeerLost, "^$"),
        (MemoryError("no room"), MemoryError, "^no room$"),
    ],
)
def test_what_goes_wrong_shows_when_everything_is_to_have_left(
    error: Exception, expected: type[Exception], text: str, large: bool
) -> None:
    outbox, work = Outbox(polled=False), Work(error)
    work.gone.set()
    sent(outbox, work, large)
    with pytest.raises(expected, match=text):
        outbox.settle()
