"""Why a run is late: of traces built by hand, in which every delay is known."""

from __future__ import annotations

from dataclasses import replace

import pipeschool as ps
import pytest
from pipeschool import lateness
from pipeschool.lateness import Delay, delays, why_late
from pipeschool.trace import Span, Trace

B, F, U, W = ps.B, ps.F, ps.U, ps.W


def trace(*spans: Span, p: int = 2, label: str = "measured, paced", **more: object) -> Trace:
    return Trace("by hand", p, 1, 1, spans, label=label, **more)


# One microbatch, two stages; times in seconds, exact in binary.
PREDICTED = trace(
    Span(0, F(0, 0), 0, 8),
    Span(1, F(1, 0), 8, 16),
    Span(1, B(1, 0), 16, 32),
    Span(0, B(0, 0), 32, 48),
    label="predicted",
)
# It begins at 100; each hop, each step from action to action and one action are late.
LATE = trace(
    Span(0, F(0, 0), 100, 108),
    Span(1, F(1, 0), 109, 117),  # delivery 1
    Span(1, B(1, 0), 117.5, 135.5),  # between 0.5, work 2
    Span(0, B(0, 0), 137.5, 153.5),  # delivery 2
)


def by_action(found: list[Delay]) -> dict[object, Delay]:
    return {delay.span.action: delay for delay in found}


def test_each_action_has_one_delay_worker_by_worker() -> None:
    first, last, down, back = LATE.spans[0], LATE.spans[3], LATE.spans[1], LATE.spans[2]
    assert delays(LATE) == [
        Delay(first, None, delivery=0, busy=0, between=0, machine=0),
        Delay(last, back, delivery=2, busy=0, between=0, machine=0),
        Delay(down, first, delivery=1, busy=0, between=0, machine=0),
        Delay(back, down, delivery=0, busy=0, between=0.5, machine=0),
    ]


def test_a_simulation_has_no_delays() -> None:
    simulated = ps.simulate(ps.one_f_one_b(p=3, m=5), ps.Cost(1, 2))
    found = delays(simulated)
    assert len(found) == len(simulated.spans)
    assert all(d.delivery == d.between == d.machine == 0 for d in found)
    assert any(d.busy for d in found)


def test_an_input_that_lay_there_while_its_worker_was_busy_is_no_loss() -> None:
    found = by_action(
        delays(
            trace(
                Span(0, F(0, 0), 0, 1),
                Span(0, F(0, 1), 1, 2),
                Span(1, F(1, 0), 1.25, 5.25),
                Span(1, F(1, 1), 5.75, 6.75),  # made at 2, its worker free at 5.25
            )
        )
    )
    second = found[F(1, 1)]
    assert (second.busy, second.between, second.delivery) == (3.25, 0.5, 0)
    assert second.after is not None and second.after.action == F(1, 0)
    assert found[F(1, 0)].delivery == 0.25


def test_an_update_and_a_weight_gradient_wait_for_their_own_worker_only() -> None:
    found = by_action(
        delays(
            trace(
                Span(0, F(0, 0), 0, 1),
                Span(1, F(1, 0), 1, 2),
                Span(1, ps.I(1, 0), 2, 3),
                Span(1, W(1, 0), 3.5, 4),
                Span(1, U(1, 0), 4.25, 5),
                Span(0, ps.I(0, 0), 3.25, 4),
            )
        )
    )
    assert (found[W(1, 0)].between, found[U(1, 0)].between) == (0.5, 0.25)
    assert found[ps.I(0, 0)].delivery == 0.25
    assert sum(delay.delivery for delay in found.values()) == 0.25


def test_the_machine_is_blamed_for_what_it_took_since_the_action_before() -> None:
    kept = trace(Span(0, F(0, 0), 0, 1, waited=0.25), Span(0, F(0, 1), 2, 3, waited=0.5))
    assert [delay.machine for delay in delays(kept)] == [0.25, 0.5]


def test_an_update_that_several_make_waits_for_the_last_of_them() -> None:
    """Worker 1 comes to it 3 s after worker 0, who is 2 s late itself; the update takes 1 s more
    than the second that was predicted."""
    predicted = trace(
        Span(0, F(0, 0), 0, 4), Span(0, B(0, 0), 4, 10), Span(0, U(0, 0), 16, 17),
        Span(1, F(0, 1), 0, 8), Span(1, B(0, 1), 8, 16), Span(1, U(0, 0), 16, 17),
        label="predicted",
    )  # fmt: skip
    measured = trace(
        Span(0, F(0, 0), 0, 4), Span(0, B(0, 0), 4, 12), Span(0, U(0, 0), 12.5, 19.5),
        Span(1, F(0, 1), 0, 8), Span(1, B(0, 1), 8, 17), Span(1, U(0, 0), 17.5, 19.5),
    )  # fmt: skip
    found = {delay.span: delay for delay in delays(measured)}
    early, late = measured.spans[2], measured.spans[5]
    assert (found[early].meeting, found[early].between, found[early].after) == (
        5, 0.5, measured.spans[4]
    )  # fmt: skip
    assert (found[late].meeting, found[late].between) == (0, 0.5)
    lateness_found = why_late(predicted, measured)
    assert lateness_found.chain == (F(0, 1), B(0, 1), U(0, 0))
    assert (lateness_found.work, lateness_found.between, lateness_found.delivery) == (2, 0.5, 0)


def test_the_first_update_of_a_batch_waits_for_all_workers_where_they_meet_before_it() -> None:
    """Worker 1 has nothing to do after 2; it meets worker 0 at 9, and each updates for 1 s."""
    spans = (
        Span(0, F(0, 0), 0, 4), Span(0, B(0, 0), 4, 8), Span(0, U(0, 0), 9, 10),
        Span(1, F(1, 0), 0, 1), Span(1, B(1, 0), 1, 2), Span(1, U(1, 0), 2, 10),
        Span(1, U(3, 0), 10, 11),
    )  # fmt: skip
    for meet, meeting in ((True, 7), (False, 0)):
        found = {d.span: d for d in delays(replace(trace(*spans), updates_meet=meet))}
        assert found[spans[5]].meeting == meeting
        assert found[spans[5]].after == (spans[1] if meet else spans[4])
        assert (found[spans[2]].meeting, found[spans[6]].meeting) == (0, 0)


def test_the_parts_add_up_along_the_chain_across_workers() -> None:
    found = why_late(PREDICTED, LATE)
    assert found.chain == (F(0, 0), F(1, 0), B(1, 0), B(0, 0))
    assert (found.predicted, found.measured, found.share) == (48, 53.5, 53.5 / 48 - 1)
    assert (found.work, found.delivery, found.between, found.machine) == (2, 3, 0.5, 0)
    assert found.work + found.delivery + found.between == found.measured - found.predicted
    assert found.paced and not found.disturbed
    assert str(found) == (
        "measured, paced: 11.5% over the prediction (actions +4.2%, messages +6.2%, "
        "between actions +1.0%)"
    )


def test_what_is_off_the_chain_does_not_count() -> None:
    """Worker 1 is late, and nobody waits for it."""
    expected = trace(Span(0, F(0, 0), 0, 8), Span(1, F(1, 9), 0, 1), label="predicted")
    found = why_late(expected, trace(Span(0, F(0, 0), 0, 8), Span(1, F(1, 9), 0, 4)))
    assert (found.work, found.chain) == (0, (F(0, 0),))


def test_declared_latency_is_no_lateness() -> None:
    declared = trace(
        Span(0, F(0, 0), 0, 8),
        Span(1, F(1, 0), 12, 20),
        Span(1, B(1, 0), 20, 36),
        Span(0, B(0, 0), 40, 56),
        label="predicted",
    )
    exact = replace(declared, label="measured, paced")
    assert by_action(delays(exact))[F(1, 0)].delivery == 4  # it was under way
    assert (why_late(declared, exact).delivery, why_late(declared, exact).share) == (0, 0)
    longer = trace(
        Span(0, F(0, 0), 0, 8),
        Span(1, F(1, 0), 13, 21),
        Span(1, B(1, 0), 21, 37),
        Span(0, B(0, 0), 41, 57),
    )
    found = why_late(declared, longer)
    assert (found.delivery, found.work, found.between) == (1, 0, 0)


def test_declared_latency_that_a_busy_worker_covers_in_part_is_no_lateness() -> None:
    """What worker 1 waits for was made before it was free, and was declared to be still on its
    way."""
    declared = trace(
        Span(0, F(0, 0), 0, 4),
        Span(0, F(0, 1), 4, 8),
        Span(1, F(1, 0), 12, 18),
        Span(1, F(1, 1), 18, 24),
        Span(1, B(1, 1), 24, 32),
        Span(0, B(0, 1), 40, 48),
        label="predicted",
    )
    exact = replace(declared, label="measured, paced")
    assert why_late(declared, exact).chain == (F(0, 0), F(1, 0), F(1, 1), B(1, 1), B(0, 1))
    quick = trace(
        Span(0, F(0, 0), 0, 4),
        Span(0, F(0, 1), 4, 8),
        Span(1, F(1, 0), 12, 14),  # free before the second is there, at 16
        Span(1, F(1, 1), 17, 23),
        Span(1, B(1, 1), 23, 31),
        Span(0, B(0, 1), 39, 47),
    )
    found = why_late(declared, quick)
    assert found.chain == (F(0, 0), F(0, 1), F(1, 1), B(1, 1), B(0, 1))
    assert (found.work, found.delivery, found.between) == (0, 1, 0)
    before = by_action(delays(quick))[F(1, 1)]  # which knows of no declared time
    assert (before.busy, before.between, before.delivery) == (6, 3, 0)


def test_a_run_without_pace_says_so_and_can_be_faster() -> None:
    quick = trace(
        Span(0, F(0, 0), 0, 6),
        Span(1, F(1, 0), 6, 14),
        Span(1, B(1, 0), 14, 30),
        Span(0, B(0, 0), 30, 46),
        label="measured",
    )
    assert str(why_late(PREDICTED, quick)) == (
        "measured: 4.2% under the prediction (actions -4.2%, messages +0.0%, between actions +0.0%)"
    )


def kept_waiting(seconds: float) -> Trace:
    """PREDICTED as it ran, except that its last action was held up for so long."""
    *others, last = PREDICTED.spans
    late = last._replace(end=last.end + seconds, waited=seconds)
    return replace(PREDICTED, spans=(*others, late), label="measured, paced")


def test_a_disturbed_run_says_that_it_should_be_run_again() -> None:
    found = why_late(PREDICTED, kept_waiting(12))
    assert (found.machine, found.work, found.disturbed) == (12, 12, True)
    assert str(found) == (
        "measured, paced: 25.0% over the prediction, of which 25.0% is a worker that the machine "
        "kept waiting: run it again"
    )


def test_to_run_it_again_is_no_advice_where_workers_share_the_cores(monkeypatch) -> None:
    kept = replace(kept_waiting(12), label="measured")
    monkeypatch.setattr(lateness, "usable_cores", lambda: 1)
    assert str(why_late(PREDICTED, kept)) == (
        "measured: 25.0% over the prediction, of which 25.0% is its 2 workers sharing 1 core"
    )
    monkeypatch.setattr(lateness, "usable_cores", lambda: 2)
    assert str(why_late(PREDICTED, kept)).endswith("the machine kept waiting: run it again")


def test_disturbed_begins_above_a_share_of_the_prediction() -> None:
    limit = lateness.DISTURBED * PREDICTED.makespan
    assert not why_late(PREDICTED, kept_waiting(limit / 2)).disturbed
    assert why_late(PREDICTED, kept_waiting(2 * limit)).disturbed


def test_a_wait_for_a_core_that_made_nothing_late_is_not_counted() -> None:
    """A paced action has time to spare: what it waited for a core may fit into it."""
    *others, last = PREDICTED.spans
    unhurt = trace(*others, last._replace(waited=12))
    assert why_late(PREDICTED, unhurt).machine == 0


def test_the_machine_made_a_run_no_later_than_it_was() -> None:
    """What one action lost, another one made up for: of that no share is the machine's."""
    first, *others, last = PREDICTED.spans
    spans = [s._replace(start=s.start - 4, end=s.end - 4) for s in (*others, last)]
    spans[-1] = spans[-1]._replace(end=last.end + 2, waited=6)
    found = why_late(PREDICTED, trace(first._replace(end=first.end - 4), *spans))
    assert (found.work, found.measured - found.predicted, found.machine) == (2, 2, 2)


@pytest.mark.parametrize(
    "other",
    [ps.gpipe(2, 3), ps.gpipe(3, 2), ps.gpipe(2, 2, batches=2), ps.zb_h1(2, 2)],
    ids=["m", "p", "batches", "kinds"],
)
def test_traces_of_other_schedules_are_refused(other: ps.Schedule) -> None:
    expected = ps.simulate(ps.gpipe(2, 2))
    assert not lateness.same_actions(expected, ps.simulate(other))
    with pytest.raises(ValueError, match="can only be held against a prediction of the same"):
        why_late(expected, ps.simulate(other))


def test_the_same_actions_in_another_order_can_be_compared() -> None:
    assert why_late(ps.simulate(ps.gpipe(2, 2)), ps.simulate(ps.one_f_one_b(2, 2))).share == 0


def test_a_prediction_without_any_time_is_refused() -> None:
    nothing = ps.simulate(ps.gpipe(2, 2), ps.Cost(0, 0))
    with pytest.raises(ValueError, match="give its Cost the seconds of the run"):
        why_late(nothing, nothing)


def test_tell_prints_a_line_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    lateness.tell({"one": (PREDICTED, LATE), "another": (PREDICTED, LATE)})
    line = why_late(PREDICTED, LATE)
    assert capsys.readouterr().out == f"one      {line}\nanother  {line}\n"
    lateness.tell({})
    assert capsys.readouterr().out == ""


def test_tell_says_which_runs_are_not_to_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    lateness.tell(
        {
            "calm": (PREDICTED, LATE),
            "one": (PREDICTED, kept_waiting(12)),
            "two": (PREDICTED, kept_waiting(24)),
        }
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Before you compare: the machine was busy during one, two. Run it again."


@pytest.mark.parametrize("pair", [(PREDICTED, None), (None, LATE)])
def test_what_is_no_trace_is_told(pair: tuple[Trace, Trace]) -> None:
    with pytest.raises(TypeError) as caught:
        why_late(*pair)
    assert str(caught.value) == (
        "why_late compares two traces, the predicted and the measured one, not NoneType"
    )
