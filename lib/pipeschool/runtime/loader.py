"""What comes out of a data loader: legs of a training, and batches that are large enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from pipeschool.runtime.host.batches import listed
from pipeschool.runtime.stages.microbatches import samples

Batch = tuple[Any, Any]  # inputs, targets


def legs(
    loader: Iterable[Batch],
    epoch: int,
    skip: int,
    every: int | None,
    look: Callable[[Batch], object],
) -> Iterator[tuple[int, list[Batch]]]:
    """(batches of this epoch done after the leg, its batches), without the first `skip` batches.

    `look` is shown the first batch of the epoch before that.
    """

    batches = iter(loader)
    ahead = list(islice(batches, 1))
    for first in ahead:
        look(first)
    done = 0
    if skip:
        done = len(ahead) + sum(1 for _ in islice(batches, skip - 1))
        ahead = []
    skipped = done
    while True:
        if every is None:
            leg = ahead + listed(batches, "the loader", "say with every= how many make a leg")
        else:
            leg = ahead + list(islice(batches, every - len(ahead)))
        ahead = []
        if not leg:
            break
        done += len(leg)
        yield done, leg
    if not done or skipped < skip:
        raise ValueError(
            f"the loader gave too few batches in epoch {epoch}: it must give the same number each "
            "time it is gone through, as a list or a DataLoader does"
        )


def refuse_small_batches(loader: Iterable[Batch], m: int) -> None:
    """ValueError where it can be known beforehand that a batch has too few samples for `m`
    microbatches: of a list, and of a DataLoader that cuts a data set into equal batches."""
    if isinstance(loader, (list, tuple)):
        refuse_small(loader, 0, m)
    elif isinstance(loader, DataLoader) and cuts_evenly(loader):
        size = loader.batch_size or 1
        rest = len(loader.sampler) % size  # type: ignore[arg-type]  # cuts_evenly has seen it
        if 0 < rest < m <= size and not loader.drop_last:
            raise ValueError(
                f"the loader's last batch has {rest} samples, too few for m={m} microbatches: give "
                "the DataLoader drop_last=True, or another batch_size"
            )


def cuts_evenly(loader: DataLoader[Any]) -> bool:
    """Whether a batch of `loader` has as many samples as were drawn for it."""
    return (
        loader.batch_size is not None
        and type(loader.batch_sampler) is BatchSampler
        and not isinstance(loader.dataset, IterableDataset)
        and loader.collate_fn is default_collate
        and hasattr(loader.sampler, "__len__")
    )


def refuse_small(batches: Sequence[Batch], start: int, m: int, kept: str = "") -> None:
    """ValueError where one of `batches`, which begin at number `start` of the epoch, has too
    few samples for `m` microbatches; with `kept`, what was saved before them.

    What is no batch is for others to refuse.
    """
    for number, batch in enumerate(batches, start):
        try:
            count = samples(batch[0])
        except (TypeError, ValueError, LookupError):
            return
        if 0 < count < m:
            checkpoint = f"; of the checkpoints, {kept}" if kept else ""
            raise ValueError(
                f"a batch of {count} samples cannot be cut into {m} microbatches: leave out batch "
                f"{number} of the loader, or let m be at most {count}{checkpoint}"
            )
