"""Before an update: the gradients of all who have a share in the same weights, added up, and the
norm of all of them, where it is that of the whole model that they are clipped by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeschool.actions import Action, Schedule
from pipeschool.runtime.weights.clipping import norm
from pipeschool.runtime.weights.groups import Groups
from pipeschool.runtime.weights.reduce import add_up, add_up_over, sum_over
from pipeschool.runtime.weights.stage_weights import StageWeights
from pipeschool.runtime.weights.ties import Tie


class Sums:
    """Sums over the workers that take turns at a stage, over the stages that share a parameter, and
    where gradients are clipped by the norm of the whole model, over all workers for that.

    norm_places: where the norms of each stage's parameters begin among those of all, see
    `clipping.places`; empty where no norm is asked for. weights: of the stages on this worker.
    device: where the backend reads gradients. tensor_rank, tensor_size: which of the processes of
    its worker this one is, and of how many.
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
        norm_places: Sequence[int] = (),
    ):
        self.worker = worker
        self.owners = schedule.owners
        self.weights = weights
        self.ties = ties
        self.device = device
        self.together = bool(ties) or bool(
            norm_places
        )  # do all updates of a batch here begin with the first?
        self.begun = 0  # updates for which all has been summed
        self.norm: Tensor | None = None  # of all gradients of the update to come
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

        self.everyone: Any = None
        if norm_places and schedule.p > 1:
            ranks = [
                groups.new([w * tensor_size + rank for w in range(schedule.p)])
                for rank in range(tensor_size)
            ]
            self.everyone = ranks[tensor_rank]
        self.norm_places = norm_places

    def before(self, update: Action) -> None:
        """Let the gradients that `update` takes be the sums.

        Where stages have something to do with each other, the first update of a batch on a worker
        does it for all stages there: their gradients are complete by then. All workers go through
        the sums in the same order, so nobody waits in a circle.
        """
        if not self.together:
            self._sum_replicas(update.stage)
        elif self.begun <= update.microbatch:
            self.begun += 1
            for stage in sorted(self.weights):
                self._sum_replicas(stage)
            for tie, group in zip(self.ties, self.tie_groups, strict=True):
                self._sum_tie(tie, group)
            if self.norm_places:
                self.norm = self._norm()

    def _sum_replicas(self, stage: int) -> None:
        if group := self.replicas.get(stage):
            own = self.weights[stage]
            add_up_over(group, own.gradients, own.current, self.device)

    def _sum_tie(self, tie: Tie, group: Any) -> None:
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

    def _norm(self) -> Tensor:
        """Of the gradients of all stages: what several have, or several copies of, counts once. The
        norm of their norms, in the order in which one process has them."""
        copies = {place for tie in self.ties for place in tie[1:]}
        norms = torch.zeros(self.norm_places[-1], dtype=torch.float64, device=self.device)
        for stage, own in self.weights.items():
            if self.owners[stage][0] != self.worker:
                continue
            for place, name in enumerate(own.current, self.norm_places[stage]):
                if name in own.gradients and (stage, name) not in copies:
                    norms[place] = norm(own.gradients[name])
        if self.everyone:
            sum_over(self.everyone, norms)
        return norms[norms != 0].norm()
