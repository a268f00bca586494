"""Lets an action end no earlier than its declared time after it started."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pipeschool.actions import Action
from pipeschool.runtime.clock import sleep_until
from pipeschool.runtime.observers.observer import Observer

ORDINARY = 0.0005  # seconds by which a machine with nothing else to do may wake a worker late


class Pace(Observer):
    """seconds: declared, by kind of action and stage. What is not declared takes what it takes.

    Nothing is made up for: where the work takes longer than declared, or the machine wakes this
    worker late, the action ends late, and the next one starts after that.
    """

    def __init__(self, seconds: Mapping[str, Sequence[float]]):
        self.seconds = seconds
        self.started = 0.0
        self.late = 0.0

    def before(self, action: Action) -> None:
        """The time runs from here: the input is in hand."""
        self.started = time.perf_counter()

    def after(self, action: Action) -> None:
        """Wait for what is left."""
        self.late = 0.0
        if action.kind not in self.seconds:
            return
        until = self.started + self.seconds[action.kind][action.stage]
        if time.perf_counter() < until:
            sleep_until(until)
            self.late = time.perf_counter() - until

    def woken_late(self) -> float:
        """By how many seconds the machine woke this worker too late from the last action's wait,
        beyond what is ordinary. Where the work itself took too long, nobody was woken."""
        return max(self.late - ORDINARY, 0.0)
