"""Random models and settings: equal to one process, or refused in one sentence for a reason that
the draw has. Nothing else."""

from __future__ import annotations

import warnings
from collections import Counter

import pipeschool as ps
import pytest
import torch
from random_models import Draw, draw, one_process

REFUSALS = (ValueError, TypeError, ps.IllegalSchedule, ps.RunError)


def outcome(made: Draw) -> str:
    """``equal``, ``refused``, or what is wrong."""
    try:
        losses, states, gradients = made.run()
    except REFUSALS as error:
        sentence = str(error).partition("\n")[0]
        if len(sentence) > 300:
            return f"{len(sentence)} letters: {sentence}"
        if not any(reason in sentence for reason in made.reasons):
            return f"refused for no reason of its own: {sentence}"
        return "refused"
    expected_losses, expected_states, expected_gradients = one_process(made)
    close = 1e-9 if next(made.stages[-1].parameters()).dtype == torch.float64 else 1e-4
    if expected_losses is not None and losses != pytest.approx(
        expected_losses, rel=close, abs=close
    ):
        return f"losses {losses}, not {expected_losses}"
    for what, ours, theirs in (
        ("states", states, expected_states),
        ("gradients", gradients, expected_gradients),
    ):
        for stage, (mine, wanted) in enumerate(zip(ours or (), theirs, strict=False)):
            if mine.keys() != wanted.keys():
                return f"{what} of stage {stage}: {[*mine]}, not {[*wanted]}"
            for name, value in wanted.items():
                found = mine[name].to_dense()
                if not torch.allclose(found, value, rtol=close, atol=close):
                    return f"{what} of stage {stage}, {name}: off by {(found - value).abs().max()}"
    return "equal"


def check(numbers: range) -> Counter[str]:
    found: Counter[str] = Counter()
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            made = draw(number)
            said = outcome(made)
            found[said] += 1
            if said not in ("equal", "refused"):
                wrong.append(f"{said}\n    {made}")
    assert not wrong, "\n".join(wrong)
    return found


@pytest.mark.parametrize("chunk", range(2))
def test_a_few_random_models_equal_one_process_or_are_refused(chunk):
    found = check(range(20 * chunk, 20 * chunk + 20))
    assert found["equal"] >= 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunk", range(40))
def test_random_models_equal_one_process_or_are_refused(chunk):
    found = check(range(50 * chunk, 50 * chunk + 50))
    assert found["equal"] >= 15
