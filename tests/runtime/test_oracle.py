"""Asynchronous runs against the oracle: every weight, after every update, bit for bit.

Also the versions that the simulator predicts against those that the workers measured, and
policies as a learner writes them in a notebook cell.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pipeschool as ps
import pytest
import torch
from oracle import (
    FORWARD,
    History,
    Rule,
    cut,
    difference,
    gradients,
    replay,
    shorten,
    snapshot,
    torn_gradients,
)
from pipeschool.versions import POLICIES, with_weights
from torch import nn

pytestmark = pytest.mark.xdist_group("oracle")  # two tests look at every case

RULES = ["flush", "latest", "stash", "vertical_sync", "double_buffer"]
OPTIMIZERS = {
    "SGD": lambda w: torch.optim.SGD(w, lr=0.05),
    "momentum": lambda w: torch.optim.SGD(w, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": lambda w: torch.optim.Adam(w, lr=0.01),
    "AdamW": lambda w: torch.optim.AdamW(w, lr=0.01, weight_decay=0.1),
}
SCHEDULERS = {
    "constant": None,
    "warm-up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: min((t + 1) / 5, 1.0)),
    "decay": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.95),
}


class Case(NamedTuple):
    """One run. `stream` is (microbatches in a batch, batches)."""

    rule: str
    p: int
    optimizer: str = "momentum"
    stream: tuple[int, int] = (12, 1)
    scheduler: str = "constant"
    clip: float | None = None
    uneven: bool = True
    delays: bool = False
    loss: str = "mse_loss"
    build: str = ""  # schedule; "" stands for the rule's usual one


# In the order of Case's own fields.
CHOICES: dict[str, list[Any]] = {
    "rule": RULES,
    "p": [1, 2, 3, 4, 5, 6],
    "optimizer": list(OPTIMIZERS),
    "stream": [(1, 1), (5, 3), (7, 2), (5, 6), (50, 1)],
    "scheduler": list(SCHEDULERS),
    "clip": [None, 0.05, 100.0],
    "uneven": [False, True],
    "delays": [False, True],
    "loss": ["mse_loss", "smooth_l1_loss"],
}


def possible(case: Case) -> bool:
    """2BW needs m of p - 1 at least."""
    return case.rule != "double_buffer" or case.stream[0] >= case.p - 1


def pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    """All pairs of choices in `case`."""
    chosen = zip(CHOICES, case, strict=False)
    return set(itertools.combinations(chosen, 2))


def covering_cases() -> list[Case]:
    """Cases in which every possible pair of choices occurs: greedily, the best of some random
    ones that hold a pair still missing."""
    rng = random.Random(0)
    missing = {  # pairs that fit together if the other choices are right
        pair
        for a, b in itertools.combinations(CHOICES, 2)
        for pair in itertools.product(
            [(a, choice) for choice in CHOICES[a]], [(b, choice) for choice in CHOICES[b]]
        )
        if possible(Case("stash", 1)._replace(**dict(pair)))
    }
    cases = []
    while missing:
        wanted = dict(min(missing, key=repr))
        tries = [Case(*map(rng.choice, CHOICES.values()))._replace(**wanted) for _ in range(200)]
        cases.append(max(filter(possible, tries), key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(cases[-1])
    return cases


MORE_CASES = [
    Case("flush", 4, stream=(6, 3), build="gpipe"),
    Case("flush", 3, stream=(4, 2), build="naive"),
    Case("stash", 6, stream=(50, 1), scheduler="warm-up", clip=0.05, delays=True),
    # Several microbatches in an update, under policies that usually take one.
    Case("stash", 4, stream=(5, 4), build="pipedream_2bw"),
    Case("latest", 3, stream=(3, 5), build="pipedream_2bw"),
    Case("vertical_sync", 4, stream=(5, 4), build="pipedream_2bw"),
]
CASES = [*covering_cases(), *MORE_CASES]


# Even, so that every microbatch begins at a multiple of 16 bytes, as a copy of it does: elsewhere
# the matrix library may round in another way.
WIDTH = 6


def unequal_stages(p: int, width: int = WIDTH) -> list[nn.Sequential]:
    """Stages of one to three layers and different widths; `width` goes in and comes out."""
    rng = random.Random(p)
    torch.manual_seed(p)
    stages, wide = [], width
    for stage in range(p):
        layers: list[nn.Module] = []
        for _ in range(rng.randint(1, 3)):
            wide, before = rng.randint(2, 9), wide
            layers += [nn.Linear(before, wide), nn.Tanh()]
        if stage == p - 1:
            layers += [nn.Linear(wide, width)]
        stages.append(nn.Sequential(*layers).double())
    return stages


def data(m: int, batches: int, uneven: bool, width: int = WIDTH) -> list[tuple[Any, Any]]:
    """Batches that m divides, or batches of different sizes that it does not."""
    generator = torch.Generator().manual_seed(m)
    sizes = [2 * m + (1 + b) * (m // 2 + 1) % m if uneven else 2 * m for b in range(batches)]
    return [
        tuple(torch.randn(2, n, width, dtype=torch.float64, generator=generator)) for n in sizes
    ]


def slow(stage: nn.Sequential, seed: int) -> nn.Sequential:
    """`stage`, with random delays in forward and backward, which make its messages late."""

    class Slow(nn.Sequential):  # in here, so that it travels as a whole
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(rng.choice([0, 0, 1e-3 * rng.random()]))
            y = super().forward(x)
            y.register_hook(lambda gradient: time.sleep(rng.choice([0, 0, 1e-3 * rng.random()])))
            return y

    rng = random.Random(seed)
    return Slow(*stage)


def schedule_of(case: Case) -> ps.Schedule:
    """The schedule of a case, under the policy of its rule."""
    builds = {"flush": "one_f_one_b", "double_buffer": "pipedream_2bw"}
    build = getattr(ps, case.build or builds.get(case.rule, "pipedream"))
    m, batches = case.stream
    return with_weights(build(p=case.p, m=m, batches=batches), case.rule)


@functools.cache
def outcome(case: Case) -> tuple[Any, History]:
    """What the pipeline gave for a case, and the oracle's weights. Two tests look at it."""
    schedule, stages = schedule_of(case), unequal_stages(case.p)
    batches = data(*case.stream, case.uneven)
    loss = getattr(nn.functional, case.loss)
    optimizer, scheduler = OPTIMIZERS[case.optimizer], SCHEDULERS[case.scheduler]
    result = ps.run(
        schedule,
        [slow(stage, seed) for seed, stage in enumerate(stages)] if case.delays else stages,
        batches,
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        clip_norm=case.clip,
        history=True,
    )
    m = schedule.updates_every
    expected = replay(
        case.rule,
        stages,
        cut(batches, case.stream[0], m),
        optimizer,
        m=m,
        schedule=scheduler,
        clip=case.clip,
        loss=loss,
    )
    return result, expected


def named(case: Case) -> str:
    """A case in short."""
    return "-".join(str(part) for part in case if part not in ("", None))


every_case = pytest.mark.parametrize(
    "case",
    [
        # Every third in the first tier. All pairs of choices occur in all cases together.
        pytest.param(case, marks=pytest.mark.exhaustive if number % 3 else ())
        for number, case in enumerate(CASES)
    ],
    ids=named,
)


@every_case
def test_the_weights_equal_the_update_rule_after_every_update(case: Case) -> None:
    result, expected = outcome(case)
    m = (
        1
        if case.rule in ("latest", "stash", "vertical_sync") and not case.build
        else case.stream[0]
    )
    assert len(expected) - 1 == case.stream[0] * case.stream[1] // m
    # Bit for bit: backwards go by in the order of their microbatches, so all sums agree.
    assert difference(result.history, expected) is None
    for state, weights in zip(result.state_dicts, expected[-1], strict=True):
        assert all(torch.equal(state[name], weights[name]) for name in weights)


def rows(trace: ps.Trace) -> list[list[tuple[ps.Action, int, int]]]:
    """(action, version, versions held) of every span, worker by worker."""
    return [[(span.action, span.version, span.alive) for span in row] for row in trace.rows]


@every_case
def test_the_workers_use_and_hold_the_versions_that_the_simulator_predicts(case: Case) -> None:
    # Measured is how many copies of the weights lie in memory, not how many the ledger counts.
    measured, predicted = outcome(case)[0].trace, ps.simulate(schedule_of(case))
    assert rows(measured) == rows(predicted)
    assert measured.weight_versions == predicted.weight_versions
    assert measured.staleness == predicted.staleness


@pytest.mark.parametrize("rule", RULES)
def test_frozen_layers_and_stages_without_weights_take_part(rule: str) -> None:
    stages = unequal_stages(3)
    stages[0].requires_grad_(False)  # nothing to train here: no optimizer, and no gradient
    stages.insert(1, nn.Sequential(nn.Tanh()))
    stages[2][0].weight.requires_grad_(False)
    schedule, batches = schedule_of(Case(rule, 4)), data(12, 1, uneven=True)
    m = schedule.updates_every
    adam, clip = OPTIMIZERS["AdamW"], 0.05
    result = ps.run(schedule, stages, batches, optimizer=adam, clip_norm=clip, history=True)
    expected = replay(rule, stages, cut(batches, 12, m), adam, m=m, clip=clip)
    assert difference(result.history, expected) is None
    assert result.trace.weight_versions[1] == 1  # it has no weights to hold copies of


def test_another_order_of_backwards_differs_by_rounding_alone() -> None:
    def last_first(worker: int, p: int, m: int) -> list[ps.Action]:
        return [ps.F(worker, k) for k in range(m)] + [ps.B(worker, k) for k in reversed(range(m))]

    stages, batches = unequal_stages(3), data(7, 3, uneven=True)
    schedule = ps.Schedule.from_workers(last_first, p=3, m=7)
    result = ps.run(schedule, stages, batches, optimizer=OPTIMIZERS["momentum"], history=True)
    expected = replay("flush", stages, cut(batches, 7, 7), OPTIMIZERS["momentum"], m=7)
    # The oracle adds up the gradients from the first microbatch on, this run from the last.
    assert difference(result.history, expected) is not None
    assert difference(result.history, expected, rtol=1e-12) is None


# ---------------------------------------------------------------------------------------------
# Policies as a learner writes them


def stream_under(policy: type[ps.Policy], p: int, m: int, updates_every: int = 1) -> ps.Schedule:
    """The order of asynchronous 1F1B under `policy`."""
    rows = ps.pipedream(p=p, m=m).workers

    def order(worker: int, p: int, m: int) -> list[ps.Action]:
        return [action for action in rows[worker] if action.kind != "U"]

    return ps.Schedule.from_workers(order, p, m, weights=policy, updates_every=updates_every)


class OneMoreLate(ps.Policy):
    """As stash, but one version older still."""

    def forward(self, microbatch: int, newest: int) -> int:
        return max(newest - 1, 0)

    def oldest_needed(self, next_microbatch: int, newest: int) -> int:
        return max(newest - 1, 0)


class TwoAtOnce(ps.Policy):
    """Goes on to the newest version after every second update only: it leaves some out."""

    def forward(self, microbatch: int, newest: int) -> int:
        return max(microbatch - (self.stages - 1), 0) // 2 * 2

    def oldest_needed(self, next_microbatch: int, newest: int) -> int:
        return self.forward(next_microbatch, newest)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (OneMoreLate, lambda s, p, k, m: max(k - (p - 1 - s) - 1, 0)),
        (TwoAtOnce, lambda s, p, k, m: max(k - (p - 1), 0) // 2 * 2),
    ],
)
def test_a_policy_of_ones_own_gives_what_its_rule_says(policy: type[ps.Policy], rule: Rule) -> None:
    stages, batches = unequal_stages(3), data(11, 1, uneven=True)
    schedule = stream_under(policy, p=3, m=11)
    result = ps.run(schedule, stages, batches, optimizer=OPTIMIZERS["Adam"], history=True)
    expected = replay(rule, stages, cut(batches, 11, 1), OPTIMIZERS["Adam"])
    assert difference(result.history, expected) is None
    assert rows(result.trace) == rows(ps.simulate(schedule))


def test_a_policy_in_place_is_the_rule_called_latest() -> None:
    class Careless(ps.Policy):
        in_place = True

        def backward(self, microbatch: int, used: int, newest: int) -> int:
            return newest

    stages, batches = unequal_stages(3), data(8, 1, uneven=False)
    result = ps.run(
        ps.pipedream(p=3, m=8),
        stages,
        batches,
        optimizer=OPTIMIZERS["SGD"],
        weights=Careless,
        history=True,
    )
    expected = replay("latest", stages, cut(batches, 8, 1), OPTIMIZERS["SGD"])
    assert difference(result.history, expected) is None


class FromTheFuture(ps.Policy):
    def forward(self, microbatch: int, newest: int) -> int:
        return microbatch


class FromThePast(ps.Policy):
    def forward(self, microbatch: int, newest: int) -> int:
        return 0


class Forgetful(ps.Policy):
    def forward(self, microbatch: int, newest: int) -> int:  # type: ignore[return]
        max(newest - 1, 0)


class Overtaken(ps.Policy):
    def backward(self, microbatch: int, used: int, newest: int) -> int:
        return newest


class InPlaceButOld(ps.Policy):
    in_place = True


@pytest.mark.parametrize(
    ("policy", "worker", "action", "words"),
    [
        (
            FromTheFuture,
            0,
            ps.F(0, 1),
            "0F1 (forward of microbatch 1 on stage 0) asks for weight version 1, but the "
            "stage holds only 0",
        ),
        (
            FromThePast,  # the stages before the last still hold 0 for microbatches in flight
            2,
            ps.F(2, 1),
            "2F1 (forward of microbatch 1 on stage 2) asks for weight version 0, but the stage "
            "holds only 1",
        ),
        (
            Forgetful,
            0,
            ps.F(0, 0),
            "0F0 (forward of microbatch 0 on stage 0) asks for weight version None, but the stage "
            "holds only 0",
        ),
        (
            Overtaken,
            0,
            ps.B(0, 1),
            "0B1 (backward of microbatch 1 on stage 0) asks for weight version 1, but its forward "
            "used 0, and the graph holds on to that: only an in_place policy may differ",
        ),
        (
            InPlaceButOld,
            0,
            ps.B(0, 1),
            "0B1 (backward of microbatch 1 on stage 0) asks for weight version 0, but the stage "
            "holds only 1",
        ),
    ],
)
def test_a_policy_that_asks_for_what_is_not_there_is_refused_before_the_run(
    policy: type[ps.Policy], worker: int, action: ps.Action, words: str
) -> None:
    stages, batches = unequal_stages(3), data(8, 1, uneven=False)
    for schedule in (stream_under(policy, 3, 8), with_weights(ps.pipedream(3, 8), policy)):
        refusals = [
            lambda schedule=schedule: ps.check(schedule),
            lambda schedule=schedule: ps.simulate(schedule),
            lambda schedule=schedule: ps.run(schedule, stages, batches),
        ]
        for refusal in refusals:
            with pytest.raises(ps.IllegalSchedule) as caught:
                refusal()
            assert str(caught.value) == f"worker {worker}: {words}"
            assert (caught.value.worker, caught.value.action) == (worker, action)


# ---------------------------------------------------------------------------------------------
# The oracle itself


def test_the_oracle_knows_every_policy() -> None:
    assert set(RULES) == set(FORWARD) == set(POLICIES) - {"frozen"}  # which makes no update


@pytest.mark.parametrize("rule", ["flush", "latest", "stash", "vertical_sync"])
@pytest.mark.usefixtures("one_thread")
def test_on_one_stage_every_rule_is_ordinary_training(rule: str) -> None:
    (model,), batches = unequal_stages(1), data(9, 1, uneven=True)
    history = replay(rule, [model], cut(batches, 9, 1), OPTIMIZERS["AdamW"], clip=0.05)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for t, (x, y, _) in enumerate(cut(batches, 9, 1)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        assert all(torch.equal(w, history[t + 1][0][n]) for n, w in model.named_parameters())


def grads(stages: Sequence[nn.Module]) -> list[Any]:
    """What a backward left in each stage's parameters."""
    return [{name: w.grad for name, w in stage.named_parameters()} for stage in stages]


def test_the_oracles_flush_is_the_gradient_of_the_mean_over_the_batch() -> None:
    stages, ((x, y),) = unequal_stages(3), data(5, 1, uneven=True)
    history = replay("flush", stages, cut([(x, y)], 5, 5), OPTIMIZERS["SGD"], m=5)
    nn.functional.mse_loss(nn.Sequential(*stages)(x), y).backward()
    step = [
        {name: weights[name] - 0.05 * found[name] for name in weights}
        for weights, found in zip(history[0], grads(stages), strict=True)
    ]
    assert difference(history[1:], [step], rtol=1e-12) is None


def test_the_rules_the_shortening_and_the_schedules_make_a_difference() -> None:
    stages, batches = unequal_stages(3), data(3, 3, uneven=False)
    stream = cut(batches, 3, 1)
    histories = [replay(rule, stages, stream, OPTIMIZERS["SGD"]) for rule in RULES]
    histories.append(replay("stash", stages, stream, OPTIMIZERS["SGD"], clip=0.05))
    for name in ("warm-up", "decay"):
        histories.append(
            replay("stash", stages, stream, OPTIMIZERS["SGD"], schedule=SCHEDULERS[name])
        )
    for one, other in itertools.combinations(histories, 2):
        assert difference(one, other, rtol=1e-6) is not None


@pytest.mark.usefixtures("one_thread")
def test_weights_overwritten_behind_autograds_back_give_what_was_derived_by_hand() -> None:
    stages, newer = unequal_stages(3), unequal_stages(3)
    for stage in newer:
        for weight in stage.parameters():
            weight.data += 0.1
    old, new = snapshot(stages), snapshot(newer)
    ((x, y),) = data(6, 1, uneven=True)
    loss = nn.functional.mse_loss
    found = torn_gradients(stages, old, new, x, y, 0.3, loss)
    same = torn_gradients(newer, new, new, x, y, 0.3, loss)
    value = 0.3 * loss(nn.Sequential(*stages)(x), y)
    for stage, weights in zip(stages, new, strict=True):
        for name, weight in stage.named_parameters():
            weight.data.copy_(weights[name])  # autograd does not notice
    value.backward()
    assert difference([found], [grads(stages)]) is None
    right = gradients(newer, new, x, y, 0.3, loss)
    assert difference([same], [right]) is None
    assert difference([found], [right], rtol=1e-3) is not None


def test_the_oracle_cuts_and_weighs_microbatches_by_their_samples() -> None:
    x = torch.arange(20.0)
    stream = cut([(x[:13], x[:13]), (x[13:], x[13:])], pieces=5, m=5)
    assert [len(x) for x, _, _ in stream] == [3, 3, 3, 2, 2, 2, 2, 1, 1, 1]
    assert torch.equal(torch.cat([x for x, _, _ in stream]), x)
    assert all(torch.equal(x, y) for x, y, _ in stream)
    assert [share for *_, share in stream] == [n / 13 for n in (3, 3, 3, 2, 2)] + [
        n / 7 for n in (2, 2, 1, 1, 1)
    ]
    assert {share for *_, share in cut([(x, x)], pieces=6, m=1)} == {1.0}


def test_the_oracle_shortens_gradients_as_torch_does() -> None:
    for length in (0.1, 1e6):  # the second is longer than they are
        (stage,) = unequal_stages(1)
        (stage(data(3, 1, uneven=False)[0][0]) ** 2).sum().backward()
        found = [copy.deepcopy(part) for part in grads([stage])]
        shorten(list(found[0].values()), length)
        nn.utils.clip_grad_norm_(stage.parameters(), length)
        assert difference([found], [grads([stage])]) is None
