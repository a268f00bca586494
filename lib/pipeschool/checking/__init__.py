"""Is a schedule complete, in dependency order, within its memory, free of deadlock?

Three steps. Is everything there, once, on the right worker? Does every row by itself have each
action after what it needs from that row? (Both in `rows`.) Then all rows `together`: run them
without a clock. Each worker does its actions in order and waits where something from another worker
is missing; sends never wait, except at a `rendezvous`. The outcome does not depend on who moves
first, so one run settles it (a Kahn process network).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeschool.actions import Action, IllegalSchedule, Schedule, require_schedule
from pipeschool.arguments import numbers, per_item
from pipeschool.checking.rendezvous import rendezvous_order
from pipeschool.checking.rows import (
    check_complete,
    check_memory,
    check_messages,
    check_placement,
    check_row,
    check_updates,
    check_versions,
    needs_from_own_row,
)
from pipeschool.checking.together import execution_order
from pipeschool.dependencies import handovers

MATCHING = ("in_order", "tag", "rendezvous")


def check(
    schedule: Schedule,
    *,
    memory_cap: float | Sequence[float] | None = None,
    matching: str = "in_order",
) -> Schedule:
    """Return `schedule`, or raise `IllegalSchedule` with one sentence that says what is wrong.

    memory_cap: the most activations that a worker may hold, in units of A; one number, or one per
        worker, where their devices differ.
    matching: how receives find their message in a lowered schedule. ``tag``: by stage and
        microbatch, as gloo does. ``in_order``: the n-th receive from a worker gets that worker's
        n-th send, whatever it holds, as NCCL does; what passes here also passes with tags.
        ``rendezvous``: in order, and a send is done only when its receiver is there, as NCCL's are;
        sends and receives that are `Schedule.fused` wait together. What passes here passes in any
        case. It wants the messages: ``lower(schedule, fuse=True)`` adds and fuses them.
    """
    for _ in checked_order(schedule, matching):
        pass
    if memory_cap is not None:
        given = numbers("memory_cap", memory_cap, infinite=True)
        check_memory(schedule, per_item("memory_cap", given, schedule.p, "worker"))
    return schedule


def checked_order(schedule: Schedule, matching: str = "in_order") -> Iterator[tuple[int, Action]]:
    """`execution_order` of a schedule that `check` has passed, in one walk."""
    require_schedule(schedule)
    if matching not in MATCHING:
        raise ValueError(f"matching must be one of {', '.join(MATCHING)}, not {matching!r}")
    if matching == "rendezvous" and not schedule.lowered and handovers(schedule):
        raise ValueError(
            f"matching='rendezvous' judges sends and receives, and {schedule.name} has none yet: "
            "give lower(schedule, fuse=True)"
        )
    check_placement(schedule)
    check_complete(schedule)
    if schedule.lowered:
        check_messages(schedule)
    needs = needs_from_own_row(schedule)
    for worker, row in enumerate(schedule.workers):
        check_row(worker, row, needs)
        check_updates(schedule, worker, row)
    if not schedule.synchronous:
        check_versions(schedule)
    if matching == "rendezvous" and schedule.lowered:
        return rendezvous_order(schedule)
    return execution_order(schedule, matching)


__all__ = ["MATCHING", "IllegalSchedule", "check", "checked_order", "execution_order"]
