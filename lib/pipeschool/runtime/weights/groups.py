"""Process groups of torch.distributed for one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


class Groups:
    """Makes process groups, and closes them when the run is over, where the process lives on.

    All processes make the same groups in the same order, also those that are not in a group.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []

    def new(self, ranks: Sequence[int] | None = None) -> Any:
        """A group of all processes, or of these."""
        self.made.append(dist.new_group(ranks))
        return self.made[-1]

    def close(self) -> None:
        """Close the connections of all of them."""
        while self.made:
            dist.destroy_process_group(self.made.pop())
