"""A worker: the loop over its row of actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, MutableSequence
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step; a forked worker has it at once
import torch.distributed as dist

from pipeschool.actions import Action, B, F, U
from pipeschool.runtime.clock import Clock, Mark, now, sleep_until
from pipeschool.runtime.job import Failure, Job, Report
from pipeschool.runtime.live import Meter
from pipeschool.runtime.packet import Packed
from pipeschool.runtime.reduce import add_up
from pipeschool.runtime.stage import Stage, Tensors, checked_loss, describe
from pipeschool.runtime.tensor import parallelize
from pipeschool.runtime.transport import Transport
from pipeschool.runtime.weights import StageWeights, Update, Version, on_cpu
from pipeschool.trace import Span
from pipeschool.versions import Ledger, Stash, ledger

NO_VERSION = Version(0, 1, {})


class Worker:
    """Does one row of a lowered schedule, action by action.

    `wait_on_link` sleeps until a moment at which a declared link will have brought a message.
    """

    def __init__(
        self, rank: int, job: Job, transport: Transport, wait_on_link: Callable[[float], None]
    ):
        self.rank = rank
        self.job = job
        self.transport = transport
        self.wait_on_link = wait_on_link
        self.report = Report()
        splits = any(action.kind == "I" for action in job.schedule.workers[rank])
        self.hooks_allowed = job.schedule.synchronous and not splits
        self.last_stage = job.schedule.stages - 1
        self.stages = {}
        for index, module in job.modules.items():
            weights = StageWeights(module, job.update, ledger(job.schedule, index, rank))
            if index in job.restore:
                weights.restore(job.restore[index])
            self.stages[index] = Stage(index, module, weights, job.recompute[index])
        # What one action leaves for another on this worker: messages that came, under the name
        # of their receive; messages to go, under that of their send; and what needs no message,
        # because the neighbour stage is here too, under that of its compute.
        self.mail: dict[Action, Tensors] = {}
        self.packed: dict[Action, Packed] = {}
        self.meter = Meter(self.stages, self.mail) if job.memory else None
        # Pace and meter need every time at once; otherwise a GPU need not be waited for.
        self.clock = Clock(transport.device, on_device=not (job.pace or job.memory))
        self.done: list[tuple[Action, Mark, Mark, int, int, int]] = []
        self.tied = 0  # updates for which the parameters that stages share have been summed
        self.link_free: defaultdict[int, float] = defaultdict(float)  # peer -> end of last message
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
                message = self.packed.pop(action)
                done = self.ready if self.job.pace else now()
                self.transport.send(action, message, self.arrival(action, message, done))
                size = message.bytes
            case "RECV_F" | "RECV_B":
                arrived = self.transport.receive(action)
                self.mail[action] = arrived.tensors
                if self.meter:  # another thread took them in
                    self.meter.live.note(t for t in arrived.tensors if t is not None)
                self.ready = max(self.ready, arrived.left)
                if self.job.link:
                    self.wait_on_link(arrived.left)
        end = self.clock.mark()
        if self.job.pace and action.kind in self.job.pace:
            seconds = self.job.pace[action.kind][action.stage]
            start, end = self.keep_pace(seconds, self.clock.seconds(start))
        if self.meter:
            if self.job.backend == "gloo":  # what has left must not count; NCCL could stand still
                self.transport.settle()
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
            if "leaf Variable" in str(error):
                error.add_note("a stage must not change its input in place: leave inplace=True out")
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
        if not self.hooks_allowed:
            weights.refuse_hooks(action.stage)
        self.transport.sum_over_replicas(action.stage, weights.gradients, weights.current)
        self.sum_ties(action)
        version = weights.update(action)
        if self.job.history:
            self.report.history.setdefault(action.stage, []).append(on_cpu(version.parameters))
        return version

    def sum_ties(self, update: Action) -> None:
        """Before the first update of a batch here: the gradients of all parameters that stages
        share, summed. Every worker takes them in the same order, so nobody waits in a circle."""
        if self.tied > update.microbatch:
            return
        self.tied += 1
        for number, tie in enumerate(self.job.ties):
            here = [(self.stages[s].weights, name) for s, name in tie if s in self.stages]
            if not here:
                continue
            first, its_name = here[0]
            found = [w.gradients[name] for w, name in here if name in w.gradients]
            total = {its_name: add_up(found)} if found else {}
            self.transport.sum_over_tie(number, total, {its_name: first.current[its_name]})
            for weights, name in here:
                if total:
                    weights.gradients[name] = total[its_name].clone()

    def take(self, receive: str, action: Action) -> Tensors:
        """What `action` works on: data, a message, or what a neighbour stage here has left."""
        if action.stage == 0 and action.kind == "F":
            assert self.job.inputs is not None
            return self.job.inputs[action.microbatch]
        came = Action(receive, action.stage, action.microbatch)
        here = came._replace(kind=receive[-1])
        return self.mail.pop(came if came in self.mail else here)

    def hand_on(self, action: Action, tensors: Tensors) -> None:
        """Leave `tensors` for the send, or for the neighbour stage where it is on this worker."""
        letter, step = ("F", 1) if action.kind == "F" else ("B", -1)
        send = Action(f"SEND_{letter}", action.stage, action.microbatch)
        if send in self.transport.routes:
            self.packed[send] = self.transport.pack(send, tensors)
        else:
            self.mail[Action(letter, action.stage + step, action.microbatch)] = tensors

    def keep_pace(self, seconds: float, start: float) -> tuple[float, float]:
        """A paced action lasts as long as declared: wait for what is left; returns its span.

        Its clock starts when this worker was free and the input had left its sender, as on a
        device that starts by itself: what our processes need to pass a message on and get going
        is part of the declared time. Where the work is not done when that is over, the action
        ends late, and its span says so. Waking up late is none of its fault: the next action's
        clock starts in time.
        """
        begin = self.ready or start
        done = now()
        until = begin + seconds
        sleep_until(until)
        self.ready = max(until, done)
        return begin, self.ready

    def arrival(self, send: Action, message: Packed, done: float) -> float:
        """When what is `done` now counts as there: at once, or when the declared link would have
        brought it. A message waits until its link has brought those before it."""
        if self.job.link is None:
            return done
        latency, bandwidth = self.job.link
        peer = self.transport.routes[send].peer
        left = max(done, self.link_free[peer]) + message.bytes / bandwidth
        self.link_free[peer] = left
        return left + latency

    def refuse_nan(self, action: Action, tensors: Tensors) -> None:
        """Where the caller asked for it: stop at the first number that is none."""
        if not self.job.nan_check:
            return
        for tensor in tensors:
            if tensor is not None and tensor.is_floating_point() and tensor.isnan().any():
                raise FloatingPointError(f"{action} gave NaN")

    def finish(self) -> Report:
        """Everything sent, results on the CPU."""
        self.transport.settle()
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
    update = Update(lambda p: torch.optim.SGD(p, lr=0.1))
    weights = StageWeights(module, update, Ledger(Stash()))
    stage = Stage(1, module, weights)
    x = torch.ones(2, 2, device=device)
    for k in range(2):
        stage.forward(k, weights.use(F(1, k)), (x,), lambda y: torch.nn.functional.mse_loss(y, x))
        stage.backward(k, weights.use(B(1, k)), 1.0)
        weights.update(U(1, k))


def work(
    rank: int,
    job: Job,
    device: torch.device,
    board: MutableSequence[int],
    on_link: MutableSequence[int],
) -> Report | Failure:
    """Do this process's row, once the process group is there. With tensor parallelism, several
    processes are one worker.

    `board[rank]` always says which action of the row is under way. `on_link[rank]` is 1 while the
    message it needs has come, and is held back as a declared link would have done.
    """

    def wait_on_link(moment: float) -> None:
        on_link[rank] = 1
        sleep_until(moment)
        on_link[rank] = 0

    warm_up(device)
    number = rank // job.parts
    torch.manual_seed(job.seed + number)
    if job.generator is not None:
        torch.set_rng_state(job.generator)
    for module in job.modules.values():
        module.to(device)
    if job.parts > 1:
        parallelize(job.modules, job.schedule.p, job.parts, job.plan, device)
    if job.engine != "pipeschool":
        from pipeschool.runtime import torch_engine

        return torch_engine.work(rank, job, device, board)
    part = rank % job.parts
    transport = Transport(
        number, job.schedule, device, job.backend, part, job.parts, prompt=job.memory
    )
    transport.meet_for(job.ties)
    worker = Worker(number, job, transport, wait_on_link)
    row = job.schedule.workers[number]
    dist.barrier()
    worker.clock.start()
    with worker.meter.live if worker.meter else nullcontext():
        for position, action in enumerate(row):
            board[rank] = position
            worker.do(action)
    board[rank] = len(row)
    return worker.finish()
