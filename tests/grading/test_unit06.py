"""The exercises of unit 06: every right answer earns all points, every wrong one loses some."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pipeschool as ps
import pytest
from answers06 import WRONG
from pipeschool.grade import unit06
from test_unit01 import SEEDS, points

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name, mutant, earned",
    [
        ("tensor_bytes", "ring_but_alone_too", 2.67),
        ("tensor_bytes", "ring_forward_only", 1.33),
        ("plan_bytes", "plan_gpipe_like_1f1b", 3.0),
        ("plan_bytes", "plan_one_version", 3.0),
        ("plan_bytes", "plan_without_m", 3.0),
        ("plan_bytes", "plan_1f1b_like_gpipe", 2.0),
        ("mean_gradient", "mean_of_lines", 2.0),
        ("choose", "choose_always_pipeline", 2.4),  # desk, server and office
        ("choose", "choose_always_copies", 1.6),  # desk and workstation
        ("choose", "choose_always_tensor", 0.8),
        ("choose", "choose_one_device", 0.8),
        ("choose", "choose_for_the_same_reason", 1.6),  # server and cluster
    ],
)
def test_partly_right_answers_earn_part_of_the_points(name, mutant, earned, capsys):
    function = next(f for f in WRONG[name] if f.__name__ == mutant)
    for seed in SEEDS:
        assert points(name, function, seed) == earned
    said = capsys.readouterr()
    assert f"{name}: {earned:.3g} of 4 points" in said.out and ". Right " in said.out
    assert "smallest failing case:" in said.out and "where to look:" in said.out
    assert said.err == ""


def test_new_cases_depend_on_the_seed_alone():
    for exercise in unit06.EXERCISES:
        for part in exercise.parts:
            drawn = [
                [part.draw(rng, size) for size in range(1, 9)]
                for rng in (Random(f"{seed}/{part.title}") for seed in ("a", "a", "b"))
            ]
            assert drawn[0] == drawn[1]
            # There are five sites, and no others.
            assert exercise.name == "choose" or drawn[1] != drawn[2]


def test_claims_and_verdicts_in_the_notebook_agree():
    source = (ROOT / "solutions/06_choosing/choosing.py").read_text("utf-8")
    verdicts = re.findall(r"<summary>Verdict</summary>\n#\n# \*\*(\w+)\.?\*\*", source)
    assert [word.lower() for word in verdicts] == list(unit06.CLAIMS.values())


# --- what the checks take for right, against the cost model, the schedules and torch


def test_traffic_of_175b():
    boundary = unit06.boundary_bytes(1, 2048, 12288, 2)
    assert boundary == 48 * 2**20
    assert unit06.tensor_bytes(96, 8, boundary) == 31.5 * 2**30


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "pipedream_2bw"])
@pytest.mark.parametrize("pipeline, tensor, m", [(1, 1, 1), (2, 1, 8), (4, 2, 8), (4, 1, 4)])
def test_bytes_of_a_plan_are_those_of_the_first_stage_in_the_cost_model(
    schedule, pipeline, tensor, m
):
    model = ps.mix.Transformer(layers=8, hidden=16, sequence=4)
    machine = ps.mix.Machine(8, 1, 1e9, 1e9, 1e9, 1e9)
    mix = ps.mix.Mix(1, pipeline, tensor, m, schedule=schedule)
    layer = model.layer_activation_bytes(1, tensor)
    need = unit06.plan_bytes(schedule, pipeline, tensor, m, model.parameters, 8, layer)
    cost = ps.mix.stage_cost(model, machine, mix)
    trace = ps.simulate(mix.build(batches=2), cost)
    size, history = trace.stage_bytes[0], trace.memory[0]
    fixed = size.parameters + size.gradients + size.optimizer
    versions = 0 if pipeline == 1 and m == 1 else max(level.versions for level in history)
    if schedule == "pipedream_2bw" and versions == 0:
        versions = size.parameters  # too short a stream to need the second one
    assert need == fixed + versions + max(level.activations for level in history)


@pytest.mark.parametrize("p, lines, m", [(1, 2, 3), (2, 2, 4), (2, 3, 1)])
def test_shares_are_those_of_replicated_pipelines(p, lines, m):
    both = ps.replicate(ps.one_f_one_b(p, m), lines)
    for line in range(lines):
        row = both.workers[line * p]
        done = [action.microbatch for action in row if action.kind == "F"]
        assert done == unit06.share_of(line, lines, m * lines)


def test_mean_gradient_is_that_of_all_samples():
    import torch

    torch.manual_seed(0)
    x, y, layer = torch.randn(10, 3), torch.randn(10, 1), torch.nn.Linear(3, 1)

    def gradient(a, b):
        layer.zero_grad()
        torch.nn.functional.mse_loss(layer(x[a:b]), y[a:b]).backward()
        return layer.weight.grad.flatten().tolist()

    shares = [(0, 2), (2, 5), (5, 10)]
    found = unit06.mean_gradient([gradient(*share) for share in shares], [2, 3, 5])
    assert found == pytest.approx(gradient(0, 10), rel=1e-4)


def test_every_site_asks_for_something_else():
    """No single habit is right everywhere, and every best choice has a reason of its own."""
    mixes = {site: unit06.best_for(site).best.mix for site in unit06.SITES}
    shapes = {site: (mix.data, mix.pipeline, mix.tensor) for site, mix in mixes.items()}
    assert shapes["desk"] == (1, 1, 1)
    assert shapes["workstation"] == (8, 1, 1)
    assert shapes["office"] == (1, 4, 1)
    assert shapes["cluster"] == (1, 8, 8)
    assert shapes["server"][1] * shapes["server"][2] >= 3  # 204 GB of weights into 80 GB
    said = {site: frozenset(unit06.true_reasons(site, mix)) for site, mix in mixes.items()}
    assert len(set(said.values())) == len(said)
    assert set(unit06.REASONS) <= set().union(*said.values()) | {"recompute to fit"}
