"""Would the oracle notice? Mistakes that one can make in the runtime, each made on purpose.

A mutant is a function that replaces a method of the runtime. It must do so in the workers, and
those are not children of this process. So it travels inside the optimizer: where that is
unpickled, the mutant is installed. This process, and so checks and oracle, stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import pipeschool as ps
import pytest
import torch
from oracle import cut, difference, replay
from pipeschool.actions import Action
from pipeschool.runtime.stages.stage import Stage
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.weights.stage_weights import StageWeights, Version
from pipeschool.versions import Ledger, with_weights
from torch import Tensor, nn

# Functions of this file travel as code: importing pytest in every worker would take a while.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Mutant = Callable[[], None]
P = 4
STREAMS = {"stash": (12, 1), "vertical_sync": (12, 1), "double_buffer": (4, 4)}


def sgd(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def adam(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, lr=0.01)


class Carrier:
    """Makes the optimizer, and brings a mutant along to where it does so."""

    def __init__(self, mutant: Mutant, make: Callable[..., torch.optim.Optimizer]):
        self.mutant, self.make = mutant, make

    def __call__(self, weights: Any) -> torch.optim.Optimizer:
        raise AssertionError("only what comes out of the parcel makes an optimizer")

    def __reduce__(self) -> tuple[Any, ...]:
        return installed, (self.mutant, self.make)


def installed(mutant: Mutant, make: Any) -> Any:
    mutant()
    return make


def nothing() -> None:
    """No mistake."""


def stashes_the_version_before() -> None:
    """Where a stage still has it, a forward gets one version older than it should."""
    use = StageWeights.use

    def mistaken(self: StageWeights, action: Action) -> Version:
        version = use(self, action)
        older = version.number - 1
        if action.kind == "F" and older in self.versions:
            ledger = self.ledger
            ledger.users[version.number] -= 1
            ledger.users[older] += 1
            ledger.used[action.microbatch] = older
            return Version(older, version.held, self.versions[older])
        return version

    StageWeights.use = mistaken  # type: ignore[method-assign]


def updates_one_microbatch_late() -> None:
    """An update steps on the gradients that were due at the one before it, the first on none."""
    update = StageWeights.update

    def mistaken(self: StageWeights, action: Action, norm: Tensor | None = None) -> Version:
        due = self.__dict__.get("put_off", {})
        self.put_off, self.gradients = self.gradients, due  # type: ignore[attr-defined]
        return update(self, action, norm)

    StageWeights.update = mistaken  # type: ignore[method-assign]


def drops_a_version_that_is_in_use() -> None:
    """The ledger forgets microbatches in flight: the version goes while they need it."""

    def mistaken(self: Ledger, version: int) -> bool:
        return self.oldest <= version <= self.newest

    Ledger.holds = mistaken  # type: ignore[method-assign]


def has_room_for_one_version_too_few() -> None:
    """A full stash gives the memory of its oldest version, still in use, to the newest."""
    update = StageWeights.update

    def mistaken(self: StageWeights, action: Action, norm: Tensor | None = None) -> Version:
        version = update(self, action, norm)
        policy = self.ledger.policy
        needed = {
            "stash": policy.stages - policy.stage,
            "vertical_sync": policy.stages,
            "double_buffer": 2,
        }
        if len(self.versions) >= needed[policy.name]:
            for name, values in self.versions[min(self.versions)].items():
                values.data.copy_(version.parameters[name].data)
        return version

    StageWeights.update = mistaken  # type: ignore[method-assign]


def forgets_to_divide_by_m() -> None:
    """The gradients of an update's microbatches are added up, not averaged."""

    backward = Stage.backward

    def mistaken(self: Stage, microbatch: int, gradients: Tensors | float) -> Tensors:
        last = isinstance(gradients, float)
        return backward(self, microbatch, 1.0 if last else gradients)

    Stage.backward = mistaken  # type: ignore[method-assign]


def goes_back_through_the_newest() -> None:
    """Before a backward the newest values are copied over those of the forward."""
    use = StageWeights.use

    def mistaken(self: StageWeights, action: Action) -> Version:
        newest = self.versions[self.ledger.newest]
        version = use(self, action)
        if action.kind == "B":
            for name, values in version.parameters.items():
                values.data.copy_(newest[name].data)
        return version

    StageWeights.use = mistaken  # type: ignore[method-assign]


def departs(mutant: Mutant, rule: str, make: Any) -> tuple[int, int] | None:
    """(updates done, stage) where a run with the mutant first departs from the oracle, or None."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(P)]
    m, batches = STREAMS[rule]
    data = [
        (torch.randn(2 * m + 1, 4).double(), torch.randn(2 * m + 1, 4).double())
        for _ in range(batches)
    ]
    build = ps.pipedream_2bw if rule == "double_buffer" else ps.pipedream
    schedule = with_weights(build(P, m, batches), rule)
    result = ps.run(schedule, stages, data, optimizer=Carrier(mutant, make), history=True)
    every = schedule.updates_every
    expected = replay(rule, stages, cut(data, m, every), make, m=every)
    found = difference(result.history, expected)
    return found and found[:2]


@pytest.mark.parametrize(
    ("rule", "make"),
    [("stash", sgd), ("vertical_sync", sgd), ("double_buffer", sgd), ("stash", adam)],
)
def test_the_runtime_as_it_is_passes_the_comparison_that_mutants_fail(rule: str, make: Any) -> None:
    assert departs(nothing, rule, make) is None


@pytest.mark.parametrize(
    ("mutant", "rule", "make", "update"),
    [
        # Stage 2 stashes two versions; microbatch 2 is its first with another one than the start.
        (stashes_the_version_before, "stash", sgd, 3),
        (stashes_the_version_before, "vertical_sync", sgd, 5),  # microbatch 4 has version 1
        (stashes_the_version_before, "double_buffer", sgd, 3),  # and so has the third batch
        (updates_one_microbatch_late, "stash", sgd, 1),
        (updates_one_microbatch_late, "vertical_sync", sgd, 1),
        (updates_one_microbatch_late, "double_buffer", sgd, 1),
        # Microbatch 1 is under way on stage 2 while the first update takes its version's place.
        (has_room_for_one_version_too_few, "stash", sgd, 2),
        (has_room_for_one_version_too_few, "vertical_sync", sgd, 4),  # 3 updates fill the room
        (has_room_for_one_version_too_few, "double_buffer", sgd, 2),
        (forgets_to_divide_by_m, "double_buffer", sgd, 1),
        # Adam divides by the gradients' own size, and so all but hides it.
        (forgets_to_divide_by_m, "double_buffer", adam, 1),
        (goes_back_through_the_newest, "stash", sgd, 2),
        (goes_back_through_the_newest, "vertical_sync", sgd, 2),
        (goes_back_through_the_newest, "double_buffer", sgd, 2),
    ],
)
def test_a_mutant_departs_from_the_oracle_at_the_first_update_it_spoils(
    mutant: Mutant, rule: str, make: Any, update: int
) -> None:
    found = departs(mutant, rule, make)
    assert found is not None
    assert found[0] == update


@pytest.mark.parametrize("rule", STREAMS)
def test_a_version_dropped_while_it_is_in_use_ends_the_run(rule: str) -> None:
    with pytest.raises(
        ps.RunError, match=r"\dB\d+ .*asks for weight version 0, but the stage holds"
    ):
        departs(drops_a_version_that_is_in_use, rule, sgd)


def test_what_is_no_mistake_is_not_reported() -> None:
    # An update of a single microbatch has nothing to divide by.
    assert departs(forgets_to_divide_by_m, "stash", sgd) is None
