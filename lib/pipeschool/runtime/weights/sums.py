"""Before an update: the gradients of all who have a share in the same weights, added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipeschool.actions import Action, Schedule
from pipeschool.runtime.weights.groups import Groups
from pipeschool.runtime.weights.reduce import add_up, add_up_over
from pipeschool.runtime.weights.stage_weights import StageWeights
from pipeschool.runtime.weights.ties import Tie


class Sums:
    """Sums over the workers that take turns at a stage, and over the stages that share a parameter.

    weights: of the stages on this worker. device: where the backend reads gradients. tensor_rank,
    tensor_size: which of the processes of its worker this one is, and of how many.
    """

    def __init__(
        self,
        worker: int,
        schedule: Schedule,
        ties: Sequence[Tie],
        weights: Mapping[int, StageWeights],
        groups: Groups,
        device: torch.device,
        tensor_rank: int = 0,
        tensor_size: int = 1,
    ):
        self.weights = weights
        self.ties = ties
        self.device = device
        self.tied = 0  # updates for which the ties have been summed
        replicas = {
            (stage, rank): groups.new([w * tensor_size + rank for w in workers])
            for stage, workers in enumerate(schedule.owners)
            if len(workers) > 1
            for rank in range(tensor_size)
        }
        self.replicas = {stage: g for (stage, rank), g in replicas.items() if rank == tensor_rank}
        self.tie_groups: list[Any] = []
        for tie in ties:
            workers = sorted({schedule.owner(stage, 0) for stage, _ in tie})
            self.tie_groups.append(groups.new(workers) if len(workers) > 1 else None)

    def before(self, update: Action) -> None:
        """Let the gradients that `update` takes be the sums."""
        if group := self.replicas.get(update.stage):
            own = self.weights[update.stage]
            add_up_over(group, own.gradients, own.current, self.device)
        if self.tied <= update.microbatch:  # the first update of a batch on this worker
            self.tied += 1
            for tie, group in zip(self.ties, self.tie_groups, strict=True):
                self._sum_tie(tie, group)

    def _sum_tie(self, tie: Tie, group: Any) -> None:
        """Every worker takes ties in the same order, so nobody waits in a circle."""
        held = [(self.weights[stage], name) for stage, name in tie if stage in self.weights]
        if not held:
            return
        first, its_name = held[0]
        found = [w.gradients[name] for w, name in held if name in w.gradients]
        total = {its_name: add_up(found)} if found else {}
        if group:
            add_up_over(group, total, {its_name: first.current[its_name]}, self.device)
        for weights, name in held:
            if total:
                weights.gradients[name] = total[its_name].clone()
