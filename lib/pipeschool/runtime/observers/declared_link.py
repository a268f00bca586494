"""Holds a message back until a link as slow as declared would have brought it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from pipeschool.actions import Action
from pipeschool.runtime.clock import Clock, sleep_until
from pipeschool.runtime.observers.observer import Observer
from pipeschool.runtime.wire.wire import Wire


class LinkSpeed(NamedTuple):
    """How fast messages are declared to be."""

    latency: float  # seconds that each takes in addition
    bandwidth: float  # bytes per second; a message occupies its link meanwhile


class DeclaredLink(Observer):
    """Counts from the moment at which a message was really sent. A message waits until its link has
    brought those before it.

    waiting: is told True while a message that has come is held back, and False after that.
    """

    def __init__(self, speed: LinkSpeed, wire: Wire, clock: Clock, waiting: Callable[[bool], None]):
        self.speed = speed
        self.wire = wire
        self.clock = clock
        self.waiting = waiting
        self.free: defaultdict[int, float] = defaultdict(float)  # peer -> when its link is

    def after(self, action: Action) -> None:
        """A message has come."""
        if not action.kind.startswith("RECV"):
            return
        peer, sent, size = self.wire.last
        self.free[peer] = max(sent, self.free[peer]) + size / self.speed.bandwidth
        arrival = self.free[peer] + self.speed.latency
        self.waiting(True)
        sleep_until(time.perf_counter() + arrival - self.clock.now())
        self.waiting(False)
