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
    assert schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert (schedule.copies, schedule.depth, schedule.v) == (2, 4, 1)
    assert schedule.microbatches_of(1) == range(0, 8, 2)
    assert schedule.microbatches_of(5) == range(1, 8, 2)
    assert [schedule.neighbour(s, 1) for s in range(8)] == [1, 2, 3, None, 5, 6, 7, None]


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
    """Worker 0 is long done with stage 0 when its copy, on worker 1, has its gradients."""
    rows = (
        (ps.F(0, 0), ps.B(0, 0), ps.U(0, 0)),
        (ps.F(1, 1), ps.B(1, 1), ps.U(1, 0)),
    )
    schedule = ps.check(ps.Schedule("copies", 2, 2, rows, copies=2))
    trace = ps.simulate(schedule, ps.Cost(forward=1, backward=2, update=1, speed=[1, 0.5]))
    ends = {span.action: (span.start, span.end) for span in trace.spans}
    assert ends[ps.U(0, 0)] == (6, 7)
    assert ends[ps.U(1, 0)] == (6, 8)


def two_stages(first: list[ps.Action], second: list[ps.Action]) -> ps.Schedule:
    return ps.Schedule("mine", 2, 2, (tuple(first), tuple(second)), copies=2)


DOWN = [ps.F(0, 0), ps.F(3, 1), ps.B(3, 1), ps.B(0, 0)]
UP = [ps.F(2, 1), ps.F(1, 0), ps.B(1, 0), ps.B(2, 1)]


def test_updates_in_different_orders_are_a_deadlock():
    right = two_stages([*DOWN, ps.U(0, 0), ps.U(3, 0)], [*UP, ps.U(2, 0), ps.U(1, 0)])
    ps.check(right)
    crossed = two_stages([*DOWN, ps.U(0, 0), ps.U(3, 0)], [*UP, ps.U(1, 0), ps.U(2, 0)])
    with pytest.raises(ps.IllegalSchedule, match="deadlock: worker 0 waits at 0U0 .* for 2U0"):
        ps.check(crossed)


def test_a_microbatch_belongs_to_one_copy():
    wrong = two_stages(
        [ps.F(0, 1), ps.F(3, 1), ps.B(3, 1), ps.B(0, 1), ps.U(0, 0), ps.U(3, 0)],
        [*UP, ps.U(2, 0), ps.U(1, 0)],
    )
    message = "worker 0 does 0F1 .* stage 0 is of copy 0, which takes the even microbatches"
    with pytest.raises(ps.IllegalSchedule, match=message):
        ps.check(wrong)


def test_copies_of_a_stage_live_on_different_workers():
    together = ps.Schedule(
        "mine",
        1,
        2,
        ((ps.F(0, 0), ps.F(1, 1), ps.B(0, 0), ps.B(1, 1), ps.U(0, 0), ps.U(1, 0)),),
        copies=2,
    )
    with pytest.raises(ps.IllegalSchedule, match="worker 0 holds stage 0 and its copy, stage 1"):
        ps.check(together)


def test_a_missing_backward_of_one_copy_is_found():
    broken = replace(
        two_stages([*DOWN, ps.U(0, 0), ps.U(3, 0)], [*UP, ps.U(2, 0), ps.U(1, 0)]),
        workers=(
            tuple(a for a in [*DOWN, ps.U(0, 0), ps.U(3, 0)] if a != ps.B(3, 1)),
            (*UP, ps.U(2, 0), ps.U(1, 0)),
        ),
    )
    with pytest.raises(ps.IllegalSchedule, match="worker 0 never does 3B1"):
        ps.check(broken)


def test_three_copies_and_odd_batches_are_refused():
    with pytest.raises(ps.IllegalSchedule, match="copies must be 1 or 2, not 3"):
        ps.check(replace(ps.chimera(2, 2), copies=3))
    with pytest.raises(ps.IllegalSchedule, match="needs as many stages for each"):
        ps.check(replace(ps.gpipe(3, 4), copies=2))


def test_the_schedule_file_knows_one_copy():
    with pytest.raises(ValueError, match="knows one copy of the model, but chimera trains 2"):
        to_csv(ps.chimera(2, 2))
