"""Inference: fill, drain, requests that arrive late, tokens in flight."""

from __future__ import annotations

import pipeschool as ps
import pytest


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("m", [1, 2, 8, 24])
def test_the_bubble_is_that_of_a_training_pipeline(p, m):
    schedule = ps.check(ps.forward_only(p, m))
    ps.check(ps.lower(schedule))
    trace = ps.simulate(schedule, ps.Cost(forward=2))
    assert trace.makespan == 2 * (m + p - 1)
    assert trace.bubble_of_total == pytest.approx((p - 1) / (m + p - 1))
    assert trace.peak_activations == [1] * p
    ps.check(schedule, memory_cap=1)
    with pytest.raises(ps.IllegalSchedule, match="worker 0 holds the activations of 1 micro"):
        ps.check(schedule, memory_cap=0.5)


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize(("p", "requests"), [(4, 1), (4, 2), (4, 4), (4, 9), (1, 3), (3, 8)])
def test_it_takes_p_requests_to_keep_p_workers_busy(p, requests, tokens):
    schedule = ps.check(ps.forward_only(p, requests, tokens=tokens))
    ps.check(ps.lower(schedule))
    trace = ps.simulate(schedule)
    busy = max(p, requests)
    assert trace.makespan == busy * tokens + min(p, requests) - 1
    assert trace.v == 1


def test_a_request_that_arrives_late_is_waited_for():
    trace = ps.simulate(ps.forward_only(2, 3), ps.Cost(forward=1), release=[0, 5, 5])
    starts = {str(span.action): span.start for span in trace.spans}
    assert starts == {"0F0": 0, "0F1": 5, "0F2": 6, "1F0": 1, "1F1": 6, "1F2": 7}


@pytest.mark.parametrize("release", [[-1], ["soon"], [float("inf")]])
def test_a_release_must_be_a_time(release):
    with pytest.raises(ValueError, match="release must be a number, 0 or more"):
        ps.simulate(ps.forward_only(2, 1), release=release)


def test_a_backward_has_no_place_in_it():
    def order(worker, p, m):
        return [ps.F(worker, 0), ps.B(worker, 0)]

    wrong = ps.Schedule.from_workers(order, 2, 1, weights="frozen")
    with pytest.raises(ps.IllegalSchedule, match="worker 0 does 0B0 .* there are forwards alone"):
        ps.check(wrong)


def test_a_schedule_that_trains_cannot_freeze_and_this_one_cannot_train():
    with pytest.raises(ValueError, match="pipedream trains, so it needs another policy"):
        ps.simulate(ps.pipedream(2, 2), weights="frozen")
    with pytest.raises(ValueError, match="does not train, so it needs weights='frozen'"):
        ps.simulate(ps.forward_only(2, 2), weights="stash")
