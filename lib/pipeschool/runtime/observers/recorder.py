"""Notes when each action started and ended, by the clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeschool.actions import MESSAGE_KINDS, Action
from pipeschool.runtime.clock import Clock, CoreWait, Mark
from pipeschool.runtime.observers.observer import Observer
from pipeschool.runtime.weights.stage_weights import StageWeights
from pipeschool.runtime.wire.wire import Wire
from pipeschool.trace import Span


class Recorder(Observer):
    """The spans of one worker. weights: of its stages; they know which version was used.
    woken_late: says by how much the machine was late to end the wait of a paced action."""

    def __init__(
        self,
        worker: int,
        clock: Clock,
        weights: Mapping[int, StageWeights],
        wire: Wire | None,
        woken_late: Callable[[], float] = lambda: 0.0,
    ):
        self.woken_late = woken_late
        self.worker = worker
        self.clock = clock
        self.weights = weights
        self.wire = wire
        self.core_wait = CoreWait()
        self.noted: list[tuple[Action, Mark, Mark, int, int, int, float]] = []
        self.start: Mark = 0.0

    def before(self, action: Action) -> None:
        """It starts now."""
        self.start = self.clock.mark()

    def after(self, action: Action) -> None:
        """It ends now."""
        end = self.clock.mark()
        if action.kind in MESSAGE_KINDS:
            size = self.wire.last.bytes if self.wire else 0
            self.noted.append((action, self.start, end, 0, 1, size, 0.0))
        else:  # asked once for all messages before it, since asking takes some time itself
            number, held = self.weights[action.stage].in_use
            waited = max(self.core_wait.since_last(), self.woken_late())
            self.noted.append((action, self.start, end, number, held, 0, waited))

    def spans(self) -> tuple[list[Span], list[Span]]:
        """Those of compute and updates, and those of messages."""
        found: tuple[list[Span], list[Span]] = ([], [])
        for action, start, end, number, held, size, waited in self.noted:
            begin, finish = self.clock.seconds(start), self.clock.seconds(end)
            found[action.is_message].append(
                Span(self.worker, action, begin, finish, number, held, size, waited)
            )
        self.core_wait.close()
        return found
