"""Measured means measured: what happens shows in the trace where it happened.

Nothing here asserts how long something takes on this machine. A sleep takes at least as long as it
says, and what needs something else starts after it: that is all a test can count on.
"""

from __future__ import annotations

import random
import time

import pipeschool as ps
import pytest
import torch
from pipeschool.dependencies import message_of, needs, sender_of
from pipeschool.runtime.torch_engine.engine import Torch1F1B, TorchGPipe
from test_run import batch, linear_stages, sgd
from torch import nn

PACE = (0.004, 0.008)


def spans_of(trace: ps.Trace) -> dict[ps.Action, ps.Span]:
    """Each action's span, for schedules with one worker per stage."""
    return {span.action: span for span in trace.spans}


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.015)
        return super().step(closure)


def test_an_update_takes_its_own_time_and_the_next_forward_comes_after_it():
    schedule = ps.pipedream(3, 1, batches=8)
    result = ps.run(
        schedule,
        linear_stages(3),
        [batch(2, seed=k) for k in range(8)],
        optimizer=lambda parameters: SlowSGD(parameters, lr=0.1),
        pace=PACE,
    )
    updates = [span for span in result.trace.spans if span.action.kind == "U"]
    assert len(updates) == 3 * 8
    assert all(span.seconds >= 0.015 for span in updates)
    for row in result.trace.rows:
        for before, after in zip(row, row[1:], strict=False):
            assert after.start >= before.end


class Widens(nn.Module):
    """Hands on one number per sample; for the third microbatch 32 MB of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        width = 2_000_000 if self.calls == 3 else 1
        return self.layer(x)[:, :1].expand(-1, width)


class Narrows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 6).double()

    def forward(self, x):
        return self.layer(x[:, :1])


def test_a_large_message_costs_what_it_costs_where_it_is_made_and_sent():
    result = ps.run(ps.gpipe(2, 6), [Widens(), Narrows()], [batch(12)], pace=PACE)
    spans = spans_of(result.trace)
    sizes = {m.action: m.bytes for m in result.trace.messages if m.action.kind == "SEND_F"}
    large = ps.Action("SEND_F", 0, 2)
    assert sizes[large] == 2 * 2_000_000 * 8
    assert all(size == 16 for action, size in sizes.items() if action != large)
    # Copying 32 MB takes longer than anything that the other five have to do, paced or not: it
    # lengthens the forward, which packs the message, its sending, or its way to the next forward.
    cost = {k: spans[ps.F(1, k)].start - spans[ps.F(0, k)].start for k in range(6)}
    waiting = {k: max(0.0, spans[ps.F(1, k - 1)].end - spans[ps.F(0, k)].end) for k in range(1, 6)}
    added = {k: cost[k] - PACE[0] - waiting.get(k, 0.0) for k in range(6)}
    copied = torch.zeros(4_000_000, dtype=torch.float64)
    begin = time.perf_counter()
    copied.clone()
    assert added[2] > (time.perf_counter() - begin) / 4


class LateOnce(nn.Module):
    """Sleeps in its fourth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 4:
            time.sleep(0.1)
        return self.layer(x)


def test_a_stage_that_is_late_once_shows_it_and_so_do_those_that_wait_for_it():
    first, _, last = linear_stages(3)
    schedule = ps.gpipe(3, 6)
    predicted = ps.simulate(schedule, ps.Cost(*PACE))
    trace = ps.run(schedule, [first, LateOnce(), last], [batch(12)], pace=PACE).trace
    spans, expected = spans_of(trace), spans_of(predicted)
    assert spans[ps.F(1, 3)].seconds >= 0.1
    assert spans[ps.F(2, 3)].start >= spans[ps.F(1, 3)].end
    # Who comes later can only be later than predicted by what is left of the sleep.
    behind = 0.1 - PACE[0] - 0.001
    for action in (ps.F(1, 4), ps.F(2, 3), ps.F(2, 5), ps.B(2, 0), ps.B(0, 5)):
        assert spans[action].start - expected[action].start >= behind
    late = ps.why_late(predicted, trace)
    assert ps.F(1, 3) in late.chain
    assert late.work >= behind
    assert late.measured - late.predicted >= behind


def test_no_span_ends_when_a_prediction_says_so():
    schedule = ps.one_f_one_b(3, 6)
    expected = spans_of(ps.simulate(schedule, ps.Cost(*PACE)))
    trace = ps.run(schedule, linear_stages(3), [batch(12)], pace=PACE).trace
    for span in trace.spans:
        if span.action.kind != "U":
            assert span.seconds >= PACE[span.action.kind == "B"]
            assert span.end > expected[span.action].end


def test_a_declared_link_holds_a_message_back_from_when_it_was_sent():
    latency = 0.03
    schedule = ps.gpipe(3, 4)
    trace = ps.run(
        schedule, linear_stages(3), [batch(8)], pace=PACE, latency=latency, bandwidth=1e5
    ).trace
    spans = spans_of(trace)
    messages = {m.action: m for m in trace.messages}
    assert len(messages) == 2 * 2 * 4 * 2
    for action, received in messages.items():
        if action.kind.startswith("RECV"):
            sent = messages[sender_of(action)]
            assert received.bytes == sent.bytes == 2 * 6 * 8
            assert received.end - sent.start >= latency + sent.bytes / 1e5
            assert spans[ps.Action(action.kind[-1], *action[1:])].start >= received.end
    # A message occupies its link: four that are sent one right after the other come in turn.
    late = [messages[ps.Action("RECV_B", 0, k)].end for k in range(4)]
    assert all(b - a >= 96 / 1e5 for a, b in zip(late, late[1:], strict=False))


def test_a_message_has_times_of_its_own_between_those_of_its_actions():
    trace = ps.run(ps.one_f_one_b(4, 8), linear_stages(4), [batch(16)], pace=PACE).trace
    spans, messages = spans_of(trace), {m.action: m for m in trace.messages}
    for action, sent in messages.items():
        if action.kind.startswith("SEND"):
            received = messages[message_of(action)]
            made = spans[ps.Action(action.kind[-1], *action[1:])]
            used = spans[ps.Action(action.kind[-1], *message_of(action)[1:])]
            assert made.end <= sent.start <= sent.end
            assert sent.start <= received.end <= used.start


FAMILIES = {
    "naive": {}, "gpipe": {}, "1f1b": {}, "eager_1f1b": {}, "interleaved_1f1b": {"v": 2},
    "looped_bfs": {"v": 2}, "zb_h1": {}, "zb_h2": {}, "zb_v": {}, "dualpipe_v": {}, "chimera": {},
    "pipedream": {}, "pipedream_2bw": {},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_spans_of_a_worker_never_overlap_and_each_starts_after_what_it_needs(name):
    choose = random.Random(name)
    p, m = choose.choice([2, 4]), choose.choice([4, 6])
    pace = choose.choice([None, (0.001, 0.002)])
    link = choose.choice([{}, {"latency": 0.002}])
    schedule = ps.build(name, p, m, **FAMILIES[name])
    stages = linear_stages(schedule.stages)
    data = [batch(m, seed=k) for k in range(schedule.batches)]
    check_times(schedule, ps.run(schedule, stages, data, optimizer=sgd, pace=pace, **link).trace)


def test_the_same_holds_for_workers_that_take_turns():
    for schedule in (ps.replicate(ps.gpipe(2, 4), 2), ps.round_robin([2, 1], 4)):
        trace = ps.run(schedule, linear_stages(schedule.stages), [batch(8)], optimizer=sgd).trace
        check_times(schedule, trace)


@pytest.mark.parametrize(
    ("engine", "build"),
    [("torch", ps.gpipe), ("torch", ps.one_f_one_b), (Torch1F1B, ps.one_f_one_b),
     (TorchGPipe, ps.gpipe)],
)  # fmt: skip
def test_the_same_holds_for_pytorchs_engines(engine, build):
    """Long declared times: a message that leaves before they are over would be seen."""
    schedule, data = build(3, 4), [batch(8), batch(8, seed=1)]
    trace = ps.run(schedule, linear_stages(3), data, engine=engine, pace=(0.02, 0.03)).trace
    check_times(schedule.repeat(2), trace)


def check_times(schedule: ps.Schedule, trace: ps.Trace) -> None:
    """No worker does two things at a time, messages included; nothing starts before its input."""
    ends = {span.action: span.end for span in trace.spans if span.action.kind != "U"}
    for worker in range(schedule.p):
        doings = [s for s in (*trace.spans, *trace.messages) if s.worker == worker]
        doings.sort(key=lambda span: (span.start, span.end))
        for before, after in zip(doings, doings[1:], strict=False):
            assert before.start <= before.end <= after.start
    for span in trace.spans:
        for need in needs(span.action, schedule):
            assert ends[need] <= span.start
