"""Cut a model into stages: measure its layers, plan the cuts, make the stages.

A profile and a plan are plain data, and planning does without torch, which loads when a model
comes in.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeschool.partition.plan import Plan, cut_at
from pipeschool.partition.planners import balanced, equal, pipedream
from pipeschool.partition.profile import Layer, Profile

if TYPE_CHECKING:
    from pipeschool.partition.chain import Chain, profile_layers, split_layers

_WITH_TORCH = {"Chain", "profile_layers", "split_layers"}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(importlib.import_module("pipeschool.partition.chain"), name)
    raise AttributeError(f"module 'pipeschool.partition' has no attribute {name!r}")


__all__ = [
    "Chain",
    "Layer",
    "Plan",
    "Profile",
    "balanced",
    "cut_at",
    "equal",
    "pipedream",
    "profile_layers",
    "split_layers",
]
