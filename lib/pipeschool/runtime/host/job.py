"""What the controller gives a worker, and what it gets back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipeschool.actions import Action, Schedule
from pipeschool.memory import MemorySample
from pipeschool.runtime.errors import Frame
from pipeschool.runtime.observers.declared_link import LinkSpeed
from pipeschool.runtime.options import RunOptions
from pipeschool.runtime.stages.random_numbers import RandomNumbers
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.weights.stage_weights import Parameters, StageState
from pipeschool.runtime.weights.ties import Tie
from pipeschool.trace import Span


@dataclass
class Job:
    """One worker's share of a run. Only the ends of the pipeline hold data.

    schedule: lowered. modules: stage -> its layers; those of another copy are equal. inputs,
    targets: one per microbatch; None unless a first or a last stage is here. loss_weights: the
    weight of each microbatch's loss in the loss of its update. recompute: of every stage. pace:
    kind -> declared seconds per stage. restore: stage -> where it was when an earlier run ended.
    generator: the state of this worker's random numbers at that time. ties: parameters that several
    stages share. norm_places: see `Sums`; empty where no norm of all stages is asked for.
    engine: the class that does the row. carrier: of messages, ``local``, ``rendezvous`` or the name
    of torch.distributed's backend. rendezvous: the file through which processes find each other in
    torch.distributed; empty where they need not.
    """

    options: RunOptions
    schedule: Schedule
    modules: dict[int, nn.Module]
    inputs: Sequence[Tensors] | None
    targets: list[Any] | None
    loss_weights: list[float]
    recompute: list[bool]
    pace: dict[str, list[float]] | None
    restore: dict[int, StageState]
    generator: RandomNumbers | None
    ties: list[Tie]
    norm_places: list[int]
    engine: type[Any]
    carrier: str
    backend: str
    device: str
    rendezvous: str
    default_dtype: torch.dtype  # of new tensors, as the caller has it

    @property
    def link(self) -> LinkSpeed | None:
        """The declared speed of messages; None where they take what they take."""
        declared = self.options.latency > 0 or self.options.bandwidth < math.inf
        return LinkSpeed(self.options.latency, self.options.bandwidth) if declared else None


@dataclass
class Ready:
    """A worker could begin."""


@dataclass
class Report:
    """What one worker did. Times are those of `Clock.now`, which all processes share."""

    spans: list[Span] = field(default_factory=list)
    messages: list[Span] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # microbatch -> mean loss
    outputs: dict[int, Tensors] = field(default_factory=dict)  # microbatch -> of the last stage
    gradients: dict[int, Parameters] = field(default_factory=dict)  # stage -> last update's
    states: dict[int, StageState] = field(default_factory=dict)
    history: dict[int, list[Parameters]] = field(default_factory=dict)  # stage -> after each update
    generator: RandomNumbers | None = None
    parameter_bytes: dict[int, int] = field(default_factory=dict)  # stage -> of one version
    memory: list[MemorySample] = field(default_factory=list)  # where the job asked for it


@dataclass
class Failure:
    """Why a worker gave up. `secondary` is True where another worker's end is the likely cause."""

    action: Action | None
    error: str
    frames: tuple[Frame, ...]
    secondary: bool
