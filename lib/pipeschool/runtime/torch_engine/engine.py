"""PyTorch's own pipeline engine, ``torch.distributed.pipelining``, as an engine class of ours.

What crosses over is the schedule file: PyTorch reads our compute-only CSV, adds the messages
itself, and runs the result with its stages and its sends. Ours are the model, the microbatches,
the optimizer, and what watches each action: its clock and its pace.

The names used here are private and have moved between versions of PyTorch; they are used in this
package and nowhere else.
"""

from __future__ import annotations

import copy
import logging
import math
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from pipeschool.actions import Action
from pipeschool.formats import to_csv
from pipeschool.runtime.errors import PeerLost, lost_connection, text_of
from pipeschool.runtime.observers.position import Position
from pipeschool.runtime.share import Share
from pipeschool.runtime.stages.loss import checked_loss
from pipeschool.runtime.stages.tensors import Tensors
from pipeschool.runtime.torch_engine.limits import one_batch

DISTRIBUTED = Path(dist.__file__).parent


class TorchEngine:
    """PyTorch's runtime with our schedule. `own_messages`: it needs no wire of ours."""

    own_messages = True
    theirs = ""  # or the name of one of its own classes of schedules

    def __init__(self, share: Share):
        logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)  # prints rows on errors
        self.share = share
        self.row = Row(share)
        self.m = share.schedule.m
        self.stages = [
            Stage(self.row, stage.module, index, share.schedule.stages, share.device)
            for index, stage in sorted(share.stages.items())
        ]
        self.engine = Engine(self.row, self.stages, self.m, self.theirs)
        done_by_torch(self.engine.prepare, *self.microbatches(0))

    def run(self) -> None:
        """All batches, each with its updates at the end."""
        for batch in range(self.share.schedule.batches):
            self.row.batch = batch
            done_by_torch(self.engine.do_batch, *self.microbatches(batch))
            for stage in self.stages:
                self.row.begin("U", stage.stage_index, 0)
                self.share.update(self.row.under_way)
                self.row.end()

    def microbatches(self, batch: int) -> tuple[list[Tensors], list[Any] | None]:
        """Inputs and targets of one batch; where there are none here, no inputs for each."""
        device, these = self.share.device, slice(batch * self.m, batch * self.m + self.m)
        inputs = self.share.inputs[these] if self.share.inputs is not None else [()] * self.m
        targets = self.share.targets[these] if self.share.targets is not None else None
        return (
            [tuple(x.to(device) for x in values if x is not None) for values in inputs],
            None if targets is None else [target.to(device) for target in targets],
        )


class Torch1F1B(TorchEngine):
    """PyTorch's class ``Schedule1F1B``, with a loop of its own; `bench` measures it."""

    theirs = "1f1b"


class TorchGPipe(TorchEngine):
    """PyTorch's class ``ScheduleGPipe``, with a loop of its own; `bench` measures it."""

    theirs = "gpipe"


def done_by_torch(call: Callable[..., None], *args: Any) -> None:
    """``call(*args)`` of PyTorch's engine. A lost connection is told apart from what torch refuses,
    and from an error of the learner's own code: a send or receive raised it, and says so."""
    try:
        call(*args)
    except Exception as error:
        source = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if source.is_relative_to(DISTRIBUTED):
            sends = "pipelining" not in source.parts
            if sends and isinstance(error, RuntimeError) and lost_connection(error):
                raise PeerLost(text_of(error).partition("\n")[0]) from None
            error.add_note("so says torch.distributed: engine='pipeschool' may do it")
        raise


class Row:
    """One worker's row while PyTorch's engine does it: what is under way, for those who watch.

    The board, on which the controller looks, counts the actions of our own lowered row, though
    PyTorch's messages may stand in other places: after an action a worker is said to be at what
    follows it, which is a receive where it has to wait for one.
    """

    def __init__(self, share: Share):
        self.share = share
        self.batch = 0
        self.under_way = Action("F", 0, 0)
        self.position = next(o for o in share.observers if isinstance(o, Position))

    def go_on(self, place: int) -> None:
        """Say on the board what comes next. No send is waited for, and updates come last."""
        row = self.share.row
        while place < len(row) and row[place].kind in ("SEND_F", "SEND_B", "U"):
            place += 1
        self.position.move_to(place)

    def begin(self, kind: str, stage: int, number: int) -> None:
        """An action starts; `number` counts within the batch."""
        size = 1 if kind == "U" else self.share.schedule.m
        self.under_way = Action(kind, stage, number + self.batch * size)
        for observer in self.share.observers:
            observer.before(self.under_way)

    def end(self) -> None:
        """It is done."""
        for observer in reversed(self.share.observers):
            observer.after(self.under_way)
        self.go_on(self.position.place_of[self.under_way] + 1)


class Stage(PipelineStage):
    """PyTorch's stage, on the clock of a `Row`."""

    def __init__(self, row: Row, module: nn.Module, index: int, count: int, device: torch.device):
        super().__init__(module, index, count, device)
        self.row = row

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward. On the last stage its action goes on until `Engine` has computed the loss;
        elsewhere it ends here, before PyTorch sends what it gives."""
        self.row.begin("F", self.stage_index, fwd_chunk_id)
        with unwrapped():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self.row.end()
        return output

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
        self.row.go_on(self.row.position.place_of[Action("F", self.stage_index, 0)])
        if not self.is_first:
            for x in args:
                x.detach().zero_()
        return super()._compute_outputs(*args, module=copy.deepcopy(module), **kwargs)


class Engine:
    """PyTorch's engine on the clock of a `Row`. It divides gradients by m, so a loss is multiplied
    by m and by its share in that of the batch.

    theirs: empty for its runtime with our schedule; otherwise which of its classes.
    """

    def __init__(self, row: Row, stages: list[Stage], m: int, theirs: str):
        self.row = row
        self.stages = stages
        self.m = m
        self.losses: dict[int, Tensor] = {}  # of microbatches in flight
        self.theirs: Any
        if not theirs:
            self.theirs = schedules._PipelineScheduleRuntime(stages, m, loss_fn=self.loss)
            with tempfile.TemporaryDirectory(prefix="pipeschool-") as folder:
                file = Path(folder) / "schedule.csv"
                file.write_text(to_csv(one_batch(row.share.schedule)), encoding="utf-8")
                self.theirs._load_csv(str(file))
        else:
            make = schedules.get_schedule_class(theirs)
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
        return checked_loss(lambda found: self.row.share.loss(found, target), tuple(outputs))

    def end_forward(
        self, stage: Stage, output: Any, targets: Any, microbatch: int, loss_kwargs: Any = None
    ) -> None:
        """The loss belongs to the last stage's forward, which ends here. PyTorch would count
        losses in the order of the forwards; here each keeps the number of its microbatch."""
        if stage.is_last:
            number = self.row.batch * self.m + microbatch
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            loss = checked_loss(self.row.share.loss_of(number), tuple(outputs))
            part = self.m * self.row.share.loss_weight(number)
            self.losses[microbatch] = loss if math.isclose(part, 1.0) else part * loss
            self.row.share.losses[number] = loss.item()
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
