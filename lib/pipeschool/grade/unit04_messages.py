"""The exercises of unit 04 about messages: find a deadlock, and put it right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from pipeschool.actions import Action, Schedule
from pipeschool.checking import IllegalSchedule, check, execution_order
from pipeschool.dependencies import sender_of
from pipeschool.grade import plain
from pipeschool.grade.core import Case, Exercise, Part
from pipeschool.grade.guard import Answer
from pipeschool.grade.plain import Wrong, require, show
from pipeschool.grade.unit01 import listed
from pipeschool.lowering import lower
from pipeschool.schedules import gpipe, one_f_one_b

Rows = list[list[Action]]


def rows_with_messages(build: Callable[[int, int], Schedule], p: int, m: int) -> Rows:
    """The rows of a schedule with its sends and receives, without its updates."""
    return [listed(lower(build(p, m)), worker) for worker in range(p)]


def as_schedule(rows: Rows) -> Schedule:
    """Rows with messages as a schedule of one batch."""
    m = 1 + max(action.microbatch for action in rows[0])
    return Schedule.from_workers(lambda worker, *_: rows[worker], len(rows), m, name="your rows")


def stuck(rows: Rows) -> dict[int, Action]:
    """{worker that gets stuck: the receive at which it waits}."""
    schedule = as_schedule(rows)
    done: Counter[int] = Counter()
    try:
        for worker, _ in execution_order(schedule, matching="tag"):
            done[worker] += 1
    except IllegalSchedule:
        return {w: row[done[w]] for w, row in enumerate(schedule.workers) if done[w] < len(row)}
    return {}


def waiting_circle(rows: Rows) -> list[int]:
    """From any stuck worker on, follow who waits for whom until somebody comes for a second time.

    Who waits for a worker that is not stuck waits for ever, too, but with complete rows there is
    nobody like that.
    """
    waits = {worker: sender_of(receive).stage for worker, receive in stuck(rows).items()}
    seen: list[int] = []
    worker = min(waits, default=-1)
    while worker in waits and worker not in seen:
        seen.append(worker)
        worker = waits[worker]
    return seen[seen.index(worker) :] if worker in seen else []


def judge_waiting_circle(answer: Answer, rows: Rows) -> None:
    """Any circle, beginning with any of its workers."""
    got = answer(rows)
    at = stuck(rows)
    case = "; ".join(f"row {w}: {' '.join(map(str, row))}" for w, row in enumerate(rows))
    case = f"{answer.function.__name__}(rows) with {case}" if len(case) < 200 else answer.latest
    if not at:
        require(not got, "[]: all rows run to their end", show(got), case)
        return
    right = waiting_circle(rows)
    reason = ", ".join(f"worker {w} is stuck at {at[w]}" for w in right)
    expected = f"{right}: {reason}"
    require(bool(got), expected, "[]", case)
    require(len(set(got)) == len(got), expected, f"{show(got)}, with a worker listed twice", case)
    for worker, following in zip(got, [*got[1:], got[0]], strict=True):
        require(
            worker in at, expected, f"{show(got)}, but worker {show(worker)} is not stuck", case
        )
        waits_for = sender_of(at[worker]).stage
        require(
            waits_for == following,
            expected,
            f"{show(got)}, but worker {worker} waits at {at[worker]} for worker {waits_for}",
            case,
        )


def misplaced(rng: Random, rows: Rows, moves: int) -> Rows:
    """`rows` with sends later or receives earlier than they should be, each row right by itself."""
    rows = [list(row) for row in rows]
    for _ in range(moves):
        row = rng.choice(rows)
        action = rng.choice([a for a in row if a.is_message])
        place = row.index(action)
        row.remove(action)
        sends = action.kind.startswith("SEND")
        row.insert(rng.randint(place, len(row)) if sends else rng.randint(0, place), action)
    return rows


def draw_misplaced(rng: Random, p: int, m: int, fine: bool) -> Case:
    """Rows that get stuck, or rows that run although messages are not in their places."""
    build = rng.choice([gpipe, one_f_one_b])
    while True:
        rows = misplaced(rng, rows_with_messages(build, p, m), 1 if fine else rng.randint(1, 2))
        if bool(stuck(rows)) != fine:
            return (rows,)


def acts(*texts: str) -> Rows:
    """Rows out of their text."""
    return [[Action.parse(text) for text in row.split()] for row in texts]


WAITING_CIRCLE = Exercise(
    name="waiting_circle",
    arguments="rows",
    returns=plain.whole_numbers,
    reference=waiting_circle,
    judge=judge_waiting_circle,
    parts=[
        Part(
            title="for two workers",
            share=1,
            cases=[
                (acts("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),),
                (acts("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),),
                (
                    acts(
                        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1",
                        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
                    ),
                ),
                (rows_with_messages(one_f_one_b, 2, 3),),
            ],
            draw=lambda rng, size: draw_misplaced(rng, 2, size + 1, fine=size % 3 == 0),
            hint="go along all rows, again and again: a receive is possible once its send is done, "
            "everything else at once. Where are you when nothing is possible any more?",
        ),
        Part(
            title="for longer lines",
            share=1,
            cases=[
                (rows_with_messages(gpipe, 3, 1),),
                (
                    acts(
                        "0F0 0SEND_F0 0RECV_B0 0B0",
                        "1RECV_F0 1F0 1RECV_B0 1SEND_F0 1B0 1SEND_B0",
                        "2RECV_F0 2F0 2B0 2SEND_B0",
                    ),
                ),
                (
                    acts(
                        "0F0 0RECV_B0 0SEND_F0 0B0",
                        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
                        "2RECV_F0 2F0 2B0 2SEND_B0",
                    ),
                ),
            ],
            draw=lambda rng, size: draw_misplaced(
                rng, rng.randint(3, 3 + size // 3), rng.randint(1, 1 + size // 2), size % 3 == 0
            ),
            hint="not everybody who is stuck is in the circle: some only wait for a worker that is "
            "in it. Follow who waits for whom until somebody comes for the second time",
        ),
    ],
)

# --- the cure ------------------------------------------------------------------------------------


def mend_row(row: list[Action], p: int) -> list[Action]:
    """Send at once what is done, receive only what is needed next."""
    mended = []
    for kind, stage, k in row:
        if kind == "F":
            mended += [Action("RECV_F", stage, k)] if stage > 0 else []
            mended += [Action("F", stage, k)]
            mended += [Action("SEND_F", stage, k)] if stage < p - 1 else []
        elif kind == "B":
            mended += [Action("RECV_B", stage, k)] if stage < p - 1 else []
            mended += [Action("B", stage, k)]
            mended += [Action("SEND_B", stage, k)] if stage > 0 else []
    return mended


def judge_mend_row(answer: Answer, rows: Rows) -> None:
    """The same work, every message next to the work it belongs to, and all rows together run."""
    p = len(rows)
    mended, calls = [], []
    for row in rows:
        new = answer(row, p)
        calls.append(answer.latest)
        work, ours = ([a for a in r if not a.is_message] for r in (new, row))
        require(work == ours, f"the same work in the same order: {show(ours)}", show(work))
        due = {a for a in row if a.is_message}
        counts = Counter(a for a in new if a.is_message)
        for message in sorted(due | counts.keys()):
            require(
                counts[message] == (message in due),
                f"{message} {'once' if message in due else 'nowhere: this worker never does it'}",
                f"{counts[message]} times in {show(new)}",
            )
        judge_places(new)
        mended.append(new)
    try:
        check(as_schedule(mended))
    except IllegalSchedule as problem:
        worker = problem.worker or 0
        raise Wrong(
            "rows that run together", f"{show(mended[worker])}: {problem}", calls[worker]
        ) from None


def judge_places(row: list[Action]) -> None:
    """No work between a message and the work that makes or needs it."""
    judge_neighbours(row, row, "SEND", "right after")
    judge_neighbours(row, row[::-1], "RECV", "right before")


def judge_neighbours(row: list[Action], walk: list[Action], kind: str, place: str) -> None:
    """Each message of this kind has its own work as the last that the walk came through."""
    latest = None
    for action in walk:
        if not action.is_message:
            latest = action
        elif action.kind.startswith(kind):
            own = Action(action.kind[-1], action.stage, action.microbatch)
            require(
                latest == own,
                f"{action} {place} {own}, with no other work in between",
                f"{action} {place} {latest or 'nothing'} in {show(row)}",
            )


MEND_ROW = Exercise(
    name="mend_row",
    arguments="row p",
    returns=plain.actions,
    reference=mend_row,
    judge=judge_mend_row,
    parts=[
        Part(
            title="for two workers",
            share=1,
            cases=[
                (acts("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),),
                (rows_with_messages(one_f_one_b, 2, 2),),
            ],
            draw=lambda rng, size: draw_misplaced(rng, 2, size + 1, fine=False),
            hint="each send directly behind the work that makes its content, each receive directly "
            "in front of the work that needs it. The ends of the line have fewer messages",
        ),
        Part(
            title="for longer lines",
            share=2,
            cases=[
                (
                    acts(
                        "0F0 0SEND_F0 0RECV_B0 0B0",
                        "1RECV_F0 1F0 1RECV_B0 1SEND_F0 1B0 1SEND_B0",
                        "2RECV_F0 2F0 2B0 2SEND_B0",
                    ),
                ),
                (misplaced(Random(4), rows_with_messages(one_f_one_b, 4, 4), 12),),
            ],
            draw=lambda rng, size: draw_misplaced(rng, 3 + size // 3, size, fine=False),
            hint="a worker in the middle sends and receives both ways: what does its F need, and "
            "from where? Where does its F's result go? And the same for its B",
        ),
    ],
)
