"""What the controller gives a worker, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeschool.actions import Action, Schedule
from pipeschool.memory import MemorySample
from pipeschool.runtime.errors import Frame
from pipeschool.runtime.stage import Loss, Tensors
from pipeschool.runtime.tensor import Plan
from pipeschool.runtime.ties import Tie
from pipeschool.runtime.weights import Parameters, StageState, Update
from pipeschool.trace import Span


class Link(NamedTuple):
    """How fast messages are declared to be."""

    latency: float  # seconds that each takes in addition
    bandwidth: float  # bytes per second; a message occupies its link meanwhile


@dataclass
class Job:
    """One worker's share of a run. Only the ends of the pipeline hold data."""

    schedule: Schedule  # lowered
    modules: dict[int, nn.Module]  # stage -> its layers; those of another copy are equal
    inputs: Sequence[Tensors] | None  # one per microbatch; None unless a first stage is here
    targets: list[Any] | None  # one per microbatch; None unless a last stage is here
    scales: list[float]  # weight of each microbatch's loss in the loss of its update
    loss: Loss
    update: Update
    recompute: list[bool]  # of every stage: keep only inputs, go forward again for the backward
    link: Link | None  # declared speed of messages
    memory: bool  # note how many bytes are alive
    restore: dict[int, StageState]  # stage -> where it was when an earlier run ended
    generator: Tensor | None  # state of this worker's random numbers at that time
    history: bool  # note the weights after every update
    pace: dict[str, list[float]] | None  # kind -> declared seconds per stage
    backend: str
    device: str
    ties: list[Tie]  # parameters that several stages share
    parts: int  # processes of a worker, that share its weights between them
    plan: Plan  # how
    rendezvous: str  # file through which the workers find each other
    nan_check: bool
    seed: int
    engine: str = "pipeschool"  # or one of `torch_engine`


@dataclass
class Report:
    """What one worker did. Times are those of `clock.now`, which all processes share."""

    spans: list[Span] = field(default_factory=list)
    messages: list[Span] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # microbatch -> mean loss
    outputs: dict[int, Tensors] = field(default_factory=dict)  # microbatch -> of the last stage
    gradients: dict[int, Parameters] = field(default_factory=dict)  # stage -> last update's
    states: dict[int, StageState] = field(default_factory=dict)
    history: dict[int, list[Parameters]] = field(default_factory=dict)  # stage -> after each update
    generator: Tensor | None = None
    parameter_bytes: dict[int, int] = field(default_factory=dict)  # stage -> of one version
    memory: list[MemorySample] = field(default_factory=list)  # where the job asked for it


@dataclass
class Failure:
    """Why a worker gave up. `secondary` is True where another worker's end is the likely cause."""

    action: Action | None
    error: str
    frames: tuple[Frame, ...]
    secondary: bool
