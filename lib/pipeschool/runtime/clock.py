"""When did an action start and end? On a GPU the device knows, not the process that feeds it.

All workers tell the time of worker 0. On one machine `time.perf_counter` is the same for all
processes; other machines find out by how much theirs differs.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

Mark = float | torch.cuda.Event
BOOT = Path("/proc/sys/kernel/random/boot_id")  # tells machines apart, and a machine from its past
PINGS = 16

offset = 0.0  # what this process adds to its clock


def now() -> float:
    """Seconds on the clock of worker 0."""
    return time.perf_counter() + offset


def sleep_until(moment: float) -> None:
    """Do nothing until `now` says `moment`."""
    while (left := moment - now()) > 0:
        time.sleep(left)


def agree_on_time() -> None:
    """Let all processes of the default group tell the time of worker 0. As on the internet: of many
    questions, the one answered fastest says best what time it was in the middle of it."""
    global offset
    here = (socket.gethostname(), BOOT.read_text() if BOOT.exists() else "")
    machines: list[tuple[str, str]] = [here] * dist.get_world_size()
    dist.all_gather_object(machines, here)
    offset = 0.0
    time_there = torch.zeros(1, dtype=torch.float64)
    for other, machine in enumerate(machines):
        if machine == machines[0] or (machine[1] and machine[1] == machines[0][1]):
            continue  # the same machine, if perhaps under another name
        if dist.get_rank() == 0:
            for _ in range(PINGS):
                dist.recv(time_there, other)
                time_there[0] = time.perf_counter()
                dist.send(time_there, other)
        elif dist.get_rank() == other:
            answers = []
            for _ in range(PINGS):
                asked = time.perf_counter()
                dist.send(time_there, 0)
                dist.recv(time_there, 0)
                took = time.perf_counter() - asked
                answers.append((took, time_there.item() - asked - took / 2))
            offset = min(answers)[1]


class Clock:
    """Marks moments; `seconds` tells them afterwards, on the clock of worker 0.

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
        self.zero = now()
        self.zero_event = self.mark()

    def mark(self) -> Mark:
        """A mark for what has been asked of the device until now."""
        if self.on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.cuda:  # not the whole device: a message may wait for its receiver
            torch.cuda.current_stream().synchronize()
        return now()

    def seconds(self, mark: Mark) -> float:
        """When the device had come to `mark`; waits for it where it has not yet."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        assert not isinstance(self.zero_event, float)
        milliseconds: float = self.zero_event.elapsed_time(mark)
        return self.zero + milliseconds / 1000
