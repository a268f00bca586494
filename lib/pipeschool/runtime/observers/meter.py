"""Reads off, after every action of a worker, what its bytes are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._pytree import tree_leaves

from pipeschool.actions import Action
from pipeschool.dependencies import used_by
from pipeschool.memory import MemorySample
from pipeschool.runtime.clock import Clock
from pipeschool.runtime.observers.live_bytes import LiveBytes, size_of
from pipeschool.runtime.observers.observer import Observer
from pipeschool.runtime.stages.stage import Stage


class Meter(Observer):
    """Counts within ``with meter.live:``; `levels` is what it has found."""

    def __init__(self, stages: Mapping[int, Stage], mail: Mapping[Any, Any], clock: Clock):
        self.clock = clock
        self.start = 0.0
        self.live = LiveBytes()
        self.stages = stages
        self.mail = mail
        weights = [stage.weights for stage in stages.values()]
        self.live.note(w for own in weights for w in own.current.values())
        self.live.peak = self.live.now
        self.spare = 0
        self.levels = [self._level(0.0)]

    def before(self, action: Action) -> None:
        """It starts now."""
        self.start = self.clock.now()

    def after(self, action: Action) -> None:
        """One level from its start on, at the height of the action, and one for its end."""
        if action.kind.startswith("RECV"):  # made by no operation of this process
            self.live.note(t for t in self.mail[used_by(action)] if t is not None)
        before = self.levels[-1]
        working = self.live.peak - self.spare - before.total
        self.levels.append(before._replace(time=self.start, working=max(working, 0.0)))
        self.levels.append(self._level(self.clock.now()))
        self.live.peak = self.live.now

    def _level(self, time: float) -> MemorySample:
        weights = [stage.weights for stage in self.stages.values()]
        held = sum(w.bytes * w.held for w in weights)
        one = sum(w.bytes for w in weights)
        gradients = sum(size_of(w.gradients.values()) for w in weights)
        optimizer = sum(
            size_of(tree_leaves(list(w.optimizer.state.values()))) for w in weights if w.optimizer
        )
        received = [
            flight.leaves
            for stage in self.stages.values()
            if stage.index
            for flight in stage.in_flight.values()
        ]
        buffers = sum(map(size_of, [*received, *self.mail.values()]))
        # Those of the update before are kept for the caller alone: training does without them.
        self.spare = sum(size_of(w.last_gradients.values()) for w in weights)
        others = held + gradients + optimizer + buffers + self.spare
        return MemorySample(
            time,
            weights=one,
            versions=held - one,
            gradients=gradients,
            optimizer=optimizer,
            activations=self.live.now - others,
            buffers=buffers,
            working=0.0,
        )
