"""When did an action start and end? On a GPU the device knows, not the process that feeds it.

All workers tell the time of worker 0. On one machine `time.perf_counter` is the same for all
processes; other machines find out by how much theirs differs (`cluster.time`).
"""

from __future__ import annotations

import os
import time

import torch

Mark = float | torch.cuda.Event


def sleep_until(moment: float) -> None:
    """Do nothing until `time.perf_counter` says `moment`."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class CoreWait:
    """How long this thread has been ready to run while something else had its core.

    Linux counts that (the second number of ``/proc/thread-self/schedstat``, in nanoseconds); on
    other systems, and where the kernel does not say, it stays 0.
    """

    def __init__(self) -> None:
        try:
            self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self.file = -1
        self.before = self.seconds()

    def seconds(self) -> float:
        """Since the thread was started."""
        if self.file < 0:
            return 0.0
        return int(os.pread(self.file, 64, 0).split()[1]) / 1e9

    def since_last(self) -> float:
        """Since this was last asked."""
        now = self.seconds()
        waited, self.before = now - self.before, now
        return waited

    def close(self) -> None:
        """Close the file."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class Clock:
    """Marks moments; `seconds` tells them afterwards, on the clock of worker 0.

    on_device: put a mark into the device's stream of work, as an event, instead of waiting for it.
    Otherwise a mark on a GPU waits until the device has done what it was given.
    offset: what this machine adds to its own clock to tell the time of worker 0.
    """

    def __init__(self, device: torch.device, on_device: bool = False, offset: float = 0.0):
        self.cuda = device.type == "cuda"
        self.on_device = self.cuda and on_device
        self.offset = offset
        self.start()

    def now(self) -> float:
        """Seconds on the clock of worker 0."""
        return time.perf_counter() + self.offset

    def start(self) -> None:
        """Let the device's time be that of the host, now."""
        if self.cuda:
            torch.cuda.synchronize()
        self.zero = self.now()
        self.zero_event = self.mark()

    def mark(self) -> Mark:
        """A mark for what has been asked of the device until now."""
        if self.on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.cuda:  # not the whole device: a message may wait for its receiver
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() + self.offset

    def seconds(self, mark: Mark) -> float:
        """When the device had come to `mark`; waits for it where it has not yet."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        assert not isinstance(self.zero_event, float)
        milliseconds: float = self.zero_event.elapsed_time(mark)
        return self.zero + milliseconds / 1000
