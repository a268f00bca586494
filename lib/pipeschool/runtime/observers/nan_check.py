"""Stops at the first NaN."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any

from torch import Tensor

from pipeschool.actions import Action
from pipeschool.dependencies import used_by
from pipeschool.runtime.observers.observer import Observer


class NanCheck(Observer):
    """Looks at what an action leaves in the mail, and at losses. FloatingPointError where a number
    in it is none."""

    def __init__(
        self,
        mail: Mapping[Action, Any],
        losses: Mapping[int, float],
        outputs: Mapping[int, Any],
        last_stage: int,
    ):
        self.mail = mail
        self.losses = losses
        self.outputs = outputs
        self.last_stage = last_stage

    def after(self, action: Action) -> None:
        """Has it made a NaN?"""
        kind, stage, microbatch = action
        if kind not in ("F", "B", "I"):
            return
        made = self.mail.get(used_by(action), ())
        if kind == "F" and stage == self.last_stage:
            made = self.outputs.get(microbatch, ())
            if isnan(self.losses.get(microbatch, 0.0)):
                raise FloatingPointError(f"{action} gave NaN")
        for tensor in made:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.isnan().any():
                raise FloatingPointError(f"{action} gave NaN")
