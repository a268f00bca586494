"""What learners may hand in for unit 03: right answers of several kinds, and plausible wrong ones.

`RIGHT[name]` and `WRONG[name]` are lists of functions. Each stands for an answer called `name`; its
own name says what is particular about it.
"""

from __future__ import annotations

import copy
from collections import defaultdict

import numpy as np
import pipeschool as ps
from torch.func import functional_call

RIGHT = defaultdict(list)
WRONG = defaultdict(list)


def right(name):
    return lambda function: RIGHT[name].append(function) or function


def wrong(name):
    return lambda function: WRONG[name].append(function) or function


# --- stash_step


@right("stash_step")
def by_kind(action, newest, in_flight):
    if action.kind == "F":
        return newest, sorted({newest, *in_flight.values()})
    if action.kind == "B":
        others = {v for k, v in in_flight.items() if k != action.microbatch}
        return in_flight[action.microbatch], sorted({newest} | others)
    return newest + 1, sorted({newest + 1, *in_flight.values()})


@right("stash_step")
def with_a_table_of_users(action, newest, in_flight):
    """Counts who uses what, as the library's ledger does; kept comes unsorted, as numpy."""
    kind, _, k = action
    flying = in_flight | ({k: newest} if kind == "F" else {})
    version = newest + 1 if kind == "U" else flying[k]
    if kind == "B":
        flying = {other: v for other, v in flying.items() if other != k}
    users = dict.fromkeys([*flying.values(), version if kind == "U" else newest])
    return [version, np.array(list(users)[::-1])]


@right("stash_step")
def as_a_match(action, newest, in_flight):
    kept = set(in_flight.values())
    match action:
        case ("F", _, _):
            version = newest
        case ("B", _, k):
            version = in_flight[k]
            kept = {v for other, v in in_flight.items() if other != k}
        case _:
            version = newest = newest + 1
    kept.add(newest)
    return version, kept


@wrong("stash_step")
def backward_on_the_newest(action, newest, in_flight):
    version, kept = by_kind(action, newest, in_flight)
    return (newest if action.kind == "B" else version), kept


@wrong("stash_step")
def never_drops(action, newest, in_flight):
    version, _ = by_kind(action, newest, in_flight)
    return version, list(range(max(version, newest) + 1))


@wrong("stash_step")
def drops_what_another_still_needs(action, newest, in_flight):
    version, kept = by_kind(action, newest, in_flight)
    return version, [v for v in kept if action.kind != "B" or v != version or v == newest]


@wrong("stash_step")
def keeps_what_the_backward_has_just_used(action, newest, in_flight):
    version, kept = by_kind(action, newest, in_flight)
    return version, sorted({*kept, version})


@wrong("stash_step")
def forgets_the_newest(action, newest, in_flight):
    version, _ = by_kind(action, newest, in_flight)
    return version, sorted(set(in_flight.values()))


@wrong("stash_step")
def update_keeps_the_version_before(action, newest, in_flight):
    version, kept = by_kind(action, newest, in_flight)
    return version, sorted({*kept, newest})


@wrong("stash_step")
def one_copy_per_microbatch(action, newest, in_flight):
    version, _ = by_kind(action, newest, in_flight)
    return version, [max(version, newest), *in_flight.values()]


@wrong("stash_step")
def microbatch_for_version(action, newest, in_flight):
    return action.microbatch, sorted({newest, *in_flight.values()})


@wrong("stash_step")
def changes_what_it_was_given(action, newest, in_flight):
    version = newest
    if action.kind == "F":
        in_flight[action.microbatch] = newest
    elif action.kind == "B":
        version = in_flight.pop(action.microbatch)
    else:
        version = newest = newest + 1
    return version, sorted({newest, *in_flight.values()})


@wrong("stash_step")
def version_alone(action, newest, in_flight):
    return by_kind(action, newest, in_flight)[0]


# --- versions_needed and staleness


@right("versions_needed")
def needed_formula(stage, p):
    return p - stage


@right("versions_needed")
def needed_counted(stage, p):
    """One for each microbatch that is on stages further down, and one for its own."""
    return np.int64(len(range(stage, p)))


@right("versions_needed")
def needed_in_flight(stage, p):
    row = ps.one_f_one_b(p, 3 * p).workers[stage]
    held = most = 0
    for action in row:
        held += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


@wrong("versions_needed")
def needed_p_everywhere(stage, p):
    return p


@wrong("versions_needed")
def needed_one_less(stage, p):
    return p - 1 - stage


@wrong("versions_needed")
def needed_from_the_other_end(stage, p):
    return stage + 1


@wrong("versions_needed")
def needed_two(stage, p):
    return 2


@wrong("versions_needed")
def needed_one_more(stage, p):
    return p - stage + 1


@right("staleness")
def late_formula(stage, p):
    return p - 1 - stage


@right("staleness")
def late_simulated(stage, p):
    return ps.simulate(ps.pipedream(p, 1, batches=3 * p)).staleness[stage]


@wrong("staleness")
def late_as_versions(stage, p):
    return p - stage


@wrong("staleness")
def late_as_stage(stage, p):
    return stage


@wrong("staleness")
def late_everywhere(stage, p):
    return p - 1


@wrong("staleness")
def late_nowhere(stage, p):
    return 0


@wrong("staleness")
def late_there_and_back(stage, p):
    return 2 * (p - 1 - stage)


# --- delayed_descent


@right("delayed_descent")
def descent_loop(gradient, start, delay, lr, updates):
    weights = [start]
    for t in range(updates):
        old = weights[t - delay] if t >= delay else start
        weights += [weights[-1] - lr * gradient(old)]
    return weights


@right("delayed_descent")
def descent_with_a_queue(gradient, start, delay, lr, updates):
    from collections import deque

    line = deque([start] * (delay + 1), maxlen=delay + 1)
    yield start
    for _ in range(updates):
        line.append(line[-1] - lr * gradient(line[0]))
        yield line[-1]


@right("delayed_descent")
def descent_in_numpy(gradient, start, delay, lr, updates):
    w = np.full(delay + updates + 1, float(start))
    for t in range(delay, delay + updates):
        w[t + 1] = w[t] - lr * gradient(w[t - delay])
    return w[delay:]


@wrong("delayed_descent")
def descent_without_delay(gradient, start, delay, lr, updates):
    return descent_loop(gradient, start, 0, lr, updates)


@wrong("delayed_descent")
def descent_from_the_old_weights(gradient, start, delay, lr, updates):
    """The update is applied to the weights that the gradient was computed at."""
    weights = [start]
    for t in range(updates):
        old = weights[max(t - delay, 0)]
        weights.append(old - lr * gradient(old))
    return weights


@wrong("delayed_descent")
def descent_counts_from_the_end(gradient, start, delay, lr, updates):
    """A negative index is no error in Python."""
    weights = [start]
    for t in range(updates):
        weights.append(weights[t] - lr * gradient(weights[(t - delay) % len(weights)]))
    return weights


@wrong("delayed_descent")
def descent_one_more_late(gradient, start, delay, lr, updates):
    return descent_loop(gradient, start, delay + 1, lr, updates)


@wrong("delayed_descent")
def descent_waits_first(gradient, start, delay, lr, updates):
    weights = [start]
    for t in range(updates):
        step = lr * gradient(weights[t - delay]) if t >= delay else 0
        weights.append(weights[t] - step)
    return weights


@wrong("delayed_descent")
def descent_without_the_start(gradient, start, delay, lr, updates):
    return descent_loop(gradient, start, delay, lr, updates)[1:]


@wrong("delayed_descent")
def descent_uphill(gradient, start, delay, lr, updates):
    return descent_loop(gradient, start, delay, -lr, updates)


# --- vertical_sync_version


@right("vertical_sync_version")
def vertical_formula(microbatch, p):
    return max(microbatch - (p - 1), 0)


@right("vertical_sync_version")
def vertical_counted(microbatch, p):
    """Backwards that stage 0 has done when it lets the microbatch in."""
    row = ps.pipedream(p, microbatch + 1).workers[0]
    return sum(a.kind == "B" for a in row[: row.index(ps.F(0, microbatch))])


@wrong("vertical_sync_version")
def vertical_without_max(microbatch, p):
    return microbatch - (p - 1)


@wrong("vertical_sync_version")
def vertical_p_late(microbatch, p):
    return max(microbatch - p, 0)


@wrong("vertical_sync_version")
def vertical_newest(microbatch, p):
    return microbatch


@wrong("vertical_sync_version")
def vertical_oldest(microbatch, p):
    return 0


@wrong("vertical_sync_version")
def vertical_batches_of_p(microbatch, p):
    return microbatch // p


@wrong("vertical_sync_version")
def vertical_counted_from_1(microbatch, p):
    return max(microbatch - p + 2, 0)


# --- double_buffer_version and last_user


@right("double_buffer_version")
def double_formula(microbatch, m):
    return max(microbatch // m - 1, 0)


@right("double_buffer_version")
def double_as_the_paper_counts(microbatch, m):
    """The paper counts microbatches from 1."""
    k = microbatch + 1
    return max((k - 1) // m - 1, 0)


@right("double_buffer_version")
def double_step_by_step(microbatch, m):
    version = 0
    while microbatch >= (version + 2) * m:
        version += 1
    return version


@wrong("double_buffer_version")
def double_newest(microbatch, m):
    return microbatch // m


@wrong("double_buffer_version")
def double_without_max(microbatch, m):
    return microbatch // m - 1


@wrong("double_buffer_version")
def double_paper_formula_from_0(microbatch, m):
    return max((microbatch - 1) // m - 1, 0)


@wrong("double_buffer_version")
def double_two_behind(microbatch, m):
    return max(microbatch // m - 2, 0)


@wrong("double_buffer_version")
def double_one_behind_the_microbatch(microbatch, m):
    return max(microbatch - 1, 0)


@wrong("double_buffer_version")
def double_in_fractions(microbatch, m):
    return max(microbatch / m - 1, 0)


@wrong("double_buffer_version")
def double_which_buffer(microbatch, m):
    return microbatch // m % 2


@right("last_user")
def last_formula(version, m):
    return (version + 2) * m - 1


@right("last_user")
def last_by_search(version, m):
    users = [k for k in range((version + 4) * m) if double_formula(k, m) == version]
    return users[-1]


@wrong("last_user")
def last_of_the_batch_itself(version, m):
    return (version + 1) * m - 1


@wrong("last_user")
def last_is_the_next_ones_first(version, m):
    return (version + 2) * m


@wrong("last_user")
def last_counted_from_version_1(version, m):
    return version * m - 1


@wrong("last_user")
def last_as_how_many(version, m):
    return 2 * m if version == 0 else m


@wrong("last_user")
def last_is_the_first(version, m):
    return (version + 1) * m


# --- version_bytes

COPIES = {
    "latest": lambda s, p: 1,
    "stash": lambda s, p: p - s,
    "vertical_sync": lambda s, p: p,
    "double_buffer": lambda s, p: 2,
}


@right("version_bytes")
def bytes_from_a_table(policy, sizes):
    return [COPIES[policy](s, len(sizes)) * size for s, size in enumerate(sizes)]


@right("version_bytes")
def bytes_in_numpy(policy, sizes):
    p = len(sizes)
    copies = {
        "latest": np.ones(p),
        "stash": np.arange(p, 0, -1),
        "vertical_sync": np.full(p, p),
        "double_buffer": np.full(p, 2),
    }
    return copies[policy] * np.array(sizes)


@wrong("version_bytes")
def bytes_vertical_like_stash(policy, sizes):
    return bytes_from_a_table("stash" if policy == "vertical_sync" else policy, sizes)


@wrong("version_bytes")
def bytes_stash_from_the_other_end(policy, sizes):
    if policy == "stash":
        return [(s + 1) * size for s, size in enumerate(sizes)]
    return bytes_from_a_table(policy, sizes)


@wrong("version_bytes")
def bytes_two_buffers_of_everything(policy, sizes):
    return [2 * size for size in sizes]


@wrong("version_bytes")
def bytes_without_the_newest(policy, sizes):
    return [(COPIES[policy](s, len(sizes)) - 1) * size for s, size in enumerate(sizes)]


@wrong("version_bytes")
def bytes_of_all_workers(policy, sizes):
    return [sum(bytes_from_a_table(policy, sizes))]


@wrong("version_bytes")
def bytes_of_the_largest(policy, sizes):
    return bytes_from_a_table(policy, [max(sizes)] * len(sizes))


@wrong("version_bytes")
def bytes_raises_for_latest(policy, sizes):
    return bytes_from_a_table({"stash": "stash"}[policy], sizes)


# --- replay


def replayer(
    used_of=lambda history, s, v: history[v][s],
    share=lambda m: 1 / m,
    base_of=lambda history, version, s, k: None,
    overwrites=True,
    overwritten_with=lambda history: history[-1],
    one_optimizer_step_per_microbatch=False,
    keep=lambda w: w.detach().clone(),
    forget=True,
    fresh_optimizer=False,
    clone=lambda w: w.clone(),
    start=True,
    own_copy=copy.deepcopy,
):
    """A right replay, with places to break it."""

    def replay(stages, batches, loss, optimizer, version, m, overwrite):
        newest = [dict(own_copy(stage).named_parameters()) for stage in stages]
        steppers = [optimizer(list(weights.values())) for weights in newest]
        history = [[{n: keep(w) for n, w in stage.items()} for stage in newest]]
        for k, (x, y) in enumerate(batches):
            used = []
            for s in range(len(stages)):
                values = used_of(history, s, version(s, k))
                used.append({n: clone(w).requires_grad_() for n, w in values.items()})
            for stage, weights in zip(stages, used, strict=True):
                x = functional_call(stage, weights, (x,))
            if overwrite and overwrites:
                now = overwritten_with(history)
                for weights, values in zip(used, now, strict=True):
                    for n, w in weights.items():
                        w.data.copy_(values[n])
            (loss(x, y) * share(m)).backward()
            for weights, leaves in zip(newest, used, strict=True):
                for n, w in weights.items():
                    w.grad = leaves[n].grad + (0 if w.grad is None else w.grad)
            if one_optimizer_step_per_microbatch or (k + 1) % m == 0:
                for s, weights in enumerate(newest):
                    old = base_of(history, version, s, k)
                    for n, w in weights.items():
                        if old:
                            w.data.copy_(old[n])
                    if fresh_optimizer:
                        steppers[s] = optimizer(list(weights.values()))
                    steppers[s].step()
                    if forget:
                        steppers[s].zero_grad()
            if (k + 1) % m == 0:
                history.append([{n: keep(w) for n, w in stage.items()} for stage in newest])
        return history if start else history[1:]

    return replay


def named(name, function):
    function.__name__ = name
    return function


right("replay")(named("as_the_course_does", replayer()))
right("replay")(named("sum_then_share", replayer(share=lambda m: m**-1.0)))


@right("replay")
def one_stage_at_a_time(stages, batches, loss, optimizer, version, m, overwrite):
    """As a pipeline does it: graphs cut at the boundaries, gradients handed back by hand."""
    p = len(stages)
    newest = [copy.deepcopy(stage) for stage in stages]
    steppers = [optimizer(stage.parameters()) for stage in newest]

    def copies(dicts):
        return [{n: w.detach().clone() for n, w in d.items()} for d in dicts]

    history = [copies(dict(stage.named_parameters()) for stage in newest)]
    for t in range(len(batches) // m):
        for k in range(t * m, (t + 1) * m):
            x, y = batches[k]
            graphs = []
            for s in range(p):
                (weights,) = copies([history[version(s, k)][s]])
                for w in weights.values():
                    w.requires_grad = True
                x = x.detach().requires_grad_()
                out = functional_call(stages[s], weights, (x,))
                graphs.append((x, weights, out))
                x = out
            last_x, last_weights, out = graphs[-1]
            graphs[-1] = (last_x, last_weights, loss(out, y) / m)
            gradient = None
            for s in reversed(range(p)):
                x, weights, out = graphs[s]
                if overwrite:
                    for n, w in weights.items():
                        w.data.copy_(history[t][s][n])
                out.backward(gradient)
                gradient = x.grad
                for n, w in newest[s].named_parameters():
                    w.grad = weights[n].grad if w.grad is None else w.grad + weights[n].grad
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        history.append(copies(dict(stage.named_parameters()) for stage in newest))
    return history


wrong("replay")(named("always_the_newest", replayer(used_of=lambda h, s, v: h[-1][s])))
wrong("replay")(named("one_version_too_old", replayer(used_of=lambda h, s, v: h[max(v - 1, 0)][s])))
wrong("replay")(named("always_the_start", replayer(used_of=lambda h, s, v: h[0][s])))
wrong("replay")(
    named(
        "steps_from_the_old_weights",
        replayer(base_of=lambda history, version, s, k: history[version(s, k)][s]),
    )
)
wrong("replay")(named("forgets_to_divide_by_m", replayer(share=lambda m: 1)))
wrong("replay")(
    named("steps_at_every_microbatch", replayer(one_optimizer_step_per_microbatch=True))
)
wrong("replay")(named("does_not_overwrite", replayer(overwrites=False)))
wrong("replay")(named("overwrites_with_the_start", replayer(overwritten_with=lambda h: h[0])))
wrong("replay")(named("history_without_copies", replayer(keep=lambda w: w)))
wrong("replay")(named("gradients_pile_up", replayer(forget=False)))
wrong("replay")(named("a_new_optimizer_each_time", replayer(fresh_optimizer=True)))
wrong("replay")(named("without_the_start", replayer(start=False)))
wrong("replay")(named("trains_the_stages_themselves", replayer(own_copy=lambda stage: stage)))
wrong("replay")(
    named("overwrites_history", replayer(clone=lambda w: w.requires_grad_(False).detach()))
)


@wrong("replay")
def last_weights_only(stages, batches, loss, optimizer, version, m, overwrite):
    return replayer()(stages, batches, loss, optimizer, version, m, overwrite)[-1]


@wrong("replay")
def lists_instead_of_names(stages, batches, loss, optimizer, version, m, overwrite):
    found = replayer()(stages, batches, loss, optimizer, version, m, overwrite)
    return [[list(stage.values()) for stage in weights] for weights in found]
