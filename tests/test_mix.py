"""The cost model of data x pipeline x tensor parallelism, against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pipeschool as ps
import pytest
from pipeschool.mix import GB, GIB, MIB, Machine, Mix, Transformer

# A layer has 12 * 10^2 = 1200 weights, a boundary 5 * 10 * 2 = 100 bytes. At 12000 operations per
# second a layer's forward of one sequence takes 2 * 1200 * 5 / 12000 = 1 second.
TINY = Transformer(layers=4, hidden=10, sequence=5)
LINKS = Machine(devices_per_node=2, nodes=4, memory=1e9, flops=12000, inside=100, between=10)
FREE = replace(LINKS, inside=1e30, between=1e30)

GPT3 = Transformer(layers=96, hidden=12288, sequence=2048)
WITH_WORDS = replace(GPT3, vocabulary=51200)
CLUSTER = Machine(8, 16, 80 * GB, 150e12, inside=200 * GB, between=20 * GB, latency=1e-5)


def test_boundary_against_tensor_parallel_traffic_of_175b():
    """48 MiB = 2048 * 12288 * 2 bytes; 96 layers * 4 all-reduces * 2 * 7/8 * 48 MiB = 31.5 GiB."""
    assert GPT3.parameters == 96 * 12 * 12288**2
    assert GPT3.boundary_bytes() == 48 * MIB
    cut = ps.mix.estimate(GPT3, CLUSTER, Mix(tensor=8))
    assert cut.tensor_bytes == 31.5 * GIB
    assert cut.pipeline_bytes == 0
    piped = ps.mix.estimate(GPT3, CLUSTER, Mix(pipeline=8))
    assert piped.tensor_bytes == 0
    assert piped.pipeline_bytes == 2 * 48 * MIB  # forwards to the right, gradients to the left


def test_compute_is_six_operations_per_weight_and_word():
    alone = ps.mix.estimate(TINY, FREE, Mix(m=3, microbatch=2))
    assert alone.seconds == alone.compute == 6 * TINY.parameters * (3 * 2 * 5) / 12000 == 72
    again = ps.mix.estimate(TINY, FREE, Mix(m=3, microbatch=2, recompute=True))
    assert again.seconds == again.compute == 96
    # The vectors of 7 words add 70 weights to the product at the output.
    ends = ps.mix.estimate(replace(TINY, vocabulary=7), FREE, Mix())
    assert ends.seconds == pytest.approx(6 * (4800 + 70) * 5 / 12000)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_a_pipeline_of_equal_stages_has_the_bubble_of_the_formula(schedule):
    found = ps.mix.estimate(TINY, FREE, Mix(pipeline=4, m=8, schedule=schedule))
    assert found.seconds == pytest.approx((8 + 3) * 3)
    assert found.bubble == pytest.approx(3 * 3)
    assert found.bubble_of_total == pytest.approx(3 / 11)


def test_asynchronous_pipelines_fill_once_and_not_per_step():
    found = ps.mix.estimate(TINY, FREE, Mix(pipeline=4, m=8, schedule="pipedream_2bw"))
    assert found.seconds == pytest.approx(8 * 3)
    assert found.bubble == 0


TRAINING = sorted(set(ps.SCHEDULES) - {"chimera", "forward_only"})


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("machine", [FREE, replace(LINKS, inside=1e4, between=1e3)])
def test_no_step_is_shorter_than_the_work_of_the_busiest_worker(schedule, machine):
    """Also of a stream that is not full after its first batches, and of unequal stages."""
    model = replace(TINY, layers=8)
    for pipeline, m in product((2, 3, 4), (1, 2, 5, 8)):
        if schedule == "pipedream_2bw" and m < pipeline - 1:
            continue
        found = ps.mix.estimate(model, machine, Mix(1, pipeline, 2, m, schedule=schedule))
        assert found.compute == pytest.approx(8 * 3 * m / (pipeline * 2))
        assert found.seconds >= max(found.trace.busy) * (1 - 1e-9)
        assert found.bubble >= 0


def test_traffic_and_its_seconds():
    """Two devices of a node: an all-reduce of 100 bytes sends 100, which takes a second."""
    cut = ps.mix.estimate(TINY, LINKS, Mix(tensor=2, m=3))
    assert cut.tensor_bytes == 3 * 4 * 4 * 100
    assert (cut.compute, cut.tensor, cut.seconds) == (18, 48, 66)
    assert ps.mix.estimate(TINY, LINKS, Mix(tensor=2, m=3, recompute=True)).tensor == 72

    copies = ps.mix.estimate(TINY, LINKS, Mix(data=2, m=3))
    assert copies.data_bytes == 4800 * 2  # 2 (n - 1)/n is 1 for two
    assert (copies.compute, copies.data, copies.seconds) == (36, 96, 132)

    # Two stages of 2 seconds forward and 4 back; each of the messages that nobody hides takes 1:
    # the first microbatch has to go down, and the last one to come back.
    piped = ps.mix.estimate(TINY, LINKS, Mix(pipeline=2, m=1))
    assert piped.pipeline_bytes == 100
    assert (piped.compute, piped.bubble, piped.seconds) == (6, 8, 14)


def test_latency_counts_for_every_message_in_a_row():
    slow = replace(FREE, latency=0.5)
    assert ps.mix.estimate(TINY, slow, Mix(tensor=2)).tensor == 16 * 2 * 0.5
    assert ps.mix.estimate(TINY, slow, Mix(data=4)).data == 6 * 0.5
    assert ps.mix.estimate(TINY, slow, Mix(pipeline=2)).seconds == 12 + 2 * 0.5


@pytest.mark.parametrize(
    ("mix", "tensor", "data"),
    [
        (Mix(data=2, tensor=2), "inside", "between"),
        (Mix(data=2, pipeline=4), None, "inside"),
        (Mix(tensor=4), "between", None),
        (Mix(data=2), None, "inside"),
        (Mix(data=4), None, "between"),
    ],
)
def test_what_lies_within_a_node_uses_its_links(mix, tensor, data):
    speeds = {"inside": 100, "between": 10}
    found = ps.mix.estimate(TINY, LINKS, mix)
    if tensor:
        assert found.tensor == pytest.approx(found.tensor_bytes / speeds[tensor])
    if data:
        assert found.data == pytest.approx(found.data_bytes / speeds[data])


def test_groups_that_do_not_divide_a_node_cross_it_unless_they_are_alone():
    odd = replace(LINKS, devices_per_node=8, nodes=2)
    assert odd.is_inside(3, used=6) and not odd.is_inside(3, used=9)
    assert odd.is_inside(4, used=16) and not odd.is_inside(16, used=16)


@pytest.mark.parametrize(
    ("schedule", "recompute", "held"),
    [("gpipe", False, 8), ("one_f_one_b", False, 4), ("one_f_one_b", True, 1)],
)
def test_memory_of_the_first_worker(schedule, recompute, held):
    """1200 weights at 2 + 2 + 12 bytes, and 17 boundaries for each microbatch in flight."""
    mix = Mix(pipeline=4, m=8, schedule=schedule, recompute=recompute)
    found = ps.mix.estimate(TINY, FREE, mix)
    assert max(level.activations for level in found.trace.memory[0]) == held * 1700
    inputs = {"gpipe": 8, "one_f_one_b": 3}[schedule]  # of worker 1; worker 0 has none
    second = {"gpipe": 8, "one_f_one_b": 1 if recompute else 3}[schedule] * 1700 + inputs * 100
    assert found.memory == 1200 * 16 + max(held * 1700, second)


def test_memory_of_one_device_and_of_its_half():
    assert ps.mix.estimate(TINY, FREE, Mix(m=2)).memory == 4800 * 16 + 4 * 1700
    assert ps.mix.estimate(TINY, FREE, Mix(m=2, tensor=2)).memory == 2400 * 16 + 4 * 1100
    exact = replace(FREE, memory=4800 * 16 + 4 * 1700)
    assert ps.mix.estimate(TINY, exact, Mix(m=2)).fits
    assert not ps.mix.estimate(TINY, replace(exact, memory=exact.memory - 1), Mix(m=2)).fits


def test_word_vectors_lie_at_both_ends():
    found = ps.mix.estimate(replace(TINY, vocabulary=7), FREE, Mix(pipeline=2))
    assert [size.parameters for size in found.trace.stage_bytes] == [(2400 + 70) * 2] * 2


def test_the_four_shares_make_up_the_step():
    for data, pipeline, tensor, m in product((1, 2), (1, 2), (1, 2), (1, 3)):
        found = ps.mix.estimate(TINY, LINKS, Mix(data, pipeline, tensor, m))
        parts = found.compute + found.tensor + found.bubble + found.data
        assert parts == pytest.approx(found.seconds)
        assert found.compute == pytest.approx(12 * m / (pipeline * tensor))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.mix.estimate(TINY, LINKS, Mix(data=9)), "needs 9 devices, and there are 8"),
        (lambda: ps.mix.estimate(TINY, LINKS, Mix(pipeline=5)), "4 layers cannot be cut into 5"),
        (lambda: Mix(tensor=0), "tensor must be at least 1, not 0"),
        (lambda: Transformer(4, 0, 5), "hidden must be at least 1, not 0"),
        (lambda: replace(LINKS, between=0), "between must be a number, above 0, not 0"),
        (lambda: ps.mix.recommend(TINY, LINKS, 8, devices=9), "there are 8 devices, not 9"),
        (lambda: ps.mix.recommend(TINY, LINKS, 8, schedules=["1f2b"]), "no schedule '1f2b'"),
        (lambda: ps.mix.estimate(TINY, LINKS, Mix(schedule="forward_only")), "not in this cost"),
        (
            lambda: ps.mix.estimate(TINY, LINKS, Mix(pipeline=2, m=2, schedule="chimera")),
            "it has two copies of the model",
        ),
        (lambda: ps.mix.recommend(TINY, replace(LINKS, memory=99), 8), "nothing fits: "),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def kinds(found):
    return {reason.kind: reason for reason in found.reasons}


def test_one_device_suffices():
    found = ps.mix.recommend(TINY, replace(LINKS, nodes=1), 8, devices=1)
    assert found.best.mix.devices == 1
    assert set(kinds(found)) == {"fits", "one device suffices"}
    assert kinds(found)["one device suffices"].value == found.best.memory
    assert "no pipeline" in str(found)


def test_of_equally_fast_mixes_the_one_with_the_least_memory_wins():
    """Over links that cost nothing, sharing every layer takes as long as copies of all of them."""
    mix = ps.mix.recommend(TINY, FREE, 8).best.mix
    assert (mix.tensor, mix.m, mix.microbatch) == (8, 8, 1)


def test_slow_links_leave_devices_idle():
    """96 seconds alone; a message or an all-reduce takes longer than all of it."""
    snail = replace(LINKS, inside=0.1, between=0.1)
    assert ps.mix.recommend(TINY, snail, 8).best.mix.devices == 1


def test_where_a_copy_fits_and_links_are_fast_there_is_no_pipeline():
    found = ps.mix.recommend(TINY, replace(LINKS, inside=1e6, between=1e6), 8)
    assert (found.best.mix.devices, found.best.mix.pipeline) == (8, 1)
    reason = kinds(found)["faster than a pipeline"]
    assert reason.value == found.best.seconds < reason.limit
    assert "A pipeline is not worth it" in str(found)


def test_tensor_inside_the_node_and_pipeline_across_nodes():
    found = ps.mix.recommend(WITH_WORDS, CLUSTER, batch=512)
    mix, why = found.best.mix, kinds(found)
    assert mix.tensor == 8 and mix.pipeline > 1 and mix.devices == 128
    assert set(why) == {
        "fits", "must be cut", "small bubble", "tensor inside the node", "pipeline across nodes",
    }  # fmt: skip
    assert why["must be cut"].value > 96 * 12 * 12288**2 * 16  # bytes
    assert why["small bubble"].value == found.best.bubble_of_total < 0.1
    assert why["tensor inside the node"].limit > 7 * why["tensor inside the node"].value
    assert why["pipeline across nodes"].value == found.best.pipeline_bytes / (20 * GB)


def test_slow_network_prefers_a_pipeline_to_copies():
    office = Machine(1, 4, 24 * GB, 50e12, inside=20 * GB, between=GB / 8, latency=5e-5)
    model = Transformer(32, 1600, 1024, 50000)
    found = ps.mix.recommend(model, office, batch=64)
    assert found.best.mix == Mix(pipeline=4, m=64)
    copies = ps.mix.estimate(model, office, Mix(data=4, m=16))
    assert kinds(found)["faster than data parallel"].limit == pytest.approx(copies.seconds)
    shared = ps.mix.estimate(model, office, Mix(tensor=4, m=64))
    assert kinds(found)["pipeline across nodes"].limit == pytest.approx(shared.tensor)


def test_recompute_to_fit():
    """Without it worker 0 holds four microbatches, and worker 1 three and their inputs."""
    need = 1200 * 16 + 4 * 1700
    again = Mix(pipeline=4, m=8, recompute=True)
    for spare, said in ((0, False), (-1, True)):
        found = ps.mix.reasons(TINY, replace(FREE, memory=need + spare), again)
        assert ("recompute to fit" in [reason.kind for reason in found]) == said
    assert [r.value for r in found if r.kind == "recompute to fit"] == [need]


@pytest.mark.parametrize("machine", [LINKS, FREE, replace(LINKS, inside=1e4, between=1e3)])
@pytest.mark.parametrize("memory", [30_000, 1e9])
def test_nothing_that_fits_is_faster(machine, memory):
    """Whatever the schedules are: the floor under which none can get is one."""
    machine = replace(machine, memory=memory)
    names = ("one_f_one_b", "gpipe", "pipedream_2bw", "interleaved_1f1b", "zb_h2", "zb_v")
    best = ps.mix.recommend(TINY, machine, 4, schedules=names).best
    every = ps.mix.compare(TINY, machine, ps.mix.mixes(TINY, 8, 4, names))
    fitting = [found.seconds for found in every if found.fits]
    assert best.seconds == pytest.approx(min(fitting))


def test_the_table_says_what_does_not_fit():
    small = replace(LINKS, memory=80_000)
    lines = ps.mix.table(ps.mix.compare(TINY, small, [Mix(), Mix(pipeline=2)])).split("\n")
    assert len(lines) == 3
    assert lines[1].startswith("1 x 1 x 1, m=1") and lines[1].endswith("does not fit")
    assert lines[2].startswith("1 x 2 x 1, m=1") and lines[2].endswith("GB")


def test_the_cost_model_needs_no_torch():
    code = (
        "import sys, pipeschool as ps\n"
        "model = ps.mix.Transformer(4, 8, 8)\n"
        "ps.mix.recommend(model, ps.mix.Machine(2, 2, 1e9, 1e9, 1e9, 1e8), 8)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
