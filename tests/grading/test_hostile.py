"""Answers that are long, slow or stubborn cost a class nothing but their own points."""

from __future__ import annotations

import time

import pipeschool as ps
import pytest
import torch
from pipeschool import grade
from pipeschool.grade import guard, plain, unit01, unit02, unit07
from test_unit01 import as_answer

LONG = 20_000


def verdict(name, function) -> str:
    with pytest.raises(grade.CheckFailed) as caught:
        grade.check(as_answer(name, function), points=4)
    return str(caught.value)


def test_show_looks_at_no_more_of_a_list_than_it_shows():
    class Counted:
        asked = 0

        def __repr__(self):
            Counted.asked += 1
            return "x"

    text = plain.show([Counted()] * LONG)
    assert text.startswith("[x, x, ") and text.endswith(" ...") and len(text) == 160
    assert Counted.asked < 100
    assert plain.show(dict.fromkeys(range(LONG), [1] * LONG)).startswith("{0: [1, 1, ")


def test_show_of_a_list_that_holds_itself_ends():
    endless: list[object] = [1]
    endless.append(endless)
    assert plain.show(endless).startswith("[1, [1, [1, ") and len(plain.show(endless)) == 160


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (unit01, "gpipe_order"),
        (unit01, "one_f_one_b_order"),
        (unit02, "async_order"),
        (unit07, "interleaved_order"),
    ],
)
def test_a_judge_makes_no_text_for_actions_that_are_right(monkeypatch, module, name):
    asked = []
    for unit in (unit01, module):
        monkeypatch.setattr(unit, "show", lambda *given: asked.append(given) or plain.show(*given))

    def order(worker, *_):
        return [ps.F(worker, 0)] * LONG

    assert f"{name} is not right yet" in verdict(name, order)
    assert len(asked) < 50


def test_a_bare_except_does_not_keep_an_endless_loop_alive():
    def warm_up(worker, p, m):
        number = 0
        while True:
            try:
                number = (number + 1) % 1000
            except:  # noqa: E722
                pass

    said = verdict("warm_up", warm_up)
    assert "an answer within 2 seconds" in said and "still no end" in said


def test_many_slow_answers_end_together(monkeypatch):
    monkeypatch.setattr(guard, "SECONDS_IN_ALL", 0.5)
    calls = []

    def priority(action, moment):
        calls.append(action)
        time.sleep(0.1)
        return 0

    said = verdict("priority", priority)
    assert "all answers of this exercise within 0.5 seconds" in said
    assert 1 < len(calls) < 20  # checked twice: as the answer, and as what the answer calls


def test_a_huge_tensor_is_refused_before_it_becomes_a_list():
    said = verdict("input_half", lambda gradient, weight: torch.zeros(3000, 3000))
    assert "one of 9000000 numbers" in said


def test_a_long_circle_is_named_in_short():
    def waiting_circle(rows):
        return [] if rows[0][1].kind == "SEND_F" else [0, 1] * LONG

    said = verdict("waiting_circle", waiting_circle)
    assert "with a worker listed twice" in said and len(said) < 1000
