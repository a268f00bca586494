"""The exercises of unit 03: every right answer earns all points, every wrong one loses some."""

from __future__ import annotations

from functools import partial
from random import Random

import pipeschool as ps
import pytest
import torch
from pipeschool.grade import unit03
from test_both_sides import earns_part
from torch import nn


@pytest.mark.parametrize(
    "name, mutant, earned",
    [
        ("stash_step", "backward_on_the_newest", 2.0),
        ("stash_step", "drops_what_another_still_needs", 2.0),
        ("stash_step", "update_keeps_the_version_before", 3.0),
        ("stash_step", "changes_what_it_was_given", 1.0),
        ("delayed_descent", "descent_without_delay", 1.33),
        ("delayed_descent", "descent_from_the_old_weights", 1.33),
        ("vertical_sync_version", "vertical_without_max", 2.67),
        ("double_buffer_version", "double_without_max", 2.67),
        ("version_bytes", "bytes_vertical_like_stash", 3.0),
        ("version_bytes", "bytes_raises_for_latest", 1.0),
        ("replay", "forgets_to_divide_by_m", 3.2),
        ("replay", "does_not_overwrite", 3.2),
        ("replay", "always_the_newest", 0.0),
    ],
)
def test_partly_right_answers_earn_part_of_the_points(name, mutant, earned, capsys):
    earns_part(name, mutant, earned, capsys)


def test_new_cases_depend_on_the_seed_alone():
    for exercise in unit03.EXERCISES:
        for part in exercise.parts:
            drawn = [
                [part.draw(rng, size) for size in range(1, 9)]
                for rng in (Random(f"{seed}/{part.title}") for seed in ("a", "a", "b"))
            ]
            assert drawn[0] == drawn[1] != drawn[2]


# --- what the checks take for right, against the simulator, the runtime and mathematics


@pytest.mark.parametrize("p", [1, 2, 4, 5])
def test_stashing_step_by_step_is_what_the_ledger_does(p):
    trace = ps.simulate(ps.pipedream(p, m=1, batches=4 * p))
    for stage, row in enumerate(trace.rows):
        newest, flying, most = 0, {}, 0
        for span in row:
            version, kept = unit03.stash_step(span.action, newest, flying)
            assert version == span.version
            most = max(most, len(kept))
            if span.action.kind == "F":
                flying[span.action.microbatch] = version
            elif span.action.kind == "B":
                del flying[span.action.microbatch]
            else:
                newest = version
        assert most == trace.weight_versions[stage]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_closed_forms(p):
    needed, late = unit03.VERSIONS_NEEDED.reference, unit03.STALENESS.reference
    assert [needed(s, p) for s in range(p)] == [p - s for s in range(p)]
    assert [late(s, p) for s in range(p)] == [p - 1 - s for s in range(p)]
    for policy, copies in (("latest", 1), ("vertical_sync", p), ("double_buffer", 2)):
        assert unit03.version_bytes(policy, [10] * p) == [10 * copies] * p


@pytest.mark.parametrize("m", [1, 2, 5])
def test_the_last_user_of_a_version_is_the_last_that_asks_for_it(m):
    asked = [unit03.double_buffer_version(k, m) for k in range(9 * m)]
    for version in range(6):
        last = max(k for k, used in enumerate(asked) if used == version)
        assert unit03.last_user(version, m) == last


def late_by_stage(stage, k):
    return max(k - (2 - stage), 0)


def vertical(stage, k):
    return unit03.vertical_sync_version(k, 3)


def double(stage, k):
    return unit03.double_buffer_version(k, 3)


@pytest.mark.parametrize(
    "policy, version, m",
    [
        ("latest", late_by_stage, 1),
        ("stash", late_by_stage, 1),
        ("vertical_sync", vertical, 1),
        ("double_buffer", double, 3),
    ],
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_replay_is_what_the_pipeline_does(policy, version, m, momentum):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(3)]
    batches = [
        (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))
        for _ in range(8)
    ]
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    schedule = ps.pipedream_2bw(3, m, 8) if m > 1 else ps.pipedream(3, m, 8)
    ran = ps.run(schedule, stages, batches, optimizer=sgd, weights=policy, history=True).history
    cups = [pair for x, y in batches for pair in zip(x.chunk(m), y.chunk(m), strict=True)]
    ours = unit03.replay(stages, cups, nn.functional.mse_loss, sgd, version, m, policy == "latest")
    assert len(ours) == len(ran) == 9
    for theirs, mine in zip(ran, ours, strict=True):
        for a, b in zip(theirs, mine, strict=True):
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-14)
