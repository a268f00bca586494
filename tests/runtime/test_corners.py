"""Models and faults at the corners: the right gradients or one clear message, never wrong ones."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time

import pipeschool as ps
import pytest
import torch
from pipeschool.runtime import reference
from pipeschool.runtime.host.batches import fit_batches
from test_run import batch, linear_stages, sgd
from test_tensor_parallel import PLAN, Block
from torch import Tensor, nn


def error_of(schedule, stages, data, replicas=(), **options) -> float:
    """The largest difference between the gradients of a run and those of one process."""
    expected = reference.gradients(
        stages, [(x.clone(), y) for x, y in data], schedule.m, replicas=replicas
    )
    result = ps.run(schedule, stages, data, **options)
    return reference.max_error(result.gradients, expected)


class Complex(nn.Module):
    """Gives a tensor that torch has only marked as conjugated, or as negated."""

    def __init__(self, width: int, out: int, imaginary: bool):
        super().__init__()
        self.layer = nn.Linear(width, out, dtype=torch.complex128)
        self.imaginary = imaginary

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.to(torch.complex128)).conj()
        return y.imag if self.imaginary else y


class FromComplex(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(width, 6, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(torch.complex128)).conj().imag


@pytest.mark.parametrize("width", [3, 900], ids=["in a packet", "behind it"])
@pytest.mark.parametrize("imaginary", [False, True], ids=["conjugated", "negated"])
def test_lazily_conjugated_and_negated_tensors_travel_as_they_are(width, imaginary):
    torch.manual_seed(0)
    stages = [Complex(6, width, imaginary), FromComplex(width)]
    assert error_of(ps.gpipe(2, 2), stages, [batch(4)]) == 0.0


class Choice(nn.Module):
    """Uses one of two layers of the same shape, as the input says."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.idle = (nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x[0, 0] > 50 else self.b(x)


@pytest.mark.parametrize("marked", [[1, 3], [1], [0, 1, 2]])
def test_replicas_sum_the_parameters_that_only_some_of_them_use(marked):
    torch.manual_seed(0)
    x, y = batch(8)
    for k in marked:  # two samples per microbatch
        x[2 * k, 0] = 99
    schedule = ps.replicate(ps.one_f_one_b(1, 2), 2)
    assert error_of(schedule, [Choice()], [(x, y)], replicas=[2], optimizer=sgd) == 0.0


class Looks(nn.Module):
    """Looks up a word, as the input says; and, as it says, uses the whole table besides."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 6, sparse=True).double()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if x[0, 0] > 0:
            y = y + self.table(torch.arange(len(x)) + 1)
        return y + self.table.weight.sum() if x[0, 1] > 0 else y


@pytest.mark.parametrize("dense", [[], [0], [1], [1, 2]])
@pytest.mark.parametrize("sparse", [[], [0], [3], [0, 1, 2, 3]])
def test_replicas_sum_gradients_that_are_sparse_on_some_of_them(sparse, dense):
    torch.manual_seed(0)
    x, y = batch(8)
    x[:, :2] = -1.0
    for k in sparse:  # two samples per microbatch
        x[2 * k, 0] = 1.0
    for k in dense:
        x[2 * k, 1] = 1.0
    schedule = ps.replicate(ps.one_f_one_b(1, 2), 2)
    stages, data = [Looks()], [(x, y), (x, y)]
    expected = reference.gradients(stages, data, 4, optimizer=plain, replicas=[2])
    found = ps.run(schedule, stages, data, optimizer=plain).gradients
    assert reference.max_error(found, expected) == 0.0
    if sparse or dense:
        assert found[0]["table.weight"].is_sparse is not bool(dense)
    else:
        assert set(found[0]) == {"layer.weight", "layer.bias"}


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Counts(nn.Module):
    """What it gives depends on a buffer that it changes."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.layer, self.in_place = nn.Linear(6, 6).double(), in_place
        self.register_buffer("calls", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.calls.clone()
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return y


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("build", [ps.gpipe, ps.zb_h1])
def test_recomputation_sees_the_buffers_that_the_forward_saw(in_place, build):
    stages = [Counts(in_place), *linear_stages(1)]
    assert error_of(build(2, 4), stages, [batch(8)], recompute=True) == 0.0


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2))


def test_a_first_stage_may_change_its_input_in_place_unless_it_recomputes():
    stages = [ChangesItsInput(), *linear_stages(1)]
    assert error_of(ps.gpipe(2, 2), stages, [batch(4)]) == 0.0
    with pytest.raises(ps.RunError, match="stage 0 changes its input in place, so it cannot be"):
        ps.run(ps.gpipe(2, 2), stages, [batch(4)], recompute=[True, False])


def test_profiling_leaves_the_batch_as_it_is():
    x, y = batch(4)
    ps.profile([ChangesItsInput(), *linear_stages(1)], (x, y), 2)
    assert torch.equal(x, batch(4)[0])


def test_sparse_gradients_are_counted_like_others():
    torch.manual_seed(0)
    words, y = torch.tensor([1, 2, 1, 8]), batch(4)[1]
    stages = [nn.Embedding(9, 6, sparse=True).double(), *linear_stages(1)]
    result = ps.run(ps.gpipe(2, 2), stages, [(words, y)], memory=True)
    # An index and 6 numbers, of 8 bytes each, for each of the three different words.
    assert max(level.gradients for level in result.trace.measured_memory[0]) == 3 * (8 + 6 * 8)
    assert ps.profile(stages, (words, y), 2).seconds(ps.gpipe(2, 2))["F"][0] > 0


class SleepsOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 50:
            time.sleep(10_000)
        return self.layer(x)


def test_a_copy_that_waits_at_an_update_is_not_blamed_for_one_that_sleeps():
    x, y = batch(4)
    x[3] = 99  # microbatch 3 is worker 1's; worker 0 has done its own by then
    schedule = ps.replicate(ps.one_f_one_b(1, 2), 2)
    with pytest.raises(ps.RunError, match="worker 1 is stuck at 0F3 ") as caught:
        ps.run(schedule, [SleepsOn()], [(x, y)], optimizer=sgd, timeout=1.0)
    assert (caught.value.worker, caught.value.action) == (1, ps.F(0, 3))


def test_a_declared_latency_does_not_count_as_a_standstill():
    result = ps.run(ps.gpipe(2, 1), linear_stages(2), [batch(2)], latency=1.5, timeout=1.0)
    assert result.trace.makespan > 3.0  # there and back


def test_the_time_of_a_message_at_the_declared_bandwidth_does_not_count_as_a_standstill():
    """A message of 2 x 6 float64 has 96 bytes at least: 1.5 s at 64 bytes a second, each way."""
    result = ps.run(ps.gpipe(2, 1), linear_stages(2), [batch(2)], bandwidth=64, timeout=1.0)
    assert result.trace.makespan > 2 * 1.5


def test_who_sleeps_is_found_beside_a_declared_link():
    x, y = batch(4)
    x[2] = 99  # the first sample of microbatch 1
    with pytest.raises(ps.RunError, match="worker 0 is stuck at 0F1 ") as caught:
        ps.run(
            ps.gpipe(2, 2),
            [SleepsOn(), nn.Linear(6, 6).double()],
            [(x, y)],
            timeout=1.0,
            latency=0.1,
            bandwidth=1e3,
        )
    assert (caught.value.worker, caught.value.action) == (0, ps.F(0, 1))


class Leaves(nn.Module):
    """Starts a process that outlives the run, and holds the worker's output open."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        return self.layer(x)


def test_a_process_that_a_stage_has_started_does_not_hold_up_the_end_of_a_run(capsys):
    import psutil

    ps.run(ps.gpipe(1, 1), [Leaves()], [batch(2)])
    said = capsys.readouterr().out
    sleeper = psutil.Process(int(said.removeprefix("[worker 0] ")))
    assert sleeper.is_running()  # and yet we are here
    sleeper.kill()


class HalfKilled(Block):
    """One of the two processes that share it dies; the other is in the middle of a collective."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def test_a_part_that_is_killed_is_named_not_the_part_that_lost_it():
    x, y = (t.float() for t in batch(4, width=8))
    with pytest.raises(ps.RunError, match="worker 1 was killed by SIGKILL at 1F0 "):
        ps.run(
            ps.gpipe(2, 2), [Block(), HalfKilled()], [(x, y)], tensor_parallel=2, tensor_plan=PLAN
        )


@pytest.mark.parametrize("stages", [None, 3, (stage for stage in linear_stages(2)), nn.Tanh()])
def test_stages_that_are_no_list_are_refused_in_one_sentence(stages):
    with pytest.raises(ValueError, match="^stages must be a list of modules, one per stage, not "):
        ps.run(ps.gpipe(2, 2), stages, [batch(4)])


@pytest.mark.parametrize("batches", [None, 3])
def test_batches_that_cannot_be_gone_through_are_refused_in_one_sentence(batches):
    with pytest.raises(ValueError, match="^batches must be a list, or any other iterable, of "):
        ps.run(ps.gpipe(2, 2), linear_stages(2), batches)


def test_batches_without_end_are_refused_where_nothing_says_how_many_are_wanted():
    """Each schedule and training that takes all there are; an asynchronous one takes its own."""
    endless = itertools.repeat(batch(4))
    says = "gave more than 1000 batches and has no length that says when it will end: "
    with pytest.raises(ValueError) as caught:
        ps.run(ps.gpipe(2, 2), linear_stages(2), endless)
    assert str(caught.value) == f"batches {says}give a list of as many as you want"
    with pytest.raises(ValueError) as caught:
        ps.train("gpipe", linear_stages(2), endless, m=2, log=None)
    assert str(caught.value) == f"the loader {says}say with every= how many make a leg"
    with pytest.raises(ValueError, match="built with batches=2, but there are more"):
        ps.run(ps.pipedream(2, 2, batches=2), linear_stages(2), endless)


def test_batches_of_a_generator_are_taken_to_their_end_and_a_length_sets_no_limit():
    generator = (batch(4) for _ in range(3))
    assert len(ps.run(ps.gpipe(2, 2), linear_stages(2), generator).losses) == 3 * 2
    data = [(x, x) for x in range(1001)]
    schedule, given = fit_batches(ps.gpipe(1, 1), data)
    assert (schedule.batches, given) == (1001, data)
    schedule, given = fit_batches(ps.gpipe(1, 1), (pair for pair in data[:1000]))
    assert (schedule.batches, given) == (1000, data[:1000])


@pytest.mark.parametrize(
    ("stages", "data", "said"),
    [
        ([], batch(4), "stages must be a list of one or more modules"),
        (nn.Tanh(), batch(4), "stages must be a list of one or more modules"),
        (["tanh"], batch(4), "stages must be a list of one or more modules"),
        ([nn.Tanh()], batch(4)[0], "batch must be one .inputs, targets. pair, not Tensor"),
        ([nn.Tanh()], (*batch(4), 1), "batch must be one .inputs, targets. pair, not tuple"),
        ([nn.Tanh()], (batch(4)[0], None), "a batch without targets"),
    ],
)
def test_profile_refuses_what_is_no_model_and_no_batch(stages, data, said):
    with pytest.raises(ValueError, match=said):
        ps.profile(stages, data, 2)
