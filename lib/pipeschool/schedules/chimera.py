"""Chimera: two pipelines in opposite directions, on two copies of the model."""

from __future__ import annotations

from pipeschool.actions import Action, Schedule, U, whole_number
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
    rows = _merged(p, m)
    for worker, row in enumerate(rows):
        # Both workers of a stage meet to sum their gradients, so all go by the order of the model.
        row += [U(stage, 0) for stage in sorted(_stages(worker, p))]
    replicas = tuple((stage, p - 1 - stage) for stage in range(p))
    return Schedule("chimera", p, m, tuple(map(tuple, rows)), replicas=replicas).repeat(batches)


def _stages(worker: int, p: int) -> tuple[int, int]:
    """The stages of a worker: for the microbatches that go down, and for those that go up."""
    return worker, p - 1 - worker


def _merged(p: int, m: int) -> list[list[Action]]:
    """One row per worker out of its two 1F1B orders. Where F and B take one unit of time each, what
    can start first comes first; of equals a backward, then the earlier microbatch."""
    orders = [
        [
            [Action(kind, stage, 2 * k + way) for kind, _, k in one_f_one_b_order(stage, p, m // 2)]
            for way, stage in enumerate(_stages(worker, p))
        ]
        for worker in range(p)
    ]
    rows: list[list[Action]] = [[] for _ in range(p)]
    free = [0] * p
    ends: dict[Action, int] = {}
    for _ in range(2 * p * m):
        candidates = [
            (
                max(free[worker], ends[need] if need else 0),
                head.kind == "F",
                head.microbatch,
                worker,
                order,
            )
            for worker, both in enumerate(orders)
            for order in both
            for head in order[:1]
            if (need := _need(head, p)) is None or need in ends
        ]
        start, _, _, worker, order = min(candidates)
        action = order.pop(0)
        rows[worker].append(action)
        free[worker] = ends[action] = start + 1
    return rows


def _need(action: Action, p: int) -> Action | None:
    """What must be over before `action` can start; None where it needs the data alone."""
    kind, stage, _ = action
    if kind == "F":
        return action._replace(stage=stage - 1) if stage else None
    return action._replace(stage=stage + 1) if stage < p - 1 else action._replace(kind="F")
