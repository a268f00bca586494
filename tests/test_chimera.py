"""Two copies of a model: Chimera's closed forms, and what `check` asks of copies."""

from __future__ import annotations

from dataclasses import replace

import pipeschool as ps
import pytest
from pipeschool.formats import to_csv

SIZES = [(p, m) for p in (2, 4, 6, 8) for m in range(2, 26, 2)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_closed_forms(p, m):
    schedule = ps.check(ps.chimera(p, m), memory_cap=p)
    ps.check(ps.lower(schedule))
    ps.check(ps.lower(schedule), matching="tag")
    equal = ps.simulate(schedule, ps.Cost(forward=1, backward=1))
    double = ps.simulate(schedule, ps.Cost(forward=1, backward=2))
    if m >= p:
        assert equal.makespan == 2 * m + p - 2
        assert equal.bubble_of_total == pytest.approx((p - 2) / (2 * m + p - 2))
        assert double.makespan == 3 * m + 2 * (p - 2)
    else:  # as if each copy were alone
        assert equal.makespan == 2 * (m // 2 + p - 1)
    assert max(equal.peak_activations) == min(p, m)
    if m == p:
        assert min(equal.peak_activations) == p // 2 + 1
    assert equal.weight_versions == [1] * p  # one version; of two stages


def test_each_worker_holds_a_stage_of_each_copy():
    schedule = ps.chimera(4, 8)
    assert schedule.owners == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert (schedule.period, schedule.stages, schedule.v) == (2, 4, 1)
    assert [schedule.owner(1, k) for k in range(4)] == [1, 2, 1, 2]
    assert schedule.microbatches_of(1, worker=1) == range(0, 8, 2)
    assert schedule.microbatches_of(1, worker=2) == range(1, 8, 2)
    assert schedule.stages_of(1) == [1, 2]


def test_several_batches_flush_in_between():
    schedule = ps.check(ps.chimera(4, 8, batches=3))
    assert ps.simulate(schedule, ps.Cost(1, 1)).makespan >= 3 * 16 + 2
    assert len([a for a in schedule.workers[0] if a.kind == "U"]) == 6


@pytest.mark.parametrize(
    ("p", "m", "message"),
    [(3, 4, "p must be even for chimera, not 3"), (4, 5, "m must be even for chimera, not 5")],
)
def test_odd_numbers_are_refused(p, m, message):
    with pytest.raises(ValueError, match=message):
        ps.chimera(p, m)


def test_the_first_update_waits_for_the_other_copy():
    """Worker 0 has its gradients at 3; worker 1, twice as busy elsewhere, at 6."""
    rows = (
        (ps.F(0, 0), ps.B(0, 0), ps.U(0, 0)),
        (ps.F(0, 1), ps.F(1, 0), ps.F(1, 1), ps.B(1, 0), ps.B(1, 1), ps.B(0, 1))
        + (ps.U(1, 0), ps.U(0, 0)),
    )
    schedule = ps.check(ps.Schedule("mine", 2, 2, rows, replicas=((0, 1), (1,))))
    trace = ps.simulate(schedule, ps.Cost(forward=1, backward=2, update=1))
    spans = {(s.worker, s.action): (s.start, s.end) for s in trace.spans}
    assert spans[0, ps.B(0, 0)] == (5, 7)  # when its gradient has come back
    assert spans[1, ps.U(1, 0)] == (9, 10)
    assert spans[0, ps.U(0, 0)] == spans[1, ps.U(0, 0)] == (10, 11)


def two_stages(first: list[ps.Action], second: list[ps.Action]) -> ps.Schedule:
    return ps.Schedule("mine", 2, 2, (tuple(first), tuple(second)), replicas=((0, 1), (1, 0)))


DOWN = [ps.F(0, 0), ps.F(1, 1), ps.B(1, 1), ps.B(0, 0)]
UP = [ps.F(0, 1), ps.F(1, 0), ps.B(1, 0), ps.B(0, 1)]
IN_ORDER = [ps.U(0, 0), ps.U(1, 0)]


def test_updates_in_different_orders_are_a_deadlock():
    ps.check(two_stages([*DOWN, *IN_ORDER], [*UP, *IN_ORDER]))
    crossed = two_stages([*DOWN, *IN_ORDER], [*UP, *reversed(IN_ORDER)])
    message = "deadlock: worker 0 waits at 0U0 .* for 0U0 from worker 1; worker 1 waits at 1U0"
    with pytest.raises(ps.IllegalSchedule, match=message):
        ps.check(crossed)


def test_a_microbatch_belongs_to_one_worker():
    wrong = two_stages([ps.F(0, 1), *DOWN[1:3], ps.B(0, 1), *IN_ORDER], [*UP, *IN_ORDER])
    message = "worker 0 lists 0F1 .* which is worker 1's: the workers of stage 0 are 0, 1, in turn"
    with pytest.raises(ps.IllegalSchedule, match=message):
        ps.check(wrong)


def test_a_kind_that_there_is_not_is_named_here_too():
    wrong = two_stages([*DOWN, ps.Action("X", 0, 0), *IN_ORDER], [*UP, *IN_ORDER])
    with pytest.raises(ps.IllegalSchedule, match="worker 0 lists 0X0, but kinds are F, B, I, W"):
        ps.check(wrong)


def test_a_missing_backward_of_one_copy_is_found():
    broken = two_stages([*DOWN[:2], DOWN[3], *IN_ORDER], [*UP, *IN_ORDER])
    with pytest.raises(ps.IllegalSchedule, match="worker 0 never does 1B1"):
        ps.check(broken)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (((0, 1),), "replicas must name the workers of each stage: 2 stages, not 1"),
        (((0, 1), (1, 1)), r"stage 1 has workers \(1, 1\): it needs one or more different ones"),
        (((0, 2), (1, 0)), r"stage 0 has workers \(0, 2\): .* numbered from 0 to 1"),
        (((), (1, 0)), r"stage 0 has workers \(\): it needs one or more"),
    ],
)
def test_replicas_that_make_no_sense_are_refused(replicas, message):
    with pytest.raises(ps.IllegalSchedule, match=message):
        ps.check(replace(ps.chimera(2, 2), replicas=replicas))


def test_an_update_must_be_shared_equally():
    rows = ((ps.F(0, 0), ps.B(0, 0), ps.F(0, 2), ps.B(0, 2), ps.U(0, 0)), (ps.F(0, 1), ps.B(0, 1)))
    with pytest.raises(ps.IllegalSchedule, match="3 microbatches, which the 2 workers of stage 0"):
        ps.check(ps.Schedule("mine", 2, 3, rows, replicas=((0, 1),)))


def test_workers_that_take_turns_have_the_same_speed():
    with pytest.raises(ValueError, match="workers of stage 0, 0, 1, take turns, so they must have"):
        ps.simulate(ps.chimera(2, 2), ps.Cost(speed=[1, 2]))


def test_the_schedule_file_knows_one_worker_per_stage():
    with pytest.raises(ValueError, match="knows one worker per stage, but in chimera several"):
        to_csv(ps.chimera(2, 2))
