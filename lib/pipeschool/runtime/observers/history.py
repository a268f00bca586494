"""Keeps the weights as they are after every update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from pipeschool.actions import Action
from pipeschool.runtime.observers.observer import Observer
from pipeschool.runtime.weights.stage_weights import Parameters, StageWeights, on_cpu


class History(Observer):
    """stage -> its parameters after each update, on the CPU."""

    def __init__(self, weights: Mapping[int, StageWeights]):
        self.weights = weights
        self.after_updates: defaultdict[int, list[Parameters]] = defaultdict(list)

    def after(self, action: Action) -> None:
        """An update has been made."""
        if action.kind == "U":
            weights = self.weights[action.stage]
            newest = weights.versions[weights.ledger.newest]
            self.after_updates[action.stage].append(on_cpu(newest))
