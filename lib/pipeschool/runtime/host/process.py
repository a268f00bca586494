"""A worker's process: get the job, find the others, do the row, report, wait to be ended."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping, MutableSequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from pipeschool.actions import Action
from pipeschool.runtime.host.cores import keep_to_one_core, wake_in_time
from pipeschool.runtime.host.failure import failure
from pipeschool.runtime.host.job import Failure, Job, Ready, Report
from pipeschool.runtime.host.network import loopback
from pipeschool.runtime.host.serialize import deserialize, serialize
from pipeschool.runtime.host.worker import work
from pipeschool.runtime.weights.groups import Groups
from pipeschool.runtime.wire.local_wire import Link


def main(
    process: int,
    board: MutableSequence[int],
    on_link: MutableSequence[int],
    links: Mapping[Link, socket.socket],
    control: Connection,
    *outputs: Connection,
) -> None:
    """All that a worker process does. `board` tells the controller where it is, even when this
    process is gone; `on_link`, whether a declared link holds it up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller hears the stop button
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # what a stage starts is in this group, and ends with it
    for descriptor, output in enumerate(outputs, start=1):  # stdout, stderr
        redirect(output, descriptor)
    row: tuple[Action, ...] = ()
    answer: Report | Failure
    try:
        torch.set_num_threads(1)
        gc.freeze()
        job: Job = deserialize(control.recv_bytes())
        start = threading.Event()
        threading.Thread(target=listen, args=(control, start, job.rendezvous), daemon=True).start()
        row = job.schedule.workers[process // job.options.tensor_parallel]
        if torch.device(job.device).type == "cuda":
            torch.cuda.set_device(job.device)  # NCCL looks there
        if job.rendezvous:
            meet_in_torch(process, job)
        wake_in_time()
        if job.pace:  # others compute, and go where there is a free core
            keep_to_one_core(process)

        def meet() -> None:
            control.send_bytes(serialize(Ready()))
            start.wait()

        answer = work(process, job, board, on_link, links, Groups(), meet)
    except BaseException as error:
        place = board[process]
        answer = failure(row[place] if 0 <= place < len(row) else None, error)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        packed = serialize(answer)
    except Exception as error:  # outputs or a state that cannot travel
        packed = serialize(failure(None, error))
    control.send_bytes(packed)
    threading.Event().wait()  # the peers may still be reading; the controller ends all at once


def meet_in_torch(process: int, job: Job) -> None:
    """Join the process group of torch.distributed that all processes of the run are in."""
    if name := loopback():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    processes = job.schedule.p * job.options.tensor_parallel
    dist.init_process_group(
        job.backend,
        store=dist.FileStore(job.rendezvous, processes),
        rank=process,
        world_size=processes,
    )


def redirect(target: Connection, descriptor: int) -> None:
    """Let `descriptor` (1 stdout, 2 stderr) write to `target`, for C code as for Python."""
    os.dup2(target.fileno(), descriptor)
    stream = open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    if descriptor == 1:
        sys.stdout = stream
    else:
        sys.stderr = stream


def listen(control: Connection, start: threading.Event, rendezvous: str) -> None:
    """The controller says once when to start. No orphans: when it is gone, so is its end of the
    pipe, and so is this worker, with all that it has started and the folder they met in."""
    try:
        control.recv_bytes()
        start.set()
        control.poll(None)
    finally:
        if rendezvous:
            shutil.rmtree(Path(rendezvous).parent, ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)
