"""A carrier whose sends wait, as NCCL's do: every family runs on it, and what would stand still is
refused, or named by the watch."""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace

import pipeschool as ps
import pytest
import torch
from faulty import Faulty, killed
from oracles import random_schedule, scatter_messages
from own_engine import MyEngine
from pipeschool.dependencies import sender_of
from pipeschool.runtime import launch, plan, reference
from pipeschool.runtime.clock import Clock
from pipeschool.runtime.errors import PeerLost
from pipeschool.runtime.wire import torch_wire
from pipeschool.runtime.wire.rendezvous_wire import RendezvousWire
from test_run import batch, linear_stages, sgd
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

FAMILIES = [
    ("naive", 4, 4, None),
    ("gpipe", 4, 8, None),
    ("one_f_one_b", 4, 8, None),
    ("eager_1f1b", 4, 9, None),
    ("interleaved_1f1b", 4, 8, 2),
    ("looped_bfs", 4, 8, 2),
    ("zb_h1", 4, 8, None),
    ("zb_h2", 4, 8, None),
    ("zb_v", 4, 7, None),
    ("dualpipe_v", 4, 8, None),
    ("chimera", 4, 8, None),
]
TURNS = {
    "replicas": lambda: ps.replicate(ps.one_f_one_b(2, 4), 2),
    "round robin": lambda: ps.round_robin((1, 2, 1), 8, weights="flush"),
}


def both(schedule, data, **options):
    """The same run on both carriers of one machine."""
    stages = linear_stages(schedule.stages)
    return [
        ps.run(schedule, stages, data, optimizer=sgd, matching=matching, **options)
        for matching in ("rendezvous", "in_order")
    ]


def assert_same(waiting, other):
    assert (waiting.backend, other.backend) == ("rendezvous", "local")
    assert waiting.losses == other.losses
    for a, b in zip(waiting.gradients, other.gradients, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
    for a, b in zip(waiting.state_dicts, other.state_dicts, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize(("name", "p", "m", "v"), FAMILIES)
def test_gradients_equal_one_process_and_the_other_carrier(name, p, m, v):
    schedule = ps.build(name, p, m, v=v)
    data = [batch(2 * m + 1), batch(2 * m + 1, seed=1)]
    waiting, other = both(schedule, data)
    assert_same(waiting, other)
    expected = reference.gradients(
        linear_stages(schedule.stages), data, m, optimizer=sgd,
        replicas=[len(workers) for workers in schedule.owners],
    )  # fmt: skip
    assert reference.max_error(waiting.gradients, expected) == 0.0


@pytest.mark.parametrize("turns", TURNS)
def test_workers_that_take_turns(turns):
    schedule = TURNS[turns]()
    assert_same(*both(schedule, [batch(16), batch(16, seed=1)]))


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_asynchronous_streams(name):
    assert_same(*both(ps.build(name, 4, 4, batches=2), [batch(8), batch(8, seed=1)]))


def test_inference():
    stages, (x, _) = linear_stages(4), batch(8)
    schedule = ps.forward_only(4, 4)
    results = [
        ps.run(schedule, stages, [(x, None)], matching=matching)
        for matching in ("rendezvous", "in_order")
    ]
    for a, b in zip(*(result.outputs for result in results), strict=True):
        assert torch.equal(a[0], b[0])


def test_large_tensors_and_a_shared_parameter():
    stages = linear_stages(4, width=96)
    stages[3][0].weight = stages[0][0].weight
    x, y = batch(64, width=96)  # beyond what a packet holds
    results = [
        ps.run(ps.zb_h1(4, 4), stages, [(x, y)] * 2, optimizer=sgd, matching=matching)
        for matching in ("rendezvous", "in_order")
    ]
    assert_same(*results)


def test_two_processes_per_worker():
    stages = [nn.Sequential(OrderedDict(up=nn.Linear(8, 8), down=nn.Linear(8, 8))) for _ in "ab"]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    x, y = (t.float() for t in batch(8, width=8))
    results = [
        ps.run(
            ps.one_f_one_b(2, 4), stages, [(x, y)], optimizer=sgd, matching=matching,
            tensor_parallel=2, tensor_plan=plan,
        )
        for matching in ("rendezvous", "in_order")
    ]  # fmt: skip
    assert_same(*results)


def test_an_engine_of_the_caller():
    stages, data = linear_stages(4), [batch(8)]
    result = ps.run(ps.interleaved_1f1b(2, 4), stages, data, engine=MyEngine, matching="rendezvous")
    assert reference.max_error(result.gradients, reference.gradients(stages, data, 4)) == 0.0


def test_slow_links_paces_and_counted_bytes_go_with_it():
    stages, data = linear_stages(4), [batch(8)]
    result = ps.run(
        ps.zb_v(2, 4), stages, data, matching="rendezvous", pace=(0.001, 0.002), latency=0.001,
        memory=True, nan_check=True,
    )  # fmt: skip
    assert reference.max_error(result.gradients, reference.gradients(stages, data, 4)) == 0.0


def test_training_goes_on_from_leg_to_leg():
    losses = [
        ps.train(
            "zb_v", linear_stages(4), [batch(8), batch(8, seed=1)], m=4, v=2, epochs=2, every=1,
            optimizer=sgd, log=None, matching=matching,
        ).losses
        for matching in ("rendezvous", "in_order")
    ]  # fmt: skip
    assert losses[0] == losses[1] and len(losses[0]) == 16


@pytest.mark.exhaustive
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name in ps.SCHEDULES if name != "forward_only"])
def test_every_family_at_more_sizes(name, p):
    for m in (1, 2, 5, 8, 12):
        try:
            schedule = ps.check(ps.build(name, p, m))
        except ValueError:
            continue
        assert_same(*both(schedule, [batch(2 * m)] * schedule.batches))


# --- what stands still ---------------------------------------------------------------------------

FACING = ps.lower(ps.one_f_one_b(2, 4))  # and not fused


def test_facing_sends_that_are_not_fused_are_refused_beforehand():
    with pytest.raises(ps.IllegalSchedule) as caught:
        ps.run(FACING, linear_stages(2), [batch(8)], matching="rendezvous")
    assert str(caught.value) == (
        "deadlock: worker 0 waits at 0SEND_F1 (send of the activations of microbatch 1 on stage 0) "
        "for worker 1 to receive it; worker 1 waits at 1SEND_B0 (send of the gradients of "
        "microbatch 0 on stage 1) for worker 0 to receive it"
    )


def test_the_same_row_runs_where_sends_do_not_wait_and_where_it_is_fused():
    stages, data = linear_stages(2), [batch(8)]
    expected = reference.gradients(stages, data, 4)
    for schedule, matching in (
        (FACING, "in_order"),
        (ps.lower(FACING, fuse=True), "rendezvous"),
        (ps.lower(FACING, fuse=True), "in_order"),
    ):
        result = ps.run(schedule, stages, data, matching=matching)
        assert reference.max_error(result.gradients, expected) == 0.0


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(plan, "check", lambda schedule, **options: schedule)


def test_it_really_stands_still_and_the_watch_says_who_waits_for_whom(unchecked):
    with pytest.raises(ps.RunError) as caught:
        ps.run(FACING, linear_stages(2), [batch(8)], matching="rendezvous", timeout=1)
    assert str(caught.value).startswith(
        "worker 0 is stuck at 0SEND_F1 (send of the activations of microbatch 1 on stage 0) (for "
        "worker 1 to receive it; worker 1 waits for it at 1SEND_B0): nothing has moved for "
    )
    error = caught.value
    assert (error.worker, error.action, error.peer) == (0, ps.Action("SEND_F", 0, 1), 1)


def test_a_worker_that_is_killed_is_named_not_those_whose_sends_wait_for_it():
    stages = linear_stages(3)
    stages[1] = Faulty(6, killed, "F", 2)
    with pytest.raises(ps.RunError, match="^worker 1 was killed by SIGKILL at 1F2"):
        ps.run(ps.one_f_one_b(3, 6), stages, [batch(12)], matching="rendezvous")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"matching": "tag"}, "matching must be in_order or rendezvous, not 'tag'"),
        (
            {"matching": "rendezvous", "engine": "torch"},
            "matching='rendezvous' does not go with engine='torch': leave it out",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, sentence):
    with pytest.raises(ValueError) as caught:
        ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)], **options)
    assert str(caught.value) == sentence


# --- the wire by itself --------------------------------------------------------------------------

CPU = torch.device("cpu")


@contextmanager
def wires_of(schedule):
    """The wires of all workers, in this process."""
    ends = {link: socket.socketpair() for link in plan.links_of(schedule, 1)}
    try:
        yield [
            RendezvousWire(
                w,
                schedule,
                Clock(CPU),
                CPU,
                {link: pair[w == link[1]] for link, pair in ends.items() if w in link},
                w,
            )
            for w in range(schedule.p)
        ]
    finally:
        for pair in ends.values():
            for end in pair:
                with suppress(OSError):  # wakes up who still waits
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def do_row(wire, worker, done):
    """All messages of a row; `done` counts them."""
    for action in wire.schedule.workers[worker]:
        if action.kind.startswith("SEND"):
            wire.send(action, (torch.tensor([action.stage, action.microbatch]),))
        elif action.is_message:
            (found,) = wire.receive(action)
            sender = sender_of(action)
            assert found.tolist() == [sender.stage, sender.microbatch]
        done[worker] += 1


def comes_to_its_end(schedule, patience):
    """Do threads that do the rows all come to their ends?"""
    done = [0] * schedule.p

    def work(wire, worker):
        with suppress(PeerLost):  # the sockets are closed where it stands still
            do_row(wire, worker, done)

    with wires_of(schedule) as wires:
        threads = [Thread(target=work, args=(wire, w), daemon=True) for w, wire in enumerate(wires)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + patience
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
    for thread in threads:
        thread.join(10)
    return done == [len(row) for row in schedule.workers]


def passes(schedule):
    try:
        ps.check(schedule, matching="rendezvous")
    except ps.IllegalSchedule as error:
        assert str(error).startswith("deadlock")
        return False
    return True


def test_what_check_passes_comes_to_its_end_and_what_it_refuses_stands_still():
    verdicts = []
    for seed in range(40):
        schedule = random_schedule(seed, weights="flush")
        for lowered in (scatter_messages(schedule, seed), ps.lower(schedule, fuse=True)):
            for fused in (False, True):
                this = replace(lowered, fused=fused)
                right = passes(this)
                assert comes_to_its_end(this, patience=20 if right else 0.1) == right
                verdicts.append(right)
    assert verdicts.count(True) > 40 and verdicts.count(False) > 10


def row_of_worker_1_in_three():
    """Worker 1 sends to both neighbours at once."""
    rows = ["0RECV_B0", "1SEND_B0 1SEND_F1", "2RECV_F1"]
    workers = tuple(tuple(map(ps.Action.parse, row.split())) for row in rows)
    return replace(ps.gpipe(3, 2), workers=workers, fused=True)


def test_a_send_is_done_when_its_receiver_is_there_and_a_group_when_all_are():
    schedule = row_of_worker_1_in_three()
    with wires_of(schedule) as wires:
        at, done = [], [0] * 3
        wires[1].waits_at = at.append
        sender = Thread(target=do_row, args=(wires[1], 1, done), daemon=True)
        sender.start()
        wires[2].receive(ps.Action("RECV_F", 2, 1))  # its own message passes, whatever the other
        sender.join(0.1)
        assert sender.is_alive()
        assert str(at[-1]) == "1SEND_B0"
        wires[0].receive(ps.Action("RECV_B", 0, 0))
        sender.join(10)
        assert not sender.is_alive()
        assert done[1] == 2


# --- torch.distributed with NCCL -----------------------------------------------------------------


def test_with_nccl_what_has_no_messages_gets_those_that_are_right_where_sends_wait(monkeypatch):
    taken = []

    def take(planned, *rest):
        taken.append(planned.schedule)
        raise InterruptedError

    monkeypatch.setattr(plan, "choose_device", lambda device, n: ("nccl", ["cuda:0"] * n))
    monkeypatch.setattr(launch, "on_this_machine", take)
    for schedule in (ps.zb_v(2, 4), ps.lower(ps.zb_v(2, 4))):
        with pytest.raises(InterruptedError):
            ps.run(schedule, linear_stages(4), [batch(8)])
    assert taken == [ps.lower(ps.zb_v(2, 4), fuse=True), ps.lower(ps.zb_v(2, 4))]
    sentence = "matching='rendezvous' does not go with NCCL, which does so by itself: leave it out"
    with pytest.raises(ValueError, match=sentence):
        ps.run(ps.zb_v(2, 4), linear_stages(4), [batch(8)], matching="rendezvous")


class Group:
    """Stands for a process group; notes (group, worker, whether it sends, peer)."""

    def __init__(self, name, worker, noted):
        self.name, self.worker, self.noted = name, worker, noted

    def send(self, tensors, process, tag):
        self.noted.append((self.name, self.worker, True, process))
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors, process, tag):
        self.noted.append((self.name, self.worker, False, process))
        return SimpleNamespace(wait=lambda: None)


def nccl_wire(worker, schedule, monkeypatch):
    """A wire as NCCL has it, on groups that only note what is asked of them."""
    noted, names = [], iter(["second", "third", "fourth"])
    world = SimpleNamespace(group=SimpleNamespace(WORLD=Group("first", worker, noted)))
    monkeypatch.setattr(torch_wire, "dist", world)
    groups = SimpleNamespace(new=lambda: Group(next(names), worker, noted))
    return torch_wire.TorchWire(worker, schedule, Clock(CPU), CPU, "nccl", groups), noted


@pytest.mark.parametrize("name", ["one_f_one_b", "looped_bfs", "zb_v", "chimera"])
@pytest.mark.parametrize("p", [2, 4])
def test_with_nccl_all_meet_on_every_link_in_one_order_and_no_group_goes_both_ways(
    name, p, monkeypatch
):
    schedule = ps.lower(ps.build(name, p, 4), fuse=True)
    wires = [nccl_wire(w, schedule, monkeypatch) for w in range(p)]
    todo = [list(noted) for _, noted in wires]
    met = set()
    while any(todo):  # each waits at its first until its peer has come to the same
        heads = {(group, w, peer): sends for ((group, w, sends, peer), *_) in filter(None, todo)}
        pairs = [
            k for k, sends in heads.items() if sends and heads.get((k[0], k[2], k[1])) is False
        ]
        assert pairs, todo
        for group, source, target in pairs:
            todo[source].pop(0)
            todo[target].pop(0)
            met.add((group, source, target))
    links = {(source, target) for _, source, target in met}
    assert links == plan.links_of(schedule, 1)
    assert not any((group, target, source) in met for group, source, target in met)
    for worker, (wire, noted) in enumerate(wires):
        noted.clear()
        for message in (a for a in schedule.workers[worker] if a.is_message):
            process, group, _ = wire._route(message)
            way = (worker, process) if message.kind.startswith("SEND") else (process, worker)
            assert (group.name, *way) in met
