"""PyTorch's own pipeline engine, ``torch.distributed.pipelining``, behind the same call.

What crosses over is the schedule file: PyTorch reads our compute-only CSV, adds the messages
itself, and runs the result with its stages and its sends. Ours are the model, the microbatches,
the optimizer, and the clock: each action is timed, and paced, inside the stage.

The names used here are private and have moved between versions of PyTorch; they are used in this
file and in no other. `shipped` gives the schedules that PyTorch comes with.
"""

from __future__ import annotations

import copy
import itertools
import logging
import tempfile
import traceback
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from pipeschool.actions import Action, Schedule
from pipeschool.arguments import whole_number
from pipeschool.formats import from_csv, to_csv
from pipeschool.runtime.clock import Clock, Mark, now, sleep_until
from pipeschool.runtime.errors import PeerLost
from pipeschool.runtime.job import Failure, Job, Report
from pipeschool.runtime.process import failure
from pipeschool.runtime.stage import Tensors, checked_loss
from pipeschool.runtime.torch_limits import one_batch
from pipeschool.runtime.weights import StageWeights, on_cpu
from pipeschool.trace import Span
from pipeschool.versions import OneVersion

SHIPPED = {  # a name like ours -> PyTorch's, and the chunks per worker where nobody asks
    "gpipe": ("GPipe", 1),
    "1f1b": ("1F1B", 1),
    "interleaved_1f1b": ("Interleaved1F1B", 1),
    "looped_bfs": ("LoopedBFS", 1),
    "interleaved_zero_bubble": ("InterleavedZeroBubble", 1),
    "zbv_zero_bubble": ("ZBVZeroBubble", 2),
    "dualpipe_v": ("DualPipeV", 2),
}


def shipped(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """A schedule that PyTorch comes with, as its own table has it, with our updates at the end.

    name: ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``looped_bfs``, ``interleaved_zero_bubble``
        (with v=1 this is ZB-H1), ``zbv_zero_bubble`` or ``dualpipe_v``.
    v: chunks per worker; 1 where not given, and 2 for the last two, which know nothing else.

    One repair: PyTorch's table of 1F1B counts the last worker's forwards from 1, and its own check
    refuses it (its engine does not read that table). Here they count from 0.

    Raises ValueError for other names, and for sizes that PyTorch refuses.
    """
    if name not in SHIPPED:
        raise ValueError(f"PyTorch ships no schedule {name!r}; choose one of {', '.join(SHIPPED)}")
    theirs, usual = SHIPPED[name]
    p, m = whole_number("p", p), whole_number("m", m)
    v = usual if v is None else whole_number("v", v)
    make = schedules.get_schedule_class(theirs)
    alone = issubclass(make, schedules.PipelineScheduleSingle)
    if alone and v != 1:
        raise ValueError(f"{name} has one chunk per worker, so v must be 1, not {v}")
    # All that a table depends on; no process group is needed for it.
    stages = [
        SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, submod=None) for _ in range(v)
    ]
    try:
        order = make(stages[0] if alone else stages, m).pipeline_order
    except ValueError as error:
        raise ValueError(f"PyTorch's {theirs} refuses p={p}, m={m}, v={v}: {error}") from None
    rows = [order[rank] for rank in range(p)]
    if name == "1f1b":
        rows[-1] = counted_from_zero(rows[-1])
    text = "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows)
    return from_csv(text, p, m, name)


def counted_from_zero(row: list[Any]) -> list[Any]:
    """PyTorch's row of 1F1B with its forwards numbered in their order, from 0."""
    numbers = itertools.count()
    return [
        action._replace(microbatch_index=next(numbers))
        if action and action.computation_type == schedules.FORWARD
        else action
        for action in row
    ]


def work(
    rank: int, job: Job, device: torch.device, board: MutableSequence[int]
) -> Report | Failure:
    """What a worker does with its job under PyTorch's engine."""
    row = Row(rank, job, board, device)
    try:
        return _work(row, device)
    except Exception as error:
        if connection_failed(error):
            error = PeerLost(str(error).splitlines()[0])
        return failure(row.at, error)


def connection_failed(error: Exception) -> bool:
    """Was it a send or receive that raised this? The learner's own code may raise the same type,
    but from other places."""
    source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return type(error) is RuntimeError and source.is_relative_to(Path(dist.__file__).parent)


def _work(row: Row, device: torch.device) -> Report:
    job = row.job
    schedule = job.schedule
    m, count = schedule.m, schedule.stages
    logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)  # prints all rows on errors
    for index, module in job.modules.items():
        row.weights[index] = StageWeights(module, job.update, OneVersion())
        if index in job.restore:
            row.weights[index].restore(job.restore[index])
    stages = [Stage(row, module, i, count, device) for i, module in sorted(job.modules.items())]
    engine = Engine(row, stages, m)

    def microbatches(batch: int) -> tuple[list[Tensors], list[Any] | None]:
        these = slice(batch * m, batch * m + m)
        inputs = job.inputs[these] if job.inputs is not None else [()] * m
        targets = job.targets[these] if job.targets is not None else None
        return (
            [tuple(x.to(device) for x in values if x is not None) for values in inputs],
            None if targets is None else [target.to(device) for target in targets],
        )

    engine.prepare(*microbatches(0))
    dist.barrier()
    row.clock.start()
    for row.batch in range(schedule.batches):
        engine.do_batch(*microbatches(row.batch))
        for stage in stages:
            row.update(stage)
    row.go_on(len(row.actions))
    seconds = row.clock.seconds
    for action, start, end, version in row.marks:
        span = Span(row.rank, action, seconds(start), seconds(end), version)
        row.report.spans.append(span)
    for index, weights in row.weights.items():
        row.report.gradients[index] = on_cpu(weights.last_gradients)
        row.report.states[index] = weights.state(job.modules[index])
        row.report.parameter_bytes[index] = weights.bytes
    row.report.generator = torch.get_rng_state()
    return row.report


class Row:
    """One worker's row while PyTorch's engine does it: what is under way, and since when.

    The board, on which the controller looks, counts the actions of our own lowered row, though
    PyTorch's messages may stand in other places: after an action a worker is said to be at what
    follows it, which is a receive where it has to wait for one.
    """

    def __init__(self, rank: int, job: Job, board: MutableSequence[int], device: torch.device):
        self.rank = rank
        self.job = job
        self.board = board
        self.actions = job.schedule.workers[rank]
        self.position = {action: position for position, action in enumerate(self.actions)}
        self.batch = 0
        self.under_way: Action | None = None
        self.clock = Clock(device, on_device=not job.pace)
        self.start = self.clock.mark()
        self.marks: list[tuple[Action, Mark, Mark, int]] = []  # start, end, weight version
        self.weights: dict[int, StageWeights] = {}
        self.report = Report()

    @property
    def at(self) -> Action | None:
        """What the board says."""
        position = self.board[self.rank]
        return self.actions[min(position, len(self.actions) - 1)] if position >= 0 else None

    def go_on(self, position: int) -> None:
        """Say on the board what comes next. No send is waited for, and updates come last."""
        passed = ("SEND_F", "SEND_B", "U")
        while position < len(self.actions) and self.actions[position].kind in passed:
            position += 1
        self.board[self.rank] = position

    def begin(self, kind: str, stage: int, number: int) -> Action:
        """An action starts; `number` counts within the batch."""
        size = 1 if kind == "U" else self.job.schedule.m
        self.under_way = Action(kind, stage, number + self.batch * size)
        self.board[self.rank] = self.position[self.under_way]
        self.start = self.clock.mark()
        return self.under_way

    def end(self) -> None:
        """The action is done: wait until its declared time is over, if there is one."""
        action = self.under_way
        assert action is not None
        end = self.clock.mark()
        if self.job.pace and action.kind in self.job.pace:
            until = self.clock.seconds(self.start) + self.job.pace[action.kind][action.stage]
            sleep_until(until)
            end = now()
        version = self.weights[action.stage].ledger.newest
        self.marks.append((action, self.start, end, version))
        self.under_way = None
        self.go_on(self.position[action] + 1)

    def update(self, stage: Stage) -> None:
        """An optimizer update from the gradients that PyTorch has collected in the parameters."""
        weights = self.weights[stage.stage_index]
        action = self.begin("U", stage.stage_index, 0)
        weights.gradients = {
            name: parameter.grad
            for name, parameter in stage.submod.named_parameters()
            if parameter.grad is not None
        }
        version = weights.update(action)
        if self.job.history:
            after = self.report.history.setdefault(stage.stage_index, [])
            after.append(on_cpu(version.parameters))
        self.end()


class Stage(PipelineStage):
    """PyTorch's stage, on the clock of a `Row`."""

    def __init__(self, row: Row, module: nn.Module, index: int, count: int, device: torch.device):
        super().__init__(module, index, count, device)
        self.row = row

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward. Its action goes on until `Engine` has computed the loss."""
        self.row.begin("F", self.stage_index, fwd_chunk_id)
        with unwrapped():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """The whole backward, or its input half. PyTorch leaves the latter out on stage 0."""
        self.row.begin("B" if full_backward else "I", self.stage_index, bwd_chunk_id)
        with unwrapped():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.row.end()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weight half of a split backward."""
        self.row.begin("W", self.stage_index, bwd_chunk_id)
        with unwrapped():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.row.end()

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        """PyTorch learns shapes by running a microbatch through all stages. It gets a copy of the
        module, so that the statistics of a batch norm do not count it, and zeros where it would
        take memory as it finds it: an index must be a valid one."""
        self.row.go_on(self.row.position[Action("F", self.stage_index, 0)])
        if not self.is_first:
            for x in args:
                x.detach().zero_()
        return super()._compute_outputs(*args, module=copy.deepcopy(module), **kwargs)


class Engine:
    """PyTorch's engine on the clock of a `Row`. It divides gradients by m: the mean over the batch.

    ``torch`` is its runtime with our schedule. ``torch 1f1b`` and ``torch gpipe`` are its own
    classes of these schedules, with loops of their own; `bench` measures them.
    """

    def __init__(self, row: Row, stages: list[Stage], m: int):
        self.row = row
        self.stages = stages
        self.losses: dict[int, Tensor] = {}  # of microbatches in flight
        self.theirs: Any
        if row.job.engine == "torch":
            self.theirs = schedules._PipelineScheduleRuntime(stages, m, loss_fn=self.loss)
            with tempfile.TemporaryDirectory(prefix="pipeschool-") as folder:
                file = Path(folder) / "schedule.csv"
                file.write_text(to_csv(one_batch(row.job.schedule)), encoding="utf-8")
                self.theirs._load_csv(str(file))
        else:
            make = schedules.get_schedule_class(row.job.engine.removeprefix("torch "))
            self.theirs = make(stages[0], m, loss_fn=self.loss)
        self.theirs._maybe_compute_loss = self.end_forward
        self.theirs._maybe_get_loss = self.begin_backward

    def prepare(self, inputs: list[Tensors], targets: list[Any] | None) -> None:
        """Connect to the neighbours, and let the stages learn the shapes that they will meet."""
        for stage in self.stages:
            stage.has_backward = True
        several = isinstance(self.theirs, schedules.PipelineScheduleMulti)
        start = self.theirs._initialize_stages if several else self.theirs._initialize_stage
        start(inputs[0], {}, targets[0] if targets else None)

    def do_batch(self, inputs: list[Tensors], targets: list[Any] | None) -> None:
        """What the public `step` does once it has cut a batch into microbatches."""
        for stage in self.stages:
            stage.clear_runtime_states()
        self.theirs._step_microbatches(inputs, None, targets, return_outputs=False)

    def loss(self, output: Any, target: Any) -> Tensor:
        """The loss of one microbatch."""
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        return checked_loss(lambda found: self.row.job.loss(found, target), tuple(outputs))

    def end_forward(
        self, stage: Stage, output: Any, targets: Any, microbatch: int, loss_kwargs: Any = None
    ) -> None:
        """The loss belongs to the last stage's forward, which ends here. PyTorch would count
        losses in the order of the forwards; here each keeps the number of its microbatch."""
        if stage.is_last:
            loss = self.loss(output, targets[microbatch])
            self.losses[microbatch] = loss
            number = self.row.batch * len(targets) + microbatch
            self.row.report.losses[number] = loss.item()
        self.row.end()

    def begin_backward(self, stage: Stage, microbatch: int) -> Tensor | None:
        """The loss that the last stage's backward starts from."""
        return self.losses.pop(microbatch) if stage.is_last else None


@contextmanager
def unwrapped() -> Iterator[None]:
    """PyTorch wraps what a stage raises into a RuntimeError of its own; the learner's comes out."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None
