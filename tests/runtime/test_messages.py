"""Messages: what a packet holds, and what each carrier does with it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pipeschool as ps
import pytest
import torch
import torch.distributed as dist
from pipeschool.actions import Action
from pipeschool.lowering import lower
from pipeschool.runtime.clock import Clock
from pipeschool.runtime.errors import PeerLost
from pipeschool.runtime.weights.groups import Groups
from pipeschool.runtime.wire import packet
from pipeschool.runtime.wire.local_wire import ROOM, LocalWire
from pipeschool.runtime.wire.outbox import MANY, Outbox
from pipeschool.runtime.wire.shared_memory import MOST, SlotsToSend
from pipeschool.runtime.wire.torch_wire import TorchWire
from pipeschool.runtime.wire.wire import Wire
from torch import Tensor

CPU = torch.device("cpu")
RECEIVE = Action("RECV_F", 2, 3)


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    """Some numbers of that dtype."""
    return (torch.arange(torch.Size(shape).numel()) % 7 - 2).to(dtype).reshape(shape)


# Packets


def there_and_back(*tensors: Tensor | None) -> tuple[packet.Packed, packet.Header, list]:
    """A message of `tensors`, written and read."""
    payload = [t for t in tensors if t is not None]
    packed = packet.pack(packet.write_header(RECEIVE, tensors), payload, room=1 << 20)
    memory = memoryview(packed.stamp(12.5))
    header = packet.read_header(memory)
    return packed, header, list(packet.copy_out(memory, header))


@pytest.mark.parametrize("dtype", packet.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1, 2, 3, 1)], ids=str)
def test_a_packet_gives_back_what_was_put_in(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    first, last = of(dtype, *shape), of(torch.int8, 3)
    packed, header, (came_first, missing, came_last) = there_and_back(first, None, last)
    assert (header.sent, header.receive) == (12.5, RECEIVE)
    assert packed.bytes == first.nbytes + 3
    assert missing is None
    for sent, came in ((first, came_first), (last, came_last)):
        assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
        assert came.equal(sent)


@pytest.mark.parametrize("dtype", packet.DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1])
def test_a_column_of_one_number_or_none_is_as_good_as_any_tensor(
    dtype: torch.dtype, rows: int
) -> None:
    column, spread = of(dtype, 2, 3)[:rows, 1], of(dtype, 1)[0].expand(rows, 1)
    *_, read = there_and_back(column, spread)
    assert [t.tolist() for t in read] == [column.tolist(), spread.tolist()]


def test_what_comes_out_of_a_packet_has_memory_of_its_own() -> None:
    packed, _, (first, second) = there_and_back(of(torch.float32, 4), of(torch.float32, 4))
    assert first.untyped_storage().nbytes() == 16
    packed.packet[:] = bytes(len(packed.packet))
    first.zero_()
    assert second.tolist() == [-2, -1, 0, 1]


@pytest.mark.parametrize(("more", "inside"), [(0, True), (1, False)])
def test_what_does_not_fit_into_a_packet_is_not_in_it(more: int, inside: bool) -> None:
    room = 4096
    start = packet.aligned(8 * 15)  # a matrix has a header of 15 numbers
    tensor = of(torch.uint8, 1, room - start + more)
    packed = packet.pack(packet.write_header(RECEIVE, (tensor,)), [tensor], room)
    header = packet.read_header(memoryview(packed.stamp(0.0)))
    assert header.place == (packet.INSIDE if inside else packet.FOLLOWS)
    assert [t is tensor for t in packed.rest] == ([] if inside else [True])
    assert header.shapes == (packet.Shape(torch.uint8, tuple(tensor.shape)),)


def test_too_many_tensors_are_refused() -> None:
    most = (packet.HEADER - 11) // 2
    there_and_back(*[torch.tensor(1.0)] * most)
    with pytest.raises(ValueError, match=r"^59 tensors are too many for one message"):
        there_and_back(*[torch.tensor(1.0)] * (most + 1))


# Both carriers, two workers

SCHEDULE = lower(ps.gpipe(2, 200))
SMALL, LARGE = (3, 4), (60, 700)


def local_pair() -> Iterator[tuple[Wire, Wire]]:
    """The wires of two workers, both in this process."""
    ends = {(0, 1): socket.socketpair(), (1, 0): socket.socketpair()}
    yield tuple(
        LocalWire(
            worker,
            SCHEDULE,
            Clock(CPU),
            CPU,
            {link: pair[worker != link[0]] for link, pair in ends.items()},
            worker,
        )
        for worker in (0, 1)
    )
    for pair in ends.values():
        for end in pair:
            end.close()


@pytest.fixture
def pair() -> Iterator[tuple[LocalWire, LocalWire]]:
    """Two workers on one machine."""
    yield from local_pair()


def send(wire: Wire, k: int, *tensors: Tensor | None) -> None:
    """What worker 0 sends forward for microbatch k."""
    wire.send(Action("SEND_F", 0, k), tensors)


def receive(wire: Wire, k: int) -> Any:
    """What worker 1 gets for it."""
    return wire.receive(Action("RECV_F", 1, k))


def talk(worker: int, make: Callable[[int], Wire], answer: Any) -> None:
    """Worker 0 sends microbatches that worker 1 doubles and sends back."""
    torch.set_num_threads(1)
    wire = make(worker)
    shapes = [SMALL, LARGE, (0, 2), LARGE, (200, 700), SMALL]
    if worker == 0:
        for k, shape in enumerate(shapes):  # all of them first: no send waits for its receiver
            send(wire, k, of(torch.float64, *shape), None, of(torch.int32, 2))
        found = []
        for k, shape in enumerate(shapes):
            (doubled,) = wire.receive(Action("RECV_B", 0, k))
            found.append(torch.equal(doubled, 2 * of(torch.float64, *shape)))
            assert wire.last.bytes == doubled.nbytes
        answer.put(found)
    else:
        for k in range(len(shapes)):
            x, nothing, numbers = receive(wire, k)
            assert nothing is None and numbers.tolist() == [-2, -1]
            wire.send(Action("SEND_B", 1, k), (2 * x,))
    wire.flush()


def over_sockets(links: dict) -> Callable[[int], Wire]:
    """How each of two processes makes its local wire."""
    return lambda worker: LocalWire(worker, SCHEDULE, Clock(CPU), CPU, links[worker], worker)


def over_torch(file: str, connected: bool) -> Callable[[int], Wire]:
    """How each of two processes makes its wire over gloo; connected: as with NCCL."""

    def make(worker: int) -> Wire:
        dist.init_process_group("gloo", init_method=file, rank=worker, world_size=2)
        wire = TorchWire(worker, SCHEDULE, Clock(CPU), CPU, "gloo", Groups())
        if connected:
            wire.connect()
        return wire

    return make


@pytest.mark.parametrize("carrier", ["local", "gloo", "gloo, connected"])
def test_two_processes_exchange_messages_of_all_sizes(carrier: str, tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    ends = {(0, 1): socket.socketpair(), (1, 0): socket.socketpair()}
    links = [{link: two[w != link[0]] for link, two in ends.items()} for w in (0, 1)]
    file, connected = (tmp_path / "f").as_uri(), "connected" in carrier
    make = over_sockets(links) if carrier == "local" else over_torch(file, connected)
    answer = context.SimpleQueue()
    workers = [context.Process(target=talk, args=(w, make, answer)) for w in (0, 1)]
    for worker in workers:
        worker.start()
    assert answer.get() == [True] * 6
    for worker in workers:
        worker.join(20)
        worker.kill()


def test_a_message_for_somebody_else_is_noticed(pair) -> None:
    send(pair[0], 4, of(torch.float32, 2))
    with pytest.raises(ValueError, match=r"^got 0SEND_F4 where 0SEND_F3 was due$"):
        receive(pair[1], 3)


def test_a_message_says_when_it_was_handed_over_not_when_it_was_packed(pair) -> None:
    packed = pair[0].pack(Action("SEND_F", 0, 0), (of(torch.float32, *LARGE),))
    time.sleep(0.01)
    before = time.perf_counter()
    pair[0].send(Action("SEND_F", 0, 0), packed)
    after = time.perf_counter()
    receive(pair[1], 0)
    for wire in pair:
        assert before <= wire.last.sent + 1e-8 and wire.last.sent <= after
        assert wire.last.bytes == 4 * 60 * 700


def test_a_packed_message_is_what_the_tensor_was_when_it_was_packed(pair) -> None:
    for k, shape in enumerate((SMALL, LARGE)):
        tensor = of(torch.float32, *shape)
        packed = pair[0].pack(Action("SEND_F", 0, k), (tensor,))
        expected = tensor.clone()
        tensor.zero_()
        pair[0].send(Action("SEND_F", 0, k), packed)
        assert torch.equal(receive(pair[1], k)[0], expected)


def taken(wire: LocalWire) -> list[int]:
    """The slots in use, by segment, of what worker 0 sends."""
    segments = wire.sending[1].slots.segments
    return [segment.memory[: segment.count].count(b"\1") for segment in segments]


def test_a_slot_is_used_again_once_its_tensors_are_gone_and_not_before(pair) -> None:
    source, target = pair

    def passed(k: int) -> Tensor:
        send(source, k, of(torch.float32, *LARGE) + k)
        return receive(target, k)[0]

    first = passed(0)
    view = first[3:]
    second = passed(1)
    assert taken(source) == [1, 1]
    del second
    gc.collect()
    assert taken(source) == [1, 0]
    third = passed(2)  # in the slot of the second
    assert taken(source) == [1, 1]
    assert torch.equal(third, of(torch.float32, *LARGE) + 2)
    del first
    gc.collect()
    fourth = passed(3)  # a view still needs the first slot
    assert taken(source) == [1, 1, 1]
    assert torch.equal(view, of(torch.float32, *LARGE)[3:])
    assert torch.equal(fourth, of(torch.float32, *LARGE) + 3)


def test_messages_of_any_size_need_slots_for_those_alive_and_no_more(pair) -> None:
    """Growing, shrinking, and larger again: slots are kept by powers of two of their size."""
    source, target = pair
    for k, rows in enumerate([*range(10, 130, 4), *range(130, 10, -4), *range(10, 130, 4)]):
        send(source, k, of(torch.float32, rows, 700))
        assert torch.equal(receive(target, k)[0], of(torch.float32, rows, 700))
        gc.collect(0)  # what is new; all that the tests hold would take long
    assert [s.count for s in source.sending[1].slots.segments] == [1, 1, 1, 1, 1]
    sizes = [segment.size for segment in source.sending[1].slots.segments]
    assert sizes == [1 << power for power in (15, 16, 17, 18, 19)]


def test_messages_may_leave_in_another_order_than_they_were_packed_in(pair) -> None:
    source, target = pair
    order = [3, 1, 0, 2, 5, 4]
    packed = {
        k: source.pack(Action("SEND_F", 0, k), (of(torch.float32, *LARGE) + k,)) for k in range(6)
    }
    for k in order:
        source.send(Action("SEND_F", 0, k), packed[k])
    for k in order:
        assert torch.equal(receive(target, k)[0], of(torch.float32, *LARGE) + k)


def test_a_receiver_that_gives_back_what_nobody_asks_for_does_not_wait(pair) -> None:
    """More messages than any socket could hold answers for, and a sender that is done."""
    for k in range(200):
        for _ in range(10):
            send(pair[0], k, of(torch.float32, 5000))
    for k in range(200):
        for _ in range(10):
            receive(pair[1], k)
    gc.collect()
    assert sum(taken(pair[0])) == 0


def test_a_tensor_of_a_slot_may_be_changed_in_place_and_shares_its_memory_with_no_other(pair):
    send(pair[0], 0, of(torch.float32, *LARGE), of(torch.float32, *LARGE))
    first, second = receive(pair[1], 0)
    first.zero_()
    assert torch.equal(second, of(torch.float32, *LARGE))
    assert first.untyped_storage().nbytes() == first.nbytes


def test_many_messages_in_flight_need_few_descriptors(pair) -> None:
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("counts descriptors under /proc, which only Linux has")
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    for k in range(100):
        send(pair[0], k, of(torch.float32, *LARGE) + k)
    kept = [receive(pair[1], k)[0] for k in range(100)]
    assert all(torch.equal(t, of(torch.float32, *LARGE) + k) for k, t in enumerate(kept))
    # Segments of 1, 1, 2, 4, ... 64 slots: eight, one descriptor each at either end.
    assert len(os.listdir("/proc/self/fd")) - before <= 16


def test_no_send_waits_for_its_receiver(pair) -> None:
    full = of(torch.uint8, ROOM - 200)
    for k in range(200):  # many times what a socket holds
        send(pair[0], k, full + k % 5)
    assert all(torch.equal(receive(pair[1], k)[0], full + k % 5) for k in range(200))
    pair[0].flush()
    assert pair[0].sending[1].thread is None
    send(pair[0], 0, full)
    assert pair[0].sending[1].thread is None  # nobody waits: no thread is needed


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_peer_that_is_gone_is_a_lost_peer(pair, shape) -> None:
    pair[1].receiving[0].socket.close()
    with pytest.raises(PeerLost, match="^the other end of a message has gone"):
        send(pair[0], 0, of(torch.float32, *shape))
    pair[1].sending[0].socket.close()
    with pytest.raises(PeerLost, match="^the other end of a message has gone"):
        pair[0].receive(Action("RECV_B", 0, 0))


def test_shared_memory_without_memfd(monkeypatch, pair) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)  # as on macOS
    send(pair[0], 0, of(torch.float32, *LARGE))
    assert torch.equal(receive(pair[1], 0)[0], of(torch.float32, *LARGE))


def test_segments_double_up_to_a_size() -> None:
    slots = SlotsToSend()
    for _ in range(9):
        slots.put([of(torch.uint8, 40_000)])
    assert [(s.size, s.count) for s in slots.segments] == [(65536, n) for n in (1, 1, 2, 4, 8)]
    large = SlotsToSend()
    for _ in range(5):
        large._take(MOST // 2)
    assert [s.count for s in large.segments] == [1, 1, 2, 2]
    for segment in (*slots.segments, *large.segments):
        os.close(segment.descriptor)


# The sending end of torch.distributed


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
    outbox.flush()
    assert alive(buffers) == 0


def test_small_buffers_are_kept_up_to_a_number() -> None:
    outbox = Outbox(polled=False)
    works = [Work() for _ in range(MANY + 3)]
    for work in works:
        work.gone.set()
    buffers = [sent(outbox, work, large=False) for work in works]
    assert until(lambda: alive(buffers) == 3)
    outbox.flush()
    assert alive(buffers) == 0


def test_an_outbox_goes_on_after_it_was_flushed_and_leaves_no_thread() -> None:
    before = threading.active_count()
    outbox, work = Outbox(polled=False), Work()
    work.gone.set()
    for _ in range(3):
        sent(outbox, work, large=True)
        outbox.flush()
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
        outbox.flush()
