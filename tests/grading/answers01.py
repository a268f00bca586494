"""What learners may hand in for unit 01: right answers of several kinds, and plausible wrong ones.

`RIGHT[name]` and `WRONG[name]` are lists of functions. Each stands for an answer called `name`; its
own name says what is particular about it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pipeschool as ps
from pipeschool.actions import Action, B, F

RIGHT = defaultdict(list)
WRONG = defaultdict(list)


def right(name):
    return lambda function: RIGHT[name].append(function) or function


def wrong(name):
    return lambda function: WRONG[name].append(function) or function


# --- split_batch


@right("split_batch")
def like_tensor_split(samples, m):
    return [samples // m + (k < samples % m) for k in range(m)]


@right("split_batch")
def larger_ones_last(samples, m):
    return tuple(np.diff([samples * k // m for k in range(m + 1)]))


@right("split_batch")
def last_one_takes_what_is_left(samples, m):
    """As torch.chunk does it, where that gives m microbatches at all."""
    size = math.ceil(samples / m)
    if size * (m - 1) < samples:
        return [size] * (m - 1) + [samples - size * (m - 1)]
    return like_tensor_split(samples, m)


@wrong("split_batch")
def drops_what_is_left(samples, m):
    return [samples // m] * m


@wrong("split_batch")
def all_that_is_left_to_the_last(samples, m):
    return [samples // m] * (m - 1) + [samples // m + samples % m]


@wrong("split_batch")
def m_is_the_size(samples, m):
    return [m] * (samples // m)


@wrong("split_batch")
def one_too_many(samples, m):
    size = samples // m
    return [size] * m + ([samples - size * m] if samples % m else [])


@wrong("split_batch")
def floats_that_are_not_whole(samples, m):
    return [samples / m] * m


@wrong("split_batch")
def chunk_with_empty_ones(samples, m):
    size = math.ceil(samples / m)
    return [max(0, min(size, samples - size * k)) for k in range(m)]


# --- loss_weights


@right("loss_weights")
def shares(sizes):
    return [size / sum(sizes) for size in sizes]


@right("loss_weights")
def shares_in_numpy(sizes):
    return np.array(sizes) / np.sum(sizes)


@right("loss_weights")
def shares_one_by_one(sizes):
    total = 0
    for size in sizes:
        total += size
    yield from (size / total for size in sizes)


@wrong("loss_weights")
def one_over_m(sizes):
    return [1 / len(sizes)] * len(sizes)


@wrong("loss_weights")
def no_weights(sizes):
    return [1.0] * len(sizes)


@wrong("loss_weights")
def over_the_largest(sizes):
    return [size / max(sizes) for size in sizes]


@wrong("loss_weights")
def the_wrong_way_up(sizes):
    return [1 / size for size in sizes]


@wrong("loss_weights")
def over_the_largest_and_m(sizes):
    return [size / (len(sizes) * max(sizes)) for size in sizes]


# --- naive_order


@right("naive_order")
def forward_and_backward_in_turn(worker, p, m):
    return [kind(worker, k) for k in range(m) for kind in (F, B)]


@right("naive_order")
def from_the_last_part_to_the_first(worker, p, m):
    order = []
    for k in reversed(range(m)):
        order.append(F(worker, k))
        order.append(B(worker, k))
    return order


@right("naive_order")
def with_the_update_written_out(worker, p, m):
    return [*forward_and_backward_in_turn(worker, p, m), ps.U(worker, 0)]


@wrong("naive_order")
def all_forwards_first(worker, p, m):
    return [F(worker, k) for k in range(m)] + [B(worker, k) for k in range(m)]


@wrong("naive_order")
def always_stage_0(worker, p, m):
    return [kind(0, k) for k in range(m) for kind in (F, B)]


@wrong("naive_order")
def stage_and_microbatch_swapped(worker, p, m):
    return [kind(k, worker) for k in range(m) for kind in (F, B)]


@wrong("naive_order")
def backward_before_forward(worker, p, m):
    return [kind(worker, k) for k in range(m) for kind in (B, F)]


@wrong("naive_order")
def one_part_missing(worker, p, m):
    return [kind(worker, k) for k in range(m - 1) for kind in (F, B)]


@wrong("naive_order")
def counted_from_1(worker, p, m):
    return [kind(worker, k) for k in range(1, m + 1) for kind in (F, B)]


@wrong("naive_order")
def stages_from_the_other_end(worker, p, m):
    return [kind(p - 1 - worker, k) for k in range(m) for kind in (F, B)]


@wrong("naive_order")
def as_many_as_workers(worker, p, m):
    return [kind(worker, k) for k in range(p) for kind in (F, B)]


# --- gpipe_order


@right("gpipe_order")
def backwards_as_forwards(worker, p, m):
    return [F(worker, k) for k in range(m)] + [B(worker, k) for k in range(m)]


@right("gpipe_order")
def backwards_in_reverse(worker, p, m):
    for k in range(m):
        yield F(worker, k)
    for k in range(m - 1, -1, -1):
        yield B(worker, k)


@right("gpipe_order")
def from_the_library(worker, p, m):
    return list(ps.gpipe(p, m).workers[worker])


@right("gpipe_order")
def all_in_reverse(worker, p, m):
    return [kind(worker, k) for kind in (F, B) for k in reversed(range(m))]


@wrong("gpipe_order")
def one_at_a_time(worker, p, m):
    return [kind(worker, k) for k in range(m) for kind in (F, B)]


@wrong("gpipe_order")
def one_forward_one_backward(worker, p, m):
    return [a for a in ps.one_f_one_b(p, m).workers[worker] if a.kind != "U"]


@wrong("gpipe_order")
def no_more_than_workers(worker, p, m):
    return [kind(worker, k) for kind in (F, B) for k in range(min(p, m))]


@wrong("gpipe_order")
def never_fewer_than_workers(worker, p, m):
    return [kind(worker, k) for kind in (F, B) for k in range(max(p, m))]


@wrong("gpipe_order")
def backwards_from_the_other_end(worker, p, m):
    return [F(worker, k) for k in range(m)] + [B(p - 1 - worker, k) for k in range(m)]


@wrong("gpipe_order")
def workers_disagree_about_the_backwards(worker, p, m):
    order = range(m) if worker % 2 else reversed(range(m))
    return [F(worker, k) for k in range(m)] + [B(worker, k) for k in order]


@wrong("gpipe_order")
def backwards_forgotten(worker, p, m):
    return [F(worker, k) for k in range(m)]


@wrong("gpipe_order")
def last_backward_off_by_one(worker, p, m):
    return [F(worker, k) for k in range(m)] + [B(worker, k) for k in range(m - 1, 0, -1)]


@wrong("gpipe_order")
def tuples_instead_of_actions(worker, p, m):
    return [(kind, worker, k) for kind in "FB" for k in range(m)]


# --- needs


@right("needs")
def both_for_a_backward(action, p):
    kind, s, k = action
    if kind == "F":
        return [] if s == 0 else [F(s - 1, k)]
    return [F(s, k)] + ([] if s == p - 1 else [B(s + 1, k)])


@right("needs")
def only_what_nothing_else_covers(action, p):
    """The gradient from the next stage cannot exist before the own forward is over."""
    if action.kind == "F":
        return [F(action.stage - 1, action.microbatch)][: action.stage]
    if action.stage == p - 1:
        return [F(action.stage, action.microbatch)]
    return [B(action.stage + 1, action.microbatch)]


@right("needs")
def everything_further_back_too(action, p):
    kind, s, k = action
    if kind == "F":
        return {F(i, k) for i in range(s)}
    return {F(i, k) for i in range(p)} | {B(i, k) for i in range(s + 1, p)}


@wrong("needs")
def no_special_ends(action, p):
    kind, s, k = action
    return [F(s - 1, k)] if kind == "F" else [F(s, k), B(s + 1, k)]


@wrong("needs")
def backward_from_the_wrong_side(action, p):
    kind, s, k = action
    if kind == "F":
        return [F(s - 1, k)] if s else []
    return [F(s, k), B(s - 1, k)] if s else [F(s, k)]


@wrong("needs")
def forward_from_the_wrong_side(action, p):
    kind, s, k = action
    if kind == "F":
        return [F(s + 1, k)] if s < p - 1 else []
    return both_for_a_backward(action, p)


@wrong("needs")
def only_the_own_forward(action, p):
    return [F(action.stage, action.microbatch)] if action.kind == "B" else []


@wrong("needs")
def the_microbatch_before(action, p):
    kind, s, k = action
    return [Action(kind, s, k - 1)] if k else []


@wrong("needs")
def nothing_on_the_last_stage(action, p):
    kind, s, k = action
    if kind == "F":
        return [F(s - 1, k)] if s else []
    return [B(s + 1, k)] if s < p - 1 else []


# --- start_times


def simulator(ready=max, backward_stage=lambda s: s, per_stage=lambda times, s: times[s], gap=0.0):
    """A right simulator, with places to break it."""

    def times(order, p, m, forward, backward):
        rows = [list(order(w, p, m)) for w in range(p)]
        at = [0] * p
        free = [0.0] * p
        ends, starts = {}, {}
        while sum(at) < sum(map(len, rows)):
            for w in range(p):
                while at[w] < len(rows[w]):
                    action = rows[w][at[w]]
                    needed = both_for_a_backward(action, p)
                    if any(a not in ends for a in needed):
                        break
                    arrived = max((ends[a] for a in needed), default=0.0)
                    starts[action] = ready(free[w], arrived) + (gap if needed else 0)
                    table = forward if action.kind == "F" else backward
                    ends[action] = starts[action] + per_stage(table, action.stage)
                    free[w] = ends[action]
                    at[w] += 1
        return starts

    return times


right("start_times")(simulator())


@right("start_times")
def by_repeated_relaxation(order, p, m, forward, backward):
    """No event loop: push every start back until nothing moves any more."""
    rows = [list(order(w, p, m)) for w in range(p)]
    starts = {a: 0.0 for row in rows for a in row}

    def end(a):
        return starts[a] + (forward if a.kind == "F" else backward)[a.stage]

    moved = True
    while moved:
        moved = False
        for row in rows:
            for before, action in zip([None, *row], row, strict=False):
                after = both_for_a_backward(action, p) + ([before] if before else [])
                earliest = max((end(a) for a in after), default=0.0)
                if earliest > starts[action]:
                    starts[action] = earliest
                    moved = True
    return starts


@right("start_times")
def by_recursion(order, p, m, forward, backward):
    rows = [list(order(w, p, m)) for w in range(p)]
    before = {b: a for row in rows for a, b in zip(row, row[1:], strict=False)}
    starts = {}

    def start(action):
        if action not in starts:
            after = both_for_a_backward(action, p)
            after += [before[action]] if action in before else []
            starts[action] = max(map(end, after), default=0)
        return starts[action]

    def end(action):
        return start(action) + (forward if action.kind == "F" else backward)[action.stage]

    return {action: np.float64(start(action)) for row in rows for action in row}


wrong("start_times")(simulator(ready=lambda free, arrived: free + arrived))
wrong("start_times")(simulator(ready=lambda free, arrived: arrived))
wrong("start_times")(simulator(ready=lambda free, arrived: free))
wrong("start_times")(simulator(per_stage=lambda times, s: times[0]))
wrong("start_times")(simulator(per_stage=lambda times, s: max(times)))
wrong("start_times")(simulator(gap=1e-3))


@wrong("start_times")
def ends_instead_of_starts(order, p, m, forward, backward):
    starts = simulator()(order, p, m, forward, backward)
    return {a: t + (forward if a.kind == "F" else backward)[a.stage] for a, t in starts.items()}


@wrong("start_times")
def gpipe_formula_whatever_the_order(order, p, m, forward, backward):
    f, b = forward[0], backward[0]
    starts = {F(s, k): (s + k) * f for s in range(p) for k in range(m)}
    flushed = (m + p - 1) * f
    return starts | {B(s, k): flushed + (p - 1 - s + k) * b for s in range(p) for k in range(m)}


@wrong("start_times")
def forwards_only(order, p, m, forward, backward):
    starts = simulator()(order, p, m, forward, backward)
    return {a: t for a, t in starts.items() if a.kind == "F"}


@wrong("start_times")
def backward_as_long_as_forward(order, p, m, forward, backward):
    return simulator()(order, p, m, forward, forward)


# --- the bubbles


@right("bubble_of_total")
def total_formula(p, m):
    return (p - 1) / (m + p - 1)


@right("bubble_of_total")
def total_in_seconds(p, m):
    makespan = (m + p - 1) * (1 + 2)
    return Fraction(makespan - m * 3, makespan)


@wrong("bubble_of_total")
def total_other_denominator(p, m):
    return (p - 1) / m


@wrong("bubble_of_total")
def total_without_minus_1(p, m):
    return (p - 1) / (m + p)


@wrong("bubble_of_total")
def total_p_over(p, m):
    return p / (m + p - 1)


@wrong("bubble_of_total")
def total_of_the_naive_schedule(p, m):
    return (p - 1) / p


@wrong("bubble_of_total")
def total_useful_share(p, m):
    return m / (m + p - 1)


@wrong("bubble_of_total")
def total_p_and_m_swapped(p, m):
    return (m - 1) / (m + p - 1)


@right("bubble_of_ideal")
def ideal_formula(p, m):
    return (p - 1) / m


@right("bubble_of_ideal")
def ideal_from_total(p, m):
    share = (p - 1) / (m + p - 1)
    return np.float64(share / (1 - share))


@wrong("bubble_of_ideal")
def ideal_other_denominator(p, m):
    return (p - 1) / (m + p - 1)


@wrong("bubble_of_ideal")
def ideal_p_over(p, m):
    return p / m


@wrong("bubble_of_ideal")
def ideal_all_workers_over_one(p, m):
    return p * (p - 1) / m


@wrong("bubble_of_ideal")
def ideal_upside_down(p, m):
    return m / max(1, p - 1)


@wrong("bubble_of_ideal")
def ideal_whole_division(p, m):
    return (p - 1) // m


# --- peak_activations


@right("peak_activations")
def counter(actions):
    held = peak = 0
    for a in actions:
        held += {"F": 1, "B": -1}.get(a.kind, 0)
        peak = max(peak, held)
    return peak


@right("peak_activations")
def set_of_microbatches(actions):
    held, sizes = set(), [0]
    for kind, _, k in actions:
        if kind == "F":
            held.add(k)
        if kind == "B":
            held.remove(k)
        sizes.append(len(held))
    return np.int64(max(sizes))


@right("peak_activations")
def running_sum(actions):
    steps = [(a.kind == "F") - (a.kind == "B") for a in actions]
    return float(np.cumsum(steps).max())


@wrong("peak_activations")
def how_many_forwards(actions):
    return sum(a.kind == "F" for a in actions)


@wrong("peak_activations")
def what_is_left_at_the_end(actions):
    return sum({"F": 1, "B": -1}.get(a.kind, 0) for a in actions)


@wrong("peak_activations")
def off_by_one(actions):
    return counter(actions) + 1


@wrong("peak_activations")
def forwards_before_the_first_backward(actions):
    kinds = [a.kind for a in actions]
    return kinds.index("B")


@wrong("peak_activations")
def longest_run_of_forwards(actions):
    longest = run = 0
    for a in actions:
        run = run + 1 if a.kind == "F" else 0
        longest = max(longest, run)
    return longest


@wrong("peak_activations")
def updates_let_go_too(actions):
    held = peak = 0
    for a in actions:
        held += 1 if a.kind == "F" else -1
        peak = max(peak, held)
    return peak


@wrong("peak_activations")
def updates_hold_too(actions):
    held = peak = 0
    for a in actions:
        held += -1 if a.kind == "B" else 1
        peak = max(peak, held)
    return peak


@wrong("peak_activations")
def never_lets_go(actions):
    return len({a.microbatch for a in actions if a.kind in "FB"})


# --- smallest_m


@right("smallest_m")
def one_after_the_other(p, target):
    m = 1
    while (p - 1) / (m + p - 1) > target:
        m += 1
    return m


@right("smallest_m")
def solved_for_m_with_room_for_rounding(p, target):
    return max(1, math.ceil((p - 1) * (1 - target) / target - 1e-9))


@right("smallest_m")
def solved_in_fractions(p, target):
    share = Fraction(str(target))
    return max(1, math.ceil((p - 1) * (1 - share) / share))


@wrong("smallest_m")
def solved_in_floats(p, target):
    """Too many where rounding lifts a whole number: 13 for p = 4 and a fifth."""
    return max(1, math.ceil((p - 1) * (1 - target) / target))


@wrong("smallest_m")
def of_ideal(p, target):
    return max(1, math.ceil((p - 1) / target))


@wrong("smallest_m")
def rounded_down(p, target):
    return max(1, math.floor((p - 1) * (1 - target) / target))


@wrong("smallest_m")
def strictly_below(p, target):
    m = 1
    while (p - 1) / (m + p - 1) >= target:
        m += 1
    return m


@wrong("smallest_m")
def no_microbatch_for_one_worker(p, target):
    return math.ceil((p - 1) * (1 - target) / target)


@wrong("smallest_m")
def the_last_that_misses(p, target):
    return max(1, one_after_the_other(p, target) - 1)


@wrong("smallest_m")
def p_instead_of_p_minus_1(p, target):
    return max(1, math.ceil(p * (1 - target) / target))


@wrong("smallest_m")
def four_times_p(p, target):
    return 4 * p
