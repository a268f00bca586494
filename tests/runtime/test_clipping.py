"""Gradients are clipped by the norm of the whole model, as in one process, or of each stage."""

from __future__ import annotations

import copy
import itertools

import pipeschool as ps
import pytest
import torch
from test_run import batch, linear_stages
from test_tensor_parallel import PLAN, blocks
from test_ties import tied_stages
from torch import nn

MOST = 0.05  # shorter than what they are


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def alone(stages, data, most=MOST, over="model"):
    """The weights that plain PyTorch ends with, in one process."""
    model = nn.ModuleList(copy.deepcopy(list(stages)))
    optimizer = sgd(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(nn.Sequential(*model)(x), y).backward()
        for part in [model] if over == "model" else model:
            nn.utils.clip_grad_norm_(part.parameters(), most)
        optimizer.step()
    return [stage.state_dict() for stage in model]


def assert_same(found, expected, atol=1e-12):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=atol)


def differ(one, other):
    return max((a[n] - b[n]).abs().max() for a, b in zip(one, other, strict=True) for n in a)


SCHEDULES = [
    ps.gpipe(1, 4),
    ps.one_f_one_b(4, 4),
    ps.interleaved_1f1b(2, 4, v=2),
    ps.zb_v(2, 4),
    ps.chimera(4, 4),
    ps.replicate(ps.one_f_one_b(2, 3), 2),
    ps.round_robin([1, 2], 4, weights="flush"),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name} {s.p}")
def test_the_norm_is_that_of_the_whole_model(schedule):
    stages = linear_stages(schedule.stages)
    data = [batch(13, seed=seed) for seed in range(3)]
    result = ps.run(schedule, stages, data, optimizer=sgd, clip_norm=MOST)
    assert result.clipped_over == "model"
    assert_same(result.state_dicts, alone(stages, data))
    # What is noted of the last update is what the optimizer got.
    squares = sum((g**2).sum() for stage in result.gradients for g in stage.values())
    assert float(squares) ** 0.5 == pytest.approx(MOST, rel=1e-4)


def test_the_norm_of_each_stage_is_another_rule():
    stages = linear_stages(3)
    data = [batch(12, seed=seed) for seed in range(2)]
    run = {
        over: ps.run(ps.gpipe(3, 4), stages, data, optimizer=sgd, clip_norm=MOST, clip_over=over)
        for over in ("model", "stage")
    }
    for over, result in run.items():
        assert result.clipped_over == over
        assert_same(result.state_dicts, alone(stages, data, over=over))
        assert result.trace.updates_meet == (over == "model")
    assert differ(*(result.state_dicts for result in run.values())) > 1e-3


def test_what_is_short_enough_is_left_as_it_is():
    stages, data = linear_stages(3), [batch(12)]
    clipped = ps.run(ps.gpipe(3, 4), stages, data, optimizer=sgd, clip_norm=1e6)
    plain = ps.run(ps.gpipe(3, 4), stages, data, optimizer=sgd)
    assert differ(clipped.state_dicts, plain.state_dicts) == 0.0
    assert (clipped.clipped_over, plain.clipped_over) == ("model", "")


def test_a_shared_parameter_counts_once():
    stages = tied_stages(4, [(0, 3), (1, 2)])
    data = [batch(12, seed=seed) for seed in range(2)]
    schedule = ps.interleaved_1f1b(2, 4, v=2)
    result = ps.run(schedule, stages, data, optimizer=sgd, clip_norm=MOST)
    assert_same(result.state_dicts, alone(stages, data))


def test_frozen_and_sparse_weights_count_as_in_one_process():
    torch.manual_seed(0)
    words, y = torch.tensor([1, 2, 1, 8]), batch(4)[1]
    stages = [nn.Embedding(9, 6, sparse=True).double(), *linear_stages(2)]
    stages[1].requires_grad_(False)
    run = ps.run(
        ps.gpipe(3, 2),
        stages,
        [(words, y)],
        optimizer=lambda w: torch.optim.SGD(w, lr=0.5),
        clip_norm=MOST,
    )
    dense = [nn.Embedding.from_pretrained(stages[0].weight, freeze=False), *stages[1:]]
    model = nn.Sequential(*copy.deepcopy(dense))
    nn.functional.mse_loss(model(words), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), MOST)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    assert_same(run.state_dicts, [stage.state_dict() for stage in model])


def test_slices_of_a_weight_count_together():
    stages = blocks(2)
    data = [tuple(t.float() for t in batch(8, width=8, seed=seed)) for seed in range(3)]
    result = ps.run(
        ps.one_f_one_b(2, 4),
        stages,
        data,
        optimizer=sgd,
        clip_norm=MOST,
        tensor_parallel=2,
        tensor_plan=PLAN,
    )
    assert_same(result.state_dicts, alone(stages, data), atol=1e-6)


def test_pytorchs_engine_clips_by_the_same_norm():
    stages, data = linear_stages(3), [batch(12, seed=seed) for seed in range(2)]
    result = ps.run(
        ps.one_f_one_b(3, 4), stages, data, optimizer=sgd, clip_norm=MOST, engine="torch"
    )
    assert result.clipped_over == "model"
    assert_same(result.state_dicts, alone(stages, data))


def test_legs_of_a_training_clip_as_one_process_does():
    stages, data = linear_stages(2), [batch(12, seed=seed) for seed in range(3)]
    training = ps.train("1f1b", stages, data, m=4, every=1, optimizer=sgd, clip_norm=MOST, log=None)
    assert_same(training.state_dicts, alone(stages, data))


def test_without_a_flush_each_stage_has_its_own_norm():
    stages, data = linear_stages(2), [batch(8)]
    result = ps.run(ps.pipedream(2, 4), stages, data, optimizer=sgd, clip_norm=MOST)
    assert result.clipped_over == "stage"
    norms = [sum((g**2).sum() for g in own.values()) ** 0.5 for own in result.gradients]
    assert all(float(norm) <= MOST for norm in norms)
    sentence = (
        "^clip_over='model' needs an update in which the gradients of all stages meet, and "
        "pipedream updates each stage by itself: choose clip_over='stage'$"
    )
    with pytest.raises(ValueError, match=sentence):
        ps.run(ps.pipedream(2, 4), stages, data, clip_norm=MOST, clip_over="model")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"clip_norm": 1.0, "clip_over": "all"},
            "^clip_over must be 'model' or 'stage', not 'all'$",
        ),
        ({"clip_over": "stage"}, "^clip_over needs clip_norm, the largest norm that there may be$"),
    ],
)
def test_what_is_no_choice_is_refused(options, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)], **options)


def test_early_updates_of_a_row_wait_for_the_last_backward():
    def order(worker, p, m):
        """All of one stage, then all of the other; each is updated after its own backwards."""
        return itertools.chain(
            *([ps.F(s, k) for k in range(m)] for s in (worker, p + worker)),
            *([ps.B(s, k) for k in range(m)] for s in (p + worker, worker)),
        )

    schedule = ps.Schedule.from_workers(order, p=2, m=3)
    assert [a.kind for a in schedule.workers[0][-4:]] == ["B", "B", "B", "U"]
    assert schedule.workers[0][9].kind == "U"
    stages, data = linear_stages(4), [batch(12)]
    result = ps.run(schedule, stages, data, optimizer=sgd, clip_norm=MOST)
    assert_same(result.state_dicts, alone(stages, data))
