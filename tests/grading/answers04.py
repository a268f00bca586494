"""What learners may hand in for unit 04: right answers of several kinds, and plausible wrong ones.

`RIGHT[name]` and `WRONG[name]` are lists of functions. Each stands for an answer called `name`; its
own name says what is particular about it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pipeschool as ps

RIGHT = defaultdict(list)
WRONG = defaultdict(list)


def right(name):
    return lambda function: RIGHT[name].append(function) or function


def wrong(name):
    return lambda function: WRONG[name].append(function) or function


# --- warm_up


@right("warm_up")
def warm_up_formula(worker, p, m):
    return min(p - 1 - worker, m)


@right("warm_up")
def warm_up_by_counting_workers(worker, p, m):
    further_down = range(worker + 1, p)
    return np.int64(len(list(zip(further_down, range(m), strict=False))))


@right("warm_up")
def warm_up_with_a_first_turn(worker, p, m):
    """Where all forwards come first, the last one and the first backward may be called a turn."""
    return min(p - worker, m) - 1


@wrong("warm_up")
def warm_up_one_more(worker, p, m):
    """What is in flight when the first backward comes: with the forward of the first turn."""
    return min(p - worker, m)


@wrong("warm_up")
def warm_up_from_the_other_end(worker, p, m):
    return min(worker, m)


@wrong("warm_up")
def warm_up_equal_for_all(worker, p, m):
    return min(p - 1, m)


@wrong("warm_up")
def warm_up_twice_as_long(worker, p, m):
    return min(2 * (p - 1 - worker), m)


@wrong("warm_up")
def warm_up_without_an_end(worker, p, m):
    return p - 1 - worker


@wrong("warm_up")
def warm_up_as_in_gpipe(worker, p, m):
    return m


# --- one_f_one_b_order


@right("one_f_one_b_order")
def order_in_three_pieces(worker, p, m):
    warm = min(p - 1 - worker, m)
    row = [ps.F(worker, k) for k in range(warm)]
    for k in range(m - warm):
        row += [ps.F(worker, warm + k), ps.B(worker, k)]
    return row + [ps.B(worker, k) for k in range(m - warm, m)]


@right("one_f_one_b_order")
def order_by_watching_the_counter(worker, p, m):
    """A backward whenever the counter is full or nothing is left to begin."""
    forwards, backwards = iter(range(m)), iter(range(m))
    begun = done = 0
    while done < m:
        if begun - done < p - worker and begun < m:
            yield ps.F(worker, next(forwards))
            begun += 1
        else:
            yield ps.B(worker, next(backwards))
            done += 1


@right("one_f_one_b_order")
def order_with_updates(worker, p, m):
    return [*order_in_three_pieces(worker, p, m), ps.U(worker, 0)]


@right("one_f_one_b_order")
def order_sorted_by_slots(worker, p, m):
    """Forward k has place 2k, backward k the place right after forward k + warm-up."""
    warm = p - 1 - worker
    places = [(2 * k, ps.F(worker, k)) for k in range(m)]
    places += [(2 * (k + warm) + 1, ps.B(worker, k)) for k in range(m)]
    return [action for _, action in sorted(places)]


@wrong("one_f_one_b_order")
def order_for_many_only(worker, p, m):
    warm = p - 1 - worker
    row = [ps.F(worker, k) for k in range(warm)]
    for k in range(m - warm):
        row += [ps.F(worker, warm + k), ps.B(worker, k)]
    return row + [ps.B(worker, k) for k in range(m - warm, m)]


@wrong("one_f_one_b_order")
def order_of_gpipe(worker, p, m):
    return [ps.F(worker, k) for k in range(m)] + [ps.B(worker, k) for k in range(m)]


@wrong("one_f_one_b_order")
def order_naive(worker, p, m):
    return [kind(worker, k) for k in range(m) for kind in (ps.F, ps.B)]


def with_warm_up(length):
    def order(worker, p, m):
        warm = max(0, min(length(worker, p), m))
        row = [ps.F(worker, k) for k in range(warm)]
        for k in range(m - warm):
            row += [ps.F(worker, warm + k), ps.B(worker, k)]
        return row + [ps.B(worker, k) for k in range(m - warm, m)]

    return order


@wrong("one_f_one_b_order")
def order_with_one_more(worker, p, m):
    return with_warm_up(lambda w, p: p - w)(worker, p, m)


@wrong("one_f_one_b_order")
def order_with_one_less(worker, p, m):
    return with_warm_up(lambda w, p: p - 2 - w)(worker, p, m)


@wrong("one_f_one_b_order")
def order_of_the_other_end(worker, p, m):
    return with_warm_up(lambda w, p: w)(worker, p, m)


@wrong("one_f_one_b_order")
def order_eager(worker, p, m):
    return with_warm_up(lambda w, p: 2 * (p - 1 - w))(worker, p, m)


@wrong("one_f_one_b_order")
def order_backward_before_its_turn(worker, p, m):
    """Turns begin with the backward."""
    warm = min(p - 1 - worker, m)
    row = [ps.F(worker, k) for k in range(warm)]
    for k in range(m - warm):
        row += [ps.B(worker, k), ps.F(worker, warm + k)]
    return row + [ps.B(worker, k) for k in range(m - warm, m)]


@wrong("one_f_one_b_order")
def order_without_drain(worker, p, m):
    warm = min(p - 1 - worker, m)
    row = [ps.F(worker, k) for k in range(warm)]
    for k in range(m - warm):
        row += [ps.F(worker, warm + k), ps.B(worker, k)]
    return row


@wrong("one_f_one_b_order")
def order_newest_back_first(worker, p, m):
    """Each turn takes its own forward back at once."""
    warm = min(p - 1 - worker, m)
    row = [ps.F(worker, k) for k in range(warm)]
    for k in range(warm, m):
        row += [ps.F(worker, k), ps.B(worker, k)]
    return row + [ps.B(worker, k) for k in range(warm)]


# --- in_flight


@right("in_flight")
def flying_formula(worker, p, m):
    return min(m, p - worker)


@right("in_flight")
def flying_counted(worker, p, m):
    held = [0]
    for action in order_in_three_pieces(worker, p, m):
        held.append(held[-1] + (1 if action.kind == "F" else -1))
    return max(held)


@wrong("in_flight")
def flying_warm_up_only(worker, p, m):
    return min(m, p - 1 - worker)


@wrong("in_flight")
def flying_p_everywhere(worker, p, m):
    return min(m, p)


@wrong("in_flight")
def flying_without_m(worker, p, m):
    return p - worker


@wrong("in_flight")
def flying_as_in_gpipe(worker, p, m):
    return m


@wrong("in_flight")
def flying_from_the_other_end(worker, p, m):
    return min(m, worker + 1)


# --- waiting_circle


def where_all_stop(rows):
    """{worker: the worker it waits for}, when nothing is possible any more."""
    place = [0] * len(rows)
    sent = set()
    moved = True
    while moved:
        moved = False
        for w, row in enumerate(rows):
            while place[w] < len(row):
                kind, stage, k = row[place[w]]
                if kind == "RECV_F" and ("SEND_F", stage - 1, k) not in sent:
                    break
                if kind == "RECV_B" and ("SEND_B", stage + 1, k) not in sent:
                    break
                sent.add((kind, stage, k))
                place[w] += 1
                moved = True
    waits = {}
    for w, row in enumerate(rows):
        if place[w] < len(row):
            waits[w] = w - 1 if row[place[w]].kind == "RECV_F" else w + 1
    return waits


@right("waiting_circle")
def circle_of_neighbours(rows):
    """In a line it is always two neighbours that wait for each other."""
    waits = where_all_stop(rows)
    for w in waits:
        if waits.get(waits[w]) == w:
            return [w, waits[w]]
    return []


@right("waiting_circle")
def circle_by_following(rows):
    waits = where_all_stop(rows)
    if not waits:
        return ()
    w = max(waits)
    for _ in rows:  # now surely in a circle
        w = waits[w]
    circle = [w]
    while waits[circle[-1]] != w:
        circle.append(waits[circle[-1]])
    return np.array(circle)


@right("waiting_circle")
def circle_by_taking_away(rows):
    """Again and again drop the workers that nobody waits for."""
    waits = where_all_stop(rows)
    while set(waits) != set(waits.values()):
        waits = {w: to for w, to in waits.items() if w in waits.values()}
    first = min(waits, default=None)
    return [] if first is None else [waits[first], first]


@wrong("waiting_circle")
def circle_of_all_that_wait(rows):
    return sorted(where_all_stop(rows))


@wrong("waiting_circle")
def circle_never(rows):
    return []


@wrong("waiting_circle")
def circle_always_of_the_first_two(rows):
    return [0, 1]


@wrong("waiting_circle")
def circle_with_its_first_worker_twice(rows):
    found = circle_of_neighbours(rows)
    return found + found[:1]


@wrong("waiting_circle")
def circle_from_the_first_that_waits(rows):
    """The first stuck worker and whom it waits for."""
    waits = where_all_stop(rows)
    return [min(waits), waits[min(waits)]] if waits else []


@wrong("waiting_circle")
def circle_seen_in_one_pass(rows):
    """Goes along the rows only once, from worker 0 on."""
    sent, waits = set(), {}
    for w, row in enumerate(rows):
        for kind, stage, k in row:
            if kind.startswith("RECV"):
                source = stage - 1 if kind == "RECV_F" else stage + 1
                if (kind.replace("RECV", "SEND"), source, k) not in sent:
                    waits[w] = source
                    break
            sent.add((kind, stage, k))
    return next(([w, to] for w, to in waits.items() if waits.get(to) == w), [])


@wrong("waiting_circle")
def circle_of_names(rows):
    return [f"worker {w}" for w in circle_of_neighbours(rows)]


# --- mend_row


@right("mend_row")
def mend_from_the_work(row, p):
    new = []
    for action in row:
        s, k = action.stage, action.microbatch
        if action.kind == "F":
            if s > 0:
                new.append(ps.Action("RECV_F", s, k))
            new.append(action)
            if s < p - 1:
                new.append(ps.Action("SEND_F", s, k))
        if action.kind == "B":
            if s < p - 1:
                new.append(ps.Action("RECV_B", s, k))
            new.append(action)
            if s > 0:
                new.append(ps.Action("SEND_B", s, k))
    return new


@right("mend_row")
def mend_by_gathering(row, p):
    """Uses the messages that the row has, whichever they are."""
    for action in [a for a in row if not a.is_message]:
        for prefix in ("RECV", "", "SEND"):
            wanted = ps.Action(
                f"{prefix}_{action.kind}" if prefix else action.kind,
                action.stage,
                action.microbatch,
            )
            if wanted in row:
                yield wanted


@right("mend_row")
def mend_by_sorting(row, p):
    work = [a for a in row if not a.is_message]

    def place(a):
        own = work.index(ps.Action(a.kind[-1], a.stage, a.microbatch))
        return own, 0 if a.kind.startswith("RECV") else 2 if a.is_message else 1

    return sorted(row, key=place)


@right("mend_row")
def mend_with_the_library(row, p):
    """Lower a whole pipeline in which everybody works in this order, and take this row."""
    stage = row[0].stage
    work = [a for a in row if not a.is_message]
    rows = tuple(tuple(a._replace(stage=s) for a in work) for s in range(p))
    m = len(work) // 2
    return ps.lower(ps.Schedule("line", p, m, rows)).workers[stage]


@wrong("mend_row")
def mend_nothing(row, p):
    return row


@wrong("mend_row")
def mend_without_messages(row, p):
    return [a for a in row if not a.is_message]


@wrong("mend_row")
def mend_forgets_the_ends(row, p):
    new = []
    for action in row:
        if not action.is_message:
            new += [
                ps.Action(f"RECV_{action.kind}", *action[1:]),
                action,
                ps.Action(f"SEND_{action.kind}", *action[1:]),
            ]
    return new


@wrong("mend_row")
def mend_receives_before_it_sends(row, p):
    """A receive for the next work moves in front of the send of the last one."""
    new = mend_from_the_work(row, p)
    for i in range(len(new) - 1):
        if new[i].kind.startswith("SEND") and new[i + 1].kind.startswith("RECV"):
            new[i], new[i + 1] = new[i + 1], new[i]
    return new


@wrong("mend_row")
def mend_receives_all_first(row, p):
    new = mend_from_the_work(row, p)
    return sorted(new, key=lambda a: not a.kind.startswith("RECV"))


@wrong("mend_row")
def mend_sends_all_last(row, p):
    new = mend_from_the_work(row, p)
    return sorted(new, key=lambda a: a.kind.startswith("SEND"))


@wrong("mend_row")
def mend_changes_the_work(row, p):
    """Runs, but it is GPipe now."""
    new = mend_from_the_work(row, p)
    return sorted(new, key=lambda a: a.kind.endswith("B"))


@wrong("mend_row")
def mend_forwards_only(row, p):
    good = mend_from_the_work(row, p)
    forwards = [a for a in good if a.kind.endswith("F")]
    return forwards + [a for a in row if a.kind.endswith("B")]


@wrong("mend_row")
def mend_names_the_other_end(row, p):
    """A receive under the number of the stage that sends."""
    shift = {"RECV_F": -1, "RECV_B": 1}
    return [a._replace(stage=a.stage + shift.get(a.kind, 0)) for a in mend_from_the_work(row, p)]


# --- bytes_saved and seconds_paid


@right("bytes_saved")
def saved_formula(worker, p, m, activations):
    return (min(m, p - worker) - 1) * activations


@right("bytes_saved")
def saved_by_subtraction(worker, p, m, activations):
    held = flying_counted(worker, p, m)
    return np.float64(held * activations - activations)


@wrong("bytes_saved")
def saved_all(worker, p, m, activations):
    """Forgets that a backward needs its own activations again."""
    return min(m, p - worker) * activations


@wrong("bytes_saved")
def saved_as_in_gpipe(worker, p, m, activations):
    return (m - 1) * activations


@wrong("bytes_saved")
def saved_without_m(worker, p, m, activations):
    return (p - 1 - worker) * activations


@wrong("bytes_saved")
def saved_everywhere(worker, p, m, activations):
    return (min(m, p) - 1) * activations


@wrong("bytes_saved")
def saved_what_is_left(worker, p, m, activations):
    return activations


@right("seconds_paid")
def paid_formula(p, m, forward, backward):
    return (m + p - 1) * forward


@right("seconds_paid")
def paid_by_subtraction(p, m, forward, backward):
    before = (m + p - 1) * (forward + backward)
    after = (m + p - 1) * (forward + backward + forward)
    return after - before


@right("seconds_paid")
def paid_simulated(p, m, forward, backward):
    costs = ps.Cost(forward, forward + backward), ps.Cost(forward, backward)
    slow, fast = (ps.simulate(ps.gpipe(p, m), cost).makespan for cost in costs)
    return slow - fast


@wrong("seconds_paid")
def paid_without_fill(p, m, forward, backward):
    return m * forward


@wrong("seconds_paid")
def paid_on_every_worker(p, m, forward, backward):
    return p * m * forward


@wrong("seconds_paid")
def paid_backward_again(p, m, forward, backward):
    return (m + p - 1) * backward


@wrong("seconds_paid")
def paid_in_all(p, m, forward, backward):
    return (m + p - 1) * (2 * forward + backward)


@wrong("seconds_paid")
def paid_a_third(p, m, forward, backward):
    return (m + p - 1) * (forward + backward) / 3


# --- worker_bytes


@right("worker_bytes")
def bytes_from_formulas(schedule, worker, p, m, optimizer, weights, activations, message):
    held = m if schedule == "gpipe" else min(m, p - worker)
    return {
        "weights": weights,
        "versions": (held - 1) * weights if schedule == "pipedream" else 0,
        "gradients": weights,
        "optimizer": ["sgd", "momentum", "adam"].index(optimizer) * weights,
        "activations": held * activations,
        "buffers": held * message * (worker > 0),
    }


@right("worker_bytes")
def bytes_leaving_out_zeros(schedule, worker, p, m, optimizer, weights, activations, message):
    full = bytes_from_formulas(schedule, worker, p, m, optimizer, weights, activations, message)
    return {kind: np.int64(size) for kind, size in full.items() if size}


def bytes_but(**changes):
    """A right answer with some kinds replaced by ``change(arguments, right value)``."""

    def answer(*args):
        names = ("schedule", "worker", "p", "m", "optimizer", "weights", "activations", "message")
        given = dict(zip(names, args, strict=True))
        found = bytes_from_formulas(*args)
        return found | {kind: change(given, found[kind]) for kind, change in changes.items()}

    return answer


def named(name, function):
    function.__name__ = name
    return function


def held(a):
    return a["m"] if a["schedule"] == "gpipe" else min(a["m"], a["p"] - a["worker"])


for _name, _changes in {
    "bytes_gpipe_like_1f1b": {
        "activations": lambda a, x: min(a["m"], a["p"] - a["worker"]) * a["activations"]
    },
    "bytes_input_of_worker_0": {"buffers": lambda a, x: held(a) * a["message"]},
    "bytes_one_buffer": {"buffers": lambda a, x: a["message"] * (a["worker"] > 0)},
    "bytes_versions_with_the_newest": {
        "versions": lambda a, x: x + a["weights"] if a["schedule"] == "pipedream" else x
    },
    "bytes_versions_for_both_1f1b": {
        "versions": lambda a, x: 0 if a["schedule"] == "gpipe" else (held(a) - 1) * a["weights"]
    },
    "bytes_gradients_per_microbatch": {"gradients": lambda a, x: held(a) * a["weights"]},
    "bytes_without_gradients": {"gradients": lambda a, x: 0},
    "bytes_adam_keeps_one": {"optimizer": lambda a, x: x and a["weights"]},
    "bytes_optimizer_per_version": {
        "optimizer": lambda a, x: x * (held(a) if a["schedule"] == "pipedream" else 1)
    },
    "bytes_sgd_keeps_one": {"optimizer": lambda a, x: x + a["weights"]},
}.items():
    wrong("worker_bytes")(named(_name, bytes_but(**_changes)))


@wrong("worker_bytes")
def bytes_in_one_number(*args):
    return sum(bytes_from_formulas(*args).values())


@wrong("worker_bytes")
def bytes_under_other_names(*args):
    return {f"{kind} bytes": size for kind, size in bytes_from_formulas(*args).items()}


# --- recompute_plan


@right("recompute_plan")
def plan_worker_by_worker(p, m, fixed, activations, message, cap):
    plan = []
    for worker in range(p):
        k = min(m, p - worker)
        inputs = k * message if worker > 0 else 0
        plan.append(fixed[worker] + k * activations + inputs > cap)
    return plan


@right("recompute_plan")
def plan_in_numpy(p, m, fixed, activations, message, cap):
    worker = np.arange(p)
    k = np.minimum(m, p - worker)
    return np.array(fixed) + k * activations + k * message * (worker > 0) > cap


@right("recompute_plan")
def plan_by_taking_back(p, m, fixed, activations, message, cap):
    """All recompute; then take it back wherever that fits."""
    plan = [True] * p
    for worker in range(p):
        k = min(m, p - worker)
        if fixed[worker] + k * (activations + message * (worker > 0)) <= cap:
            plan[worker] = False
    return tuple(plan)


def plan_with(need):
    def plan(p, m, fixed, activations, message, cap):
        return [need(w, min(m, p - w), m, fixed, activations, message) > cap for w in range(p)]

    return plan


for _name, _need in {
    "plan_forgets_inputs": lambda w, k, m, fixed, a, i: fixed[w] + k * a,
    "plan_counts_worker_0s_input": lambda w, k, m, fixed, a, i: fixed[w] + k * (a + i),
    "plan_forgets_what_is_fixed": lambda w, k, m, fixed, a, i: k * (a + i * (w > 0)),
    "plan_as_in_gpipe": lambda w, k, m, fixed, a, i: fixed[w] + m * (a + i * (w > 0)),
    "plan_of_worker_0_for_all": lambda w, k, m, fixed, a, i: fixed[0] + (k + w) * a,
    "plan_where_equal_is_too_much": lambda w, k, m, fixed, a, i: (
        fixed[w] + k * (a + i * (w > 0)) + 0.5
    ),
}.items():
    wrong("recompute_plan")(named(_name, plan_with(_need)))


@wrong("recompute_plan")
def plan_without_m(p, m, fixed, activations, message, cap):
    return [fixed[w] + (p - w) * (activations + message * (w > 0)) > cap for w in range(p)]


@wrong("recompute_plan")
def plan_always(p, m, fixed, activations, message, cap):
    return [True] * p


@wrong("recompute_plan")
def plan_never(p, m, fixed, activations, message, cap):
    return [False] * p


@wrong("recompute_plan")
def plan_all_or_nothing(p, m, fixed, activations, message, cap):
    return [any(plan_worker_by_worker(p, m, fixed, activations, message, cap))] * p


@wrong("recompute_plan")
def plan_upside_down(p, m, fixed, activations, message, cap):
    return [not again for again in plan_worker_by_worker(p, m, fixed, activations, message, cap)]


@wrong("recompute_plan")
def plan_as_a_list_of_workers(p, m, fixed, activations, message, cap):
    plan = plan_worker_by_worker(p, m, fixed, activations, message, cap)
    return [worker for worker, again in enumerate(plan) if again]
