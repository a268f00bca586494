"""When did an action start and end? On a GPU the device knows, not the process that feeds it."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class Clock:
    """Marks moments; `seconds` tells them afterwards, in the time of `time.perf_counter`.

    on_device: put a mark into the device's stream of work, as an event, instead of waiting for it.
    Otherwise a mark on a GPU waits until the device has done what it was given.
    """

    def __init__(self, device: torch.device, on_device: bool):
        self.cuda = device.type == "cuda"
        self.on_device = self.cuda and on_device
        self.start()

    def start(self) -> None:
        """Let the device's time be that of the host, now."""
        if self.cuda:
            torch.cuda.synchronize()
        self.zero = time.perf_counter()
        self.zero_event = self.mark()

    def mark(self) -> Mark:
        """A mark for what has been asked of the device until now."""
        if self.on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float:
        """When the device had come to `mark`; waits for it where it has not yet."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        assert not isinstance(self.zero_event, float)
        milliseconds: float = self.zero_event.elapsed_time(mark)
        return self.zero + milliseconds / 1000
