"""What learners may hand in for unit 06: right answers of several kinds, and plausible wrong ones.

`RIGHT[name]` and `WRONG[name]` are lists of functions. Each stands for an answer called `name`; its
own name says what is particular about it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from pipeschool.grade.unit06 import SITES
from pipeschool.mix import Mix, recommend

RIGHT = defaultdict(list)
WRONG = defaultdict(list)


def right(name):
    return lambda function: RIGHT[name].append(function) or function


def wrong(name):
    return lambda function: WRONG[name].append(function) or function


def named(name, function):
    function.__name__ = name
    return function


# --- boundary_bytes


@right("boundary_bytes")
def boundary_formula(microbatch, sequence, hidden, bytes_per_number):
    return microbatch * sequence * hidden * bytes_per_number


@right("boundary_bytes")
def boundary_of_an_array(microbatch, sequence, hidden, bytes_per_number):
    return np.zeros((microbatch, sequence, hidden)).size * bytes_per_number


@wrong("boundary_bytes")
def boundary_without_bytes(microbatch, sequence, hidden, bytes_per_number):
    return microbatch * sequence * hidden


@wrong("boundary_bytes")
def boundary_of_one_sequence(microbatch, sequence, hidden, bytes_per_number):
    return sequence * hidden * bytes_per_number


@wrong("boundary_bytes")
def boundary_of_one_word(microbatch, sequence, hidden, bytes_per_number):
    return microbatch * hidden * bytes_per_number


@wrong("boundary_bytes")
def boundary_in_four_bytes(microbatch, sequence, hidden, bytes_per_number):
    return microbatch * sequence * hidden * 4


@wrong("boundary_bytes")
def boundary_as_large_as_weights(microbatch, sequence, hidden, bytes_per_number):
    return microbatch * sequence * hidden**2 * bytes_per_number


# --- tensor_bytes


@right("tensor_bytes")
def ring_formula(layers, tensor, boundary):
    return layers * 4 * 2 * (tensor - 1) / tensor * boundary


@right("tensor_bytes")
def ring_step_by_step(layers, tensor, boundary):
    sent = 0
    for _ in range(layers):
        for _ in ("attention", "linear", "attention back", "linear back"):
            for _ in ("add up", "hand out"):
                for _ in range(tensor - 1):
                    sent += boundary / tensor
    return np.float64(sent)


for _name, _function in {
    "ring_forward_only": lambda n, t, b: 2 * n * 2 * (t - 1) / t * b,
    "ring_rounded_down": lambda n, t, b: n * 4 * (2 * (t - 1) // t) * b,
    "ring_one_round": lambda n, t, b: 4 * n * (t - 1) / t * b,
    "ring_whole_boundaries": lambda n, t, b: 4 * n * 2 * (t - 1) * b,
    "ring_of_all_devices": lambda n, t, b: 4 * n * 2 * (t - 1) / t * b * t,
    "ring_once_for_all_layers": lambda n, t, b: 4 * 2 * (t - 1) / t * b,
    "ring_two_boundaries": lambda n, t, b: 4 * n * 2 * b,
    "ring_one_too_many": lambda n, t, b: 4 * n * 2 * b if t > 1 else 0,
    "ring_but_alone_too": lambda n, t, b: 4 * n * 2 * max(t - 1, 1) / t * b,
}.items():
    wrong("tensor_bytes")(named(_name, _function))


# --- plan_bytes


@right("plan_bytes")
def plan_formula(schedule, pipeline, tensor, m, parameters, layers, layer_activations):
    held = {"gpipe": m}.get(schedule, min(m, pipeline))
    per_weight = 2 + 2 + 12 + 2 * (schedule == "pipedream_2bw")
    return (
        per_weight * parameters // (pipeline * tensor)
        + held * layers // pipeline * layer_activations
    )


@right("plan_bytes")
def plan_item_by_item(schedule, pipeline, tensor, m, parameters, layers, layer_activations):
    mine = parameters / pipeline / tensor
    bill = {"weights": 2 * mine, "gradients": 2 * mine, "optimizer": 12 * mine}
    if schedule == "pipedream_2bw":
        bill["versions"] = 2 * mine
    flying = m if schedule == "gpipe" or m < pipeline else pipeline
    bill["activations"] = flying * (layers / pipeline) * layer_activations
    return np.float64(sum(bill.values()))


def plan_with(held=None, per_weight=None, cut=None, mine=None):
    def plan(schedule, pipeline, tensor, m, parameters, layers, layer_activations):
        normal = m if schedule == "gpipe" else min(m, pipeline)
        flying = held(schedule, pipeline, m) if held else normal
        each = per_weight(schedule) if per_weight else 18 if schedule == "pipedream_2bw" else 16
        weights = parameters / (cut(pipeline, tensor) if cut else pipeline * tensor)
        share = mine(layers, pipeline) if mine else layers / pipeline
        return each * weights + flying * share * layer_activations

    return plan


for _name, _changes in {
    "plan_gpipe_like_1f1b": {"held": lambda schedule, p, m: min(m, p)},
    "plan_1f1b_like_gpipe": {"held": lambda schedule, p, m: m},
    "plan_without_m": {"held": lambda schedule, p, m: m if schedule == "gpipe" else p},
    "plan_of_one_microbatch": {"held": lambda schedule, p, m: 1},
    "plan_weights_only": {"per_weight": lambda schedule: 4 if schedule == "pipedream_2bw" else 2},
    "plan_one_version": {"per_weight": lambda schedule: 16},
    "plan_all_twice_for_2bw": {
        "per_weight": lambda schedule: 32 if schedule == "pipedream_2bw" else 16
    },
    "plan_tensor_forgotten": {"cut": lambda p, t: p},
    "plan_pipeline_forgotten": {"cut": lambda p, t: t},
    "plan_all_layers": {"mine": lambda layers, p: layers},
}.items():
    wrong("plan_bytes")(named(_name, plan_with(**_changes)))


# --- share_of


@right("share_of")
def share_by_steps(line, lines, m):
    return range(line, m, lines)


@right("share_of")
def share_by_remainder(line, lines, m):
    return [k for k in reversed(range(m)) if k % lines == line]


@right("share_of")
def share_in_numpy(line, lines, m):
    return np.arange(m)[line::lines]


@wrong("share_of")
def share_in_blocks(line, lines, m):
    return list(range(line * m // lines, (line + 1) * m // lines))


@wrong("share_of")
def share_from_one_on(line, lines, m):
    return list(range(line + 1, m + 1, lines))


@wrong("share_of")
def share_without_the_rest(line, lines, m):
    return [line + lines * turn for turn in range(m // lines)]


@wrong("share_of")
def share_everything(line, lines, m):
    return list(range(m))


@wrong("share_of")
def share_how_many(line, lines, m):
    return [len(range(line, m, lines))]


# --- mean_gradient


@right("mean_gradient")
def mean_column_by_column(gradients, samples):
    result = []
    for i in range(len(gradients[0])):
        total = 0.0
        for gradient, n in zip(gradients, samples, strict=True):
            total += n * gradient[i]
        result.append(total / sum(samples))
    return result


@right("mean_gradient")
def mean_in_numpy(gradients, samples):
    return np.average(np.array(gradients), axis=0, weights=samples)


@wrong("mean_gradient")
def mean_of_lines(gradients, samples):
    return list(np.mean(gradients, axis=0))


@wrong("mean_gradient")
def mean_not_divided(gradients, samples):
    return list(np.sum(gradients, axis=0))


@wrong("mean_gradient")
def mean_over_samples_too(gradients, samples):
    """A sum of means, divided by all samples."""
    return list(np.sum(gradients, axis=0) / sum(samples))


@wrong("mean_gradient")
def mean_weighted_not_divided(gradients, samples):
    return list(np.array(samples) @ np.array(gradients))


@wrong("mean_gradient")
def mean_of_the_first_line(gradients, samples):
    return gradients[0]


@wrong("mean_gradient")
def mean_the_wrong_way(gradients, samples):
    """A mean for each line."""
    return [sum(gradient) / len(gradient) + 0.5 for gradient in gradients]


# --- choose


@right("choose")
def choose_with_care(site):
    return {
        "desk": (Mix(m=32), "one device suffices"),
        "workstation": (Mix(data=8, m=2), ["one device suffices", "faster than a pipeline"]),
        "server": (Mix(data=2, pipeline=4, m=32), "must be cut"),
        "office": (Mix(pipeline=4, m=64), ["pipeline across nodes", "faster than data parallel"]),
        "cluster": (Mix(pipeline=8, tensor=8, m=128), "tensor inside the node"),
    }[site]


@right("choose")
def choose_otherwise(site):
    """As defensible."""
    return {
        "desk": [Mix(m=8, microbatch=4), ["one device suffices"]],
        "workstation": [Mix(data=8, m=1, microbatch=2), ("faster than a pipeline",)],
        "server": [Mix(pipeline=4, tensor=2, m=64), "small bubble"],
        "office": [Mix(pipeline=4, m=64), "faster than data parallel"],
        "cluster": [Mix(pipeline=8, tensor=8, m=128), ["must be cut", "small bubble"]],
    }[site]


@right("choose")
def choose_by_asking(site):
    place = SITES[site]
    found = recommend(place.model, place.machine, place.batch)
    return found.best.mix, [r.kind for r in found.reasons if r.kind != "fits"]


def choosing(mix_of, reason=None):
    def answer(site):
        place = SITES[site]
        mix = mix_of(place.machine, place.batch)
        return mix, reason or choose_with_care(site)[1]

    return answer


def tensor_everywhere(machine, batch):
    return Mix(tensor=machine.devices, m=batch)


def pipeline_everywhere(machine, batch):
    return Mix(pipeline=machine.devices, m=batch)


def copies_everywhere(machine, batch):
    return Mix(data=machine.devices, m=batch // machine.devices)


wrong("choose")(named("choose_always_pipeline", choosing(pipeline_everywhere)))
wrong("choose")(named("choose_always_tensor", choosing(tensor_everywhere)))
wrong("choose")(named("choose_always_copies", choosing(copies_everywhere)))
wrong("choose")(named("choose_one_device", choosing(lambda machine, batch: Mix(m=batch))))
wrong("choose")(
    named("choose_more_than_there_is", choosing(lambda machine, batch: Mix(data=128, m=batch)))
)


@wrong("choose")
def choose_half_of_the_devices(site):
    return {
        "desk": (Mix(m=4, microbatch=8), "one device suffices"),
        "workstation": (Mix(data=4, m=4), "one device suffices"),
        "server": (Mix(pipeline=4, m=64), "must be cut"),
        "office": (Mix(pipeline=2, m=64), "faster than data parallel"),
        "cluster": (Mix(pipeline=4, tensor=8, m=128), "must be cut"),
    }[site]


@wrong("choose")
def choose_for_the_same_reason(site):
    return choose_with_care(site)[0], "must be cut"


@wrong("choose")
def choose_for_no_reason(site):
    return choose_with_care(site)[0], []


@wrong("choose")
def choose_for_a_reason_of_ones_own(site):
    return choose_with_care(site)[0], "it is the best"


@wrong("choose")
def choose_another_batch(site):
    mix, reason = choose_with_care(site)
    return Mix(mix.data, mix.pipeline, mix.tensor, 1), reason


@wrong("choose")
def choose_without_a_reason(site):
    return choose_with_care(site)[0]
