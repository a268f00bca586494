"""What a training is, in words and numbers that its checkpoint can keep, to be compared later."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pipeschool.actions import Schedule
from pipeschool.runtime.described import described, module_settings
from pipeschool.runtime.options import RunOptions
from pipeschool.runtime.stages.tensors import describe
from pipeschool.runtime.weights.ties import ties_of

# Options that decide how a training goes, and not what comes out of it.
NO_INFLUENCE = {
    "pace", "timeout", "nan_check", "history", "update_stages", "recompute", "memory", "latency",
    "bandwidth", "check_loss", "matching",
}  # fmt: skip
SEPARATE = {"optimizer", "scheduler", "seed"}  # what comes of them is compared, or they must agree
NOT_A_SETTING = {"optimizer", "_last_lr"}  # of what a scheduler holds


@dataclass(frozen=True)
class Rule:
    """The optimizer and the scheduler of a stage, as the caller's functions make them here: to look
    at, while those that train are on the workers.

    made: the settings of each group, as the optimizer was made. begin: the same with what the
    scheduler, where there is one, sets them to at its beginning.
    """

    optimizer: Optimizer
    scheduler: Any
    names: list[list[str]]  # of the parameters in each group
    made: list[dict[str, Any]]
    begin: list[dict[str, Any]]

    @property
    def driven(self) -> set[str]:
        """The settings that the scheduler moves."""
        if self.scheduler is None:
            return set()
        moved = {
            key
            for made, begin in zip(self.made, self.begin, strict=True)
            for key in begin
            if key not in made or described(made[key]) != described(begin[key])
        }
        cycled = {"momentum", "betas"} if getattr(self.scheduler, "cycle_momentum", False) else {}
        return {"lr", *moved, *cycled}


def rule_of(stage: nn.Module, options: RunOptions) -> Rule | None:
    """That of `stage`; None where nothing is trained, or where only a worker can make it."""
    named = [(name, p) for name, p in stage.named_parameters() if p.requires_grad]
    if not named or options.optimizer is None:
        return None
    try:
        twins = {nn.Parameter(parameter.detach()): name for name, parameter in named}
        optimizer = options.optimizer(list(twins))
        groups = optimizer.param_groups
        made = [_settings(group) for group in groups]
        scheduler = options.scheduler(optimizer) if options.scheduler else None
        begin = [_settings(group) for group in groups]
        names = [[twins[parameter] for parameter in group["params"]] for group in groups]
    except Exception:  # the workers make it, too, and say what is wrong with it
        return None
    return Rule(optimizer, scheduler, names, made, begin)


def identity_of(
    schedule: Schedule,
    v: int,
    every: int | None,
    options: RunOptions,
    stages: Sequence[nn.Module],
    loader: Iterable[Any],
    rules: Sequence[Rule | None],
) -> dict[str, Any]:
    """The training in plain values. `first batch` is for `first_batch` to say, once it is there."""
    optimizer = "None" if options.optimizer is None else "made by the workers"
    for rule in filter(None, rules):
        optimizer = type(rule.optimizer).__qualname__
    length = operator.length_hint(loader, -1)
    matter = {f.name for f in fields(options)} - NO_INFLUENCE - SEPARATE
    chosen = {name: getattr(options, name) for name in sorted(matter)}
    chosen["loss"] = options.loss or nn.functional.mse_loss
    return {
        "fixed": {
            "schedule": schedule.name,
            "p": schedule.p,
            "v": v,
            "m": schedule.m,
            "weights": getattr(schedule.weights, "__name__", schedule.weights),
            "updates_every": schedule.updates_every,
            "every": every,
            "seed": options.seed,
            "ties": described(ties_of(stages)),
            "optimizer": optimizer,
        },
        "layers": [
            {name or "itself": type(layer).__qualname__ for name, layer in stage.named_modules()}
            for stage in stages
        ],
        "trained": [
            [name for name, p in stage.named_parameters() if p.requires_grad and options.optimizer]
            for stage in stages
        ],
        "layer settings": [module_settings(stage) for stage in stages],
        "rules": [_in_words(rule) if rule else None for rule in rules],
        "options": {name: described(value) for name, value in chosen.items()}
        | {"default dtype": described(torch.get_default_dtype())},
        "batches": length if length >= 0 else None,
        "first batch": None,
    }


def first_batch(batch: Any) -> str:
    """Shapes and types of a batch: ``(6, 5) float64, (6, 5) float64``."""
    return ", ".join(describe(leaf) for leaf in tree_leaves(batch))


def weights_of(state_dict: dict[str, Any]) -> dict[str, str]:
    """Shape and type of every weight."""
    return {
        name: "of no shape yet" if nn.parameter.is_lazy(value) else describe(value)
        for name, value in state_dict.items()
    }


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _in_words(rule: Rule) -> dict[str, Any]:
    return {
        "optimizer": type(rule.optimizer).__qualname__,
        "names": rule.names,
        "settings": [
            {key: described(value) for key, value in group.items()} for group in rule.made
        ],
        "scheduler": _scheduler_in_words(rule.scheduler, rule),
        "driven": sorted(rule.driven),
    }


def _scheduler_in_words(scheduler: Any, rule: Rule) -> dict[str, str] | None:
    """The class and the settings of a scheduler and of those in it; but for the learning rate that
    it has from the optimizer, which is not its own."""
    if scheduler is None:
        return None
    own = {key: value for key, value in vars(scheduler).items() if key not in NOT_A_SETTING}
    if list(own.get("base_lrs", [])) == [group.get("lr") for group in rule.made]:
        del own["base_lrs"]
    inner = own.pop("_schedulers", ())
    words = {"scheduler": type(scheduler).__qualname__, "schedulers in it": str(len(inner))}
    words |= {f"scheduler's {key}": described(value) for key, value in own.items()}
    words |= {
        f"scheduler's {key}": described([group[key] for group in rule.begin])
        for key in rule.begin[0]
        if key not in rule.made[0] and key != "initial_lr"
    }
    for number, part in enumerate(inner):
        for key, value in (_scheduler_in_words(part, rule) or {}).items():
            words[f"{key} {number}"] = value
    return words
