"""The exercises of unit 04: every right answer earns all points, every wrong one loses some."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pipeschool as ps
import pytest
from answers04 import WRONG
from pipeschool import grade
from pipeschool.grade import unit04, unit04_messages
from test_both_sides import earns_part
from test_unit01 import as_answer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name, mutant, earned",
    [
        ("warm_up", "warm_up_without_an_end", 2.0),
        ("warm_up", "warm_up_as_in_gpipe", 0.0),
        ("warm_up", "warm_up_one_more", 0.0),
        ("one_f_one_b_order", "order_for_many_only", 2.67),
        ("one_f_one_b_order", "order_of_gpipe", 0.0),
        ("in_flight", "flying_without_m", 2.0),
        ("waiting_circle", "circle_of_all_that_wait", 2.0),
        ("mend_row", "mend_receives_before_it_sends", 0.0),
        ("bytes_saved", "saved_without_m", 0.0),
        ("worker_bytes", "bytes_gpipe_like_1f1b", 2.0),
        ("worker_bytes", "bytes_versions_with_the_newest", 2.0),
        ("worker_bytes", "bytes_adam_keeps_one", 3.0),
        ("recompute_plan", "plan_where_equal_is_too_much", 2.67),
        ("recompute_plan", "plan_counts_worker_0s_input", 0.0),
    ],
)
def test_partly_right_answers_earn_part_of_the_points(name, mutant, earned, capsys):
    earns_part(name, mutant, earned, capsys)


def test_a_plan_that_counts_too_much_fails_in_general(capsys):
    answers = {f.__name__: as_answer("recompute_plan", f) for f in WRONG["recompute_plan"]}
    with pytest.raises(grade.CheckFailed, match="except on worker 0"):
        grade.check(answers["plan_counts_worker_0s_input"], points=3)
    assert grade.check(answers["plan_without_m"], points=3) == 1
    assert "Right where one fits exactly, not yet in general." in capsys.readouterr().out


def test_new_cases_depend_on_the_seed_alone():
    for exercise in unit04.EXERCISES:
        for part in exercise.parts:
            drawn = [
                [part.draw(rng, size) for size in range(1, 9)]
                for rng in (Random(f"{seed}/{part.title}") for seed in ("a", "a", "b"))
            ]
            assert drawn[0] == drawn[1] != drawn[2]


def test_claims_and_verdicts_in_the_notebook_agree():
    source = (ROOT / "solutions/04_one_forward_one_backward/one_forward_one_backward.py").read_text(
        "utf-8"
    )
    verdicts = re.findall(r"<summary>Verdict</summary>\n#\n# \*\*(\w+)\.?\*\*", source)
    assert [word.lower() for word in verdicts] == list(unit04.CLAIMS.values())


# --- what the checks take for right, against formulas, the checker and the simulator


@pytest.mark.parametrize("p, m", [(1, 1), (2, 1), (4, 2), (4, 4), (4, 8), (8, 3)])
def test_closed_forms_of_1f1b(p, m):
    for worker in range(p):
        assert unit04.in_flight(worker, p, m) == min(m, p - worker)
        row = ps.one_f_one_b(p, m).workers[worker]
        kinds = "".join(action.kind for action in row)
        first = kinds.index("B")  # forwards before the first backward: the warm-up and one more
        assert unit04.warm_up(worker, p, m) in (first - 1, min(m, first))
        assert unit04.bytes_saved(worker, p, m, 10) == 10 * (min(m, p - worker) - 1)
    assert unit04.seconds_paid(p, m, 2, 5) == (m + p - 1) * 2


def drawn_rows():
    for seed in range(40):
        rng = Random(seed)
        p, m = rng.randint(2, 5), rng.randint(1, 4)
        yield unit04_messages.draw_misplaced(rng, p, m, fine=seed % 4 == 0)[0]


def test_rows_that_get_stuck_are_those_that_check_calls_a_deadlock():
    for rows in drawn_rows():
        schedule = unit04_messages.as_schedule(rows)
        circle = unit04_messages.waiting_circle(rows)
        if not circle:
            assert ps.check(schedule, matching="tag") is schedule
            continue
        with pytest.raises(ps.IllegalSchedule, match="^deadlock: ") as caught:
            ps.check(schedule, matching="tag")
        said = [int(w) for w in re.findall(r"worker (\d+) waits", str(caught.value))]
        assert sorted(said) == sorted(circle)
        assert len(circle) == 2 and abs(circle[0] - circle[1]) == 1  # in a line: two neighbours


def test_mended_rows_run_and_keep_their_work():
    for rows in drawn_rows():
        mended = [unit04_messages.mend_row(row, len(rows)) for row in rows]
        assert ps.check(unit04_messages.as_schedule(mended))
        for old, new in zip(rows, mended, strict=True):
            assert [a for a in old if not a.is_message] == [a for a in new if not a.is_message]
            assert sorted(old) == sorted(new)
