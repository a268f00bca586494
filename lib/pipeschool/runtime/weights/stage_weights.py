"""The weights of one stage, in as many versions as its policy needs.

Why not simply `optimizer.step()` between a forward and its backward? Autograd saved the weights of
the forward; changing them in place makes the backward raise, and hiding the change (`data.copy_`)
makes its gradient wrong. Here a version is a parameter dict of its own, handed to
`torch.func.functional_call`: the autograd graph itself holds on to what its forward used. An
update steps on a copy while somebody needs the old values. Only a policy that is `in_place` leaves
the copy out; then the graph meets the new values without noticing.

Where nothing is in flight when an update comes, as with a flush, the module's own parameters do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeschool.actions import Action
from pipeschool.runtime.weights.clipping import clip
from pipeschool.runtime.weights.sharding import local, move, whole
from pipeschool.runtime.weights.storage import address, addresses
from pipeschool.versions import Ledger, OneVersion

Parameters = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class UpdateRule(Protocol):
    """How a stage turns gradients into new weights; each part may be None. `RunOptions` is one."""

    @property
    def optimizer(self) -> MakeOptimizer | None:
        """Makes the optimizer from the parameters of a stage."""

    @property
    def scheduler(self) -> MakeScheduler | None:
        """Makes a scheduler of the learning rate from it; one step after each update."""

    @property
    def clip_norm(self) -> float | None:
        """The largest norm that the gradients of an update may have."""


class Update(NamedTuple):
    """An `UpdateRule` on its own."""

    optimizer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    clip_norm: float | None = None


class Version(NamedTuple):
    """A weight version: its number, how many versions its stage holds now, and its values."""

    number: int
    held: int
    parameters: Parameters


class StageState(NamedTuple):
    """All that a stage needs to go on where it stopped, on the CPU."""

    weights: dict[str, Tensor]  # the module's state_dict
    optimizer: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    buffers: dict[str, Tensor] = {}  # noqa: RUF012  # those that a state_dict leaves out


class StageWeights:
    """Weight versions, gradients and optimizer of one stage."""

    def __init__(
        self, module: nn.Module, update: UpdateRule, ledger: Ledger, hooks_allowed: bool = True
    ):
        self.hooks_allowed = hooks_allowed
        self.current: Parameters = dict(module.named_parameters())
        trainable = [p for p in module.parameters() if p.requires_grad]
        make = update.optimizer if trainable else None
        self.optimizer = checked_optimizer(make(trainable), trainable) if make else None
        self.scheduler = (
            checked_scheduler(update.scheduler(self.optimizer))
            if update.scheduler and self.optimizer
            else None
        )
        self.clip_norm = update.clip_norm
        self.ledger = ledger
        self.versions: dict[int, Parameters] = {0: self._view()}
        self.gradients: Parameters = {}  # of the update to come
        self.last_gradients: Parameters = {}  # of the last update
        # The number of the version that the last action here worked on or made, and how many there
        # were; not the version, which may be dropped.
        self.in_use = 0, 1

    def use(self, action: Action) -> Version:
        """The version that a forward or backward works on; drops those needed no longer.

        A backward gets the tensors that its forward worked on: they collect the gradients.
        """
        used = self.ledger.used.get(action.microbatch)
        number, _ = self.ledger.record(action)
        parameters = self.versions[number if used is None else used]
        version = Version(number, self.held, parameters)
        self.in_use = version[:2]
        self._drop()
        return version

    def lend(self, version: Version) -> None:
        """Before a backward on `version`: let autograd add to the gradients of the next update."""
        for name, parameter in version.parameters.items():
            parameter.grad = self.gradients.get(name)

    def collect(self, version: Version, passed_on: Iterable[Tensor | None]) -> None:
        """After that backward: take them back.

        Nothing else may be in their memory, since later ones are added there. Autograd lets leaves
        share it where the graph goes on to views of them: weights with each other, or with the
        inputs, whose gradients are `passed_on`.
        """
        taken = addresses(passed_on)
        for name, parameter in version.parameters.items():
            if (gradient := parameter.grad) is None:
                continue
            if name not in self.gradients:
                here = addresses([gradient])
                if here & taken:
                    gradient = gradient.clone()
                taken |= here
            self.gradients[name] = gradient
            parameter.grad = None

    def collect_from_parameters(self) -> bool:
        """Collect what an engine has left in the ``.grad`` of the parameters themselves; was there
        anything?"""
        left = any(parameter.grad is not None for parameter in self.current.values())
        if left:
            self.collect(Version(self.ledger.newest, 1, self.current), ())
        return left

    def update(self, action: Action, norm: Tensor | None = None) -> Version:
        """One optimizer step on the gradients collected; it makes the newest version.

        norm: of all gradients that are clipped together, where those of other stages are, too.
        """
        if not self.hooks_allowed:
            self._refuse_hooks(action.stage)
        old = self.ledger.newest
        number, _ = self.ledger.record(action)
        keep = self.ledger.holds(old) and not self.ledger.policy.in_place
        for name, parameter in self.current.items():
            parameter.grad = self.gradients.get(name)
            if keep and parameter.requires_grad:  # the old values are still needed: step on a copy
                move(parameter)
        if self.optimizer:
            if self.clip_norm is not None:
                clip(self.current.values(), self.clip_norm, norm)
            self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        for parameter in self.current.values():
            parameter.grad = None
        self.last_gradients, self.gradients = self.gradients, {}
        self.versions[number] = self._view()
        self._drop()
        version = Version(number, self.held, self.versions[number])
        self.in_use = version[:2]
        return version

    def _refuse_hooks(self, stage: int) -> None:
        """ValueError where somebody listens to a gradient, and might hear it twice or not at all:
        versions of a weight have no hooks, and halves of a backward call them both."""
        for version in (self.current, *self.versions.values()):
            for name, p in version.items():
                if p._backward_hooks or p._post_accumulate_grad_hooks:
                    raise ValueError(
                        f"parameter {name} of stage {stage} has a hook on its gradient: that goes "
                        "only with a schedule that flushes and splits no backward"
                    )

    @property
    def bytes(self) -> int:
        """Size of one version."""
        slices = [local(p) for p in self.current.values()]
        return sum(p.numel() * p.element_size() for p in slices)

    @property
    def held(self) -> int:
        """How many copies of the weights are in memory: those that share none of it."""
        if len(self.versions) == 1:
            return 1
        first = next((name for name, p in self.current.items() if p.requires_grad), None)
        if first is None:
            return 1
        return len({local(version[first]).data_ptr() for version in self.versions.values()})

    def state(self, module: nn.Module) -> StageState:
        """Where the stage is now, once nothing is in flight."""
        saved = module.state_dict()
        return on_cpu(
            StageState(
                saved,
                self.optimizer.state_dict() if self.optimizer else None,
                self.scheduler.state_dict() if self.scheduler else None,
                {name: b for name, b in module.named_buffers() if name not in saved},
            )
        )

    def restore(self, state: StageState) -> None:
        """Go on with optimizer and scheduler from `state`; the module has its weights already."""
        if self.optimizer and state.optimizer is not None:
            self.optimizer.load_state_dict(state.optimizer)
        if self.scheduler and state.scheduler is not None:
            self.scheduler.load_state_dict(state.scheduler)

    def _drop(self) -> None:
        if len(self.versions) > 1:
            for number in list(self.versions):
                if not self.ledger.holds(number):
                    del self.versions[number]

    def _view(self) -> Parameters:
        """The current values as leaves of their own (`.data` leaves the version counter behind), or
        where there is only one version, the parameters themselves."""
        if isinstance(self.ledger, OneVersion):
            return self.current
        return {
            name: parameter.data.requires_grad_(parameter.requires_grad)
            for name, parameter in self.current.items()
        }


def checked_optimizer(made: Any, given: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What a function `optimizer` has made; ValueError where it would train nothing of what it was
    `given`."""
    if isinstance(made, type) or not (hasattr(made, "step") and hasattr(made, "state_dict")):
        raise ValueError(
            f"optimizer must be a function that returns an optimizer, not {type(made).__name__}: "
            "does it end in return?"
        )
    mine = {id(parameter) for parameter in given}
    groups = getattr(made, "param_groups", None)
    if groups is not None and not any(id(p) in mine for group in groups for p in group["params"]):
        raise ValueError(
            "optimizer returned one that has none of the parameters it was given, so that nothing "
            "would be trained: make it from its argument"
        )
    checked: torch.optim.Optimizer = made
    return checked


def checked_scheduler(made: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """What a function `scheduler` has made; ValueError where that is none."""
    if isinstance(made, type) or not (hasattr(made, "step") and hasattr(made, "state_dict")):
        raise ValueError(
            "scheduler must be a function that returns a scheduler of the learning rate, not "
            f"{type(made).__name__}: does it end in return?"
        )
    checked: torch.optim.lr_scheduler.LRScheduler = made
    return checked


def on_cpu(value: Any, copied: dict[Any, Tensor] | None = None) -> Any:
    """`value` with every tensor in its dicts, lists and tuples copied to the CPU, whole; what is
    there twice, as a layer under two names is in a state_dict, once. copied: so far."""
    copied = {} if copied is None else copied
    if isinstance(value, Tensor):
        if isinstance(value, DTensor) or value.layout != torch.strided:
            return whole(value.detach()).cpu().clone()
        place = address(value), value.storage_offset(), value.shape, value.stride(), value.dtype
        key = *place, value.is_conj(), value.is_neg()  # which are marks on the same memory
        if key not in copied:
            copied[key] = value.detach().cpu().clone()
        return copied[key]
    if isinstance(value, dict):
        return {key: on_cpu(item, copied) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_cpu(item, copied) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(on_cpu(item, copied) for item in value)
    return value
