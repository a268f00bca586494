"""The options of a run: each is declared, checked and explained here, and nowhere else."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pipeschool.arguments import number, whole_number
from pipeschool.runtime.own_modules import modules_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    MakeOptimizer = Callable[[Iterable[Parameter]], Optimizer]
    MakeScheduler = Callable[[Optimizer], LRScheduler]

Documented = TypeVar("Documented", bound=Callable[..., Any])
Pace = tuple["float | Sequence[float]", "float | Sequence[float]"]
ENGINES = {  # the module and the class that a name stands for
    "pipeschool": ("pipeschool.runtime.engine", "Engine"),
    "torch": ("pipeschool.runtime.torch_engine.engine", "TorchEngine"),
}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The keyword arguments of `ps.run`; those of `ps.train` are the same.

    loss: ``loss(outputs, targets)`` gives the mean over the samples; mse_loss where not given. The
        loss of a batch is the mean of its microbatches' losses, by their numbers of samples. What a
        stage in the middle adds to its gradients by itself, as an auxiliary loss, is not weighed:
        let it hand its part on, for this loss to add.
    weigh: of a loss that is a mean over something else: ``weigh(targets)`` says over how much in
        one microbatch, such as ``lambda y: (y != -100).sum()``, the tokens that are not padding.
        Where it is 0, the microbatch counts for nothing and its loss is given as 0.
    check_loss: before the run, compare the loss of the first update's microbatches, at once, with
        the mean of theirs, in this process; refuse it where they differ by more than rounding.
    optimizer: makes the optimizer of a stage from its parameters; None: gradients only.
    scheduler: makes a learning-rate scheduler from it; one step after each update.
    clip_norm: the largest norm of the gradients; longer ones are shortened to it before the update.
    clip_over: whose norm that is. ``model``: of all stages together, as one process has it; their
        workers meet for it before an update, and a shared parameter counts once. ``stage``: each
        stage looks at its own, which gives another result for another number of stages. ``model``
        where a schedule flushes, unless told otherwise; elsewhere only ``stage`` can be.
    pace: (forward, backward) seconds, each one number or one per stage. Each action still does
        its work, and ends no earlier than this time after its input was in hand: see more workers
        than there are cores. All times are read from the clock.
    device: ``auto``, ``cpu`` or ``cuda``. NCCL with a GPU per worker; otherwise messages go through
        the host.
    engine: ``pipeschool``, or ``torch``: the same schedule on PyTorch's own engine,
        ``torch.distributed.pipelining``, for synchronous schedules and equal microbatches; or an
        engine class of your own, see `pipeschool.runtime.engine` and `pipeschool.runtime.share`.
    timeout: seconds without any progress after which a run counts as stuck. A worker that is
        busy computing gets 15 times as long. Declared times, of `pace` and of links, do not count.
    nan_check: stop at the first NaN that a stage gives.
    seed: worker w seeds Python's, numpy's and torch's random numbers with seed + w. So what a stage
        draws, such as a dropout, depends on the worker that it is on: with another p it is another.
    history: note the parameters after every update, see `Result.history`.
    update_stages: load the trained weights into `stages`; they are left alone otherwise.
    recompute: a stage keeps only a microbatch's input, and goes forward once more, with the same
        random numbers, for its backward; True, False, or one of them per stage. A paced backward
        then lasts as long as a forward and a backward.
    memory: count the bytes of all tensors alive, see `Trace.memory`; every operation takes some
        microseconds longer.
    latency, bandwidth: declare slower links, in seconds and in bytes per second: each message is
        held back until a link like that would have brought it, counted from the moment at which it
        was really sent. The trace is ``measured, paced`` then.
    matching: ``in_order``: no send waits. ``rendezvous``: a send is done only when its receiver is
        there, as NCCL has it; see `check` and `lower`. Between processes of one machine, to try
        what would stand still there: that is refused.
    tensor_parallel, tensor_plan: how many processes share the weights of each worker, and how: a
        style of torch.distributed.tensor.parallel for layers by their name in the stage.

    Raises ValueError where one of them is not what it must be.
    """

    loss: Callable[[Any, Any], Tensor] | None = None
    weigh: Callable[[Any], Any] | None = None
    check_loss: bool = False
    optimizer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    clip_norm: float | None = None
    clip_over: str | None = None
    pace: Pace | None = None
    device: str = "auto"
    engine: str | type[Any] = "pipeschool"
    timeout: float = 3.0
    nan_check: bool = False
    seed: int = 0
    history: bool = False
    update_stages: bool = False
    recompute: bool | Sequence[bool] = False
    memory: bool = False
    latency: float = 0.0
    bandwidth: float = math.inf
    matching: str = "in_order"
    tensor_parallel: int = 1
    tensor_plan: Mapping[str, ParallelStyle] | None = None

    def __post_init__(self) -> None:
        engine = self.engine
        own = isinstance(engine, type) and callable(getattr(engine, "run", None))
        if not own and not (isinstance(engine, str) and engine in ENGINES):
            raise ValueError(
                f"engine must be one of {', '.join(ENGINES)}, not {engine!r}; or an engine class "
                "of your own, with a method run"
            )
        if self.matching not in ("in_order", "rendezvous"):
            raise ValueError(f"matching must be in_order or rendezvous, not {self.matching!r}")
        number("timeout", self.timeout, positive=True)
        for name in ("check_loss", "nan_check", "history", "update_stages", "memory"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.scheduler is not None and self.optimizer is None:
            raise ValueError("scheduler needs an optimizer, whose learning rate it sets")
        for name, function, example in (
            ("loss", self.loss, "torch.nn.CrossEntropyLoss()"),
            ("weigh", self.weigh, "lambda targets: (targets != -100).sum()"),
            ("optimizer", self.optimizer, "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"),
            ("scheduler", self.scheduler, "lambda o: torch.optim.lr_scheduler.StepLR(o, 10)"),
        ):
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be a function, such as {example}, not {function!r}")
        if isinstance(self.loss, type):
            name = self.loss.__name__
            raise ValueError(
                f"loss must be a function of outputs and targets, such as {name}(), not the class "
                f"{name}"
            )
        if self.clip_norm is not None:
            number("clip_norm", self.clip_norm, positive=True)
        if self.clip_over not in (None, "model", "stage"):
            raise ValueError(f"clip_over must be 'model' or 'stage', not {self.clip_over!r}")
        if self.clip_over and self.clip_norm is None:
            raise ValueError("clip_over needs clip_norm, the largest norm that there may be")
        whole_number("tensor_parallel", self.tensor_parallel)
        number("latency", self.latency)
        number("bandwidth", self.bandwidth, positive=True, infinite=True)
        whole_number("seed", self.seed, at_least=0)

    @property
    def paced(self) -> bool:
        """Do actions or messages wait out a declared time?"""
        return self.pace is not None or self.latency > 0 or self.bandwidth < math.inf

    def modules_for(self, stages: object) -> list[str]:
        """The modules that a worker needs for `stages` and the functions and class given here."""
        listed = list(stages) if isinstance(stages, Iterable) else []
        layers = [m for s in listed if hasattr(s, "modules") for m in s.modules()]
        return modules_of([*layers, self.loss, self.optimizer, self.scheduler, self.engine])


def options_of(function: str, given: Mapping[str, Any]) -> RunOptions:
    """The options in `given`, keyword arguments of `function`; TypeError where there is no such."""
    known = [field.name for field in fields(RunOptions)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
            raise TypeError(f"{function} has no option {name!r}: {advice}")
    return RunOptions(**given)


def with_options(function: Documented) -> Documented:
    """Let `function`, which takes ``**options``, show each of them in its signature and explain
    them in its help, so that both are written once."""
    own = inspect.signature(function, eval_str=False)
    listed = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in fields(RunOptions)
    ]
    function.__signature__ = own.replace(parameters=[*listed, *added])  # type: ignore[attr-defined]
    explained = inspect.cleandoc(RunOptions.__doc__ or "").partition("\n\n")[2]
    options = explained.rpartition("\n\nRaises")[0]
    function.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("{options}", options)
    return function
