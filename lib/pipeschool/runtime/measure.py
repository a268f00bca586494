"""Measure what the stages of a model cost, in seconds and in bytes, before anything runs."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipeschool.actions import Action, B, F, I, Schedule, U, W
from pipeschool.cost import Cost
from pipeschool.runtime.observers.live_bytes import LiveBytes, size_of
from pipeschool.runtime.stages.loss import Loss
from pipeschool.runtime.stages.microbatches import cut, shares
from pipeschool.runtime.stages.random_numbers import put_back
from pipeschool.runtime.stages.stage import Stage
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.weights.stage_weights import MakeOptimizer, StageWeights, Update
from pipeschool.versions import OneVersion

Do = Callable[[Action, Callable[[], Any]], Any]  # does the work of an action, and measures it


class Measured(NamedTuple):
    """What was measured.

    cost: medians, and bytes. seconds: all times that count, by kind of action and stage. warm_up:
    seconds of the first microbatch, there and back, which do not count.
    """

    cost: Cost
    seconds: Mapping[str, Mapping[int, Sequence[float]]]
    warm_up: float


def measure(
    stages: Sequence[nn.Module],
    batch: tuple[Any, Any],
    m: int,
    loss: Loss,
    optimizer: MakeOptimizer | None,
    rounds: int,
    recompute: bool | Sequence[bool] = False,
) -> Measured:
    """See `pipeschool.runtime.profile`. `recompute` is for the `Cost`, which knows what follows."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"batch must be one (inputs, targets) pair, not {type(batch).__name__}")
    listed = isinstance(stages, (Sequence, nn.ModuleList, nn.Sequential)) and len(stages) > 0
    if not listed or not all(isinstance(stage, nn.Module) for stage in stages):
        raise ValueError("stages must be a list of one or more modules")
    schedule = Schedule("profile", 1, m, ())
    inputs, targets, weights = cut([batch], schedule)
    scales = shares(weights, schedule)
    line = [_stage(index, module, optimizer) for index, module in enumerate(stages)]

    def microbatch(turn: int, split: bool, do: Do) -> None:
        k = turn % len(inputs)
        # Copies: a stage may change its input in place.
        values, target = tuple(x.clone() for x in inputs[k]), targets[k]
        _there_and_back(line, k, values, lambda y: loss(y, target), scales[k], split, do)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    first, clock, scale = _Clock(), _Clock(), _Scale(len(line))
    try:
        with put_back():  # a dropout here must not change what comes later
            microbatch(0, False, first.do)  # the first time is slower
            with scale.live:
                microbatch(1, False, scale.do)
            for turn in range(2 * rounds):
                microbatch(turn, turn % 2 == 1, clock.do)
        for stage in line:
            update = U(stage.index, 0)
            clock.do(update, partial(stage.weights.update, update))
    finally:
        torch.set_num_threads(threads)
    held = [stage.weights for stage in line]
    states = [list(w.optimizer.state.values()) if w.optimizer else [] for w in held]
    cost = Cost(
        forward=clock.medians("F"),
        backward=clock.medians("B"),
        input_backward=clock.medians("I"),
        weight_backward=clock.medians("W"),
        update=clock.medians("U"),
        recompute=recompute,
        message_bytes=scale.messages,
        parameter_bytes=[w.bytes for w in held],
        gradient_bytes=[size_of(w.last_gradients.values()) for w in held],
        optimizer_bytes=[size_of(tree_leaves(state)) for state in states],
        activation_bytes=scale.activations,
        working_bytes=scale.working,
    )
    return Measured(cost, clock.seconds, first.total)


class _Clock:
    """Seconds of every action, by kind and stage."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def do(self, action: Action, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.seconds[action.kind][action.stage].append(time.perf_counter() - start)
        return result

    @property
    def total(self) -> float:
        """The sum of all."""
        return sum(sum(times) for kind in self.seconds.values() for times in kind.values())

    def medians(self, kind: str) -> list[float]:
        return [median(times) for _, times in sorted(self.seconds[kind].items())]


class _Scale:
    """Bytes: what a forward leaves behind, what a backward needs on top, what is handed on."""

    def __init__(self, stages: int):
        self.live = LiveBytes()
        self.activations = [0.0] * stages
        self.working = [0.0] * stages
        self.messages = [0.0] * stages

    def do(self, action: Action, work: Callable[[], Any]) -> Any:
        kind, stage, _ = action
        before = self.live.peak = self.live.now
        result = work()
        if kind == "F":
            self.activations[stage] = self.live.now - before
            last = stage == len(self.messages) - 1
            self.messages[stage] = 0.0 if last else size_of(result)
        elif kind == "B":  # the gradient that came in is there already
            self.working[stage] = self.live.peak - before + self.messages[stage]
        return result


def _stage(index: int, module: nn.Module, optimizer: MakeOptimizer | None) -> Stage:
    own = copy.deepcopy(module)
    return Stage(index, own, StageWeights(own, Update(optimizer), OneVersion()))


def _there_and_back(
    line: Sequence[Stage],
    k: int,
    values: Tensors,
    loss: Callable[[Any], torch.Tensor],
    scale: float,
    split: bool,
    do: Do,
) -> None:
    """Take microbatch `k` forward through all stages, and back."""
    for stage in line:
        end = loss if stage is line[-1] else None
        values = do(F(stage.index, k), partial(stage.forward, k, values, end))
    gradients: Tensors | float = scale
    for stage in reversed(line):
        s = stage.index
        if not split:
            gradients = do(B(s, k), partial(stage.backward, k, gradients))
        else:
            gradients = do(I(s, k), partial(stage.backward_input, k, gradients))
            do(W(s, k), partial(stage.backward_weight, k))
