"""A worker's process: get the job, find the others, do the row, report, wait to be ended."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import MutableSequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from pipeschool.actions import Action
from pipeschool.runtime.errors import Frame, PeerLost
from pipeschool.runtime.job import Failure, Job, Report
from pipeschool.runtime.serialize import pack, unpack
from pipeschool.runtime.worker import work


def main(
    rank: int,
    board: MutableSequence[int],
    on_link: MutableSequence[int],
    control: Connection,
    *outputs: Connection,
) -> None:
    """All that a worker process does. `board` tells the controller where it is, even when this
    process is gone; `on_link`, whether a declared link holds it up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller hears the stop button
    for descriptor, output in enumerate(outputs, start=1):  # stdout, stderr
        redirect(output, descriptor)
    row: tuple[Action, ...] = ()
    answer: Report | Failure
    try:
        torch.set_num_threads(1)
        gc.freeze()
        job: Job = unpack(control.recv_bytes())
        threading.Thread(target=end_with_controller, args=(control,), daemon=True).start()
        device = torch.device(job.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL looks there
        if name := loopback():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        dist.init_process_group(
            job.backend,
            init_method=job.rendezvous,
            rank=rank,
            world_size=job.schedule.p * job.parts,
        )
        row = job.schedule.workers[rank // job.parts]
        answer = work(rank, job, device, board, on_link)
    except BaseException as error:
        answer = failure(row[board[rank]] if 0 <= board[rank] < len(row) else None, error)
    sys.stdout.flush()
    sys.stderr.flush()
    control.send_bytes(pack(answer))
    threading.Event().wait()  # the peers may still be reading; the controller ends all at once


def loopback() -> str | None:
    """The interface through which a machine talks to itself. gloo would look for the host's name,
    which a laptop without a network may not be able to find."""
    if os.name != "posix":
        return None
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def redirect(target: Connection, descriptor: int) -> None:
    """Let `descriptor` (1 stdout, 2 stderr) write to `target`, for C code as for Python."""
    os.dup2(target.fileno(), descriptor)
    stream = open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    if descriptor == 1:
        sys.stdout = stream
    else:
        sys.stderr = stream


def end_with_controller(control: Connection) -> None:
    """No orphans: when the controller is gone, so is its end of the pipe, and so is this worker."""
    try:
        control.poll(None)
    finally:
        os._exit(1)


def failure(action: Action | None, error: BaseException) -> Failure:
    """`error` as plain data: what it says, and the lines of the learner's code it came through."""
    library = str(Path(__file__).parents[1])
    torch_home = str(Path(torch.__file__).parent)
    frames = tuple(
        Frame(frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((library, torch_home, "<frozen"))
    )
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    text = f"{type(error).__name__}: {error}{notes}"
    # Collectives inside a stage, as in tensor parallelism, lose their peers in gloo's own words.
    secondary = isinstance(error, PeerLost) or "gloo/transport" in text
    return Failure(action, text, frames, secondary)
