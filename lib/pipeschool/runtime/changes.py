"""Going on from a checkpoint with other arguments: what cannot go on is refused; what can is said,
and holds from there on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeschool.runtime.described import described, was_is
from pipeschool.runtime.host.result import State
from pipeschool.runtime.identity import Rule, weights_of
from pipeschool.runtime.weights.stage_weights import StageState

MOST = 3  # places in a sentence, or sentences of one kind
Group = tuple[int, int]  # stage, group of parameters there


def refuse_another(
    file: Path,
    saved: dict[str, Any],
    mine: dict[str, Any],
    state: State,
    stages: Sequence[nn.Module],
    batch: int,
) -> None:
    """ValueError, naming the first difference, where `file` is of a training that cannot go on as
    the one with the identity `mine`. batch: of the epoch under way, how many are done."""

    def compare(what: str, old: object, new: object) -> None:
        if old != new:
            shown = was_is(*(described(v).strip("'") for v in (old, new)))
            raise ValueError(
                f"{file} belongs to another training, with {what}{shown[0]} and not {shown[1]}: "
                "go on with the same, or choose another file"
            )

    def compare_each(what: str, s: int, old: dict[str, str], new: dict[str, str]) -> None:
        for name in {**old, **new}:
            place = f"{what} {name} of stage {s}: "
            compare(place, old.get(name, "nothing"), new.get(name, "nothing"))

    for key, value in mine["fixed"].items():
        compare(f"{key}=", saved["fixed"].get(key), value)
    for s, stage in enumerate(stages):
        compare_each("layer", s, saved["layers"][s], mine["layers"][s])
        now = weights_of(stage.state_dict())
        compare_each("weight", s, weights_of(state.stages[s].weights), now)
        compare(f"trained in stage {s}: ", saved["trained"][s], mine["trained"][s])
        old, new = saved["rules"][s], mine["rules"][s]
        if old and new:
            compare(f"the optimizer of stage {s}: ", old["optimizer"], new["optimizer"])
            compare(f"the groups of its optimizer in stage {s}: ", old["names"], new["names"])
    if batch and None not in (saved["batches"], mine["batches"]):
        compare("batches in an epoch: ", saved["batches"], mine["batches"])


def take_up(
    file: Path,
    saved: dict[str, Any],
    mine: dict[str, Any],
    state: State,
    rules: Sequence[Rule | None],
) -> tuple[State, list[str]]:
    """`state` with the settings that have changed, and one sentence for each of them.

    A setting of the optimizer holds unless a scheduler moves it: that goes on from its own state. A
    scheduler that has changed starts anew. ValueError where the optimizer would miss something
    that it has not kept so far.
    """
    said: defaultdict[str, list[Group]] = defaultdict(list)
    stages = list(state.stages)
    for s, rule in enumerate(rules):
        old, new = saved["rules"][s], mine["rules"][s]
        if old and new and rule and stages[s].optimizer is not None:
            stages[s] = _taken_up(file, s, old, new, rule, stages[s], said)
    every = [(s, g) for s, new in enumerate(mine["rules"]) if new for g in range(len(new["names"]))]
    sentences = [f"{what}{_where(places, every)}" for what, places in said.items()]
    settings = [
        _change(f"{key} of stage {s}", old[key], value)
        for s, new in enumerate(mine["layer settings"])
        for key, value in new.items()
        if (old := saved["layer settings"][s]).get(key, value) != value
    ]
    if len(settings) > MOST:
        more = len(settings) - MOST
        settings = [*settings[:MOST], f"{more} more settings of layers have changed"]
    options = [
        _change(name, saved["options"][name], value)
        for name, value in mine["options"].items()
        if saved["options"].get(name, value) != value
    ]
    old, new = saved["batches"], mine["batches"]
    if old != new and None not in (old, new):
        options.append(_change("the number of batches in an epoch", str(old), str(new)))
    return replace(state, stages=stages), [*sentences, *settings, *options]


def new_batch(old: str | None, new: str) -> list[str]:
    """What is to be said of the first batch of an epoch."""
    return [_change("the first batch", old, new)] if old and old != new else []


def _taken_up(
    file: Path,
    s: int,
    old: dict[str, Any],
    new: dict[str, Any],
    rule: Rule,
    state: StageState,
    said: defaultdict[str, list[Group]],
) -> StageState:
    assert state.optimizer is not None
    groups = [dict(group) for group in state.optimizer["param_groups"]]
    change = _scheduler_change(old["scheduler"], new["scheduler"])
    driven = {*old["driven"], *new["driven"]}
    for g, group in enumerate(groups):
        before, now = old["settings"][g], new["settings"][g]
        changed = [key for key in now if before.get(key) != now[key]]
        if change:
            for key in driven:
                group.pop(key, None)
            group |= {key: value for key, value in rule.begin[g].items() if key in driven}
            said[f"{change}: lr is {described(group.get('lr'))} from here on"].append((s, g))
        for key in changed:
            if key not in driven:
                group[key] = rule.begin[g][key]
                said[_change(key, before.get(key, "not there"), now[key])].append((s, g))
            elif not change:
                said[
                    f"{key} was {before.get(key, 'not there')}, is {now[key]}, but the scheduler "
                    f"goes on from its own: {described(group.get(key))} now"
                ].append((s, g))
        if any(key not in driven for key in changed):
            _refuse_missing(file, s, rule, g, state.optimizer["state"], group)
    return state._replace(
        optimizer=state.optimizer | {"param_groups": groups},
        scheduler=None if change else state.scheduler,
    )


def _scheduler_change(old: dict[str, str] | None, new: dict[str, str] | None) -> str:
    """The first setting in which two schedulers differ, and what comes of that; empty where they
    agree in all that both have."""
    nothing = {"scheduler": "None"}
    old, new = old or nothing, new or nothing
    for key in new:
        if old.get(key, new[key]) != new[key]:
            one, other = was_is(old[key], new[key])
            return f"{key} was {one}, is {other}{', and starts anew' if new != nothing else ''}"
    return ""


def _refuse_missing(
    file: Path,
    s: int,
    rule: Rule,
    g: int,
    kept: dict[int, dict[str, Any]],
    group: dict[str, Any],
) -> None:
    """ValueError where a step with the settings of `group` needs what was not kept so far, as Adam
    does with amsgrad. Tried on a parameter of one number."""
    first = group["params"][0]
    if not kept.get(first):  # the first step makes all that it needs
        return
    twin = rule.optimizer.param_groups[g]["params"][0]
    tiny = nn.Parameter(torch.zeros((1,) * twin.dim(), dtype=twin.dtype))
    tiny.grad = torch.zeros_like(tiny)
    trial = rule.optimizer
    before = trial.param_groups[:]
    try:
        trial.param_groups[:] = [{**rule.made[g], "params": [tiny]}]
        trial.step()
        needed = set(trial.state[tiny])
    except Exception:  # it needs more than a step to look at; the workers will say
        return
    finally:
        trial.param_groups[:] = before
    if missing := needed - set(kept[first]):
        raise ValueError(
            f"{file} belongs to another training, whose optimizer in stage {s} has kept no "
            f"{', '.join(sorted(missing))}, which its settings now need: go on with the same, or "
            "choose another file"
        )


def _change(what: str, old: str, new: str) -> str:
    one, other = was_is(old, new)
    return f"{what} was {one}, is {other} from here on"


def _where(places: list[Group], every: list[Group]) -> str:
    """Where it is not so everywhere: in which groups of which stages."""
    if places == every:
        return ""
    several = {s for s, g in every if g}
    names = (f"group {g} of stage {s}" if s in several else f"stage {s}" for s, g in places)
    more = f" and {len(places) - MOST} more" if len(places) > MOST else ""
    return f" ({', '.join(islice(names, MOST))}{more})"
