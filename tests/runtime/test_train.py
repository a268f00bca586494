"""Training over epochs: what it computes, what it notes, and that being killed changes nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pipeschool as ps
import pytest
import torch
from test_run import batch, linear_stages
from torch import nn
from training_script import make

SCRIPT = Path(__file__).with_name("training_script.py")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def small():
    torch.manual_seed(0)
    stages = [nn.Linear(5, 5).double() for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 4, 6, 5, dtype=torch.float64, generator=generator)
    return stages, list(zip(x, y, strict=True))  # four batches of six


def test_synchronous_training_equals_a_plain_loop_over_the_epochs():
    stages, batches = small()
    training = ps.train("gpipe", stages, batches, m=3, epochs=2, optimizer=sgd, log=None)
    model = nn.Sequential(*small()[0])
    optimizer = sgd(model.parameters())
    for x, y in batches * 2:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for stage, state in zip(model, training.state_dicts, strict=True):
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)
    assert len(training.losses) == 2 * 4 * 3


def test_a_leg_is_one_stream_and_the_pipeline_drains_after_it():
    stages, batches = small()
    legs = ps.train("pipedream", stages, batches, m=3, every=2, optimizer=sgd, log=None)
    first = ps.run(ps.pipedream(2, 3, batches=2), stages, batches[:2], optimizer=sgd)
    for stage, state in zip(stages, first.state_dicts, strict=True):
        stage.load_state_dict(state)
    second = ps.run(ps.pipedream(2, 3, batches=2), stages, batches[2:], optimizer=sgd)
    assert legs.losses == first.losses + second.losses
    for one, other in zip(legs.state_dicts, second.state_dicts, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_momentum_goes_on_from_leg_to_leg():
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    stages, batches = small()
    whole = ps.train("gpipe", stages, batches, m=2, optimizer=momentum, log=None)
    legs = ps.train("gpipe", stages, batches, m=2, every=1, optimizer=momentum, log=None)
    assert whole.losses == legs.losses


def test_every_epoch_is_evaluated_on_the_weights_it_ended_with_and_logged():
    stages, batches = small()
    seen, lines = [], []

    def evaluate(trained):
        assert not any(stage.training for stage in trained)
        assert not torch.is_grad_enabled()
        seen.append([stage.weight.clone() for stage in trained])
        return len(seen)

    training = ps.train(
        "pipedream_2bw", stages, batches, m=2, epochs=3, every=3,
        optimizer=sgd, evaluate=evaluate, log=lines.append,
    )  # fmt: skip
    assert [note["evaluation"] for note in training.epochs] == [1, 2, 3]
    per_epoch = [training.losses[i : i + 8] for i in (0, 8, 16)]
    means = [sum(losses) / 8 for losses in per_epoch]
    assert [note["loss"] for note in training.epochs] == pytest.approx(means)
    for stage, state in zip(seen[-1], training.state_dicts, strict=True):
        assert torch.equal(stage, state["weight"])
    places = ["epoch 0, batch 3", "epoch 0, batch 4", "epoch 0"]
    assert [line.split(":")[0] for line in lines[:3]] == places
    assert "samples/s" in lines[0]
    assert training.samples_per_second > 0


def test_shuffling_is_new_in_every_epoch_and_the_same_in_every_training():
    seen: list[list[float]] = []

    class Watching(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    stages, _ = small()
    data = Watching(torch.randn(12, 5).double(), torch.randn(12, 5).double())
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    for _ in range(2):
        ps.train("gpipe", stages, loader, m=2, epochs=2, log=None)
    assert torch.equal(torch.get_rng_state(), before)
    first, second, third, fourth = (seen[i : i + 12] for i in range(0, 48, 12))
    assert sorted(first) == list(range(12))
    assert first != second
    assert (first, second) == (third, fourth)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"every": 1.5}, "every must be a whole number of at least 1, not 1.5"),
        ({"m": 7}, "a batch of 6 samples cannot be cut into 7 microbatches"),
        ({"loader": []}, "the loader gave too few batches in epoch 0"),
        ({"loader": iter(small()[1]), "epochs": 2}, "too few batches in epoch 1"),
        ({"schedule": "tea"}, "there is no schedule 'tea'"),
        ({"weights": "stash"}, "gpipe is synchronous"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"tensor_parallel": 2}, "train has no tensor_parallel"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_sentence(options, words):
    stages, batches = small()
    given = {"schedule": "gpipe", "loader": batches, "m": 2, "log": None} | options
    with pytest.raises(ValueError, match=words) as caught:
        ps.train(given.pop("schedule"), stages, given.pop("loader"), **given)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    stages, batches = small()
    file = tmp_path / "checkpoint"
    ps.train("gpipe", stages, batches, m=2, checkpoint=file, log=None)
    with pytest.raises(ValueError, match="belongs to another training, with m=2 and not 3"):
        ps.train("gpipe", stages, batches, m=3, checkpoint=file, log=None)
    file.write_text("tea leaves")
    with pytest.raises(ValueError, match="is no checkpoint of pipeschool"):
        ps.train("gpipe", stages, batches, m=2, checkpoint=file, log=None)


def test_a_finished_training_can_be_given_more_epochs(tmp_path):
    stages, batches = small()
    file = tmp_path / "checkpoint"
    ps.train("gpipe", stages, batches, m=2, epochs=1, optimizer=sgd, checkpoint=file, log=None)
    more = ps.train(
        "gpipe", stages, batches, m=2, epochs=3, optimizer=sgd, checkpoint=file, log=None
    )
    once = ps.train("gpipe", stages, batches, m=2, epochs=3, optimizer=sgd, log=None)
    assert more.losses == once.losses


KILLS = int(os.environ.get("PIPESCHOOL_KILLS", "2"))  # of each schedule


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("pipedream", marks=pytest.mark.exhaustive),
        "pipedream_2bw",
        pytest.param("one_f_one_b", marks=pytest.mark.exhaustive),
    ],
)
def test_killed_at_random_moments_and_resumed_equals_never_killed(schedule, tmp_path):
    stages, loader, options = make()
    right = ps.train(schedule, stages, loader, **options)
    moments = random.Random(schedule)
    command = [sys.executable, SCRIPT, tmp_path, "0.004", schedule]
    kills = 0
    while not (tmp_path / "result").exists():
        script = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert script.stdout.readline() == "training\n"
        if kills < KILLS:
            time.sleep(moments.uniform(0, 2.5 if kills else 1.0))
            script.send_signal(signal.SIGKILL)
            kills += 1
        script.communicate(timeout=120)
    losses, states = torch.load(tmp_path / "result", weights_only=True)
    assert losses == right.losses
    for one, other in zip(states, right.state_dicts, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(("name", "v"), [("interleaved_1f1b", 2), ("zb_v", 2), ("gpipe", None)])
def test_several_stages_per_worker_train_like_one_process(name, v):
    stages, data = linear_stages(4), [batch(8, seed=seed) for seed in range(4)]
    training = ps.train(name, stages, data, m=4, v=v, every=2, optimizer=sgd, log=None)
    model = nn.Sequential(*linear_stages(4))
    optimizer = sgd(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for stage, state in zip(model, training.state_dicts, strict=True):
        for key, value in stage.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "v", "says"),
    [
        ("interleaved_1f1b", 3, "4 stages cannot be shared out by v=3 to each worker"),
        ("zb_v", None, "zb_v for p=4 has 8 stages, but there are 4 modules: v= says"),
        ("gpipe", 2, "v must be 1 for gpipe, not 2"),
    ],
)
def test_stages_that_cannot_be_shared_out_are_refused(name, v, says):
    with pytest.raises(ValueError, match=says):
        ps.train(name, linear_stages(4), [batch(8)], m=4, v=v, log=None)
