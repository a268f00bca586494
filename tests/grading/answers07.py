"""What learners may hand in for unit 07: right answers of several kinds, and plausible wrong ones.

`RIGHT[name]` and `WRONG[name]` are lists of functions. Each stands for an answer called `name`; its
own name says what is particular about it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

import numpy as np
import pipeschool as ps
import torch

RIGHT = defaultdict(list)
WRONG = defaultdict(list)


def right(name):
    return lambda function: RIGHT[name].append(function) or function


def wrong(name):
    return lambda function: WRONG[name].append(function) or function


# --- interleaved_warm_up


@right("interleaved_warm_up")
def warm_up_formula(worker, p, v):
    return (v - 1) * p + 2 * (p - 1 - worker)


@right("interleaved_warm_up")
def warm_up_of_the_library(worker, p, v):
    """Forwards before the first backward, without that of the first turn."""
    row = ps.interleaved_1f1b(p, 3 * p, v).workers[worker]
    return np.int64([action.kind for action in row].index("B") - 1)


@wrong("interleaved_warm_up")
def warm_up_of_1f1b(worker, p, v):
    return p - 1 - worker


@wrong("interleaved_warm_up")
def warm_up_one_forward_per_worker_below(worker, p, v):
    return (v - 1) * p + p - 1 - worker


@wrong("interleaved_warm_up")
def warm_up_through_all_chunks(worker, p, v):
    return v * p + 2 * (p - 1 - worker)


@wrong("interleaved_warm_up")
def warm_up_with_the_first_turn(worker, p, v):
    return (v - 1) * p + 2 * (p - 1 - worker) + 1


@wrong("interleaved_warm_up")
def warm_up_from_the_other_end(worker, p, v):
    return (v - 1) * p + 2 * worker


@wrong("interleaved_warm_up")
def warm_up_times_v(worker, p, v):
    return v * (p - 1 - worker)


# --- interleaved_order


def pieces(worker, p, m, v, backward_chunks=reversed, size=None):
    """The two lists, round by round."""
    stages = range(worker, v * p, p)
    size = size or p
    turns = [range(first, first + size) for first in range(0, m, size)]
    forwards = [ps.F(s, k) for turn in turns for s in stages for k in turn]
    backwards = [ps.B(s, k) for turn in turns for s in backward_chunks(stages) for k in turn]
    return forwards, backwards


def take_turns(forwards, backwards, first):
    first = min(first, len(forwards))
    row = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(forwards) - first :]


@right("interleaved_order")
def interleaved_in_pieces(worker, p, m, v):
    return take_turns(*pieces(worker, p, m, v), warm_up_formula(worker, p, v))


@right("interleaved_order")
def interleaved_by_arithmetic(worker, p, m, v):
    """Step i of all v * m: its round, chunk and place, as many write it; a generator."""

    def split(i):
        turn, place = divmod(i, p * v)
        chunk, k = divmod(place, p)
        return chunk, turn * p + k

    total = v * m
    first = min(total, (v - 1) * p + 2 * (p - 1 - worker))
    for i in range(total + first):
        if i < total:
            chunk, k = split(i)
            yield ps.F(chunk * p + worker, k)
        if i >= first:
            chunk, k = split(i - first)
            yield ps.B((v - 1 - chunk) * p + worker, k)


@right("interleaved_order")
def interleaved_with_the_short_warm_up(worker, p, m, v):
    """As fast where messages are free, and it keeps less."""
    return take_turns(*pieces(worker, p, m, v), (v - 1) * p + p - 1 - worker)


@wrong("interleaved_order")
def interleaved_backwards_through_the_first_chunk_first(worker, p, m, v):
    return take_turns(*pieces(worker, p, m, v, list), warm_up_formula(worker, p, v))


@wrong("interleaved_order")
def interleaved_one_big_round(worker, p, m, v):
    """Breadth first: every microbatch through one chunk, then the next."""
    return take_turns(*pieces(worker, p, m, v, size=m), (v - 1) * m + 2 * (p - 1 - worker))


@wrong("interleaved_order")
def interleaved_with_the_warm_up_of_1f1b(worker, p, m, v):
    return take_turns(*pieces(worker, p, m, v), p - 1 - worker)


@wrong("interleaved_order")
def interleaved_all_forwards_first(worker, p, m, v):
    return take_turns(*pieces(worker, p, m, v), v * m)


@wrong("interleaved_order")
def interleaved_neighbouring_stages_on_a_worker(worker, p, m, v):
    row = interleaved_in_pieces(worker, p, m, v)
    return [a._replace(stage=worker * v + (a.stage - worker) // p) for a in row]


@wrong("interleaved_order")
def interleaved_too_long_a_warm_up(worker, p, m, v):
    return take_turns(*pieces(worker, p, m, v), warm_up_through_all_chunks(worker, p, v))


@wrong("interleaved_order")
def interleaved_runs_out_in_one_round(worker, p, m, v):
    """Does not stop at the number of forwards there are."""
    forwards, backwards = pieces(worker, p, m, v)
    first = warm_up_formula(worker, p, v)
    row = [forwards[i] for i in range(first)]
    for i in range(len(forwards) - first):
        row += [forwards[first + i], backwards[i]]
    return row + backwards[len(forwards) - first :]


# --- messages_per_batch


@right("messages_per_batch")
def messages_formula(p, m, v):
    return 2 * m * (v * p - 1)


@right("messages_per_batch")
def messages_counted(p, m, v):
    rows = ps.lower(ps.looped_bfs(p, m, v)).workers
    return float(sum(action.kind.startswith("SEND") for row in rows for action in row))


@wrong("messages_per_batch")
def messages_one_way(p, m, v):
    return m * (v * p - 1)


@wrong("messages_per_batch")
def messages_one_per_stage(p, m, v):
    return 2 * m * v * p


@wrong("messages_per_batch")
def messages_times_v(p, m, v):
    return v * 2 * m * (p - 1)


@wrong("messages_per_batch")
def messages_without_chunks(p, m, v):
    return 2 * m * (p - 1)


@wrong("messages_per_batch")
def messages_sent_and_received(p, m, v):
    return 4 * m * (v * p - 1)


# --- input_half and weight_half


@right("input_half")
def product(gradient, weight):
    return gradient @ weight


@right("input_half")
def linear_with_the_transpose(gradient, weight):
    return torch.nn.functional.linear(gradient, weight.T)


@right("input_half")
def by_einsum(gradient, weight):
    return torch.einsum("...o,of->...f", gradient, weight).numpy()


@wrong("input_half")
def product_with_the_transpose(gradient, weight):
    return gradient @ weight.T


@wrong("input_half")
def product_the_other_way_round(gradient, weight):
    return weight @ gradient


@wrong("input_half")
def product_divided_by_samples(gradient, weight):
    return gradient @ weight / len(gradient)


@wrong("input_half")
def product_summed_over_samples(gradient, weight):
    return (gradient @ weight).sum(0)


@wrong("input_half")
def elementwise(gradient, weight):
    return gradient * weight


def halves(weight, bias):
    return lambda gradient, inputs: (weight(gradient, inputs), bias(gradient))


def flat(x):
    return x.reshape(-1, x.shape[-1])


@right("weight_half")
def flattened(gradient, inputs):
    return flat(gradient).T @ flat(inputs), flat(gradient).sum(0)


@right("weight_half")
def weight_by_einsum(gradient, inputs):
    summed = tuple(range(gradient.ndim - 1))
    return [torch.einsum("...o,...f->of", gradient, inputs), gradient.sum(summed)]


@right("weight_half")
def asks_autograd(gradient, inputs):
    layer = torch.nn.Linear(inputs.shape[-1], gradient.shape[-1])
    layer(inputs).backward(gradient)
    return layer.weight.grad, layer.bias.grad


@wrong("weight_half")
def weight_transposed(gradient, inputs):
    return flat(inputs).T @ flat(gradient), flat(gradient).sum(0)


@wrong("weight_half")
def weight_of_the_mean(gradient, inputs):
    dW, db = flattened(gradient, inputs)
    return dW / len(inputs), db / len(inputs)


@wrong("weight_half")
def bias_not_summed(gradient, inputs):
    return flattened(gradient, inputs)[0], gradient


@wrong("weight_half")
def bias_summed_over_outputs(gradient, inputs):
    return flattened(gradient, inputs)[0], flat(gradient).sum(1)


@wrong("weight_half")
def matrices_only(gradient, inputs):
    return gradient.mT @ inputs, gradient.sum(0)


@wrong("weight_half")
def weight_alone(gradient, inputs):
    return flattened(gradient, inputs)[0]


@wrong("weight_half")
def bias_as_one_number(gradient, inputs):
    return flattened(gradient, inputs)[0], gradient.sum()


# --- zb_h1_order


def as_in_1f1b(worker, p, m, held_back, before=False):
    """The row of 1F1B with I in place of B, and W held back by so many microbatches."""
    row = []
    for kind, stage, k in ps.one_f_one_b(p, m).workers[worker]:
        late = [ps.W(worker, k - held_back)] if kind == "B" and k >= held_back else []
        if kind == "F":
            row.append(ps.F(stage, k))
        elif kind == "B":
            row += [*late, ps.I(stage, k)] if before else [ps.I(stage, k), *late]
    return row + [ps.W(worker, k) for k in range(max(m - held_back, 0), m)]


@right("zb_h1_order")
def held_back_by_worker(worker, p, m):
    return as_in_1f1b(worker, p, m, worker)


@right("zb_h1_order")
def phase_by_phase(worker, p, m):
    n, ahead = max(m, p), p - 1 - worker
    waiting, row = [], []
    f = i = 0

    def do(letters):
        nonlocal f, i
        for letter in letters:
            if letter == "F":
                row.append(ps.F(worker, f))
                f += 1
            elif letter == "I":
                row.append(ps.I(worker, i))
                waiting.append(i)
                i += 1
            else:
                row.append(ps.W(worker, waiting.pop(0)))

    do("F" * ahead + "FI" * worker + "FIW" * (n - p + 1) + "IW" * ahead + "W" * worker)
    return [action for action in row if action.microbatch < m]


@right("zb_h1_order")
def as_the_library(worker, p, m):
    return (action for action in ps.zb_h1(p, m).workers[worker] if action.kind != "U")


@wrong("zb_h1_order")
def zb_at_once(worker, p, m):
    return as_in_1f1b(worker, p, m, 0)


@wrong("zb_h1_order")
def zb_all_at_the_end(worker, p, m):
    return as_in_1f1b(worker, p, m, m)


@wrong("zb_h1_order")
def zb_held_back_from_the_other_end(worker, p, m):
    return as_in_1f1b(worker, p, m, p - 1 - worker)


@wrong("zb_h1_order")
def zb_held_back_by_p(worker, p, m):
    return as_in_1f1b(worker, p, m, p)


@wrong("zb_h1_order")
def zb_weights_before_inputs(worker, p, m):
    return as_in_1f1b(worker, p, m, worker, before=True) if worker else zb_w_first(p, m)


def zb_w_first(p, m):
    return [ps.W(0, a.microbatch) if a.kind == "I" else ps.I(0, a.microbatch)
            if a.kind == "W" else a for a in as_in_1f1b(0, p, m, 0)]  # fmt: skip


@wrong("zb_h1_order")
def zb_whole_backwards(worker, p, m):
    return ps.one_f_one_b(p, m).workers[worker]


@wrong("zb_h1_order")
def zb_h2_instead(worker, p, m):
    return ps.zb_h2(p, m).workers[worker]


@wrong("zb_h1_order")
def zb_forgets_the_weights_left(worker, p, m):
    return as_in_1f1b(worker, p, m, worker)[: 3 * m - worker]


@wrong("zb_h1_order")
def zb_needs_m_of_p(worker, p, m):
    row = as_in_1f1b(worker, p, m, worker)
    return row[: -worker or None] + [ps.W(worker, k) for k in range(m - worker, m)]


# --- zero_bubble_rate


def rate(cost, work=lambda trace: max(trace.busy)):
    def function(trace):
        spans = [[s for s in row if s.action.kind != "U"] for row in trace.rows]
        return (cost(spans, trace) - work(trace)) / cost(spans, trace)

    return function


def lengths(rows):
    return [max(s.end for s in row) - min(s.start for s in row) for row in rows]


@right("zero_bubble_rate")
def rate_of_the_longest(trace):
    return rate(lambda rows, trace: max(lengths(rows)))(trace)


@right("zero_bubble_rate")
def rate_from_gaps(trace):
    """The gaps inside the longest row over its length; rows are in order."""
    most = 0.0
    for row in trace.rows:
        row = [span for span in row if span.action.kind in "FBIW"]
        gaps = sum(b.start - a.end for a, b in zip(row, row[1:], strict=False))
        most = max(most, gaps / (row[-1].end - row[0].start))
    return np.float64(most)


@wrong("zero_bubble_rate")
def rate_of_the_makespan(trace):
    return rate(lambda rows, trace: trace.makespan)(trace)


@wrong("zero_bubble_rate")
def rate_of_the_last_end(trace):
    return rate(lambda rows, trace: max(s.end for row in rows for s in row))(trace)


@wrong("zero_bubble_rate")
def rate_of_worker_0_alone(trace):
    return rate(lambda rows, trace: lengths(rows)[-1])(trace)


@wrong("zero_bubble_rate")
def rate_with_updates(trace):
    cost = max(lengths(trace.rows))
    return (cost - max(trace.busy)) / cost


@wrong("zero_bubble_rate")
def rate_over_the_work(trace):
    cost, work = max(lengths(trace.rows)), max(trace.busy)
    return (cost - work) / work


@wrong("zero_bubble_rate")
def rate_with_everybodys_work(trace):
    return rate(lambda rows, trace: max(lengths(rows)), lambda trace: sum(trace.busy))(trace)


@wrong("zero_bubble_rate")
def rate_as_bubble_of_total(trace):
    return trace.bubble_of_total


# --- v_placement


@right("v_placement")
def down_and_up(stage, p):
    return stage if stage < p else 2 * p - 1 - stage


@right("v_placement")
def from_a_list(stage, p):
    return [*range(p), *reversed(range(p))][stage]


@right("v_placement")
def read_off_the_library(stage, p):
    return ps.zb_v(p, 2 * p).placement[stage]


@wrong("v_placement")
def round_the_loop(stage, p):
    return stage % p


@wrong("v_placement")
def up_from_the_top(stage, p):
    return stage if stage < p else 2 * p - stage


@wrong("v_placement")
def neighbours(stage, p):
    return stage // 2


@wrong("v_placement")
def only_up(stage, p):
    return 2 * p - 1 - stage


@wrong("v_placement")
def turns_at_p_minus_1(stage, p):
    return stage if stage < p else 2 * p - 2 - stage


# --- read_figure


def read(give_back=("B", "W"), chunk=True, runs=groupby, share=None):
    """A right reading, with places to break it."""

    def read_figure(rows, v):
        peaks = []
        for row in rows:
            held = [0]
            for cell, _ in runs(row):
                if cell:
                    kind = ps.Action.parse(cell).kind
                    held.append(held[-1] + (kind == "F") - (kind in give_back))
            peaks.append(max(held) / (v if chunk else 1))
        cells = [cell for row in rows for cell in row]
        empty = sum(not cell for cell in cells)
        return (share(empty, cells, rows) if share else empty / len(cells)), peaks

    return read_figure


@right("read_figure")
def read_by_runs(rows, v):
    return read()(rows, v)


@right("read_figure")
def read_by_time(rows, v):
    """Column by column: forwards that have begun less backwards that are over; as numpy."""
    table = np.array(rows)
    peaks = []
    for row in table:
        begun = np.cumsum([("F" in c) and (t == 0 or row[t - 1] != c) for t, c in enumerate(row)])
        over = np.cumsum(
            [
                t > 0 and ("B" in row[t - 1] or "W" in row[t - 1]) and row[t - 1] != c
                for t, c in enumerate(row)
            ]
        )
        peaks.append(max(begun - over) / v)
    return [(table == "").mean(), np.array(peaks)]


@wrong("read_figure")
def read_gives_back_at_the_input_half(rows, v):
    return read(give_back=("B", "I"))(rows, v)


@wrong("read_figure")
def read_gives_back_twice(rows, v):
    return read(give_back=("B", "I", "W"))(rows, v)


@wrong("read_figure")
def read_whole_backwards_only(rows, v):
    return read(give_back=("B",))(rows, v)


@wrong("read_figure")
def read_counts_cells(rows, v):
    """Each cell as an action of its own."""
    return read(runs=lambda row: ((cell, None) for cell in row))(rows, v)


@wrong("read_figure")
def read_counts_chunks_as_whole(rows, v):
    return read(chunk=False)(rows, v)


@wrong("read_figure")
def read_bubble_of_ideal(rows, v):
    return read(share=lambda empty, cells, rows: empty / (len(cells) - empty))(rows, v)


@wrong("read_figure")
def read_bubble_of_worker_0(rows, v):
    return read(share=lambda empty, cells, rows: rows[0].count("") / len(rows[0]))(rows, v)


@wrong("read_figure")
def read_bubble_as_cells(rows, v):
    return read(share=lambda empty, cells, rows: empty)(rows, v)


# --- priority


@right("priority")
def forwards_until_the_line_is_full(action, moment):
    order = "FIW" if moment.held < moment.p - moment.worker else "IFW"
    return order.index(action.kind), action.microbatch


@right("priority")
def weights_earlier_in_the_warm_up(action, moment):
    order = ["F", "W", "I"] if moment.p - moment.worker > moment.held else ["I", "F", "W"]
    return [order.index(action.kind), action.microbatch]


@right("priority")
def as_in_zb_h1(action, moment):
    return ps.zb_h1(moment.p, moment.m).workers[moment.worker].index(action)


@wrong("priority")
def backwards_first(action, moment):
    return "IFW".index(action.kind), action.microbatch


@wrong("priority")
def forwards_first(action, moment):
    return "FIW".index(action.kind), action.microbatch


@wrong("priority")
def weights_at_once(action, moment):
    return "WIF".index(action.kind), action.microbatch


@wrong("priority")
def weights_before_forwards(action, moment):
    return "IWF".index(action.kind), action.microbatch


@wrong("priority")
def oldest_first(action, moment):
    return action.microbatch


@wrong("priority")
def newest_first(action, moment):
    return "IFW".index(action.kind), -action.microbatch


@wrong("priority")
def full_line_from_the_other_end(action, moment):
    order = "FIW" if moment.held < moment.worker + 1 else "IFW"
    return order.index(action.kind), action.microbatch


@wrong("priority")
def no_key(action, moment):
    return action.kind == "I" or None
