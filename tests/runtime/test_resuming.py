"""Going on from a checkpoint with other arguments: refused, or said, and then so."""

from __future__ import annotations

import re

import numpy as np
import pipeschool as ps
import pytest
import torch
from pipeschool.runtime import checkpoint as checkpoint_file
from pipeschool.runtime.checkpoint import read
from torch import nn
from torch.optim import SGD, Adam, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset


def sgd(parameters):
    return SGD(parameters, lr=0.1)


def make(kind, **settings):
    return lambda given: kind(given, **settings)


def model(width=5, last=nn.Tanh, p=0.0, count=2):
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(width, width), nn.Dropout(p), last()).double() for _ in range(count)
    ]


def data(batches=4, size=6, width=5):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, batches, size, width, dtype=torch.float64, generator=generator)
    return list(zip(x, y, strict=True))


class Resumed:
    """One epoch, then another with other arguments, and what was logged then."""

    def __init__(self, file, schedule="gpipe"):
        self.file, self.schedule, self.lines = file, schedule, []

    def begin(self, stages=None, loader=None, **options):
        options = {"m": 2, "optimizer": sgd, "log": None} | options
        ps.train(
            options.pop("schedule", self.schedule), stages or model(), loader or data(),
            checkpoint=self.file, **options,
        )  # fmt: skip

    def go_on(self, stages=None, loader=None, **options):
        options = {"m": 2, "optimizer": sgd, "log": self.lines.append, "epochs": 2} | options
        self.lines.clear()
        return ps.train(
            options.pop("schedule", self.schedule), stages or model(), loader or data(),
            checkpoint=self.file, **options,
        )  # fmt: skip


@pytest.fixture
def resumed(tmp_path):
    return Resumed(tmp_path / "tea.pt")


def said(resumed, training):
    """The sentences that were logged, each of which is noted, too."""
    assert resumed.lines[0] == f"going on from {resumed.file}: epoch 1, batch 0"
    logged = [line for line in resumed.lines[1:] if not line.startswith("epoch")]
    assert training.changes == [f"epoch 1, batch 0: {line}" for line in logged]
    assert all(len(line) < 300 for line in logged)
    return logged


def plain(change=lambda optimizer: None, loss=nn.functional.mse_loss, make_optimizer=sgd, clip=None,
          then=None):  # fmt: skip
    """The weights after two epochs in one process. Between them the optimizer is changed; `loss`,
    `clip` and the learning rate's factor `then`, after every update, are those of the second."""
    stages = model()
    optimizers = [make_optimizer(stage.parameters()) for stage in stages]
    for epoch in range(2):
        for x, y in data():
            for optimizer in optimizers:
                optimizer.zero_grad()
            output = nn.Sequential(*stages)(x)
            (loss if epoch else nn.functional.mse_loss)(output, y).backward()
            if epoch and clip:
                nn.utils.clip_grad_norm_(nn.ModuleList(stages).parameters(), clip)
            for optimizer in optimizers:
                optimizer.step()
                if epoch and then:
                    optimizer.param_groups[0]["lr"] *= then
        if epoch == 0:
            for optimizer in optimizers:
                change(optimizer)
    return [stage.state_dict() for stage in stages]


def assert_trained(training, right):
    for state, expected in zip(training.state_dicts, right, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)


def sets(**settings):
    return lambda optimizer: optimizer.param_groups[0].update(settings)


# --- what has changed holds, and is said ---------------------------------------------------------


def test_without_a_change_nothing_is_said(resumed):
    resumed.begin()
    training = resumed.go_on(timeout=9.0, recompute=True, update_stages=False)
    assert said(resumed, training) == []
    assert_trained(training, plain())


@pytest.mark.parametrize("lr", [0.05, 0, 0.0])
def test_another_learning_rate_holds(resumed, lr):
    resumed.begin()
    training = resumed.go_on(optimizer=make(SGD, lr=lr))
    assert said(resumed, training) == [f"lr was 0.1, is {lr} from here on"]
    assert_trained(training, plain(sets(lr=lr)))


def test_other_settings_of_the_optimizer_hold_and_its_state_goes_on(resumed):
    resumed.begin(optimizer=make(SGD, lr=0.1, momentum=0.9))
    training = resumed.go_on(optimizer=make(SGD, lr=0.1, momentum=0.5, weight_decay=0.1))
    assert said(resumed, training) == [
        "momentum was 0.9, is 0.5 from here on",
        "weight_decay was 0, is 0.1 from here on",
    ]
    right = plain(
        sets(momentum=0.5, weight_decay=0.1), make_optimizer=make(SGD, lr=0.1, momentum=0.9)
    )
    assert_trained(training, right)


def test_the_settings_of_adam_hold(resumed):
    resumed.begin(optimizer=make(Adam, lr=0.01))
    training = resumed.go_on(optimizer=make(Adam, lr=0.01, betas=(0.8, 0.9)))
    assert said(resumed, training) == ["betas was (0.9, 0.999), is (0.8, 0.9) from here on"]
    right = plain(sets(betas=(0.8, 0.9)), make_optimizer=make(Adam, lr=0.01))
    assert_trained(training, right)


def test_a_setting_of_some_groups_says_of_which(resumed):
    def groups(lr):
        def optimizer(parameters):
            weight, bias = parameters
            return SGD([{"params": [weight]}, {"params": [bias], "lr": lr}], lr=0.1)

        return optimizer

    resumed.begin(optimizer=groups(0.1))
    training = resumed.go_on(optimizer=groups(0.2))
    assert said(resumed, training) == [
        "lr was 0.1, is 0.2 from here on (group 1 of stage 0, group 1 of stage 1)"
    ]


def test_a_change_is_said_once_and_stays_in_the_checkpoint(resumed):
    resumed.begin()
    first = resumed.go_on(optimizer=make(SGD, lr=0.05))
    second = resumed.go_on(optimizer=make(SGD, lr=0.05), epochs=3)
    assert resumed.lines[0].startswith("going on from")
    assert all(line.startswith("epoch") for line in resumed.lines[1:])
    assert first.changes == second.changes == ["epoch 1, batch 0: lr was 0.1, is 0.05 from here on"]


def test_another_loss_holds(resumed):
    resumed.begin()
    training = resumed.go_on(loss=nn.functional.l1_loss)
    assert said(resumed, training) == ["loss was mse_loss, is l1_loss from here on"]
    assert_trained(training, plain(loss=nn.functional.l1_loss))


def scaled(factor):
    return lambda output, target: factor * ((output - target) ** 2).mean()


def test_a_function_of_the_same_name_that_does_something_else_is_another(resumed):
    resumed.begin(loss=scaled(1.0))
    assert not resumed.go_on(loss=scaled(1.0)).changes
    training = resumed.go_on(loss=scaled(2.0), epochs=3)
    (change,) = training.changes
    assert re.search(
        r"loss was <lambda>#[0-9a-f]{8}, is <lambda>#[0-9a-f]{8} from here on$", change
    )


FACTOR = 1.0


def test_a_plain_value_that_a_function_speaks_of_is_part_of_it(resumed, monkeypatch):
    def loss(output, target):
        return FACTOR * ((output - target) ** 2).mean()

    resumed.begin(loss=loss)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    (change,) = resumed.go_on(loss=loss).changes
    assert "loss was loss#" in change


def test_the_settings_of_a_loss_are_part_of_it(resumed):
    resumed.begin(loss=nn.HuberLoss(delta=1.0))
    assert not resumed.go_on(loss=nn.HuberLoss(delta=1.0)).changes
    (change,) = resumed.go_on(loss=nn.HuberLoss(delta=2.0), epochs=3).changes
    assert "loss was HuberLoss#" in change


def test_clipping_holds(resumed):
    resumed.begin()
    training = resumed.go_on(clip_norm=0.1)
    assert said(resumed, training) == ["clip_norm was None, is 0.1 from here on"]
    assert_trained(training, plain(clip=0.1))


def test_another_setting_of_a_layer_is_said(resumed):
    resumed.begin()
    training = resumed.go_on(stages=model(p=0.5))
    assert said(resumed, training) == [
        "1.p of stage 0 was 0.0, is 0.5 from here on",
        "1.p of stage 1 was 0.0, is 0.5 from here on",
    ]


def test_another_batch_size_is_said_and_so_is_another_number_of_them(resumed):
    resumed.begin()
    training = resumed.go_on(loader=data(batches=3, size=8))
    assert said(resumed, training) == [
        "the number of batches in an epoch was 4, is 3 from here on",
        "the first batch was (6, 5) float64, (6, 5) float64, is (8, 5) float64, (8, 5) float64 "
        "from here on",
    ]


# --- schedulers ----------------------------------------------------------------------------------


def test_a_scheduler_goes_on_from_its_own_learning_rate_and_says_so(resumed):
    decay = make(ExponentialLR, gamma=0.5)
    resumed.begin(scheduler=decay)
    training = resumed.go_on(scheduler=decay, optimizer=make(SGD, lr=0.05))
    assert said(resumed, training) == [
        "lr was 0.1, is 0.05, but the scheduler goes on from its own: 0.00625 now"
    ]
    once = ps.train(
        "gpipe", model(), data(), m=2, epochs=2, optimizer=sgd, scheduler=decay, log=None
    )
    assert training.losses == once.losses


def test_a_scheduler_with_another_setting_starts_anew(resumed):
    resumed.begin()
    training = resumed.go_on(scheduler=make(ExponentialLR, gamma=0.5))
    assert said(resumed, training) == [
        "scheduler was None, is ExponentialLR, and starts anew: lr is 0.1 from here on"
    ]
    assert_trained(training, plain(then=0.5))
    again = resumed.go_on(scheduler=make(ExponentialLR, gamma=0.9), epochs=3)
    assert again.changes[1:] == [
        "epoch 2, batch 0: scheduler's gamma was 0.5, is 0.9, and starts anew: lr is 0.1 from here "
        "on"
    ]
    state = read(resumed.file)["stages"][0]
    assert state["scheduler"]["gamma"] == 0.9
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.9**4, rel=1e-12)


def test_a_scheduler_and_a_learning_rate_that_both_have_changed_hold(resumed):
    resumed.begin(scheduler=make(StepLR, step_size=1))
    training = resumed.go_on(
        optimizer=make(SGD, lr=0.3), scheduler=make(LambdaLR, lr_lambda=lambda k: 0.5**k)
    )
    assert said(resumed, training) == [
        "scheduler was StepLR, is LambdaLR, and starts anew: lr is 0.3 from here on"
    ]
    state = read(resumed.file)["stages"][0]
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.3 * 0.5**4
    assert state["scheduler"]["last_epoch"] == 4


def test_without_its_scheduler_an_optimizer_has_its_own_settings_again(resumed):
    momentum = make(SGD, lr=0.1, momentum=0.9)
    cycle = make(OneCycleLR, max_lr=0.2, total_steps=100, max_momentum=0.9)
    resumed.begin(optimizer=momentum, scheduler=cycle)
    assert read(resumed.file)["stages"][0]["optimizer"]["param_groups"][0]["momentum"] < 0.9
    training = resumed.go_on(optimizer=momentum)
    assert said(resumed, training) == ["scheduler was OneCycleLR, is None: lr is 0.1 from here on"]
    group = read(resumed.file)["stages"][0]["optimizer"]["param_groups"][0]
    fresh = momentum([nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert {**group, "params": 0} == {**fresh, "params": 0}


def test_the_settings_of_schedulers_in_schedulers_count_and_their_learning_rate_does_not(resumed):
    def two(gamma):
        return lambda o: SequentialLR(o, [StepLR(o, 1), ExponentialLR(o, gamma)], [2])

    resumed.begin(scheduler=two(0.9))
    training = resumed.go_on(scheduler=two(0.9), optimizer=make(SGD, lr=0.05))
    (change,) = said(resumed, training)
    assert "but the scheduler goes on from its own" in change
    training = resumed.go_on(
        scheduler=two(0.8), optimizer=make(SGD, lr=0.05), epochs=3
    )  # fmt: skip
    assert "scheduler's gamma 1 was 0.9, is 0.8, and starts anew" in training.changes[1]


# --- what cannot go on ---------------------------------------------------------------------------


def frozen():
    stages = model()
    stages[1][0].bias.requires_grad_(False)
    return stages


def half(parameters):
    first, *others = parameters
    return SGD([{"params": others}, {"params": [first]}], lr=0.1)


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ({}, {"m": 3}, "m=2 and not 3"),
        ({}, {"seed": 1}, "seed=0 and not 1"),
        ({}, {"every": 2}, "every=None and not 2"),
        ({}, {"schedule": "1f1b"}, "schedule=gpipe and not one_f_one_b"),
        ({}, {"stages": model(count=3)}, "p=2 and not 3"),
        (
            {"stages": model(count=4), "schedule": "interleaved_1f1b", "v": 2},
            {"stages": model(count=4), "schedule": "interleaved_1f1b", "v": 1},
            "p=2 and not 4",
        ),
        (
            {"schedule": "pipedream"},
            {"schedule": "pipedream", "weights": "latest"},
            "weights=stash and not latest",
        ),
        ({}, {"optimizer": make(Adam)}, "optimizer=SGD and not Adam"),
        ({}, {"optimizer": None}, "optimizer=SGD and not None"),
        ({"optimizer": None}, {}, "optimizer=None and not SGD"),
        ({}, {"stages": model(width=4), "loader": data(width=4)},
         "weight 0.weight of stage 0: (5, 5) float64 and not (4, 4) float64"),
        ({}, {"stages": [stage.float() for stage in model()]},
         "weight 0.weight of stage 0: (5, 5) float64 and not (5, 5) float32"),
        ({}, {"stages": model(last=nn.ReLU)}, "layer 2 of stage 0: Tanh and not ReLU"),
        ({}, {"stages": frozen()}, "trained in stage 1: ('0.weight', '0.bias') and not "
                                   "('0.weight')"),
        ({}, {"optimizer": half}, "the groups of its optimizer in stage 0: (('0.weight', '0.bias'))"
                                  " and not (('0.bias'), ('0.weight'))"),
    ],
)  # fmt: skip
def test_another_training_is_refused_in_one_sentence(resumed, before, now, says):
    resumed.begin(**before)
    with pytest.raises(ValueError) as caught:
        resumed.go_on(**now)
    assert str(caught.value) == (
        f"{resumed.file} belongs to another training, with {says}: go on with the same, or choose "
        "another file"
    )


@pytest.mark.parametrize(
    ("before", "now", "lacks"),
    [
        (make(Adam), make(Adam, amsgrad=True), "max_exp_avg_sq"),
        (make(RMSprop), make(RMSprop, momentum=0.9), "momentum_buffer"),
    ],
)
def test_a_setting_that_needs_what_was_not_kept_is_refused(resumed, before, now, lacks):
    resumed.begin(optimizer=before)
    with pytest.raises(ValueError, match=f"whose optimizer in stage 0 has kept no {lacks}, which"):
        resumed.go_on(optimizer=now)


def test_within_an_epoch_another_number_of_batches_is_refused(resumed):
    def stopped(line):
        if "batch 3" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resumed.begin(every=1, log=stopped)
    assert read(resumed.file)["place"] == (0, 2)
    with pytest.raises(ValueError, match="with batches in an epoch: 4 and not 5: go on"):
        resumed.go_on(loader=data(batches=5), every=1)


# --- what cannot be kept, and places where nothing can be ----------------------------------------


def test_what_evaluate_returns_is_kept_as_plain_values(resumed):
    resumed.begin(evaluate=lambda stages: {"right": np.float64(0.5), "each": np.arange(3)})
    training = resumed.go_on()
    kept = training.epochs[0]["evaluation"]
    assert type(kept["right"]) is float
    assert kept["right"] == 0.5
    assert torch.equal(kept["each"], torch.arange(3))


def test_a_learning_rate_of_numpy_goes_on(resumed):
    resumed.begin(optimizer=make(SGD, lr=np.float64(0.1)))
    training = resumed.go_on()
    assert said(resumed, training) == []
    assert_trained(training, plain())


def test_what_evaluate_returned_and_no_checkpoint_can_hold_is_refused_and_nothing_is_lost(resumed):
    with pytest.raises(ValueError) as caught:
        resumed.begin(evaluate=lambda stages: object())
    assert str(caught.value) == (
        "a checkpoint cannot keep what evaluate has returned, with a value of type object in it: "
        "only numbers, strings, tensors, and lists and dicts of them can be read again"
    )
    assert read(resumed.file)["place"] == (0, 4)
    training = resumed.go_on(epochs=1, evaluate=lambda stages: 7)  # the epoch is only evaluated
    assert [note["evaluation"] for note in training.epochs] == [7]
    assert len(training.losses) == 8


def untouchable():
    raise AssertionError("no batch may be drawn")
    yield


@pytest.mark.parametrize("name", ["no/such/x.pt", "."])
def test_a_place_for_no_checkpoint_is_found_before_any_batch_is_drawn(tmp_path, name):
    with pytest.raises(ValueError, match="needs a folder that is not there|must be a file"):
        ps.train("gpipe", model(), untouchable(), m=2, checkpoint=tmp_path / name)


def test_a_damaged_checkpoint_is_not_trained_on(resumed):
    resumed.begin()
    wrong = bytearray(resumed.file.read_bytes())
    wrong[len(wrong) // 2] ^= 1
    resumed.file.write_bytes(wrong)
    with pytest.raises(ValueError, match=f"the checkpoint {resumed.file} is damaged"):
        resumed.go_on()


def test_a_full_disk_ends_the_training_and_leaves_what_was_saved(resumed, monkeypatch):
    saved = []

    def fsync(number):
        saved.append(number)
        if len(saved) > 2:  # the file, and its folder
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file.os, "fsync", fsync)
        with pytest.raises(ps.RunError) as caught:
            resumed.begin(every=1)
    assert str(caught.value) == (
        f"the checkpoint {resumed.file} could not be written: No space left on device; that of "
        "epoch 0, batch 1 is still there"
    )
    assert list(resumed.file.parent.iterdir()) == [resumed.file]
    training = resumed.go_on(every=1)
    assert resumed.lines[0] == f"going on from {resumed.file}: epoch 0, batch 1"
    assert_trained(training, plain())


def uneven(last):
    batches = data()
    return [*batches[:3], tuple(t[:last] for t in batches[3])]


def drawn(samples, **options):
    x = torch.randn(samples, 5, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x), batch_size=6, **options)


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (uneven(2), "a batch of 2 samples cannot be cut into 3 microbatches: leave out batch 3"),
        (drawn(20), "the loader's last batch has 2 samples, too few for m=3 microbatches: give"),
        (drawn(20, shuffle=True), "the loader's last batch has 2 samples, too few for m=3"),
    ],
)
def test_a_last_batch_that_is_too_small_is_found_at_the_start(tmp_path, loader, says):
    lines = []
    with pytest.raises(ValueError, match=says):
        ps.train("gpipe", model(), loader, m=3, every=1, log=lines.append)
    assert lines == []


def test_a_last_batch_that_is_too_small_is_refused_on_arrival_and_the_others_are_kept(resumed):
    class Unknown:
        def __iter__(self):
            return iter(uneven(2))

    with pytest.raises(ValueError) as caught:
        resumed.begin(loader=Unknown(), m=3, every=1)
    assert str(caught.value) == (
        "a batch of 2 samples cannot be cut into 3 microbatches: leave out batch 3 of the loader, "
        "or let m be at most 2; of the checkpoints, that of epoch 0, batch 3 is still there"
    )


@pytest.mark.parametrize(
    "loader",
    [
        drawn(21),
        drawn(20, drop_last=True),
        drawn(4, collate_fn=lambda items: tuple(torch.cat([torch.stack(s)] * 2) for s in
                                                zip(*items, strict=True))),
    ],
)  # fmt: skip
def test_batches_that_are_large_enough_pass(loader):
    assert ps.train("gpipe", model(), loader, m=3, every=1, log=None).losses


def test_a_checkpoint_takes_what_the_weights_need(tmp_path):
    large = torch.randn(100, 30, 30, dtype=torch.float64)

    class Slice(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.weight = nn.Parameter(large[index])

        def forward(self, x):
            return x @ self.weight

    ps.train(
        "gpipe", [Slice(3), Slice(7)], data(width=30), m=2, log=None,
        checkpoint=tmp_path / "tea.pt", optimizer=make(SGD, lr=0.1, momentum=0.9),
    )  # fmt: skip
    needed = 2 * 2 * large[0].nbytes  # weights and momenta of two stages
    # And, whatever the size, the random numbers of two workers and what the training is.
    assert needed < (tmp_path / "tea.pt").stat().st_size < needed + 40_000
