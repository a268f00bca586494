"""Train for epochs of a data loader, with evaluation and checkpoints that can be resumed.

The stream is cut into legs, an epoch long or shorter. Within a leg an asynchronous pipeline never
stops; between two legs it drains, so that there is one state of the weights to evaluate and to
save. A run that was killed goes on from its last checkpoint, and ends with the very weights that
it would have had: the legs, the order of the data and the random numbers are the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeschool.actions import Schedule
from pipeschool.arguments import whole_number
from pipeschool.runtime.errors import one_sentence_errors
from pipeschool.runtime.host.fork_server import under_torchrun
from pipeschool.runtime.interrupts import held_back
from pipeschool.runtime.options import options_of, with_options
from pipeschool.schedules import build
from pipeschool.versions import Policy, with_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeschool.runtime.host.result import State


@dataclass
class Training:
    """What `train` gave, or has got to.

    losses: the mean loss of every microbatch, in order. loss_weights: what each of them counts in a
    mean: its samples, or what `weigh` says. epochs: for each finished epoch the mean loss by these
    weights, and what `evaluate` returned. samples_per_second: over all legs of this call, start-up
    of the workers included. state_dicts: the trained weights, one per stage. changes: where it went
    on from a checkpoint with other arguments, what has changed, one sentence each.
    """

    losses: list[float] = field(default_factory=list)
    loss_weights: list[float] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    samples_per_second: float = 0.0
    state_dicts: list[dict[str, Tensor]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


@one_sentence_errors
@with_options
def train(
    schedule: str | Callable[..., Schedule],
    stages: Sequence[nn.Module],
    loader: Iterable[tuple[Any, Any]],
    *,
    m: int,
    v: int | None = None,
    epochs: int = 1,
    every: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    evaluate: Callable[[list[nn.Module]], Any] | None = None,
    log: Callable[[str], object] | None = print,
    weights: str | type[Policy] | None = None,
    **options: Any,
) -> Training:
    """Train `stages` on all batches of `loader`, `epochs` times, one worker for each of them.

    schedule: a name such as ``pipedream``, or a function of p, m and batches that builds one.
    loader: gives (inputs, targets) each time it is gone through: a list or a DataLoader. The order
        of a shuffling one follows from `seed` and the number of the epoch.
    m: microbatches in one batch.
    v: stages per worker, where there are several: their number is p * v.
    every: batches in a leg; after each the pipeline drains and a checkpoint is written. An epoch
        where not given; a loader without a length may then give 1000 batches at most.
    checkpoint: a file. Where it is there already, the training goes on from it. Schedule, p, v, m,
        weights, every, seed, layers, the class of the optimizer and its groups of parameters must
        be the same, within an epoch also the number of batches. What else has changed holds from
        there on, and is logged and noted in `Training.changes`: settings of the optimizer, such as
        lr, loss, clip_norm, batch size, settings of layers. Where a scheduler moves a setting, it
        goes on from its own state instead; a scheduler that has changed starts anew.
    evaluate: called after each epoch with the stages as they are then, in eval mode, without
        gradients; what it returns is noted.
    log: called with one line after each leg: its mean loss, and samples per second; None for
        silence. Under torchrun, worker 0 alone does so.
    {options}

    Raises as `run` does, and RunError where a checkpoint cannot be written.
    """
    with held_back():
        import torch

        from pipeschool.runtime.book import Book, Place
        from pipeschool.runtime.cluster import torchrun
        from pipeschool.runtime.host.requirements import check_stages
        from pipeschool.runtime.host.result import load, mean
        from pipeschool.runtime.launch import launch
        from pipeschool.runtime.loader import legs, refuse_small, refuse_small_batches
        from pipeschool.runtime.stages.random_numbers import put_back, seed

    chosen = options_of("train", options)

    if chosen.tensor_parallel > 1:
        raise ValueError("train has no tensor_parallel: a leg could not go on with the optimizers")
    whole_number("epochs", epochs)
    if every is not None:
        whole_number("every", every)
    chunks = whole_number("v", v or 1)
    if len(stages) % chunks:
        raise ValueError(f"{len(stages)} stages cannot be shared out by v={chunks} to each worker")
    p = len(stages) // chunks
    make = schedule if callable(schedule) else lambda **sizes: build(schedule, v=v, **sizes)
    first = with_weights(make(p=p, m=m, batches=1), weights)
    if first.stages != len(stages):
        raise ValueError(
            f"{first.name} for p={p} has {first.stages} stages, but there are {len(stages)} "
            f"modules: v= says how many of them a worker holds"
        )
    if not first.trains:
        raise ValueError(f"{first.name} does not train: ps.run takes it, train cannot")
    if under_torchrun() and torchrun.rank() > 0:
        log = None
    check_stages(first, stages)
    refuse_small_batches(loader, m)
    book, trouble = Book(log), None
    try:
        if checkpoint is not None:
            book.open(checkpoint, first, chunks, every, chosen, stages, loader)
    except ValueError as error:
        trouble = error  # which the other machines must hear of
    if under_torchrun():
        torchrun.meet_and_refuse_difference("checkpoints", str(trouble or book.place))
    if trouble:
        raise trouble
    training = Training(book.losses, book.loss_weights, book.epochs, changes=book.changes)
    place, state = book.place, book.state
    samples = seconds = 0.0
    for epoch in range(place.epoch, epochs):
        with put_back():
            seed(chosen.seed + epoch)
            done = skip = place.batch if place.epoch == epoch else 0
            for done, leg in legs(loader, epoch, skip, every, book.look):
                if every is not None:
                    refuse_small(leg, done - len(leg), m, book.kept if book.file else "")
                called = time.perf_counter()
                stream = with_weights(make(p=p, m=m, batches=len(leg)), weights)
                result = launch(stream, stages, leg, chosen, called, state)
                state = result.state
                took = time.perf_counter() - called
                count = sum(len(y if torch.is_tensor(y) else y[0]) for _, y in leg)
                samples, seconds = samples + count, seconds + took
                training.losses += result.losses
                training.loss_weights += result.loss_weights
                if log:
                    loss, speed = mean(result.losses, result.loss_weights), count / took
                    log(f"epoch {epoch}, batch {done}: loss {loss:.4f}, {speed:.0f} samples/s")
                book.save(Place(epoch, done), state)
            training.epochs.append(_finished(epoch, done, m, training, stages, state, evaluate))
            if log and evaluate:
                log(f"epoch {epoch}: evaluation {training.epochs[-1]['evaluation']}")
        book.save(Place(epoch + 1), state)
        place = Place(epoch + 1)
    assert state is not None  # there was at least one leg, in this call or before it
    training.samples_per_second = samples / seconds if seconds else 0.0
    training.state_dicts = [stage.weights for stage in state.stages]
    if chosen.update_stages:
        load(stages, state)
    return training


def _finished(
    epoch: int,
    batches: int,
    m: int,
    training: Training,
    stages: Sequence[nn.Module],
    state: State | None,
    evaluate: Callable[[list[nn.Module]], Any] | None,
) -> dict[str, Any]:
    import copy

    import torch

    from pipeschool.runtime.host.result import load, mean

    last = slice(-batches * m, None)
    loss = mean(training.losses[last], training.loss_weights[last])
    note: dict[str, Any] = {"epoch": epoch, "loss": loss}
    if evaluate:
        assert state is not None
        trained = [copy.deepcopy(stage).eval() for stage in stages]
        load(trained, state)
        with torch.no_grad():
            note["evaluation"] = evaluate(trained)
    return note
