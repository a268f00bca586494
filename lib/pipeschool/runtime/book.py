"""The book that a training keeps: how far it is, what it noted, and its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeschool.actions import Schedule
from pipeschool.runtime.changes import new_batch, refuse_another, take_up
from pipeschool.runtime.checkpoint import NEW_START, prepare, read, write
from pipeschool.runtime.host.result import State
from pipeschool.runtime.identity import first_batch, identity_of, rule_of
from pipeschool.runtime.keepable import keepable
from pipeschool.runtime.options import RunOptions
from pipeschool.runtime.stages.random_numbers import put_back, restored
from pipeschool.runtime.weights.stage_weights import StageState


@dataclass(frozen=True)
class Place:
    """How far a training is: whole epochs, and batches of the one under way."""

    epoch: int = 0
    batch: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"


class Book:
    """Where a training is, and what it has noted so far, also before it was stopped; see
    `pipeschool.runtime.training.Training` for losses, their weights, epochs and changes.

    log: is told of what has changed.
    """

    def __init__(self, log: Callable[[str], object] | None):
        self.log = log
        self.file: Path | None = None  # where the checkpoint is, if one is kept
        self.losses: list[float] = []
        self.loss_weights: list[float] = []
        self.epochs: list[dict[str, Any]] = []
        self.changes: list[str] = []
        self.place = Place()
        self.state: State | None = None
        self.identity: dict[str, Any] = {}
        self.saved_batch: str | None = None  # the first of an epoch, as the checkpoint has it
        self.in_file: Place | None = None

    def open(
        self,
        checkpoint: str | os.PathLike[str],
        schedule: Schedule,
        v: int,
        every: int | None,
        options: RunOptions,
        stages: Sequence[nn.Module],
        loader: Iterable[Any],
    ) -> None:
        """Go on from the file, if it is there. ValueError where that, or writing it, cannot be."""
        self.file = prepare(checkpoint)
        with put_back():
            rules = [rule_of(stage, options) for stage in stages]
        self.identity = identity_of(schedule, v, every, options, stages, loader, rules)
        if not self.file.exists():
            return
        content = read(self.file)
        try:
            saved = content["identity"]
            self.place = self.in_file = Place(*content["place"])
            self.losses = content["losses"].tolist()
            self.loss_weights = content["loss weights"].tolist()
            self.epochs, self.changes = content["epochs"], content["changes"]
            stage_states = [StageState(**stage) for stage in content["stages"]]
            generators = [*map(restored, content["state"]["generators"])]
            self.state = State(**content["state"] | {"generators": generators}, stages=stage_states)
        except (KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{self.file} is a checkpoint of another version of pipeschool: {NEW_START}"
            ) from None
        refuse_another(self.file, saved, self.identity, self.state, stages, self.place.batch)
        self.state, changes = take_up(self.file, saved, self.identity, self.state, rules)
        self.saved_batch = saved["first batch"]
        if self.log:
            self.log(f"going on from {self.file}: {self.place}")
        self._tell(changes)

    def look(self, batch: Any) -> None:
        """Note the first batch of an epoch, and tell where it is another than the saved one."""
        if self.identity and self.identity["first batch"] is None:
            self.identity["first batch"] = first = first_batch(batch)
            self._tell(new_batch(self.saved_batch, first))

    def save(self, place: Place, state: State | None) -> None:
        """Keep all that the training needs to go on from `place`. RunError where the file cannot be
        written, ValueError where something in it could not be read again."""
        self.place, self.state = place, state
        if self.file is None or state is None:
            return
        rest = {f.name: getattr(state, f.name) for f in fields(state) if f.name != "stages"}
        content = {
            "identity": self.identity,
            "place": (place.epoch, place.batch),
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "loss weights": torch.tensor(self.loss_weights, dtype=torch.float64),
            "epochs": keepable(self.epochs, "what evaluate has returned"),
            "changes": self.changes,
            "stages": [
                keepable(stage._asdict(), f"the state of stage {s}")
                for s, stage in enumerate(state.stages)
            ],
            "state": keepable(rest, "the state of the workers"),
        }
        write(self.file, content, self.kept)
        self.in_file = place

    @property
    def kept(self) -> str:
        """What there is to go on from."""
        if self.in_file is None:
            return "there is none yet"
        return f"that of {self.in_file} is still there"

    def _tell(self, changes: Iterable[str]) -> None:
        for change in changes:
            self.changes.append(f"{self.place}: {change}")
            if self.log:
                self.log(change)
