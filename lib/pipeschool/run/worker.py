"""A worker: the loop over its row of actions, and the process around it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, MutableSequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step; a forked worker has it at once
import torch.distributed as dist

from pipeschool.actions import Action, B, F, U
from pipeschool.lower import outgoing
from pipeschool.run.clock import Clock, Mark
from pipeschool.run.errors import Frame
from pipeschool.run.job import Failure, Job, Report
from pipeschool.run.live import Meter
from pipeschool.run.parcel import pack, unpack
from pipeschool.run.stage import Stage, Tensors, checked_loss, describe
from pipeschool.run.transport import Packed, PeerLost, Transport
from pipeschool.run.weights import StageWeights, Update, Version, on_cpu
from pipeschool.trace import Span
from pipeschool.versions import Stash, policy_named

NO_VERSION = Version(0, 1, {})


class Worker:
    """Does one row of a lowered schedule, action by action."""

    def __init__(self, rank: int, job: Job, transport: Transport):
        self.rank = rank
        self.job = job
        self.transport = transport
        self.report = Report()
        self.last_stage = job.schedule.depth - 1
        self.stages = {}
        policy = policy_named(job.schedule.weights)
        for index, module in job.modules.items():
            decide = policy(index, job.schedule.stages, job.schedule.updates_every)
            weights = StageWeights(module, job.update, decide)
            if index in job.restore:
                weights.restore(job.restore[index])
            place = index % job.schedule.depth  # in its copy of the model
            self.stages[index] = Stage(place, module, weights, job.recompute[index])
        # What one action leaves for another on this worker: messages that came, under the name
        # of their receive; messages to go, under that of their send; and what needs no message,
        # because the neighbour stage is here too, under that of its compute.
        self.mail: dict[Action, Tensors] = {}
        self.outbox: dict[Action, Packed] = {}
        self.meter = Meter(self.stages, self.mail) if job.memory else None
        # Pace and meter need every time at once; otherwise a GPU need not be waited for.
        self.clock = Clock(transport.device, on_device=not (job.pace or job.memory))
        self.done: list[tuple[Action, Mark, Mark, int, int, int]] = []
        self.ready = 0.0  # paced: when this worker was free and all its input had left its sender

    def do(self, action: Action) -> None:
        """Do one action, and note when it started and ended."""
        size, version = 0, NO_VERSION
        start = self.clock.mark()
        match action.kind:
            case "F":
                version = self.forward(action)
            case "B" | "I":
                version = self.backward(action)
            case "W":
                version = self.stages[action.stage].weights.use(action)
                self.stages[action.stage].backward_weight(action.microbatch, version)
            case "U":
                version = self.update(action)
            case "SEND_F" | "SEND_B":
                message = self.outbox.pop(action)
                self.transport.send(action, message, self.ready or time.perf_counter())
                size = message.bytes
            case "RECV_F" | "RECV_B":
                arrived = self.transport.receive(action)
                self.mail[action] = arrived.tensors
                if self.meter:  # another thread took them in
                    self.meter.live.note(t for t in arrived.tensors if t is not None)
                self.ready = max(self.ready, arrived.left)
        end = self.clock.mark()
        if self.job.pace and action.kind in self.job.pace:
            seconds = self.job.pace[action.kind][action.stage]
            start, end = self.keep_pace(seconds, self.clock.seconds(start))
        if self.meter:
            self.transport.let_go()
            self.meter.note(self.clock.seconds(start), self.clock.seconds(end))
        self.done.append((action, start, end, version.number, version.held, size))

    def forward(self, action: Action) -> Version:
        """Inputs in, outputs to the mail; on the last stage a loss instead."""
        stage, k = self.stages[action.stage], action.microbatch
        version = stage.weights.use(action)
        inputs = tuple(x for x in self.take("RECV_F", action) if x is not None)
        last = stage.index == self.last_stage
        try:
            if not self.job.schedule.trains:
                return self.infer(action, version, inputs)
            outputs: Tensors = stage.forward(k, version, inputs, self.loss(k) if last else None)
        except Exception as error:
            error.add_note(f"the input was {describe(inputs)}")
            raise
        if last:
            (loss,) = outputs
            assert loss is not None
            self.report.losses[k] = loss.item()
        else:
            self.hand_on(action, outputs)
        self.refuse_nan(action, outputs)
        return version

    def infer(self, action: Action, version: Version, inputs: tuple[torch.Tensor, ...]) -> Version:
        """A forward that no backward follows; the last stage keeps what it gives."""
        stage, k = self.stages[action.stage], action.microbatch
        outputs = stage.infer(version, inputs)
        if stage.index != self.last_stage:
            self.hand_on(action, outputs)
        else:
            self.report.outputs[k] = on_cpu(outputs)
            if self.job.targets and self.job.targets[k] is not None:
                with torch.no_grad():
                    self.report.losses[k] = checked_loss(self.loss(k), outputs).item()
        self.refuse_nan(action, outputs)
        return version

    def loss(self, microbatch: int) -> Callable[[Any], torch.Tensor]:
        """The caller's loss, given the targets of `microbatch`."""
        assert self.job.targets is not None
        target = self.job.targets[microbatch]
        return lambda outputs: self.job.loss(outputs, target)

    def backward(self, action: Action) -> Version:
        """Gradients of the outputs in, gradients of the inputs to the mail. Of a split backward
        that is the first half."""
        stage, k = self.stages[action.stage], action.microbatch
        version = stage.weights.use(action)
        last = stage.index == self.last_stage
        come = self.job.scales[k] if last else self.take("RECV_B", action)
        whole_or_half = stage.backward if action.kind == "B" else stage.backward_input
        gradients = whole_or_half(k, version, come)
        if stage.index > 0:
            self.hand_on(action, gradients)
        self.refuse_nan(action, gradients)
        return version

    def update(self, action: Action) -> Version:
        """New weights from the gradients since the last update; noted where the caller asks."""
        weights = self.stages[action.stage].weights
        self.transport.add_over_copies(action.stage, weights.gradients)
        version = weights.update(action)
        if self.job.history:
            self.report.history.setdefault(action.stage, []).append(on_cpu(version.parameters))
        return version

    def take(self, receive: str, action: Action) -> Tensors:
        """What `action` works on: data, a message, or what a neighbour stage here has left."""
        if action.stage % self.job.schedule.depth == 0 and action.kind == "F":
            assert self.job.inputs is not None
            return self.job.inputs[action.microbatch]
        came = Action(receive, action.stage, action.microbatch)
        here = came._replace(kind=receive[-1])
        return self.mail.pop(came if came in self.mail else here)

    def hand_on(self, action: Action, tensors: Tensors) -> None:
        """Leave `tensors` for the send, or for the neighbour stage where it is on this worker."""
        if message := outgoing(action, self.job.schedule):
            self.outbox[message[0]] = self.transport.pack(message[0], tensors)
        elif action.kind == "F":
            self.mail[F(action.stage + 1, action.microbatch)] = tensors
        else:
            self.mail[B(action.stage - 1, action.microbatch)] = tensors

    def keep_pace(self, seconds: float, start: float) -> tuple[float, float]:
        """A paced action lasts as long as declared: wait for what is left; returns its span.

        Its clock starts when this worker was free and the input had left its sender, as on a
        device that starts by itself: what our processes need to pass a message on and get going
        is part of the declared time. Where the work is not done when that is over, the action
        ends late, and its span says so. Waking up late is none of its fault: the next action's
        clock starts in time.
        """
        begin = self.ready or start
        done = time.perf_counter()
        until = begin + seconds
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)
        self.ready = max(until, done)
        return begin, self.ready

    def refuse_nan(self, action: Action, tensors: Tensors) -> None:
        """Where the caller asked for it: stop at the first number that is none."""
        if not self.job.nan_check:
            return
        for tensor in tensors:
            if tensor is not None and tensor.is_floating_point() and tensor.isnan().any():
                raise FloatingPointError(f"{action} gave NaN")

    def finish(self) -> Report:
        """Everything sent, results on the CPU."""
        self.transport.finish()
        for action, start, end, *rest in self.done:
            times = self.clock.seconds(start), self.clock.seconds(end)
            span = Span(self.rank, action, *times, *rest)
            (self.report.messages if action.is_message else self.report.spans).append(span)
        for index, stage in self.stages.items():
            self.report.gradients[index] = on_cpu(stage.weights.last_gradients)
            self.report.states[index] = stage.weights.state(stage.module)
            self.report.parameter_bytes[index] = stage.weights.bytes
        self.report.memory = self.meter.levels if self.meter else []
        self.report.generator = torch.get_rng_state()
        return self.report


def warm_up(device: torch.device) -> None:
    """One tiny microbatch there and back, so that the first action does not pay for torch's start
    and for the first touch of memory that a forked process shares."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()).to(device)
    weights = StageWeights(module, Update(lambda p: torch.optim.SGD(p, lr=0.1)), Stash())
    stage = Stage(1, module, weights)
    x = torch.ones(2, 2, device=device)
    for k in range(2):
        stage.forward(k, weights.use(F(1, k)), (x,), lambda y: torch.nn.functional.mse_loss(y, x))
        stage.backward(k, weights.use(B(1, k)), 1.0)
        weights.update(U(1, k))


def main(rank: int, board: MutableSequence[int], control: Connection, *outputs: Connection) -> None:
    """A worker process: get the job, find the others, do the row, report, wait to be ended.

    `board[rank]` always says which action of the row is under way, so that the controller can
    tell even when this process is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller hears the stop button
    for descriptor, output in enumerate(outputs, start=1):  # stdout, stderr
        redirect(output, descriptor)
    action: Action | None = None
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
            job.backend, init_method=job.rendezvous, rank=rank, world_size=job.schedule.p
        )
        warm_up(device)
        torch.manual_seed(job.seed + rank)
        if job.generator is not None:
            torch.set_rng_state(job.generator)
        for module in job.modules.values():
            module.to(device)
        answer: Report | Failure
        if job.engine != "pipeschool":
            from pipeschool.run import torch_engine  # it imports this module

            answer = torch_engine.work(rank, job, device, board)
        else:
            transport = Transport(rank, job.schedule, device, job.backend)
            worker = Worker(rank, job, transport)
            dist.barrier()
            worker.clock.start()
            with worker.meter.live if worker.meter else nullcontext():
                for position, action in enumerate(job.schedule.workers[rank]):
                    board[rank] = position
                    worker.do(action)
            board[rank] = len(job.schedule.workers[rank])
            answer = worker.finish()
    except BaseException as error:
        answer = failure(action, error)
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
    return Failure(action, text, frames, secondary=isinstance(error, PeerLost))
