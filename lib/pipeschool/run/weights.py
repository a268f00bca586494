"""The weights of one stage, in as many versions as its policy needs.

Why not simply `optimizer.step()` between a forward and its backward? Autograd saved the weights of
the forward; changing them in place makes the backward raise, and hiding the change (`data.copy_`)
makes its gradient wrong. Here a version is a parameter dict of its own, handed to
`torch.func.functional_call`: the autograd graph itself holds on to what its forward used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeschool.actions import Action
from pipeschool.versions import Ledger, Policy

Parameters = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Version(NamedTuple):
    """A weight version: its number, how many versions its stage holds now, and its values."""

    number: int
    held: int
    parameters: Parameters


class StageWeights:
    """Weight versions, gradients and optimizer of one stage."""

    def __init__(self, module: nn.Module, optimizer: MakeOptimizer | None, policy: Policy):
        self.current = dict(module.named_parameters())
        trainable = [p for p in self.current.values() if p.requires_grad]
        self.optimizer = optimizer(trainable) if optimizer and trainable else None
        self.ledger = Ledger(policy)
        self.versions: dict[int, Parameters] = {0: self._view()}
        self.gradients: Parameters = {}  # of the update to come
        self.last_gradients: Parameters = {}  # of the last update

    def use(self, action: Action) -> Version:
        """The version that a forward or backward works on; drops those needed no longer."""
        number, _ = self.ledger.note(action)
        version = Version(number, len(self.versions), self.versions[number])
        self._drop()
        return version

    def collect(self, version: Version) -> None:
        """After a backward on `version`: add its gradients to those of the next update."""
        for name, parameter in version.parameters.items():
            if parameter.grad is None:
                continue
            if name in self.gradients:
                self.gradients[name] += parameter.grad
            else:
                self.gradients[name] = parameter.grad
            parameter.grad = None

    def update(self, action: Action) -> Version:
        """One optimizer step on the gradients collected; it makes the newest version."""
        kept = self.ledger.newest in self.ledger.users
        for name, parameter in self.current.items():
            parameter.grad = self.gradients.get(name)
            if kept and self.optimizer:  # a microbatch in flight needs these values: step on a copy
                parameter.data = parameter.data.clone()
        if self.optimizer:
            self.optimizer.step()
        for parameter in self.current.values():
            parameter.grad = None
        self.last_gradients, self.gradients = self.gradients, {}
        number, _ = self.ledger.note(action)
        self.versions[number] = self._view()
        self._drop()
        return Version(number, len(self.versions), self.versions[number])

    def _drop(self) -> None:
        for number in list(self.versions):
            if number != self.ledger.newest and number not in self.ledger.users:
                del self.versions[number]

    def _view(self) -> Parameters:
        """The current values as leaves of their own; `.data` leaves the version counter behind."""
        return {
            name: parameter.data.requires_grad_(parameter.requires_grad)
            for name, parameter in self.current.items()
        }
