"""Chimera: two pipelines in opposite directions, on two copies of the model."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from pipeschool.actions import Action, Schedule, U
from pipeschool.arguments import whole_number
from pipeschool.dependencies import needs
from pipeschool.schedules.one_f_one_b import one_f_one_b_order


def chimera(p: int, m: int, batches: int = 1) -> Schedule:
    """Each worker holds a stage near the start of one copy and one near the end of the other.

    Stage s is on workers s and p - 1 - s. Even microbatches go down the workers, odd ones up, both
    under 1F1B, and fill each other's gaps. With tF = tB and m >= p a batch takes (2m + p - 2) tF:
    bubble of total (p - 2)/(2m + p - 2). With tB = 2 tF the gaps fit each other less well:
    (3m + 2(p - 2)) tF. At most p activations on a worker (for m = p between p/2 + 1 and p), and two
    copies of the weights, whose gradients are summed at the flush (Li and Hoefler, SC 2021). p and
    m must be even.
    """
    for name, value in (("p", p), ("m", m)):
        if whole_number(name, value) % 2:
            raise ValueError(f"{name} must be even for chimera, not {value}: half goes each way")
    orders = [
        [
            [Action(kind, stage, 2 * k + way) for kind, _, k in one_f_one_b_order(stage, p, m // 2)]
            for way, stage in enumerate(_stages(worker, p))
        ]
        for worker in range(p)
    ]
    replicas = tuple((stage, p - 1 - stage) for stage in range(p))
    work = Schedule("chimera", p, m, tuple((*down, *up) for down, up in orders), replicas=replicas)
    rows = _by_start(orders, work)
    for worker, row in enumerate(rows):
        # Both workers of a stage meet to sum their gradients, so all go by the order of the model.
        row += [U(stage, 0) for stage in sorted(_stages(worker, p))]
    return replace(work, workers=tuple(map(tuple, rows))).repeat(batches)


def _stages(worker: int, p: int) -> tuple[int, int]:
    """The stages of a worker: for the microbatches that go down, and for those that go up."""
    return worker, p - 1 - worker


def _by_start(orders: list[list[list[Action]]], schedule: Schedule) -> list[list[Action]]:
    """One row per worker out of its two 1F1B orders. Where F and B take one unit of time each, what
    can start first comes first; of equals a backward, then the earlier microbatch."""
    rows: list[list[Action]] = [[] for _ in orders]
    free = [0] * len(orders)  # when each worker is
    ends: dict[Action, int] = {}

    def start(worker: int, action: Action) -> float:
        """The earliest time for `action`; infinity while something that it needs has no end."""
        return max([free[worker], *(ends.get(need, inf) for need in needs(action, schedule))])

    while any(map(any, orders)):
        # The next action of each order, with what decides between them.
        heads = [
            (start(worker, order[0]), order[0].kind == "F", order[0].microbatch, worker, order)
            for worker, both in enumerate(orders)
            for order in both
            if order
        ]
        _, _, _, worker, order = min(heads)
        action = order.pop(0)
        free[worker] = ends[action] = int(start(worker, action)) + 1
        rows[worker].append(action)
    return rows
