"""A caller's own engine class, on the same workers as ours."""

from __future__ import annotations

import inspect

import own_engine
import pipeschool as ps
import pytest
import torch
from own_engine import MyEngine
from pipeschool.runtime import reference
from pipeschool.runtime.engine import Engine
from test_run import batch, linear_stages, sgd
from torch import nn


class Passes(nn.Module):
    """Hands on three tensors: one with a gradient, one without, one of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x, y=None, index=None):
        y = x.detach() if y is None else y
        index = torch.arange(len(x)) if index is None else index
        return torch.tanh(self.layer(x) + y), y, index


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x, y, index):
        return self.layer(x)[index] + y


@pytest.mark.parametrize("pace", [None, (0.001, 0.002)], ids=["unpaced", "paced"])
@pytest.mark.parametrize(
    ("build", "v"), [(ps.gpipe, 1), (ps.one_f_one_b, 1), (ps.interleaved_1f1b, 2)]
)
def test_seventy_lines_give_the_gradients_of_one_process(build, v, pace):
    schedule = build(4, 8, v=v) if v > 1 else build(4, 8)
    stages, data = linear_stages(4 * v), [batch(19), batch(19, seed=1)]
    result = ps.run(schedule, stages, data, optimizer=sgd, engine=MyEngine, pace=pace)
    expected = reference.gradients(stages, data, 8, optimizer=sgd)
    assert reference.max_error(result.gradients, expected) == 0.0
    assert len(result.losses) == 16
    ours = ps.run(schedule, stages, data, optimizer=sgd)
    for a, b in zip(result.state_dicts, ours.state_dicts, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)
    assert result.losses == ours.losses
    if pace:
        assert result.paced
        for span in result.trace.spans:
            if span.action.kind != "U":
                assert span.seconds >= pace[span.action.kind == "B"]


def test_it_is_as_short_as_we_say():
    lines = inspect.getsource(own_engine).splitlines()
    assert len(lines) <= 70
    assert len(inspect.getsource(inspect.getmodule(Engine)).splitlines()) <= 80


def test_it_may_hand_on_several_tensors_of_any_kind():
    torch.manual_seed(0)
    stages = [Passes(), Passes(), Ends()]
    result = ps.run(ps.gpipe(3, 4), stages, [batch(8)], engine=MyEngine)
    expected = reference.gradients(stages, [batch(8)], 4)
    assert reference.max_error(result.gradients, expected) == 0.0


def test_it_may_be_several_workers_that_take_turns_and_share_parameters():
    stages, data = linear_stages(2), [batch(8)]
    schedule = ps.replicate(ps.gpipe(2, 2), 2)
    result = ps.run(schedule, stages, data, engine=MyEngine)
    ours = ps.run(schedule, stages, data)
    assert reference.max_error(result.gradients, ours.gradients) == 0.0
    stages[1][0].weight = stages[0][0].weight
    result = ps.run(ps.gpipe(2, 4), stages, data, engine=MyEngine)
    expected = reference.gradients(stages, data, 4)
    for found, one in zip(result.gradients, expected, strict=True):
        for name in one:
            torch.testing.assert_close(found[name], one[name], rtol=1e-14, atol=1e-16)


def test_a_class_in_a_notebook_cell_travels_to_the_workers():
    source = inspect.getsource(own_engine)
    cell: dict = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), cell)
    stages, data = linear_stages(2), [batch(8)]
    result = ps.run(ps.gpipe(2, 4), stages, data, engine=cell["MyEngine"])
    assert reference.max_error(result.gradients, reference.gradients(stages, data, 4)) == 0.0


class HalfDone(MyEngine):
    def backward(self, stage, k):
        raise ArithmeticError("no backward yet")


def test_what_it_cannot_do_is_an_error_at_the_action():
    with pytest.raises(ps.RunError, match="worker 1 failed at 1B0 .*no backward yet") as caught:
        ps.run(ps.one_f_one_b(2, 2), linear_stages(2), [batch(4)], engine=HalfDone)
    assert (caught.value.worker, caught.value.action) == (1, ps.B(1, 0))
    with pytest.raises(ps.RunError, match="this engine does not know how to do I"):
        ps.run(ps.zb_h1(2, 2), linear_stages(2), [batch(4)], engine=MyEngine)


class Idle:
    """Takes the job and does nothing."""

    def __init__(self, share):
        pass

    def run(self):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nan_check": True}, "nan_check=True looks at what passes through `Engine`, and MyEngine"),
        ({"memory": True}, "memory=True looks at what passes through `Engine`"),
    ],
)
def test_what_an_engine_of_its_own_cannot_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)], engine=MyEngine, **options)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (ps.pipedream(2, 4), {}, "has several weight versions, which an engine gets from"),
        (ps.gpipe(2, 4), {"recompute": True}, "recomputes, which an engine gets from"),
    ],
)
def test_working_on_modules_directly_is_refused_where_it_would_be_wrong(schedule, options, message):
    with pytest.raises(ps.RunError, match=message):
        ps.run(schedule, linear_stages(2), [batch(8)], optimizer=sgd, engine=MyEngine, **options)


def test_an_engine_that_does_not_do_its_row_is_told_so():
    with pytest.raises(ps.RunError, match="worker . failed .*Idle has not done"):
        ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)], engine=Idle)


class Twice(MyEngine):
    def run(self):
        super().run()
        list(self.share.actions())


class Forgetful(MyEngine):
    def run(self):
        super().run()
        self.share.losses.pop(0, None)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Twice, "Twice has 2 times done"),
        (Forgetful, "Forgetful has left no loss of microbatch 0"),
    ],
)
def test_an_engine_that_leaves_a_result_out_or_does_its_row_again_is_told_so(engine, message):
    with pytest.raises(ps.RunError, match=message):
        ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)], engine=engine)


@pytest.mark.parametrize("engine", [Idle(None), lambda share: None, object, 3])
def test_something_else_than_an_engine_class_is_refused(engine):
    with pytest.raises(ValueError, match="engine must be one of pipeschool, torch, not"):
        ps.run(ps.gpipe(2, 2), linear_stages(2), [batch(4)], engine=engine)
