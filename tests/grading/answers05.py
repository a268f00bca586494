"""What learners may hand in for unit 05: right answers of several kinds, and plausible wrong ones.

`RIGHT[name]` and `WRONG[name]` are lists of functions. Each stands for an answer called `name`; its
own name says what is particular about it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from functools import cache
from itertools import accumulate, combinations, cycle, islice
from operator import add
from statistics import mean, median

import numpy as np
import pipeschool as ps

RIGHT = defaultdict(list)
WRONG = defaultdict(list)


def right(name):
    return lambda function: RIGHT[name].append(function) or function


def wrong(name):
    return lambda function: WRONG[name].append(function) or function


# --- message_seconds


@right("message_seconds")
def message_formula(samples, m, numbers, number_bytes, latency, bandwidth):
    return latency + -(-samples // m) * numbers * number_bytes / bandwidth


@right("message_seconds")
def message_of_the_largest_piece(samples, m, numbers, number_bytes, latency, bandwidth):
    sizes = [len(piece) for piece in np.array_split(np.zeros(samples), m)]
    return np.float64(max(sizes) * numbers * number_bytes / bandwidth + latency)


def message_with(count):
    def seconds(samples, m, numbers, number_bytes, latency, bandwidth):
        return latency + count(samples, m) * numbers * number_bytes / bandwidth

    return seconds


@wrong("message_seconds")
def message_of_a_mean_microbatch(*case):
    return message_with(lambda samples, m: samples / m)(*case)


@wrong("message_seconds")
def message_rounded_down(*case):
    return message_with(lambda samples, m: samples // m)(*case)


@wrong("message_seconds")
def message_of_the_batch(*case):
    return message_with(lambda samples, m: samples)(*case)


@wrong("message_seconds")
def message_with_m_as_size(*case):
    return message_with(lambda samples, m: m)(*case)


@wrong("message_seconds")
def message_without_latency(samples, m, numbers, number_bytes, latency, bandwidth):
    return math.ceil(samples / m) * numbers * number_bytes / bandwidth


@wrong("message_seconds")
def message_counts_numbers(samples, m, numbers, number_bytes, latency, bandwidth):
    return latency + math.ceil(samples / m) * numbers / bandwidth


@wrong("message_seconds")
def message_latency_for_each_sample(samples, m, numbers, number_bytes, latency, bandwidth):
    return math.ceil(samples / m) * (latency + numbers * number_bytes / bandwidth)


# --- gpipe_seconds


@right("gpipe_seconds")
def gpipe_formula(p, m, forward, backward, message, overlapped):
    if p == 1:
        return m * (forward + backward)
    if not overlapped:
        return (m + p - 1) * (forward + backward) + 2 * (m + p - 2) * message
    one = p * (forward + backward) + 2 * (p - 1) * message
    return one + (m - 1) * (max(forward, message) + max(backward, message))


@right("gpipe_seconds")
def gpipe_by_stations(p, m, forward, backward, message, overlapped):
    """Each way is a line of stations; a message is a station, or part of one."""

    def way(work):
        if overlapped:
            stations = [work] + [message, work] * (p - 1)
        else:
            stations = [work + message] * (p - 1) + [work]
        free = [0.0] * len(stations)
        for _ in range(m):
            now = 0.0
            for i, seconds in enumerate(stations):
                now = free[i] = max(now, free[i]) + seconds
        return now

    return way(forward) + way(backward)


@wrong("gpipe_seconds")
def gpipe_without_messages(p, m, forward, backward, message, overlapped):
    return (m + p - 1) * (forward + backward)


@wrong("gpipe_seconds")
def gpipe_pays_for_all_messages(p, m, forward, backward, message, overlapped):
    return (m + p - 1) * (forward + backward) + 2 * (p - 1) * m * message


@wrong("gpipe_seconds")
def gpipe_messages_one_way(p, m, forward, backward, message, overlapped):
    found = gpipe_formula(p, m, forward, backward, message, overlapped)
    return found - (p - 1) * message


@wrong("gpipe_seconds")
def gpipe_links_never_slow(p, m, forward, backward, message, overlapped):
    if not overlapped:
        return gpipe_formula(p, m, forward, backward, message, overlapped)
    return (m + p - 1) * (forward + backward) + 2 * (p - 1) * message


@wrong("gpipe_seconds")
def gpipe_last_worker_sends_too(p, m, forward, backward, message, overlapped):
    if overlapped:
        return gpipe_formula(p, m, forward, backward, message, overlapped)
    return (m + p - 1) * (forward + backward + 2 * message)


@wrong("gpipe_seconds")
def gpipe_forgets_that_one_worker_has_no_link(p, m, forward, backward, message, overlapped):
    if not overlapped:
        return (m + p - 1) * (forward + backward) + 2 * (m + p - 2) * message
    one = p * (forward + backward) + 2 * (p - 1) * message
    return one + (m - 1) * (max(forward, message) + max(backward, message))


@wrong("gpipe_seconds")
def gpipe_one_pace_for_both_ways(p, m, forward, backward, message, overlapped):
    if p == 1 or not overlapped:
        return gpipe_formula(p, m, forward, backward, message, overlapped)
    one = p * (forward + backward) + 2 * (p - 1) * message
    return one + (m - 1) * max(forward + backward, 2 * message)


@wrong("gpipe_seconds")
def gpipe_overlapped_and_not_swapped(p, m, forward, backward, message, overlapped):
    return gpipe_formula(p, m, forward, backward, message, not overlapped)


# --- typical_seconds


@right("typical_seconds")
def typical_sorted(times):
    known = sorted(times[1:])
    return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2


@right("typical_seconds")
def typical_by_statistics(times):
    return median(times[1:])


@right("typical_seconds")
def typical_in_numpy(times):
    return np.median(np.array(times)[1:])


@wrong("typical_seconds")
def typical_with_the_warm_up(times):
    return median(times)


@wrong("typical_seconds")
def typical_mean(times):
    return mean(times[1:])


@wrong("typical_seconds")
def typical_least(times):
    return min(times[1:])


@wrong("typical_seconds")
def typical_not_sorted(times):
    known = times[1:]
    half = len(known) // 2
    return known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2


@wrong("typical_seconds")
def typical_upper_middle(times):
    return sorted(times[1:])[len(times[1:]) // 2]


@wrong("typical_seconds")
def typical_sorted_before_the_warm_up_goes(times):
    """Leaves out the smallest instead of the first."""
    return median(sorted(times)[1:])


@wrong("typical_seconds")
def typical_without_the_largest(times):
    """Takes the warm-up for the slowest of all."""
    return median(sorted(times)[:-1])


# --- best_cuts


@right("best_cuts")
def cuts_by_recursion(times, p):
    n = len(times)
    before = [0.0, *accumulate(times)]

    @cache
    def best(first, left):
        if left == 1:
            return before[n] - before[first], ()
        return min(
            (
                max(before[cut] - before[first], best(cut, left - 1)[0]),
                (cut, *best(cut, left - 1)[1]),
            )
            for cut in range(first + 1, n - left + 2)
        )

    return best(0, p)[1]


@right("best_cuts")
def cuts_by_a_table_from_the_front(times, p):
    n = len(times)
    before = np.concatenate([[0.0], np.cumsum(times)])
    slowest = {(end, 1): (before[end], []) for end in range(1, n + 1)}
    for q in range(2, p + 1):
        for end in range(q, n + 1):
            slowest[end, q] = min(
                (
                    max(slowest[cut, q - 1][0], before[end] - before[cut]),
                    [*slowest[cut, q - 1][1], cut],
                )
                for cut in range(q - 1, end)
            )
    return np.array(slowest[n, p][1], dtype=int)


@right("best_cuts")
def cuts_with_an_endless_stage_for_no_layers(times, p):
    """Lets the cut run to the end, where nothing is left: that takes for ever."""
    n = len(times)

    @cache
    def best(first, left):
        if first == n:
            return math.inf, ()
        if left == 1:
            return sum(times[first:]), ()
        return min(
            (max(sum(times[first:cut]), best(cut, left - 1)[0]), (cut, *best(cut, left - 1)[1]))
            for cut in range(first + 1, n + 1)
        )

    return list(best(0, p)[1])


@right("best_cuts")
def cuts_by_guessing_the_slowest(times, p):
    """For each possible slowest stage: fill stages up to it; the least for which p stages do."""
    n = len(times)
    sums = sorted({sum(times[a:b]) for a in range(n) for b in range(a + 1, n + 1)})

    def fill(most):
        cuts, load = [], 0.0
        for i, t in enumerate(times):
            if t > most:
                return None
            if i and load + t > most + 1e-9:
                cuts.append(i)
                load = 0.0
            load += t
        return cuts

    enough = [(found := fill(most)) is not None and len(found) < p for most in sums]
    cuts = fill(sums[bisect_left(enough, True)])
    spare = (i for i in range(1, n) if i not in cuts)
    return sorted([*cuts, *islice(spare, p - 1 - len(cuts))])


@wrong("best_cuts")
def cuts_of_all_ways(times, p):
    """Right, but it takes for ever where there are many layers."""
    n = len(times)
    return min(
        combinations(range(1, n), p - 1),
        key=lambda cuts: max(sum(times[a:b]) for a, b in zip([0, *cuts], [*cuts, n], strict=True)),
    )


@wrong("best_cuts")
def cuts_of_all_ways_by_recursion_without_a_table(times, p):
    n = len(times)

    def best(first, left):
        if left == 1:
            return sum(times[first:]), []
        found = []
        for cut in range(first + 1, n - left + 2):
            rest, cuts = best(cut, left - 1)
            found.append((max(sum(times[first:cut]), rest), [cut, *cuts]))
        return min(found)

    return best(0, p)[1]


@wrong("best_cuts")
def cuts_of_equal_numbers(times, p):
    return [len(times) * s // p for s in range(1, p)]


@wrong("best_cuts")
def cuts_filled_to_the_mean(times, p):
    n, goal = len(times), sum(times) / p
    cuts, load = [], 0.0
    for i, t in enumerate(times):
        left = p - 1 - len(cuts)
        if left and i > (cuts[-1] if cuts else 0) and (load + t > goal or n - i <= left):
            cuts.append(i)
            load = 0.0
        load += t
    return cuts


@wrong("best_cuts")
def cuts_with_both_ends(times, p):
    return [0, *cuts_by_recursion(times, p), len(times)]


@wrong("best_cuts")
def cuts_with_the_last_end(times, p):
    return [*cuts_by_recursion(times, p), len(times)]


@wrong("best_cuts")
def cuts_named_after_the_layer_in_front(times, p):
    return [cut - 1 for cut in cuts_by_recursion(times, p)]


@wrong("best_cuts")
def cuts_as_stage_lengths(times, p):
    ends = [0, *cuts_by_recursion(times, p)]
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


@wrong("best_cuts")
def cuts_halved_again_and_again(times, p):
    """Always cuts the slowest stage at its best place."""
    cuts = []
    for _ in range(p - 1):
        ends = [0, *cuts, len(times)]
        a, b = max(
            ((a, b) for a, b in zip(ends, ends[1:], strict=False) if b - a > 1),
            key=lambda stage: sum(times[slice(*stage)]),
        )
        cut = min(range(a + 1, b), key=lambda c: max(sum(times[a:c]), sum(times[c:b])))
        cuts = sorted([*cuts, cut])
    return cuts


@wrong("best_cuts")
def cuts_moved_one_at_a_time(times, p):
    """From equal numbers of layers, each cut by one for as long as that alone helps."""
    n, cuts = len(times), [len(times) * s // p for s in range(1, p)]

    def slowest(ends):
        return max(sum(times[a:b]) for a, b in zip(ends, ends[1:], strict=False))

    better = True
    while better:
        better = False
        for i in range(p - 1):
            for step in (-1, 1):
                ends = [0, *cuts[:i], cuts[i] + step, *cuts[i + 1 :], n]
                rising = all(a < b for a, b in zip(ends, ends[1:], strict=False))
                if rising and slowest(ends) < slowest([0, *cuts, n]):
                    cuts, better = ends[1:-1], True
    return cuts


def cuts_by(times, p, combine, spared):
    """The cuts where ``combine(seconds of a stage, those of the stages after it)`` is smallest.
    A cut leaves at least ``spared(how many stages)`` layers for the stages after it."""
    n = len(times)

    @cache
    def best(first, left):
        if left == 1:
            return sum(times[first:]), ()
        return min(
            (combine(sum(times[first:cut]), best(cut, left - 1)[0]), (cut, *best(cut, left - 1)[1]))
            for cut in range(first + 1, n - spared(left - 1) + 1)
        )

    return best(0, p)[1]


@wrong("best_cuts")
def cuts_that_leave_too_few_layers(times, p):
    """The first stages may take so many layers that the last ones have none."""
    return cuts_by(times, p, max, lambda stages: 1)


@wrong("best_cuts")
def cuts_of_the_smallest_sum(times, p):
    """Adds up where it should take the larger."""
    return cuts_by(times, p, add, lambda stages: stages)


# --- worker_of


@right("worker_of")
def turn_formula(replicas, stage, microbatch):
    return sum(replicas[:stage]) + microbatch % replicas[stage]


@right("worker_of")
def turn_by_going_round(replicas, stage, microbatch):
    workers = iter(range(sum(replicas)))
    teams = [list(islice(workers, count)) for count in replicas]
    return next(islice(cycle(teams[stage]), microbatch, None))


@right("worker_of")
def turn_in_the_schedule(replicas, stage, microbatch):
    schedule = ps.round_robin(replicas, m=math.lcm(*replicas), batches=microbatch + 1)
    (worker,) = (w for w, row in enumerate(schedule.workers) if ps.F(stage, microbatch) in row)
    return worker


@wrong("worker_of")
def turn_stage_is_worker(replicas, stage, microbatch):
    return stage


@wrong("worker_of")
def turn_in_front_of_stage_only(replicas, stage, microbatch):
    return stage + microbatch % replicas[stage]


@wrong("worker_of")
def turn_within_the_stage(replicas, stage, microbatch):
    return microbatch % replicas[stage]


@wrong("worker_of")
def turn_first_worker_only(replicas, stage, microbatch):
    return sum(replicas[:stage])


@wrong("worker_of")
def turn_in_blocks(replicas, stage, microbatch):
    return sum(replicas[:stage]) + min(microbatch // 2, replicas[stage] - 1)


@wrong("worker_of")
def turn_off_by_a_stage(replicas, stage, microbatch):
    return sum(replicas[: stage + 1]) + microbatch % replicas[stage]


# --- spread_workers


@right("spread_workers")
def spread_one_by_one(seconds, workers):
    replicas = [1] * len(seconds)
    for _ in range(workers - len(seconds)):
        pace = [t / r for t, r in zip(seconds, replicas, strict=True)]
        replicas[pace.index(max(pace))] += 1
    return replicas


@right("spread_workers")
def spread_by_the_pace(seconds, workers):
    """For each pace that can be: the workers that it takes; those that are over go in front."""
    paces = sorted({t / r for t in seconds for r in range(1, workers + 1)})
    for pace in paces:
        replicas = [math.ceil(t / pace - 1e-9) for t in seconds]
        if sum(replicas) <= workers:
            replicas[0] += workers - sum(replicas)
            return np.array(replicas)


@wrong("spread_workers")
def spread_all_to_the_slowest(seconds, workers):
    replicas = [1] * len(seconds)
    replicas[seconds.index(max(seconds))] += workers - len(seconds)
    return replicas


@wrong("spread_workers")
def spread_evenly(seconds, workers):
    size, extra = divmod(workers, len(seconds))
    return [size + (s < extra) for s in range(len(seconds))]


@wrong("spread_workers")
def spread_by_rounding_shares(seconds, workers):
    return [max(1, round(workers * t / sum(seconds))) for t in seconds]


@wrong("spread_workers")
def spread_without_one_for_each(seconds, workers):
    replicas = [0] * len(seconds)
    for _ in range(workers):
        left = [t - r for t, r in zip(seconds, replicas, strict=True)]
        replicas[left.index(max(left))] += 1
    return replicas


@wrong("spread_workers")
def spread_forgets_the_spare_ones(seconds, workers):
    return [1] * len(seconds)


@wrong("spread_workers")
def spread_looks_at_what_is_left(seconds, workers):
    """Takes a worker for a fixed number of seconds off."""
    replicas, left = [1] * len(seconds), list(seconds)
    for _ in range(workers - len(seconds)):
        slowest = left.index(max(left))
        replicas[slowest] += 1
        left[slowest] /= 2
    return replicas


@wrong("spread_workers")
def spread_to_the_one_that_would_gain(seconds, workers):
    """Looks at the pace that a stage would have, not at the one that it has."""
    replicas = [1] * len(seconds)
    for _ in range(workers - len(seconds)):
        after = [t / (r + 1) for t, r in zip(seconds, replicas, strict=True)]
        replicas[after.index(max(after))] += 1
    return replicas


@wrong("spread_workers")
def spread_by_largest_remainders(seconds, workers):
    """One for each, and the others in proportion to the seconds."""
    shares = [(workers - len(seconds)) * t / sum(seconds) for t in seconds]
    replicas = [1 + int(share) for share in shares]
    rest = sorted(range(len(seconds)), key=lambda s: int(shares[s]) - shares[s])
    for s in rest[: workers - sum(replicas)]:
        replicas[s] += 1
    return replicas


@wrong("spread_workers")
def spread_to_the_fastest(seconds, workers):
    replicas = [1] * len(seconds)
    replicas[seconds.index(min(seconds))] += workers - len(seconds)
    return replicas


# --- best_m


@right("best_m")
def m_by_slopes(measure, start, most, budget):
    """Doubles or halves from the start, then bisects on the slope."""
    low, high = 1, most
    m = min(start, most)
    while low < high and low <= m < high:
        if measure(m) < measure(m + 1):
            low, m = m + 1, 2 * m
        else:
            high, m = m, m // 2
    while low < high:
        m = (low + high) // 2
        if measure(m) < measure(m + 1):
            low = m + 1
        else:
            high = m
    return low


@right("best_m")
def m_by_plain_bisection(measure, start, most, budget):
    low, high = 1, most
    while low < high:
        m = (low + high) // 2
        low, high = (m + 1, high) if measure(m) < measure(m + 1) else (low, m)
    return np.int64(low)


@right("best_m")
def m_by_three_points(measure, start, most, budget):
    """Keeps a middle that is better than both ends, and probes between."""
    rate = cache(measure)
    middle = min(start, most)
    low, high = max(1, middle // 2), min(most, 2 * middle)
    while low < middle and rate(low) > rate(middle):
        low, middle, high = max(1, low // 2), low, middle
    while high > middle and rate(high) > rate(middle):
        low, middle, high = middle, high, min(most, 2 * high)
    while high > low * 1.1 and high - low > 1:
        a = (low + middle) // 2
        b = (middle + high + 1) // 2
        new = a if (middle - low > high - middle and a != middle) or b in (middle, high) else b
        if new in (low, middle, high):
            break
        if rate(new) > rate(middle):
            low, middle, high = (low, new, middle) if new < middle else (middle, new, high)
        else:
            low, high = (new, high) if new < middle else (low, new)
    return max((low, middle, high), key=rate)


@right("best_m")
def m_by_the_tuner(measure, start, most, budget):
    return ps.tune.tune(measure, start, most, noise=0, limit=budget).best.value


@wrong("best_m")
def m_is_the_start(measure, start, most, budget):
    return min(start, most)


@wrong("best_m")
def m_of_a_sweep(measure, start, most, budget):
    return max(range(1, most + 1), key=measure)


@wrong("best_m")
def m_of_powers_of_two(measure, start, most, budget):
    return max((2**k for k in range(most.bit_length()) if 2**k <= most), key=measure)


@wrong("best_m")
def m_doubles_only(measure, start, most, budget):
    m = min(start, most)
    while 2 * m <= most and measure(2 * m) > measure(m):
        m *= 2
    return m


@wrong("best_m")
def m_doubles_or_halves(measure, start, most, budget):
    """Looks in both directions, but not in between."""
    m = min(start, most)
    while 2 * m <= most and measure(2 * m) > measure(m):
        m *= 2
    while m > 1 and measure(m // 2) > measure(m):
        m //= 2
    return m


@wrong("best_m")
def m_never_smaller_than_the_start(measure, start, most, budget):
    low, high = min(start, most), most
    while low < high:
        m = (low + high) // 2
        low, high = (m + 1, high) if measure(m) < measure(m + 1) else (low, m)
    return low


@wrong("best_m")
def m_step_by_step(measure, start, most, budget):
    """Climbs by one."""
    m = min(start, most)
    for step in (1, -1):
        while 1 <= m + step <= most and measure(m + step) > measure(m):
            m += step
    return m


@wrong("best_m")
def m_of_random_samples(measure, start, most, budget):
    return max((1 + k * most // budget for k in range(budget)), key=measure)


@wrong("best_m")
def m_bisects_the_wrong_side(measure, start, most, budget):
    low, high = 1, most
    while low < high:
        m = (low + high) // 2
        low, high = (m + 1, high) if measure(m) > measure(m + 1) else (low, m)
    return low


@wrong("best_m")
def m_gives_the_throughput(measure, start, most, budget):
    return measure(m_by_plain_bisection(measure, start, most, budget))


@wrong("best_m")
def m_goes_past_the_end(measure, start, most, budget):
    m = start
    while measure(2 * m) > measure(m):
        m *= 2
    low, high = max(m // 2, 1), 2 * m
    while low < high:
        m = (low + high) // 2
        low, high = (m + 1, high) if measure(m) < measure(m + 1) else (low, m)
    return low


# --- scale_of


@right("scale_of")
def scale_by_the_largest(found, right_one):
    at = max(range(len(right_one)), key=lambda i: abs(right_one[i]))
    factor = found[at] / right_one[at]
    rest = math.dist(found, [factor * r for r in right_one])
    return factor if rest <= 1e-4 * math.hypot(*found) else None


@right("scale_of")
def scale_by_projection(found, right_one):
    a, b = np.array(found), np.array(right_one)
    factor = a @ b / (b @ b)
    return factor if np.linalg.norm(a - factor * b) < 1e-4 * np.linalg.norm(a) else None


@right("scale_of")
def scale_by_least_squares(found, right_one):
    """And what is left over is measured beside `right`, in its largest number."""
    a, b = np.array(found), np.array(right_one)
    factor = np.linalg.lstsq(b[:, None], a, rcond=None)[0][0]
    return factor if max(abs(a - factor * b)) < 1e-4 * abs(factor) * np.linalg.norm(b) else None


@right("scale_of")
def scale_by_the_angle(found, right_one):
    a, b = np.array(found), np.array(right_one)
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    if abs(cosine) < 1 - 1e-8:
        return None
    return float(np.sign(cosine) * np.linalg.norm(a) / np.linalg.norm(b))


@wrong("scale_of")
def scale_of_the_first(found, right_one):
    return found[0] / right_one[0]


@wrong("scale_of")
def scale_of_lengths(found, right_one):
    return math.hypot(*found) / math.hypot(*right_one)


@wrong("scale_of")
def scale_of_lengths_with_a_check(found, right_one):
    """A sign that is wrong is taken for a wrong direction."""
    factor = scale_of_lengths(found, right_one)
    rest = math.dist(found, [factor * r for r in right_one])
    return factor if rest <= 1e-4 * math.hypot(*found) else None


@wrong("scale_of")
def scale_only_if_equal(found, right_one):
    factors = {f / r for f, r in zip(found, right_one, strict=True) if r}
    return factors.pop() if len(factors) == 1 else None


@wrong("scale_of")
def scale_upside_down(found, right_one):
    factor = scale_by_the_largest(found, right_one)
    return factor and 1 / factor


@wrong("scale_of")
def scale_never(found, right_one):
    return None


@wrong("scale_of")
def scale_skips_zeros(found, right_one):
    """Does not look where `right` is 0."""
    ratios = [f / r for f, r in zip(found, right_one, strict=True) if r]
    return ratios[0] if max(ratios) - min(ratios) < 1e-4 * abs(ratios[0]) else None


@wrong("scale_of")
def scale_off_by_less_than_a_fixed_number(found, right_one):
    """Takes tiny gradients for equal."""
    a, b = np.array(found), np.array(right_one)
    factor = a @ b / (b @ b)
    return factor if np.linalg.norm(a - factor * b) < 1e-4 else None


@wrong("scale_of")
def scale_of_each_number_on_its_own(found, right_one):
    """A number near 0 is off by much of itself."""
    at = max(range(len(right_one)), key=lambda i: abs(right_one[i]))
    factor = found[at] / right_one[at]
    near = (
        math.isclose(f, factor * r, rel_tol=1e-4) for f, r in zip(found, right_one, strict=True)
    )
    return factor if all(near) else None


@wrong("scale_of")
def scale_up_to_a_hundredth(found, right_one):
    a, b = np.array(found), np.array(right_one)
    factor = a @ b / (b @ b)
    return factor if np.linalg.norm(a - factor * b) < 1e-2 * np.linalg.norm(a) else None


@wrong("scale_of")
def scale_of_sums(found, right_one):
    return sum(found) / sum(right_one) if sum(right_one) else None


# --- clip_factor


@right("clip_factor")
def clip_by_the_whole(norms, clip_norm):
    whole = math.hypot(*norms)
    return clip_norm / whole if whole > clip_norm else 1


@right("clip_factor")
def clip_in_numpy(norms, clip_norm):
    return np.minimum(1.0, clip_norm / max(np.linalg.norm(norms), 1e-30))


@wrong("clip_factor")
def clip_by_the_sum(norms, clip_norm):
    whole = sum(norms)
    return clip_norm / whole if whole > clip_norm else 1.0


@wrong("clip_factor")
def clip_by_the_longest(norms, clip_norm):
    whole = max(norms)
    return clip_norm / whole if whole > clip_norm else 1.0


@wrong("clip_factor")
def clip_without_a_root(norms, clip_norm):
    whole = sum(n * n for n in norms)
    return clip_norm / whole if whole > clip_norm else 1.0


@wrong("clip_factor")
def clip_always(norms, clip_norm):
    return clip_norm / math.hypot(*norms)


@wrong("clip_factor")
def clip_to_length_one(norms, clip_norm):
    whole = math.hypot(*norms)
    return 1 / whole if whole > clip_norm else 1.0


@wrong("clip_factor")
def clip_divides_by_nothing(norms, clip_norm):
    return min(1.0, clip_norm / math.hypot(*norms))


@wrong("clip_factor")
def clip_each_on_its_own(norms, clip_norm):
    return [min(1.0, clip_norm / n) if n else 1.0 for n in norms]


# --- late_descent


@right("late_descent")
def late_by_index(rate, delay, steps):
    weights = [1.0]
    for t in range(steps):
        weights.append(weights[-1] - rate * weights[max(0, t - delay)])
    return weights


@right("late_descent")
def late_by_a_queue(rate, delay, steps):
    past = [1.0] * (delay + 1)
    yield past[-1]
    for _ in range(steps):
        past = [*past[1:], past[-1] - rate * past[0]]
        yield past[-1]


@wrong("late_descent")
def late_without_a_delay(rate, delay, steps):
    return [(1 - rate) ** t for t in range(steps + 1)]


@wrong("late_descent")
def late_starts_from_the_old_weight(rate, delay, steps):
    weights = [1.0]
    for t in range(steps):
        old = weights[max(0, t - delay)]
        weights.append(old - rate * old)
    return weights


@wrong("late_descent")
def late_waits_for_its_first_gradient(rate, delay, steps):
    weights = [1.0]
    for t in range(steps):
        weights.append(weights[-1] - (rate * weights[t - delay] if t >= delay else 0.0))
    return weights


@wrong("late_descent")
def late_one_step_too_late(rate, delay, steps):
    weights = [1.0]
    for t in range(steps):
        weights.append(weights[-1] - rate * weights[max(0, t - delay - 1)])
    return weights


@wrong("late_descent")
def late_reads_from_the_end(rate, delay, steps):
    """A negative index takes the newest."""
    weights = [1.0]
    for t in range(steps):
        weights.append(weights[-1] - rate * weights[t - delay if t >= delay else -1])
    return weights


@wrong("late_descent")
def late_uphill(rate, delay, steps):
    weights = [1.0]
    for t in range(steps):
        weights.append(weights[-1] + rate * weights[max(0, t - delay)])
    return weights


@wrong("late_descent")
def late_without_the_start(rate, delay, steps):
    return late_by_index(rate, delay, steps)[1:]


@wrong("late_descent")
def late_last_weight_only(rate, delay, steps):
    return late_by_index(rate, delay, steps)[-1]
