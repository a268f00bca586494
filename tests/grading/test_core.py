"""The machinery of the checks: careful calls, clear messages, no way around it by accident."""

from __future__ import annotations

import importlib
import logging
import math
import sys
import threading
import time

import pipeschool as ps
import pytest
import torch
from pipeschool import grade
from pipeschool.grade.guard import TimeUp, own_frame, time_limit


def failure(function, points=3, seed=None):
    with pytest.raises(grade.CheckFailed) as caught:
        grade.check(function, points, seed=seed)
    return str(caught.value)


def bubble_of_total(p, m):
    return (p - 1) / (m + p - 1)


def test_all_right(capsys):
    earned = grade.check(bubble_of_total, points=3)
    assert type(earned) is float and float(repr(earned)) == 3.0
    assert capsys.readouterr().out == (
        "bubble_of_total: all 7 visible checks passed, 3 of 3 points\n"
    )
    grade.check(bubble_of_total, points=3, seed=1)
    said = capsys.readouterr()
    assert "all 15 checks" in said.out and "visible" not in said.out and said.err == ""


def test_seed_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("PIPESCHOOL_SEED", raising=False)
    default = grade.seed()
    assert default == grade.seed()
    monkeypatch.setenv("PIPESCHOOL_SEED", "2027-spring")
    assert grade.seed() == "2027-spring" != default


def test_a_stub_is_not_written_yet():
    def smallest_m(p, target):
        raise NotImplementedError("Write your answer here, then delete this line")

    assert failure(smallest_m).startswith("smallest_m is not written yet: put your answer")


def test_a_stub_that_another_answer_needs_is_named():
    def needs(action, p):
        raise NotImplementedError

    def start_times(order, p, m, forward, backward):
        return {a: 0 for a in order(0, p, m) if needs(a, p)}

    assert failure(start_times).startswith("needs is not written yet, and start_times needs it")


def test_the_learners_own_line_is_shown():
    def peak_activations(actions):
        return actions[len(actions)]

    said = failure(peak_activations)
    assert "got:                   IndexError: list index out of range" in said
    assert "raised at:             line " in said
    assert "in peak_activations: return actions[len(actions)]" in said


def test_the_line_in_a_helper_of_the_learner_is_shown():
    def help_me(x):
        return x.kind.nonsense

    def peak_activations(actions):
        return max(help_me(a) for a in actions)

    assert "in help_me: return x.kind.nonsense" in failure(peak_activations)


def test_a_line_in_a_library_called_by_the_learner_is_not_shown():
    def naive_order(worker, p, m):
        return list(ps.naive(p=0, m=m).workers[worker])

    said = failure(naive_order)
    assert "in naive_order: return list(ps.naive" in said and "actions.py" not in said


def test_the_message_is_all_that_a_notebook_shows():
    def peak_activations(actions):
        return 7

    with pytest.raises(grade.CheckFailed) as caught:
        grade.check(peak_activations, points=2)
    lines = caught.value._render_traceback_()
    assert lines[0] == "peak_activations is not right yet."
    assert not any("Traceback" in line or ".py" in line for line in lines)
    assert isinstance(caught.value, AssertionError)


@pytest.mark.parametrize(
    "returned, got",
    [
        (None, "None (is there a `return`?)"),
        ("8", "'8', of type str"),
        (math.nan, "nan, of type float"),
        (math.inf, "inf, of type float"),
        (True, "True, of type bool"),
        ([1], "[1], of type list"),
        (1 + 0j, "(1+0j), of type complex"),
        (print, "<built-in function print>, of type builtin_function_or_method"),
    ],
)
def test_a_wrong_type_is_named(returned, got):
    def bubble_of_total(p, m):
        return returned

    said = failure(bubble_of_total)
    assert "expected:              a number" in said and f"got:                   {got}" in said


@pytest.mark.parametrize("returned", [5, "abc", None, {1: 2}, [None], ["1"], [math.nan]])
def test_a_list_of_something_else_is_named(returned):
    def split_batch(samples, m):
        return returned

    assert "expected:              a" in failure(split_batch)


def test_an_answer_without_end_is_stopped():
    def split_batch(samples, m):
        while True:
            yield 1

    assert "does it ever end?" in failure(split_batch)


def test_a_loop_without_end_is_stopped_in_time():
    def bubble_of_total(p, m):
        while True:
            try:
                pass
            except Exception:  # must not swallow the end
                pass

    begin = time.perf_counter()
    said = failure(bubble_of_total)
    assert "expected:              an answer within 2 seconds" in said
    assert "a loop whose condition never changes" in said
    assert time.perf_counter() - begin < 4


def test_a_sleep_is_stopped_in_time():
    def bubble_of_ideal(p, m):
        time.sleep(60)

    assert "an answer within 2 seconds" in failure(bubble_of_ideal)


def test_the_time_limit_works_outside_the_main_thread():
    caught = []

    def loop():
        try:
            with time_limit(0.2):
                while True:
                    pass
        except TimeUp:
            caught.append(True)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join(timeout=10)
    assert caught == [True]


def test_what_an_answer_prints_is_counted_but_not_shown(capsys):
    def bubble_of_total(p, m):
        print("called with", p, m)
        print("trouble", file=sys.stderr)
        logging.getLogger("learner").warning("a log line")
        return (p - 1) / (m + p - 1)

    assert grade.check(bubble_of_total, points=3) == 3
    said = capsys.readouterr()
    assert "It also printed" in said.out and "called with" not in said.out
    assert said.err == ""


def test_what_a_wrong_answer_prints_is_shown(capsys):
    def bubble_of_total(p, m):
        print("p is", p)
        return p

    assert "it printed:            p is 1" in failure(bubble_of_total)
    assert capsys.readouterr() == ("", "")


def test_printing_without_end_takes_no_memory_and_no_time():
    def bubble_of_total(p, m):
        while True:
            print("p is", p)

    begin = time.perf_counter()
    assert "it printed:            p is 1 / p is 1 / p is 1\n" in failure(bubble_of_total)
    assert time.perf_counter() - begin < 4


def test_changed_arguments_are_noticed():
    def peak_activations(actions):
        actions.clear()
        return 1

    said = failure(peak_activations)
    assert "`actions` left as it was: [0F0, 0B0]" in said
    assert "the call changed it to []" in said and "list(actions)" in said


def test_a_changed_type_is_noticed_and_shown():
    def loss_weights(sizes):
        sizes[0] = float(sizes[0])
        return [1.0]

    said = failure(loss_weights)
    assert "left as it was: [1]" in said and "changed it to [1.0]" in said


def test_cases_can_be_pasted():
    def needs(action, p):
        return [ps.F(7, 7)]

    assert "smallest failing case: needs(action=ps.F(0, 2), p=1)" in failure(needs)

    def peak_activations(actions):
        return 0

    assert "peak_activations(actions=[ps.F(0, 0), ps.B(0, 0)])" in failure(peak_activations)


def test_only_a_visible_case_is_called_the_smallest():
    def bubble_of_total(p, m):
        return (p - 1) / (m + p - 1) if (p, m) in [(1, 1), (2, 1), (2, 2), (3, 2)] else 9

    assert "smallest failing case: bubble_of_total(p=4, m=4)" in failure(bubble_of_total, seed=1)

    def bubble_of_ideal(p, m):
        shown = [(1, 1), (2, 1), (2, 2), (3, 2), (4, 4), (4, 8), (8, 32)]
        return (p - 1) / m if (p, m) in shown else 9

    said = failure(bubble_of_ideal, seed=1)
    assert "first failing case:" in said and "smallest" not in said


def test_a_broken_helper_is_blamed():
    def bubble_of_total(p, m):
        return (p - 1) / m

    def fine(p, m):
        return bubble_of_total(p, m)

    def smallest_m(p, target):
        return next(m for m in range(1, 1000) if fine(p, m) <= target)

    assert "mend this first:       your bubble_of_total, which it uses" in failure(smallest_m)


def test_a_right_helper_is_not_blamed():
    def smallest_m(p, target):
        return next((m for m in range(1, 99) if bubble_of_total(p, m) < target), 0) - 1

    assert "mend this first" not in failure(smallest_m)


def test_hints_fit_what_went_wrong():
    def naive_order(worker, p, m):
        return [F(worker, k) for k in range(m)]  # noqa: F821

    said = failure(naive_order)
    assert "name 'F' is not defined (write ps.F)" in said
    assert "where to look:         that line" in said

    def split_batch(samples, m):
        return [None]

    said = failure(split_batch)
    assert "a whole number as item 0 of the list" in said and "`return`" not in said
    assert "where to look:         what you return" in said

    def smallest_m(p, target):
        return int(input("how many? "))

    assert "input() is not for answers" in failure(smallest_m)


def test_exit_does_not_end_the_kernel():
    def bubble_of_total(p, m):
        sys.exit(0)

    assert "a call of exit()" in failure(bubble_of_total)


def test_the_stop_button_still_stops():
    def bubble_of_total(p, m):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade.check(bubble_of_total, points=1)


def test_another_name_is_explained():
    def gpipe_orders(worker, p, m):
        return []

    assert "No exercise is called 'gpipe_orders'" in failure(gpipe_orders)
    assert "such as 'gpipe_order'" in failure(gpipe_orders)
    assert failure(None) == failure(None) == "A function is needed here, not None."


class Yes:
    """Equal to everything, larger and smaller than everything, and all that is asked for."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __lt__(self, other):
        return True

    __le__ = __gt__ = __ge__ = __lt__

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([Yes()])

    def __getitem__(self, key):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args):
        return self

    def __float__(self):
        return 1.0

    def __index__(self):
        return 1


class YesFloat(float):
    __eq__ = __le__ = __ge__ = lambda self, other: True
    __ne__ = __lt__ = __gt__ = lambda self, other: False
    __hash__ = float.__hash__
    __sub__ = __rsub__ = lambda self, other: 0.0


class YesInt(int):
    __eq__ = __le__ = __ge__ = lambda self, other: True
    __ne__ = __lt__ = __gt__ = lambda self, other: False
    __hash__ = int.__hash__


class YesStr(str):
    __eq__ = lambda self, other: True  # noqa: E731
    __hash__ = str.__hash__


class YesDict(dict):
    def __contains__(self, key):
        return True

    def __len__(self):
        return 2

    def __missing__(self, key):
        return YesFloat(0)


CHEATS = {
    "yes": Yes(),
    "float": YesFloat(0.25),
    "int": YesInt(3),
    "list": [YesInt(1), YesInt(1)],
    "actions": [ps.Action(YesStr("F"), YesInt(0), YesInt(0))],
    "dict": YesDict(),
}


@pytest.mark.parametrize("name", list(grade.core.EXERCISES))
@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_objects_that_equal_everything_earn_nothing(name, cheat):
    def answer(*args):
        return cheat

    answer.__name__ = name
    for seed in (None, 1):
        failure(answer, seed=seed)


def test_patching_the_public_names_earns_nothing(monkeypatch):
    """The checks hold on to the real functions, whatever a notebook does to `ps`."""
    fake = ps.simulate(ps.gpipe(2, 2))
    for name in ("simulate", "check", "gpipe", "Schedule", "lower"):
        monkeypatch.setattr(ps, name, lambda *args, **kwargs: fake)
    monkeypatch.setattr(math, "isclose", lambda *args, **kwargs: True)
    monkeypatch.setattr(importlib, "import_module", lambda name: Yes())

    def naive_order(worker, p, m):
        return [ps.F(worker, k) for k in range(m)]

    def bubble_of_total(p, m):
        return 0.9

    failure(naive_order, seed=1)
    failure(bubble_of_total, seed=1)


def test_yours_falls_back_until_the_answer_is_right(capsys):
    def smallest_m(p, target):
        raise NotImplementedError

    assert grade.yours(smallest_m)(4, 0.2) == 12
    assert "does not pass its checks yet" in capsys.readouterr().out
    assert grade.yours(bubble_of_total)(4, m=8) == bubble_of_total(4, 8)
    assert capsys.readouterr().out == "This is your bubble_of_total at work.\n"


def test_yours_hands_on_plain_data():
    def split_batch(samples, m):
        sizes = [samples // m + (k < samples % m) for k in range(m)]
        return torch.tensor(sizes, dtype=torch.float64)

    def gpipe_order(worker, p, m):
        yield from (kind(worker, k) for kind in (ps.F, ps.B) for k in range(m))

    sizes = grade.yours(split_batch)(10, 4)
    assert sizes == [3, 3, 2, 2] and all(type(size) is int for size in sizes)
    row = grade.yours(gpipe_order)(0, 1, 2)
    assert row == [ps.F(0, 0), ps.F(0, 1), ps.B(0, 0), ps.B(0, 1)]


def test_yours_says_what_is_wrong_beyond_the_checks():
    def bubble_of_total(p, m):
        return (p - 1) / (m + p - 1) if p < 100 else None

    with pytest.raises(grade.CheckFailed, match=r"^bubble_of_total\(100, 8\) gave None"):
        grade.yours(bubble_of_total)(100, 8)


def test_yours_prefers_the_reference_to_an_answer_that_is_partly_right(capsys):
    def split_batch(samples, m):
        return [samples // m] * m

    assert grade.yours(split_batch)(5, 2) == [3, 2]
    assert "not pass" in capsys.readouterr().out


def test_a_prediction_is_set_beside_the_truth(capsys):
    grade.reveal(40, 96.0, "seconds")
    grade.reveal(None, 96.0, "seconds")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "You predicted 40. Computed: 96 seconds."
    assert said[1].startswith("Computed: 96 seconds.")


def test_verdicts_are_shown_only_for_claims_that_were_judged(capsys):
    grade.tally({1: "wrong", 2: "wrong", 3: "?"}, {1: "wrong", 2: "right", 3: "half"})
    said = capsys.readouterr().out
    assert "2   wrong   right" in said and "3   ?       (judge first)" in said
    assert "You agree on 1 of 3." in said


def test_verdicts_count_in_any_spelling(capsys):
    grade.tally({1: " Right", 2: "HALF "}, {1: "right", 2: "half"})
    assert "You agree on 2 of 2." in capsys.readouterr().out


def test_self_check_says_how_to_mend(monkeypatch, capsys):
    from pipeschool.grade import installation

    monkeypatch.setitem(installation.PACKAGES, "no_such_package", "no-such-package")
    monkeypatch.setattr(installation, "workers", lambda: "ready")
    grade.self_check()
    said = capsys.readouterr().out
    assert "WRONG   no-such-package: ModuleNotFoundError: No module named" in said
    assert "To mend it, close JupyterLab and run `make lab` again" in said
    assert "1 of these need" in said
    assert "ok      torch: " in said


def test_the_line_at_fault_is_not_one_that_a_dataclass_has_written() -> None:
    def makes(m: int) -> ps.Cost:
        return ps.Cost(forward=-m)  # the learner's own last line

    with pytest.raises(ValueError) as caught:
        makes(1)
    frame = own_frame(caught.value)
    assert frame is not None
    assert frame.name == "makes"
