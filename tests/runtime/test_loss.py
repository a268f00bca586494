"""The loss of a batch is the mean that one process computes, or it is refused."""

from __future__ import annotations

import copy
import functools

import pipeschool as ps
import pytest
import torch
from pipeschool.runtime import reference
from test_run import batch, linear_stages, sgd
from torch import nn

CLASSES, PAD = 6, -100


def words(n, lengths, seed=0):
    """Sequences of classes as targets, of which only the first few count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, CLASSES, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (n, 5), generator=generator)
    for row, length in enumerate(lengths):
        y[row, length:] = PAD
    return x, y


def of_tokens(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def tokens(targets):
    return (targets != PAD).sum()


def alone(stages, data, loss, optimizer=sgd):
    """(losses of the batches, gradients of the last, weights) of plain PyTorch, batch by batch."""
    model = nn.Sequential(*copy.deepcopy(list(stages)))
    stepper, losses = optimizer(model.parameters()), []
    for x, y in data:
        stepper.zero_grad()
        value = loss(model(x), y)
        value.backward()
        losses.append(value.item())
        gradients = [{n: p.grad.clone() for n, p in s.named_parameters()} for s in model]
        stepper.step()
    return losses, gradients, [stage.state_dict() for stage in model]


LENGTHS = [5, 4, 1, 1, 0, 0, 2, 5]  # with m=4 the third microbatch has nothing but padding
PADDED = [words(8, LENGTHS), words(8, LENGTHS[::-1], seed=1)]


@pytest.mark.parametrize(
    "schedule",
    [
        ps.gpipe(3, 4),
        ps.one_f_one_b(3, 4),
        ps.interleaved_1f1b(2, 4, v=2),
        ps.zb_h1(3, 4),
        ps.chimera(4, 4),
        ps.replicate(ps.one_f_one_b(2, 2), 2),
    ],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("recompute", [False, True])
def test_padded_targets_are_weighed_by_what_is_no_padding(schedule, recompute):
    stages = linear_stages(schedule.stages)
    losses, gradients, weights = alone(stages, PADDED, of_tokens)
    options = {"loss": of_tokens, "weigh": tokens, "optimizer": sgd, "recompute": recompute}
    result = ps.run(schedule, stages, PADDED, **options)
    assert reference.max_error(result.gradients, gradients) < 1e-12
    assert reference.max_error(result.state_dicts, weights) < 1e-12
    assert result.batch_losses == pytest.approx(losses, abs=1e-12)
    if schedule.name in ("gpipe", "1f1b"):
        assert result.losses[2] == 0.0  # nothing in it counts
        assert result.loss_weights[:4] == [9, 2, 0, 7]


def test_pytorchs_engine_weighs_in_the_same_way():
    stages = linear_stages(3)
    losses, gradients, _ = alone(stages, PADDED, of_tokens)
    result = ps.run(
        ps.one_f_one_b(3, 4), stages, PADDED, loss=of_tokens, weigh=tokens, optimizer=sgd,
        engine="torch",
    )  # fmt: skip
    assert reference.max_error(result.gradients, gradients) < 1e-12
    assert result.batch_losses == pytest.approx(losses, abs=1e-12)


def test_the_reference_weighs_in_the_same_way():
    stages = linear_stages(2)
    _, gradients, _ = alone(stages, PADDED, of_tokens)
    found = reference.gradients(stages, PADDED, 4, of_tokens, sgd, weigh=tokens)
    assert reference.max_error(found, gradients) < 1e-12


def test_a_policy_that_updates_every_few_microbatches_weighs_within_each_update():
    """Version 0 is all that the first two updates of 2BW see."""
    stages = linear_stages(2)
    schedule = ps.pipedream_2bw(2, 4)
    result = ps.run(schedule, stages, PADDED[:1], loss=of_tokens, weigh=tokens, history=True)
    _, gradients, _ = alone(stages, PADDED[:1], of_tokens)
    assert reference.max_error(result.gradients, gradients) < 1e-12


def test_class_weights_are_a_mean_by_the_weights_of_the_targets():
    stages, counts = linear_stages(2), torch.tensor([1.0, 5, 2, 9, 1, 3]).double()
    x, y = batch(9)[0], torch.arange(9) % CLASSES
    loss = nn.CrossEntropyLoss(weight=counts)
    losses, gradients, _ = alone(stages, [(x, y)], loss)
    result = ps.run(ps.gpipe(2, 4), stages, [(x, y)], loss=loss, weigh=lambda y: counts[y].sum())
    assert reference.max_error(result.gradients, gradients) < 1e-12
    assert result.batch_losses == pytest.approx(losses)


# What is refused


def l2(stages):
    return lambda y, t: nn.functional.mse_loss(y, t) + stages[0][0].weight.square().sum()


def with_default(stages):
    def loss(y, t, head=stages[1]):
        return nn.functional.mse_loss(head(y), t)

    return loss


def computed_before(stages):
    penalty = stages[0][0].weight.square().sum()
    return lambda y, t: nn.functional.mse_loss(y, t) + penalty


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, y, t):
        return self.scale * nn.functional.mse_loss(y, t)


CROSS = nn.functional.cross_entropy
INT = torch.tensor([0, 1, 2, 3, -100, 5, 1, 2])
SEVEN = torch.tensor([0, 1, 2, 3, 4, 5, 1, 2])

REFUSED = {
    "ignored": (lambda _: nn.CrossEntropyLoss(), INT, "CrossEntropyLoss ignores targets of -100"),
    "another index": (
        lambda _: nn.CrossEntropyLoss(ignore_index=4),
        SEVEN,
        "CrossEntropyLoss ignores targets of 4, and there are some, so it is no mean over samples: "
        r"say with weigh= what it is a mean over, such as weigh=lambda y: \(y != 4\).sum\(\)$",
    ),
    "function": (lambda _: CROSS, INT, "cross_entropy ignores targets of -100"),
    "partial": (
        lambda _: functools.partial(CROSS, ignore_index=4),
        SEVEN,
        "cross_entropy ignores targets of 4",
    ),
    "within a function": (lambda _: lambda y, t: CROSS(y, t), INT, "ignores targets of -100"),
    "module in a function": (
        lambda _: (lambda loss: lambda y, t: loss(y, t))(nn.CrossEntropyLoss()),
        INT,
        "CrossEntropyLoss ignores targets of -100",
    ),
    "class weights in a function": (
        lambda _: (lambda loss: lambda y, t: loss(y, t))(nn.NLLLoss(torch.arange(6.0).double())),
        SEVEN,
        "NLLLoss has class weights",
    ),
    "class weights": (
        lambda _: nn.CrossEntropyLoss(weight=torch.arange(6.0).double()),
        SEVEN,
        "CrossEntropyLoss has class weights, so it is no mean over samples",
    ),
    "sum": (
        lambda _: nn.MSELoss(reduction="sum"),
        None,
        "^MSELoss has reduction='sum', and the loss of a batch is made from means",
    ),
    "partial sum": (
        lambda _: functools.partial(nn.functional.mse_loss, reduction="sum"),
        None,
        "mse_loss has reduction='sum'",
    ),
    "none": (lambda _: nn.L1Loss(reduction="none"), None, "L1Loss has reduction='none'"),
    "L2 penalty": (
        l2,
        None,
        "reaches parameter 0.weight of stage 0, whose gradient would be lost: compute that part "
        "inside the stage",
    ),
    "tied head": (with_default, None, "the loss loss reaches parameter 0.weight of stage 1"),
    "computed before": (computed_before, None, "has parameters of its own"),
    "parameters": (lambda _: Learned(), None, "the loss Learned has parameters of its own"),
    "its method": (lambda _: Learned().forward, None, "has parameters of its own"),
    "a list": (
        lambda _: functools.partial(lambda y, t, scale: y.mean() * scale[0], scale=[torch.ones(
            (), requires_grad=True)]),
        None,
        "has parameters of its own",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_known_to_be_no_mean_over_samples_is_refused(name):
    make, targets, sentence = REFUSED[name]
    stages, (x, y) = linear_stages(2), batch(8)
    data = [(x, y if targets is None else targets)]
    with pytest.raises(ValueError, match=sentence) as caught:
        ps.run(ps.gpipe(2, 4), stages, data, loss=make(stages))
    assert len(str(caught.value)) < 300


def test_a_complex_loss_is_refused():
    x, y = (t.to(torch.complex128) for t in batch(8))
    stages = [nn.Linear(6, 6).to(torch.complex128) for _ in range(2)]
    with pytest.raises(ps.RunError, match=r"the loss must be a real number, not \(\) complex128"):
        ps.run(ps.gpipe(2, 4), stages, [(x, y)], loss=lambda a, b: (a - b).square().mean())


def test_targets_that_weigh_nothing_in_a_whole_update_are_refused():
    x, y = words(8, [0] * 8)
    options = {"loss": of_tokens, "weigh": tokens}
    with pytest.raises(ValueError, match="^weigh gives 0 for all targets of an update: micro"):
        ps.run(ps.gpipe(2, 4), linear_stages(2), [(x, y)], **options)
    with pytest.raises(ValueError, match="microbatch 2 is to be averaged"):
        ps.run(ps.pipedream(2, 4), linear_stages(2), PADDED[:1], **options)


@pytest.mark.parametrize("said", [-1, float("nan"), float("inf"), "many", None, torch.ones(2)])
def test_a_weight_is_a_number_from_0_on(said):
    with pytest.raises(ValueError, match="^weigh must give the weight of a microbatch's targets"):
        ps.run(ps.gpipe(2, 4), linear_stages(2), [batch(8)], weigh=lambda y: said)


# What is right is not refused


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), SEVEN),
        (nn.CrossEntropyLoss(label_smoothing=0.1), SEVEN),
        (nn.CrossEntropyLoss(weight=None), torch.rand(8, 6).double()),
        (nn.BCEWithLogitsLoss(pos_weight=torch.arange(6.0).double()), torch.rand(8, 6).double()),
        (nn.KLDivLoss(reduction="batchmean"), torch.rand(8, 6).double()),
        (nn.MultiMarginLoss(weight=torch.arange(6.0).double()), SEVEN),
        (lambda y, t: CROSS(y, t, ignore_index=-1), SEVEN),
        (nn.HuberLoss(), torch.rand(8, 6).double()),
    ],
)
def test_means_over_samples_are_taken_as_they_are(loss, targets):
    stages, x = linear_stages(2), batch(8)[0]
    result = ps.run(ps.gpipe(2, 3), stages, [(x, targets)], loss=loss, check_loss=True)
    losses, gradients, _ = alone(stages, [(x, targets)], loss)
    assert reference.max_error(result.gradients, gradients) < 1e-12
    assert result.batch_losses == pytest.approx(losses)


def test_a_frozen_teacher_may_be_part_of_a_loss():
    teacher = linear_stages(1)[0].requires_grad_(False)

    def loss(y, t):
        return nn.functional.mse_loss(y, teacher(t))

    stages, data = linear_stages(2), [batch(8)]
    result = ps.run(ps.gpipe(2, 4), stages, data, loss=loss)
    assert reference.max_error(result.gradients, alone(stages, data, loss)[1]) < 1e-12


def test_inference_takes_any_loss():
    x, y = batch(8)
    loss = nn.MSELoss(reduction="sum")
    result = ps.run(ps.forward_only(2, 4), linear_stages(2), [(x, y)], loss=loss)
    whole = loss(torch.cat([out for (out,) in result.outputs]), y)
    assert sum(result.losses) == pytest.approx(whole.item())


# The check that computes


def contrastive(y, t):
    """Each sample against the others of its batch."""
    return CROSS(y @ t.T, torch.arange(len(y)))


@pytest.mark.parametrize(
    ("loss", "data"),
    [
        (contrastive, batch(8)),
        (lambda y, t: (y - t).square().sum(), batch(8)),
        (lambda y, t: CROSS(y.flatten(0, 1), t.flatten(), ignore_index=PAD), PADDED[0]),
    ],
)
def test_the_check_finds_what_cannot_be_known(loss, data):
    stages = linear_stages(2)
    before = copy.deepcopy([stage.state_dict() for stage in stages])
    random_numbers = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"at once, and .* its gradients are off by") as caught:
        ps.run(ps.gpipe(2, 4), stages, [data], loss=loss, check_loss=True)
    assert len(str(caught.value)) < 300
    assert reference.max_error(before, [stage.state_dict() for stage in stages]) == 0
    assert torch.equal(torch.get_rng_state(), random_numbers)


def test_the_check_says_by_how_much():
    """A sum over 8 samples of 6 numbers: 48 times the mean, and the mean of 4 sums a quarter."""
    stages, (x, y) = linear_stages(1), batch(8)
    with torch.no_grad():
        at_once = (stages[0](x) - y).square().sum().item()
    sentence = f"microbatches is {at_once:.6g} at once, and {at_once / 4:.6g} as the mean"
    with pytest.raises(ValueError, match=sentence + ".* off by 0.75 of their length"):
        ps.run(
            ps.gpipe(1, 4),
            stages,
            [(x, y)],
            loss=lambda y, t: (y - t).square().sum(),
            check_loss=True,
        )


def test_the_check_leaves_what_the_stages_do_with_a_batch_to_them():
    stages = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout()).double()]
    ps.run(ps.gpipe(1, 4), stages, [batch(8)], check_loss=True)
    assert stages[0][1].num_batches_tracked == 0


# What a training reports


def test_a_training_reports_the_mean_over_samples():
    stages = linear_stages(2)
    data = [batch(7), batch(20, seed=1), batch(4, seed=2)]
    lines = []
    training = ps.train("gpipe", stages, data, m=4, epochs=2, log=lines.append)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        expected = nn.functional.mse_loss(nn.Sequential(*stages)(x), y).item()
    assert [note["loss"] for note in training.epochs] == pytest.approx([expected] * 2, abs=1e-12)
    assert [line.split(",")[1] for line in lines] == [f" batch 3: loss {expected:.4f}"] * 2
    assert training.loss_weights == 2 * [2, 2, 2, 1, 5, 5, 5, 5, 1, 1, 1, 1]


def test_a_training_that_goes_on_reports_the_mean_of_the_whole_epoch(tmp_path):
    stages, data = linear_stages(2), [batch(7), batch(20, seed=1), batch(4, seed=2)]
    options = {"m": 4, "every": 1, "log": None, "optimizer": sgd}
    whole = ps.train("gpipe", stages, data, **options)

    class Breaks:
        def __iter__(self):
            yield data[0]
            raise KeyError("no more tea")

    options |= {"checkpoint": tmp_path / "tea.pt"}
    with pytest.raises(KeyError):
        ps.train("gpipe", stages, Breaks(), **options)
    again = ps.train("gpipe", stages, data, **options)
    assert again.epochs == whole.epochs
