"""Forward only: inference. The line fills and drains, and nothing has to come back."""

from __future__ import annotations

from pipeschool.actions import Action, F, Schedule
from pipeschool.arguments import whole_number


def forward_only(p: int, m: int, batches: int = 1, tokens: int = 1) -> Schedule:
    """(m + p - 1) tF seconds for m microbatches: bubble of total (p - 1)/(m + p - 1) once more.

    tokens: how often each microbatch goes down the line, in turn with the others. That is
    generation token by token: stage t * p + s is stage s at token t (give the same modules again
    for each), and a request's next token can start only when its last one has left the line. So it
    takes p requests to keep p workers busy: m * tokens + p - 1 forwards of time for m >= p,
    otherwise p * tokens + m - 1.
    """
    whole_number("tokens", tokens)

    def order(worker: int, p: int, m: int) -> list[Action]:
        return [F(turn * p + worker, k) for turn in range(tokens) for k in range(m)]

    return Schedule.from_workers(
        order, p, m, batches=batches, weights="frozen", name="forward_only"
    )
