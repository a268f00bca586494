"""Run a schedule on real worker processes. Importing this does not import torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeschool.actions import Schedule
from pipeschool.arguments import number, whole_number
from pipeschool.cost import Cost
from pipeschool.runtime.errors import RunError, RunStopped, one_sentence_errors
from pipeschool.runtime.pool import start_early
from pipeschool.runtime.training import Training, train
from pipeschool.versions import Policy, with_weights

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

    from pipeschool.runtime.launch import Options, Pace, Result
    from pipeschool.runtime.weights import MakeOptimizer, MakeScheduler

TIMEOUT = 3.0  # seconds
ENGINES = ("pipeschool", "torch")


@one_sentence_errors
def run(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    clip_norm: float | None = None,
    weights: str | type[Policy] | None = None,
    pace: Pace | None = None,
    device: str = "auto",
    engine: str = "pipeschool",
    timeout: float = TIMEOUT,
    nan_check: bool = False,
    seed: int = 0,
    history: bool = False,
    update_stages: bool = False,
    recompute: bool | Sequence[bool] = False,
    memory: bool = False,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    tensor_parallel: int = 1,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
) -> Result:
    """Train `stages` on `batches` as `schedule` says, one process per worker.

    schedule: compute-only or lowered; it is checked, and refused where it could go wrong.
    stages: one module per stage. The first gets the inputs of a microbatch, every other what the
        stage before it returned: a tensor, or a tuple of tensors of any shape and dtype.
    batches: (inputs, targets) pairs, tensors or tuples of tensors, samples along the first
        dimension; a forward-only schedule takes (inputs, None), too. A synchronous schedule of
        one batch repeats itself for as many as there are; of an iterable without a length, such as
        a generator, it takes 1000 at most. Any other wants as many as it was built for.
    loss: ``loss(outputs, targets)`` gives the mean over the samples; mse_loss where not given.
    optimizer: makes the optimizer of a stage from its parameters; None: gradients only.
    scheduler: makes a learning-rate scheduler from it; one step after each update.
    clip_norm: the largest norm of a stage's gradients; longer ones are shortened to it before the
        update. Every stage looks at its own: no stage has those of all.
    weights: weight-version policy of an asynchronous schedule, a name or your own subclass of
        `Policy`; the schedule's own where not given.
    pace: (forward, backward) seconds, each one number or one per stage. Each action still does
        its work, then waits until this time is over: see more workers than there are cores.
    device: ``auto``, ``cpu`` or ``cuda``. NCCL with a GPU per worker, otherwise gloo.
    engine: ``pipeschool``, or ``torch``: the same schedule on PyTorch's own engine,
        ``torch.distributed.pipelining``, for synchronous schedules and equal microbatches.
    timeout: seconds without any progress after which a run counts as stuck. A worker that is
        busy computing gets 15 times as long. Declared times, of `pace` and of links, do not count.
    nan_check: stop at the first NaN that a stage gives.
    seed: worker w seeds torch with seed + w.
    history: note the parameters after every update, see `Result.history`.
    update_stages: load the trained weights into `stages`; they are left alone otherwise.
    recompute: a stage keeps only a microbatch's input, and goes forward once more, with the same
        random numbers, for its backward; True, False, or one of them per stage. A paced backward
        then lasts as long as a forward and a backward.
    tensor_parallel, tensor_plan: how many processes share the weights of each worker, and how: a
        style of torch.distributed.tensor.parallel for layers by their name in the stage.
    latency, bandwidth: declare slower links, in seconds and in bytes per second: each message is
        really held back until a link like that would have brought it, as in `Cost`. The trace is
        ``measured, paced`` then.
    memory: count the bytes of all tensors alive, see `Trace.memory`; every operation takes some
        microseconds longer.

    Raises ValueError for arguments that do not fit, IllegalSchedule, and RunError when a run
    fails; `RunStopped` (a KeyboardInterrupt) when it is interrupted. No worker outlives the call.
    """
    called = time.perf_counter()
    schedule = with_weights(schedule, weights)
    start_early()
    options = options_of(
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        clip_norm=clip_norm,
        pace=pace,
        device=device,
        engine=engine,
        timeout=timeout,
        nan_check=nan_check,
        seed=seed,
        history=history,
        update_stages=update_stages,
        recompute=recompute,
        memory=memory,
        latency=latency,
        bandwidth=bandwidth,
        tensor_parallel=tensor_parallel,
        tensor_plan=tensor_plan,
    )
    from pipeschool.runtime.launch import launch

    return launch(schedule, stages, batches, options, called)


@one_sentence_errors
def profile(
    stages: Sequence[nn.Module],
    batch: tuple[Any, Any],
    m: int,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: MakeOptimizer | None = None,
    recompute: bool | Sequence[bool] = False,
    rounds: int = 5,
) -> Cost:
    """What each of `stages` costs for a microbatch of `batch` cut in `m`: a `Cost` to predict with.

    This process takes microbatches through all stages and back, `rounds` times with whole
    backwards and as often with split ones. Seconds are medians of these; bytes are those of
    tensors alive. The stages are not changed. `loss`, `optimizer` and `recompute` as for `run`.
    """
    import torch

    from pipeschool.runtime.measure import measure

    whole_number("m", m)
    whole_number("rounds", rounds)
    return measure(
        stages, batch, m, loss or torch.nn.functional.mse_loss, optimizer, rounds, recompute
    ).cost


def options_of(
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    clip_norm: float | None = None,
    pace: Pace | None = None,
    device: str = "auto",
    engine: str = "pipeschool",
    timeout: float = TIMEOUT,
    nan_check: bool = False,
    seed: int = 0,
    history: bool = False,
    update_stages: bool = False,
    recompute: bool | Sequence[bool] = False,
    memory: bool = False,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    tensor_parallel: int = 1,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
) -> Options:
    """The keyword arguments that `run` and `train` share, checked."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    number("timeout", timeout, positive=True)
    for name, function, example in (
        ("loss", loss, "torch.nn.CrossEntropyLoss()"),
        ("optimizer", optimizer, "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"),
        ("scheduler", scheduler, "lambda o: torch.optim.lr_scheduler.StepLR(o, 10)"),
    ):
        if function is not None and not callable(function):
            raise ValueError(f"{name} must be a function, such as {example}, not {function!r}")
    if isinstance(loss, type):
        raise ValueError(
            f"loss must be a function of outputs and targets, such as {loss.__name__}(), not the "
            f"class {loss.__name__}"
        )
    if clip_norm is not None:
        number("clip_norm", clip_norm, positive=True)
    whole_number("tensor_parallel", tensor_parallel)
    number("latency", latency)
    number("bandwidth", bandwidth, positive=True, infinite=True)
    whole_number("seed", seed, at_least=0)
    import torch

    from pipeschool.runtime.launch import Options
    from pipeschool.runtime.weights import Update

    return Options(
        loss=loss or torch.nn.functional.mse_loss,
        update=Update(optimizer, scheduler, clip_norm),
        pace=pace,
        device=device,
        engine=engine,
        timeout=timeout,
        nan_check=nan_check,
        seed=seed,
        history=history,
        update_stages=update_stages,
        recompute=recompute,
        memory=memory,
        latency=latency,
        bandwidth=bandwidth,
        tensor_parallel=tensor_parallel,
        tensor_plan=tensor_plan,
    )


__all__ = ["RunError", "RunStopped", "Training", "options_of", "profile", "run", "train"]
