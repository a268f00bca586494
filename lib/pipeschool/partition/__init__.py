"""Cut a model into stages: measure its layers, plan the cuts, make the stages.

A profile and a plan are plain data, and planning does without torch, which loads when a model
comes in.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeschool.partition.plan import Plan, cut_at
from pipeschool.partition.planners import balanced, equal, pipedream_plan
from pipeschool.partition.profile import Layer, Profile

if TYPE_CHECKING:
    from pipeschool.partition.chain import Chain, split_layers
    from pipeschool.partition.measuring import profile_layers

_WITH_TORCH = {"Chain": "chain", "split_layers": "chain", "profile_layers": "measuring"}  # file of


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        file = importlib.import_module(f"pipeschool.partition.{_WITH_TORCH[name]}")
        return getattr(file, name)
    raise AttributeError(f"module 'pipeschool.partition' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(globals().keys() | _WITH_TORCH.keys())


__all__ = [
    "Chain",
    "Layer",
    "Plan",
    "Profile",
    "balanced",
    "cut_at",
    "equal",
    "pipedream_plan",
    "profile_layers",
    "split_layers",
]
