"""The random numbers of a process: Python's, numpy's and torch's, seeded, kept and set together.

Generators of its own, that a stage makes and holds, are its own affair.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class RandomNumbers(NamedTuple):
    """Where the generators are. Plain numbers and tensors, so that a checkpoint can hold it.

    python, numpy: the state of each, in numbers. torch: of the CPU. devices: of GPUs, by number.
    """

    python: tuple[int, list[int], float | None]
    numpy: tuple[list[int], int, int, float]
    torch: Tensor
    devices: dict[int, Tensor]


def seed(number: int) -> None:
    """Seed all generators with `number`; numpy's with its lowest 32 bits, which is all it takes."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def random_numbers(devices: Iterable[int] = ()) -> RandomNumbers:
    """Where the generators are now, those of some GPUs among them."""
    version, words, next_one = random.getstate()
    numpy = np.random.get_state(legacy=False)
    inner = numpy["state"]
    return RandomNumbers(
        (version, list(words), next_one),
        (inner["key"].tolist(), inner["pos"], numpy["has_gauss"], numpy["gauss"]),
        torch.get_rng_state(),
        {device: torch.cuda.get_rng_state(device) for device in devices},
    )


def go_on_from(state: RandomNumbers) -> None:
    """Put the generators where they were."""
    version, words, next_one = state.python
    random.setstate((version, tuple(words), next_one))
    key, place, has_gauss, gauss = state.numpy
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), place, has_gauss, gauss))
    torch.set_rng_state(state.torch)
    for device, there in state.devices.items():
        torch.cuda.set_rng_state(there, device)


@contextmanager
def put_back(devices: Iterable[int] = ()) -> Iterator[None]:
    """Whatever is drawn inside, what comes after is drawn as if nothing had been."""
    before = random_numbers(devices)
    try:
        yield
    finally:
        go_on_from(before)


def restored(saved: Any) -> RandomNumbers | None:
    """What a checkpoint has of `RandomNumbers`."""
    return None if saved is None else RandomNumbers(*saved)
