"""Run a schedule on real worker processes. Importing this does not import torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pipeschool.actions import Schedule
from pipeschool.arguments import whole_number
from pipeschool.cost import Cost
from pipeschool.runtime.errors import RunError, RunStopped, one_sentence_errors
from pipeschool.runtime.host.fork_server import start_early
from pipeschool.runtime.interrupts import held_back
from pipeschool.runtime.options import RunOptions, options_of, with_options
from pipeschool.runtime.training import Training, train
from pipeschool.versions import Policy, with_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeschool.runtime.host.result import Result
    from pipeschool.runtime.options import MakeOptimizer


@one_sentence_errors
@with_options
def run(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batches: Iterable[tuple[Any, Any]],
    *,
    weights: str | type[Policy] | None = None,
    **options: Any,
) -> Result:
    """Train `stages` on `batches` as `schedule` says, one process per worker.

    schedule: compute-only or lowered; it is checked, and refused where it could go wrong.
    stages: one module per stage. The first gets the inputs of a microbatch, every other what the
        stage before it returned: a tensor, or a tuple of tensors of any shape and dtype.
    batches: (inputs, targets) pairs, tensors or tuples of tensors, samples along the first
        dimension; a forward-only schedule takes (inputs, None), too. A synchronous schedule of
        one batch repeats itself for as many as there are; of an iterable without a length, such as
        a generator, it takes 1000 at most. Any other wants as many as it was built for.
    weights: weight-version policy of an asynchronous schedule, a name or your own subclass of
        `Policy`; the schedule's own where not given.
    {options}

    Raises ValueError for arguments that do not fit, IllegalSchedule, and RunError when a run
    fails; `RunStopped` (a KeyboardInterrupt) when it is interrupted. No worker outlives the call.
    """
    called = time.perf_counter()
    chosen = options_of("run", options)
    schedule = with_weights(schedule, weights)
    start_early(chosen.modules_for(stages))
    with held_back():
        from pipeschool.runtime.launch import launch

    return launch(schedule, stages, batches, chosen, called)


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
    with held_back():
        import torch

        from pipeschool.runtime.measure import measure

    whole_number("m", m)
    whole_number("rounds", rounds)
    return measure(
        stages, batch, m, loss or torch.nn.functional.mse_loss, optimizer, rounds, recompute
    ).cost


__all__ = ["RunError", "RunOptions", "RunStopped", "Training", "profile", "run", "train"]
