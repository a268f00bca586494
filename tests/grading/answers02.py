"""What learners may hand in for unit 02: right answers of several kinds, and plausible wrong ones.

`RIGHT[name]` and `WRONG[name]` are lists of functions. Each stands for an answer called `name`; its
own name says what is particular about it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pipeschool as ps
import torch
from pipeschool.actions import B, F, U

RIGHT = defaultdict(list)
WRONG = defaultdict(list)


def right(name):
    return lambda function: RIGHT[name].append(function) or function


def wrong(name):
    return lambda function: WRONG[name].append(function) or function


# --- flush_time


@right("flush_time")
def batch_after_batch(p, m, batches, forward, backward):
    total = 0
    for _ in range(batches):
        total += (m + p - 1) * forward + (m + p - 1) * backward
    return total


@right("flush_time")
def simulated(p, m, batches, forward, backward):
    return ps.simulate(ps.gpipe(p, m, batches), ps.Cost(forward, backward)).makespan


@wrong("flush_time")
def flush_filled_only_once(p, m, batches, forward, backward):
    return (m * batches + p - 1) * (forward + backward)


@wrong("flush_time")
def flush_without_a_pipeline(p, m, batches, forward, backward):
    return batches * m * p * (forward + backward)


@wrong("flush_time")
def flush_one_batch(p, m, batches, forward, backward):
    return (m + p - 1) * (forward + backward)


@wrong("flush_time")
def flush_one_slot_too_many(p, m, batches, forward, backward):
    return batches * (m + p) * (forward + backward)


@wrong("flush_time")
def flush_without_the_backward(p, m, batches, forward, backward):
    return batches * (m + p - 1) * forward


# --- stream_time


@right("stream_time")
def work_and_the_rest_of_the_line(p, n, forward, backward):
    slot = forward + backward
    return n * slot + (p - 1) * slot


@right("stream_time")
def stream_simulated(p, n, forward, backward):
    return np.float64(ps.simulate(ps.pipedream(p, n), ps.Cost(forward, backward)).makespan)


@wrong("stream_time")
def stream_work_alone(p, n, forward, backward):
    """What one believes who takes the bubble to be 0."""
    return n * (forward + backward)


@wrong("stream_time")
def stream_one_slot_too_many(p, n, forward, backward):
    return (n + p) * (forward + backward)


@wrong("stream_time")
def stream_fills_with_forwards_only(p, n, forward, backward):
    return n * (forward + backward) + (p - 1) * forward


@wrong("stream_time")
def stream_one_at_a_time(p, n, forward, backward):
    return n * p * (forward + backward)


@wrong("stream_time")
def stream_shared_among_workers(p, n, forward, backward):
    return n * (forward + backward) / p


# --- gain


@right("gain")
def gain_with_its_limit(p, m, batches):
    if batches == math.inf:
        return 1 + (p - 1) / m
    return Fraction(batches * (m + p - 1), batches * m + p - 1)


@right("gain")
def gain_divided_through_by_batches(p, m, batches):
    """One formula for both: 1 / inf is 0."""
    return (m + p - 1) / (m + (p - 1) / batches)


@right("gain")
def gain_with_very_many(p, m, batches):
    batches = min(batches, 10**9)
    return batches * (m + p - 1) / (batches * m + p - 1)


@wrong("gain")
def gain_nan_in_the_limit(p, m, batches):
    return batches * (m + p - 1) / (batches * m + p - 1)


@wrong("gain")
def gain_always_the_limit(p, m, batches):
    return (m + p - 1) / m


@wrong("gain")
def gain_upside_down(p, m, batches):
    return 1 / gain_divided_through_by_batches(p, m, batches)


@wrong("gain")
def gain_none_in_the_limit(p, m, batches):
    return 1.0 if batches == math.inf else gain_nan_in_the_limit(p, m, batches)


@wrong("gain")
def gain_as_a_share_saved(p, m, batches):
    return 1 - 1 / gain_divided_through_by_batches(p, m, batches)


@wrong("gain")
def gain_over_no_pipeline(p, m, batches):
    return m * p / (m + (p - 1) / batches)


# --- async_order


def one_f_one_b(
    worker, p, n, first=None, update=lambda worker, k: [U(worker, k)], last_ones=lambda row: row
):
    """A right order, with places to break it."""
    first = min(n, p - worker) if first is None else first
    row = [F(worker, k) for k in range(first)]
    for k in range(n):
        row += [B(worker, k), *update(worker, k)]
        if first + k < n:
            row.append(F(worker, first + k))
    return last_ones(row)


@right("async_order")
def in_three_phases(worker, p, n):
    warm_up = min(p - 1 - worker, n)
    row = [F(worker, k) for k in range(warm_up)]
    for k in range(warm_up, n):
        row += [F(worker, k), B(worker, k - warm_up), U(worker, k - warm_up)]
    for k in range(n - warm_up, n):
        row += [B(worker, k), U(worker, k)]
    return row


@right("async_order")
def in_turn(worker, p, n):
    return tuple(one_f_one_b(worker, p, n))


@right("async_order")
def whatever_can_be_done_next(worker, p, n):
    """No phases: go forward while there is room on the counter, otherwise backward."""
    entered = left = 0
    while left < n:
        if entered < n and entered - left < p - worker:
            yield F(worker, entered)
            entered += 1
        else:
            yield from (B(worker, left), U(worker, left))
            left += 1


@right("async_order")
def async_from_the_library(worker, p, n):
    return list(ps.pipedream(p, n).workers[worker])


@wrong("async_order")
def updates_forgotten(worker, p, n):
    return one_f_one_b(worker, p, n, update=lambda *_: [])


@wrong("async_order")
def updates_all_at_the_end(worker, p, n):
    row = one_f_one_b(worker, p, n, update=lambda *_: [])
    return row + [U(worker, k) for k in range(n)]


@wrong("async_order")
def one_update_at_the_end(worker, p, n):
    return [*one_f_one_b(worker, p, n, update=lambda *_: []), U(worker, 0)]


@wrong("async_order")
def update_after_the_own_forward(worker, p, n):
    row = one_f_one_b(worker, p, n, update=lambda *_: [])
    return [
        a for action in row for a in ([action, U(*action[1:])] if action[0] == "F" else [action])
    ]


@wrong("async_order")
def update_one_forward_late(worker, p, n):
    """Back, forward with the old weights, and only then the update."""
    row = one_f_one_b(worker, p, n)
    for i, (a, b) in enumerate(zip(row, row[1:], strict=False)):
        if a.kind == "U" and b.kind == "F":
            row[i], row[i + 1] = b, a
    return row


@wrong("async_order")
def updates_counted_from_1(worker, p, n):
    return one_f_one_b(worker, p, n, update=lambda worker, k: [U(worker, k + 1)])


@wrong("async_order")
def one_warm_up_for_all(worker, p, n):
    return one_f_one_b(worker, p, n, first=min(n, p))


@wrong("async_order")
def one_forward_too_few(worker, p, n):
    return one_f_one_b(worker, p, n, first=max(1, min(n, p - 1 - worker)))


@wrong("async_order")
def one_forward_too_many(worker, p, n):
    return one_f_one_b(worker, p, n, first=min(n, p - worker + 1))


@wrong("async_order")
def warm_up_from_the_wrong_end(worker, p, n):
    return one_f_one_b(worker, p, n, first=min(n, worker + 1))


@wrong("async_order")
def warm_up_longer_than_the_stream(worker, p, n):
    return one_f_one_b(worker, p, n, first=p - worker)


@wrong("async_order")
def last_backwards_forgotten(worker, p, n):
    return one_f_one_b(worker, p, n)[: -2 * (p - 1 - worker) or None]


@wrong("async_order")
def all_forwards_first(worker, p, n):
    return one_f_one_b(worker, p, n, first=n)


@wrong("async_order")
def one_cup_at_a_time(worker, p, n):
    return one_f_one_b(worker, p, n, first=1)


@wrong("async_order")
def always_stage_0(worker, p, n):
    return [action._replace(stage=0) for action in one_f_one_b(worker, p, n)]


@wrong("async_order")
def last_cup_first(worker, p, n):
    return [
        a if a.kind == "U" else a._replace(microbatch=n - 1 - a.microbatch)
        for a in one_f_one_b(worker, p, n)
    ]


# --- latency


@right("latency")
def from_first_to_last(trace, microbatch):
    spans = [s for s in trace.spans if s.action[2] == microbatch and s.action[0] in ("F", "B")]
    return max(s.end for s in spans) - min(s.start for s in spans)


@right("latency")
def on_stage_0(trace, microbatch):
    for span in trace.rows[0]:
        if span.action == F(0, microbatch):
            start = span.start
        if span.action == B(0, microbatch):
            return span.end - start


@right("latency")
def with_dictionaries(trace, microbatch):
    starts = {span.action: span.start for span in trace.spans}
    ends = {span.action: span.end for span in trace.spans}
    return np.float64(ends[B(0, microbatch)]) - starts[F(0, microbatch)]


@wrong("latency")
def from_the_start_of_the_run(trace, microbatch):
    return max(s.end for s in trace.spans if s.action == B(0, microbatch))


@wrong("latency")
def work_without_waiting(trace, microbatch):
    spans = [s for s in trace.spans if s.action[2] == microbatch and s.action[0] != "U"]
    return sum(s.end - s.start for s in spans)


@wrong("latency")
def updates_taken_for_microbatches(trace, microbatch):
    spans = [s for s in trace.spans if s.action.microbatch == microbatch]
    return max(s.end for s in spans) - min(s.start for s in spans)


@wrong("latency")
def down_the_line_only(trace, microbatch):
    spans = [s for s in trace.spans if s.action[2] == microbatch and s.action[0] == "F"]
    return max(s.end for s in spans) - min(s.start for s in spans)


@wrong("latency")
def the_last_start(trace, microbatch):
    starts = {span.action: span.start for span in trace.spans}
    return starts[B(0, microbatch)] - starts[F(0, microbatch)]


@wrong("latency")
def mean_of_all(trace, microbatch):
    return trace.makespan / len({s.action.microbatch for s in trace.spans})


# --- steady_pace


@right("steady_pace")
def slowest_of_all(forward, backward):
    return max(map(sum, zip(forward, backward, strict=True)))


@right("steady_pace")
def slowest_in_numpy(forward, backward):
    return (np.array(forward) + np.array(backward)).max()


@right("steady_pace")
def slowest_simulated(forward, backward):
    p = len(forward)
    trace = ps.simulate(ps.pipedream(p, 40 * p), ps.Cost(forward, backward))
    ends = [span.end for span in trace.rows[0] if span.action.kind == "B"]
    return (ends[30 * p] - ends[20 * p]) / (10 * p)


@wrong("steady_pace")
def slowest_forward_and_slowest_backward(forward, backward):
    return max(forward) + max(backward)


@wrong("steady_pace")
def mean_of_the_stages(forward, backward):
    return (sum(forward) + sum(backward)) / len(forward)


@wrong("steady_pace")
def whole_line(forward, backward):
    return sum(forward) + sum(backward)


@wrong("steady_pace")
def slowest_single_action(forward, backward):
    return max(*forward, *backward)


@wrong("steady_pace")
def fastest(forward, backward):
    return min(f + b for f, b in zip(forward, backward, strict=True))


@wrong("steady_pace")
def last_stage(forward, backward):
    return forward[-1] + backward[-1]


@wrong("steady_pace")
def microbatches_per_second(forward, backward):
    return 1 / slowest_of_all(forward, backward)


# --- mismatched


@right("mismatched")
def with_two_dictionaries(trace):
    used = {"F": {}, "B": {}, "U": {}}
    for span in trace.spans:
        kind, stage, k = span.action
        used[kind][stage, k] = span.version
    return [pair for pair in used["B"] if used["B"][pair] != used["F"][pair]]


@right("mismatched")
def with_nested_loops(trace):
    found = set()
    for a in trace.spans:
        for b in trace.spans:
            if a.action.kind == "F" and b.action == B(*a.action[1:]) and a.version != b.version:
                found.add((a.action.stage, np.int64(a.action.microbatch)))
    return found


@right("mismatched")
def row_by_row(trace):
    for row in trace.rows:
        forward = {}
        for span in row:
            if span.action.kind == "F":
                forward[span.action.microbatch] = span.version
            elif span.action.kind == "B" and forward[span.action.microbatch] != span.version:
                yield [span.action.stage, span.action.microbatch]


@wrong("mismatched")
def those_that_agree(trace):
    torn = set(with_two_dictionaries(trace))
    return {s.action[1:] for s in trace.spans if s.action.kind == "F"} - torn


@wrong("mismatched")
def stages_are_not_told_apart(trace):
    """The last forward of a microbatch, wherever it was, against the backward."""
    forward = {s.action.microbatch: s.version for s in trace.spans if s.action.kind == "F"}
    return [
        (s.action.stage, s.action.microbatch)
        for s in trace.spans
        if s.action.kind == "B" and s.version != forward[s.action.microbatch]
    ]


@wrong("mismatched")
def backwards_against_updates(trace):
    made = {s.action[1:]: s.version for s in trace.spans if s.action.kind == "U"}
    return [
        s.action[1:]
        for s in trace.spans
        if s.action.kind == "B" and s.version != made[s.action[1:]]
    ]


@wrong("mismatched")
def by_the_formula_for_the_stream(trace):
    n = 1 + max(span.action.microbatch for span in trace.spans)
    return [(stage, k) for stage in range(trace.p - 1) for k in range(1, n)]


@wrong("mismatched")
def all_but_the_last_stage(trace):
    n = 1 + max(span.action.microbatch for span in trace.spans)
    return [(stage, k) for stage in range(trace.p - 1) for k in range(n)]


@wrong("mismatched")
def none_at_all(trace):
    return []


@wrong("mismatched")
def microbatch_before_stage(trace):
    return [(k, stage) for stage, k in with_two_dictionaries(trace)]


@wrong("mismatched")
def microbatches_only(trace):
    return [k for _, k in with_two_dictionaries(trace)]


@wrong("mismatched")
def not_the_newest(trace):
    """Old weights are not the question: it is whether the two agree."""
    newest = max(span.version for span in trace.spans)
    return [s.action[1:] for s in trace.spans if s.action.kind == "B" and s.version < newest]


# --- versions_met


@right("versions_met")
def updates_before_each(stage, microbatch, p):
    return max(0, microbatch - (p - 1 - stage)), microbatch


@right("versions_met")
def counted_in_the_row(stage, microbatch, p):
    """How many updates stand before F, and before B, in the row of an order long enough."""
    row = in_three_phases(stage, p, microbatch + p)
    f, b = row.index(F(stage, microbatch)), row.index(B(stage, microbatch))
    return [sum(a.kind == "U" for a in row[:end]) for end in (f, b)]


@right("versions_met")
def read_off_a_simulation(stage, microbatch, p):
    trace = ps.simulate(ps.pipedream(p, microbatch + p), weights="latest")
    version = {span.action: span.version for span in trace.spans}
    return np.array([version[F(stage, microbatch)], version[B(stage, microbatch)]])


@wrong("versions_met")
def below_version_0(stage, microbatch, p):
    return microbatch - (p - 1 - stage), microbatch


@wrong("versions_met")
def as_if_stashed(stage, microbatch, p):
    version = max(0, microbatch - (p - 1 - stage))
    return version, version


@wrong("versions_met")
def off_by_one(stage, microbatch, p):
    return max(0, microbatch - (p - stage)), microbatch


@wrong("versions_met")
def its_own_update_counted(stage, microbatch, p):
    return max(0, microbatch - (p - 1 - stage)), microbatch + 1


@wrong("versions_met")
def always_the_same(stage, microbatch, p):
    return microbatch, microbatch


@wrong("versions_met")
def late_from_the_wrong_end(stage, microbatch, p):
    return max(0, microbatch - stage), microbatch


@wrong("versions_met")
def backward_first(stage, microbatch, p):
    return microbatch, max(0, microbatch - (p - 1 - stage))


@wrong("versions_met")
def every_stage_as_late_as_the_first(stage, microbatch, p):
    return max(0, microbatch - (p - 1)), microbatch


# --- first_gradient


@right("first_gradient")
def products(x, target, down, up):
    return (math.prod(down) * x - target) * math.prod(up[1:]) * x


@right("first_gradient")
def step_by_step(x, target, down, up):
    cup = x
    for weight in down:
        cup = weight * cup
    message = cup - target
    for weight in reversed(up[1:]):
        message = message * weight
    return float(message * x)


@right("first_gradient")
def by_autograd(x, target, down, up):
    weights = [torch.tensor(float(w), dtype=torch.float64, requires_grad=True) for w in down]
    cup = torch.tensor(float(x), dtype=torch.float64)
    for weight in weights:
        cup = weight * cup
    loss = (cup - target) ** 2 / 2
    for weight, new in zip(weights, up, strict=True):
        weight.data.fill_(new)
    loss.backward()
    return weights[0].grad


@wrong("first_gradient")
def of_the_old_weights(x, target, down, up):
    return products(x, target, down, down)


@wrong("first_gradient")
def of_the_new_weights(x, target, down, up):
    return products(x, target, up, up)


@wrong("first_gradient")
def its_own_weight_too(x, target, down, up):
    return (math.prod(down) * x - target) * math.prod(up) * x


@wrong("first_gradient")
def of_the_square_without_a_half(x, target, down, up):
    return 2 * products(x, target, down, up)


@wrong("first_gradient")
def x_forgotten(x, target, down, up):
    return (math.prod(down) * x - target) * math.prod(up[1:])


@wrong("first_gradient")
def error_forgotten(x, target, down, up):
    return math.prod(up[1:]) * x


@wrong("first_gradient")
def wrong_sign(x, target, down, up):
    return -products(x, target, down, up)


@wrong("first_gradient")
def down_and_up_swapped(x, target, down, up):
    return products(x, target, up, down)
