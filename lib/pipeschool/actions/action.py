"""An action, its kinds, and what is raised where actions do not make a schedule."""

from __future__ import annotations

import re
from typing import NamedTuple

COMPUTE_KINDS = ("F", "B", "I", "W")
MESSAGE_KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
KINDS = (*COMPUTE_KINDS, "U", *MESSAGE_KINDS)

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "U": "optimizer update",
    "SEND_F": "send of the activations",
    "RECV_F": "receive of the activations",
    "SEND_B": "send of the gradients",
    "RECV_B": "receive of the gradients",
}


class IllegalSchedule(ValueError):
    """A schedule that must not run. The message is one sentence.

    Attributes: `worker` (its number or None) and `action` (an `Action` or None).
    """

    def __init__(self, message: str, worker: int | None = None, action: Action | None = None):
        super().__init__(message)
        self.worker = worker
        self.action = action

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence, without the library's own frames."""
        return [f"{type(self).__name__}: {self}"]

    @property
    def microbatch(self) -> int | None:
        """The microbatch of `action`; None where there is none, as in an update."""
        return None if self.action is None or self.action.kind == "U" else self.action.microbatch


class Action(NamedTuple):
    """One thing that one worker does: `kind` on `stage` for `microbatch`, all counted from 0.

    Kinds: ``F`` forward, ``B`` whole backward, ``I`` input gradient, ``W`` weight gradient,
    ``U`` optimizer update, and the messages ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
    For ``U`` the number counts updates, not microbatches.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_message(self) -> bool:
        """True for sends and receives."""
        return self.kind in MESSAGE_KINDS

    def describe(self) -> str:
        """In words, for error messages: ``2F5 (forward of microbatch 5 on stage 2)``."""
        what = "number" if self.kind == "U" else "of microbatch"
        return f"{self} ({KIND_NAMES[self.kind]} {what} {self.microbatch} on stage {self.stage})"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `text` names, such as ``2F5``; ValueError where it names none."""
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text.strip())
        if not match or match[2] not in KINDS:
            raise ValueError(
                f"{text!r} is no action: write stage, kind and microbatch, such as 2F5, "
                f"with a kind out of {', '.join(KINDS)}"
            )
        return cls(match[2], int(match[1]), int(match[3]))


def F(stage: int, microbatch: int) -> Action:
    """Forward of `microbatch` on `stage`."""
    return Action("F", stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    """Whole backward (input and weight gradients) of `microbatch` on `stage`."""
    return Action("B", stage, microbatch)


def I(stage: int, microbatch: int) -> Action:  # noqa: E743  (the field's own letter)
    """Input-gradient half of a split backward."""
    return Action("I", stage, microbatch)


def W(stage: int, microbatch: int) -> Action:
    """Weight-gradient half of a split backward."""
    return Action("W", stage, microbatch)


def U(stage: int, update: int) -> Action:
    """Optimizer update number `update` of `stage`."""
    return Action("U", stage, update)
