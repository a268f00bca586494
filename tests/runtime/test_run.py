"""A run equals one process: gradients bit for bit, whatever p, m, shapes and dtypes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pipeschool as ps
import pytest
import torch
from pipeschool.partition import split_layers
from pipeschool.runtime import reference
from torch import nn

SYNCHRONOUS = [ps.naive, ps.gpipe, ps.one_f_one_b]


def linear_stages(p: int, width: int = 6) -> list[nn.Module]:
    torch.manual_seed(p)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()).double() for _ in range(p)]


def batch(samples: int, width: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, width, dtype=torch.float64, generator=generator)
    return x, y


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("build", SYNCHRONOUS)
@pytest.mark.parametrize(
    ("p", "m", "samples"), [(4, 8, 16), (1, 3, 5), (3, 1, 4), (4, 2, 5), (2, 5, 13), (1, 1, 1)]
)
def test_gradients_are_bit_equal_to_one_process(build, p, m, samples):
    stages, data = linear_stages(p), [batch(samples)]
    result = ps.run(build(p=p, m=m), stages, data)
    expected = reference.gradients(stages, data, m)
    assert reference.max_error(result.gradients, expected) == 0.0


def test_the_reference_itself_is_the_gradient_of_the_mean_over_the_batch():
    stages, (x, y) = linear_stages(3), batch(13)
    nn.functional.mse_loss(nn.Sequential(*stages)(x), y).backward()
    for stage, found in zip(stages, reference.gradients(stages, [(x, y)], m=5), strict=True):
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("build", SYNCHRONOUS)
def test_training_on_several_batches_equals_training_in_one_process(build):
    stages = linear_stages(3)
    data = [batch(10, seed=seed) for seed in range(4)]
    result = ps.run(build(p=3, m=4), stages, data, optimizer=sgd, update_stages=False)
    model = nn.Sequential(*linear_stages(3))
    optimizer = sgd(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for stage, state in zip(model, result.state_dicts, strict=True):
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)


def test_the_losses_are_one_mean_per_microbatch_in_order():
    stages, (x, y) = linear_stages(2), batch(7)
    result = ps.run(ps.gpipe(p=2, m=3), stages, [(x, y)])
    outputs = nn.Sequential(*stages)(x)
    sizes = [3, 2, 2]  # 7 samples in 3 microbatches
    expected = [
        nn.functional.mse_loss(a, b).item()
        for a, b in zip(outputs.split(sizes), y.split(sizes), strict=True)
    ]
    assert result.losses == pytest.approx(expected, rel=1e-12)


def test_stages_of_the_caller_change_only_when_asked():
    stages, data = linear_stages(2), [batch(4)]
    before = [{k: v.clone() for k, v in stage.state_dict().items()} for stage in stages]
    result = ps.run(ps.gpipe(p=2, m=2), stages, data, optimizer=sgd)
    for stage, old in zip(stages, before, strict=True):
        assert all(torch.equal(stage.state_dict()[k], old[k]) for k in old)
    ps.run(ps.gpipe(p=2, m=2), stages, data, optimizer=sgd, update_stages=True)
    for stage, new in zip(stages, result.state_dicts, strict=True):
        assert all(torch.equal(stage.state_dict()[k], new[k]) for k in new)


class Fork(nn.Module):
    """Hands on several tensors of different shapes and types, one of them without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x):
        y = self.linear(x)
        return y, y[:, :2].float(), x.argmax(dim=1), y.sum()


class Join(nn.Module):
    """Takes what Fork gives; leaves the small float tensor without a gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 6).double()

    def forward(self, y, small, index, total):
        assert (small.dtype, index.dtype, total.shape) == (torch.float32, torch.int64, ())
        return y * total + self.embedding(index)


def test_several_tensors_of_any_shape_and_type_travel_between_stages():
    torch.manual_seed(0)
    stages, data = [Fork(), Join()], [batch(9)]
    result = ps.run(ps.one_f_one_b(p=2, m=4), stages, data)
    expected = reference.gradients(stages, data, m=4)
    assert reference.max_error(result.gradients, expected) == 0.0
    assert result.gradients[0]["linear.weight"].abs().max() > 0


def test_tensors_larger_than_a_packet_travel_too():
    stages, data = linear_stages(3, width=100), [batch(101, width=100)]  # up to 40 KB a message
    result = ps.run(ps.gpipe(p=3, m=2), stages, data)
    assert reference.max_error(result.gradients, reference.gradients(stages, data, m=2)) == 0.0


def test_a_long_stream_asks_for_more_packets_than_it_does_ahead():
    stages, data = linear_stages(2), [batch(200)]
    result = ps.run(ps.one_f_one_b(p=2, m=200), stages, data)
    assert reference.max_error(result.gradients, reference.gradients(stages, data, 200)) == 0.0


def test_batchnorm_statistics_come_back():
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double() for _ in range(2)]
    result = ps.run(ps.gpipe(p=2, m=3), stages, [batch(12)])
    assert [int(state["1.num_batches_tracked"]) for state in result.state_dicts] == [3, 3]


def replayed(stages, microbatches, lr):
    """PipeDream's rule, written from its recurrence alone: the gradient of microbatch t is taken
    with stage s (of p, from 0) at version max(t - (p - 1 - s), 0), and makes version t + 1."""
    p = len(stages)
    names = [list(dict(stage.named_parameters())) for stage in stages]
    history = [[[w.detach().clone() for w in stage.parameters()] for stage in stages]]
    for t, (x, y) in enumerate(microbatches):
        used = [history[max(t - (p - 1 - s), 0)][s] for s in range(p)]
        leaves = [[w.clone().requires_grad_() for w in weights] for weights in used]
        value = x
        for stage, keys, weights in zip(stages, names, leaves, strict=True):
            value = torch.func.functional_call(
                stage, dict(zip(keys, weights, strict=True)), (value,)
            )
        nn.functional.mse_loss(value, y).backward()
        history.append(
            [
                [new - lr * w.grad for new, w in zip(newest, weights, strict=True)]
                for newest, weights in zip(history[-1], leaves, strict=True)
            ]
        )
    return history[-1]


@pytest.mark.parametrize(("p", "m", "batches"), [(1, 4, 1), (2, 5, 1), (4, 9, 1), (4, 3, 3)])
def test_pipedream_equals_the_papers_recurrence(p, m, batches):
    stages = linear_stages(p)
    data = [batch(2 * m, seed=seed) for seed in range(batches)]
    schedule = ps.pipedream(p=p, m=m, batches=batches)
    result = ps.run(schedule, stages, data, optimizer=lambda w: torch.optim.SGD(w, lr=0.1))
    stream = [
        pair for x, y in data for pair in zip(x.tensor_split(m), y.tensor_split(m), strict=True)
    ]
    expected = replayed(stages, stream, lr=0.1)
    for state, weights in zip(result.state_dicts, expected, strict=True):
        for found, wanted in zip(state.values(), weights, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    n = m * batches
    assert result.trace.weight_versions == [min(p - s, n) for s in range(p)]
    assert result.trace.staleness == [min(p - 1 - s, n - 1) for s in range(p)]


def test_a_learners_order_from_a_closure_runs():
    def order(worker, p, m):
        return [ps.F(worker, k) for k in range(m)] + [ps.B(worker, k) for k in reversed(range(m))]

    stages, data = linear_stages(3), [batch(8)]
    mine = ps.Schedule.from_workers(order, p=3, m=4)
    result = ps.run(mine, stages, data)
    expected = reference.gradients(stages, data, m=4)
    assert reference.max_error(result.gradients, expected) < 1e-15  # the order of sums differs
    assert result.trace.peak_activations == [4, 4, 4]


def test_two_stages_on_one_worker_need_no_message():
    def order(worker, p, m):
        chunks = [worker, worker + 1] if worker else [0]
        forwards = [ps.F(stage, k) for k in range(m) for stage in chunks]
        return forwards + [ps.B(stage, k) for k in range(m) for stage in reversed(chunks)]

    stages, data = linear_stages(3), [batch(8)]
    mine = ps.Schedule.from_workers(order, p=2, m=4)
    result = ps.run(mine, stages, data)
    assert reference.max_error(result.gradients, reference.gradients(stages, data, m=4)) == 0.0
    assert {m.action.stage for m in result.trace.messages if "F" in m.action.kind} == {0, 1}


def test_what_workers_print_and_warn_reaches_the_caller(capsys):
    class Talkative(nn.Linear):
        def forward(self, x):
            print("cups:", len(x))
            print("careful", file=sys.stderr)
            return super().forward(x)

    stages = [Talkative(6, 6).double(), nn.Linear(6, 6).double()]
    ps.run(ps.gpipe(p=2, m=2), stages, [batch(6)])
    out, err = capsys.readouterr()
    assert out.splitlines() == ["[worker 0] cups: 3"] * 2
    assert err.splitlines() == ["[worker 0] careful"] * 2


def test_runs_from_several_threads_do_not_disturb_each_other():
    stages, data = linear_stages(2), [batch(6)]
    expected = reference.gradients(stages, data, m=3)
    main = sys.modules["__main__"]
    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(ps.run, ps.gpipe(p=2, m=3), stages, data) for _ in range(6)]
    assert [reference.max_error(run.result().gradients, expected) for run in runs] == [0.0] * 6
    assert sys.modules["__main__"] is main


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, pipeschool as ps\n"
        "print('top')\n"
        "class Tea(torch.nn.Linear):\n"
        "    pass\n"
        "x = torch.ones(4, 3)\n"
        "print(len(ps.run(ps.gpipe(p=2, m=2), [Tea(3, 3), Tea(3, 3)], [(x, x)]).losses))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("top\n2\n", "")


def test_paced_actions_last_at_least_as_long_as_declared():
    stages, data = linear_stages(2), [batch(4)]
    result = ps.run(ps.gpipe(p=2, m=2), stages, data, pace=(0.01, [0.02, 0.03]))
    assert result.paced
    assert result.trace.label == "measured, paced"
    declared = {("F", 0): 0.01, ("F", 1): 0.01, ("B", 0): 0.02, ("B", 1): 0.03}
    for span in result.trace.spans:
        if span.action.kind != "U":
            assert span.seconds >= declared[span.action.kind, span.action.stage] - 1e-9
    # No run is shorter than its critical path: 3 forwards, then B0 and B1 on the slower stage 1.
    assert result.trace.makespan >= 0.01 * 3 + 0.03 * 2 + 0.02


LEGAL = ps.gpipe(p=2, m=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stages": linear_stages(3)}, "gpipe has 2 stages, so it needs as many modules, not 3"),
        ({"stages": [nn.Linear(6, 6), "tea"]}, "stage 1 must be a torch.nn.Module, not str"),
        ({"batches": [batch(1)]}, "a batch of 1 samples cannot be cut into 2 microbatches"),
        ({"batches": []}, "there is no batch"),
        ({"batches": batch(4)}, r"batches must give \(inputs, targets\) pairs, not Tensor"),
        ({"batches": [(batch(4)[0], batch(5)[1])]}, "a batch has 4 inputs, but 5 targets"),
        ({"pace": "fast"}, r"pace must be \(forward, backward\) in seconds.*not 'fast'"),
        ({"pace": (0.1, -1)}, "pace must be .*backward must be a number, 0 or more, not -1"),
        ({"pace": (0.1, [1, 2, 3])}, "backward needs one number, or one per stage: 2, not 3"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, not 'tpu'"),
        ({"loss": nn.MSELoss}, r"loss must be a function .*, such as MSELoss\(\), not the class"),
        ({"loss": 3}, "loss must be a function, such as .*, not 3"),
        ({"optimizer": "sgd"}, "optimizer must be a function, such as lambda parameters: .*, not"),
        ({"latency": -1}, "latency must be a number, 0 or more, not -1"),
        ({"bandwidth": 0}, "bandwidth must be a number, above 0, not 0"),
        ({"engine": "horse"}, "engine must be one of pipeschool, torch, not 'horse'"),
        (
            {"weights": "fresh"},
            "there is no weight policy 'fresh'; choose one of flush, frozen, latest, stash,",
        ),
        ({"weights": "stash"}, "gpipe is synchronous and needs weights='flush', not 'stash'"),
        (
            {"schedule": ps.gpipe(p=65, m=1), "stages": [nn.Identity()] * 65},
            "a run may have at most 64 workers, not 65",
        ),
        ({"timeout": 0}, "timeout must be a number, above 0, not 0"),
        ({"schedule": "gpipe"}, "schedule must be a pipeschool Schedule.*not str"),
        (
            {"schedule": ps.pipedream(p=2, m=2, batches=2)},
            "pipedream was built with batches=2, but there are 1",
        ),
        (
            {"schedule": ps.pipedream(p=2, m=2), "weights": "flush"},
            "pipedream never flushes, so it needs another policy than weights='flush'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_sentence(arguments, words):
    given = {"schedule": LEGAL, "stages": linear_stages(2), "batches": [batch(4)]} | arguments
    with pytest.raises(ValueError, match=words) as caught:
        ps.run(given.pop("schedule"), given.pop("stages"), given.pop("batches"), **given)
    assert "\n" not in str(caught.value)


def test_what_cannot_travel_to_a_worker_is_refused_in_one_sentence():
    lock = __import__("threading").Lock()
    with pytest.raises(TypeError, match="this cannot be sent to a worker process: cannot pickle"):
        ps.run(LEGAL, linear_stages(2), [batch(4)], loss=lambda x, y: (lock, (x - y).sum())[1])


def test_split_layers_gives_consecutive_layers_of_near_equal_number():
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(7)])
    stages = split_layers(model, 3)
    assert [len(stage) for stage in stages] == [3, 2, 2]
    assert [layer for stage in stages for layer in stage] == list(model)
    with pytest.raises(ValueError, match="a model of 7 layers cannot be cut into 8 stages"):
        split_layers(model, 8)


def test_a_notebook_shows_one_sentence_for_an_argument_that_does_not_fit():
    with pytest.raises(ValueError) as caught:
        ps.run(LEGAL, linear_stages(3), [batch(4)])
    sentence = "ValueError: gpipe has 2 stages, so it needs as many modules, not 3"
    assert caught.value._render_traceback_() == [sentence]


def test_an_error_of_the_callers_own_code_keeps_its_traceback():
    def batches():
        raise ValueError("no more tea")
        yield

    with pytest.raises(ValueError, match="no more tea") as caught:
        ps.run(LEGAL, linear_stages(2), batches())
    assert not hasattr(caught.value, "_render_traceback_")


def test_a_declared_link_holds_every_message_back():
    """It arrives no sooner than the prediction says: 20 ms late, and one after the other."""
    stages, (x, y) = linear_stages(2), batch(4)
    size = 2 * 6 * 8  # bytes of a message
    link = {"latency": 0.02, "bandwidth": size / 0.01}
    trace = ps.run(LEGAL, stages, [(x, y)], pace=(0.001, 0.002), **link).trace
    predicted = ps.simulate(LEGAL, ps.Cost(0.001, 0.002, message_bytes=size, **link))
    assert trace.label == "measured, paced"
    expected = {span.action: span.start for span in predicted.spans}
    for span in trace.spans:
        if span.action.kind in "FB":
            assert span.start >= expected[span.action] - 1e-4


def test_a_stage_that_changes_its_input_in_place_is_told_so():
    stages = linear_stages(2)
    stages[1] = nn.Sequential(nn.ReLU(inplace=True), stages[1])
    with pytest.raises(ps.RunError, match="a stage must not change its input in place"):
        ps.run(LEGAL, stages, [batch(4)])
