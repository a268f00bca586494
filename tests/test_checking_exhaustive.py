"""Every single mistake in the messages of small schedules, judged by an exhaustive search.

The judge is the abstract machine of `oracles`: it runs the rows in every order the workers could
take, and a mutated schedule is harmless only if every run ends with the weights that one process
computes. `check` has to come to the same verdict, with tags and without. Where sends wait for their
receivers, `Meetings` have to come to an end, too, whoever moves first.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import pipeschool as ps
import pytest
from oracles import Machine, Meetings, names_it_all, scatter_messages, weights_in_one_process
from pipeschool import Action, B, F, I, Schedule, W
from pipeschool.lowering import compute_only

MATCHINGS = ("tag", "in_order")


def looped(worker: int, p: int, m: int) -> list[Action]:
    """Two chunks a worker, so that one link carries activations and gradients."""
    chunks = (worker, worker + p)
    forwards = [F(stage, k) for stage in chunks for k in range(m)]
    return forwards + [B(stage, k) for stage in reversed(chunks) for k in range(m)]


def v_shaped(worker: int, p: int, m: int) -> list[Action]:
    """Chunks down and back up: the two stages in the middle share a worker, with no message."""
    chunks = (worker, 2 * p - 1 - worker)
    forwards = [F(stage, k) for stage in chunks for k in range(m)]
    return forwards + [B(stage, k) for stage in reversed(chunks) for k in range(m)]


def halved(worker: int, p: int, m: int) -> list[Action]:
    """Backwards in halves, the weight halves last."""
    rows = [kind(worker, k) for kind in (F, I) for k in range(m)]
    return rows + [W(worker, k) for k in range(m)]


def cases() -> dict[str, Schedule]:
    """Lowered schedules small enough for an exhaustive search."""
    computes = {
        f"{name} p={p} m={m}": ps.build(name, p, m)
        for name in ps.SCHEDULES
        if name not in ("chimera", "forward_only")  # the machine trains, and one model
        for p, m in ((2, 1), (2, 2), (2, 3), (3, 2), (3, 3))
        if p * m < 6 or ps.build(name, p, m).v == 1  # more chunks, more orders to search
    }
    computes["one_f_one_b p=2 m=2, two batches"] = ps.one_f_one_b(2, 2, batches=2)
    computes |= {
        f"{order.__name__} p=2 m=2": Schedule.from_workers(order, p=2, m=2)
        for order in (looped, v_shaped, halved)
    }
    lowered = {name: ps.lower(schedule) for name, schedule in computes.items()}
    lowered |= {
        f"{name}, messages scattered": scatter_messages(computes[name], seed=number)
        for number, name in enumerate(computes)
        if "m=1" not in name
    }
    return lowered


CASES = cases()
every_case = pytest.mark.parametrize(
    "schedule",
    [
        # The first tier: up to three workers and two microbatches.
        pytest.param(case, id=name, marks=pytest.mark.exhaustive if case.m > 2 else ())
        for name, case in CASES.items()
    ],
)
both_matchings = pytest.mark.parametrize("matching", MATCHINGS)


def harmless(schedule: Schedule, matching: str, versions: bool = True) -> bool:
    """The judge's verdict: does every run end with the weights that one process computes?"""
    outcomes = Machine(schedule.workers, matching, versions).outcomes()
    right = weights_in_one_process(
        schedule.stages,
        schedule.microbatches,
        schedule.updates_every,
        version_used(schedule),
        versions,
    )
    if right in outcomes:
        assert outcomes == {right}, "the outcome depends on who moves first"
    return outcomes == {right}


def version_used(schedule: Schedule) -> Callable[[int, int], int]:
    """The version of stage and microbatch, from the papers: one per batch, 2BW's one batch behind,
    or PipeDream's delay."""
    if schedule.synchronous:
        return lambda stage, k: k // schedule.m
    if schedule.weights == "double_buffer":
        return lambda stage, k: max(0, k // schedule.m - 1)
    return lambda stage, k: max(0, k - (schedule.stages - 1 - stage))


def refusal(schedule: Schedule, matching: str) -> ps.IllegalSchedule | None:
    """What `check` raises, if it does; its sentence must name worker, action and microbatch."""
    try:
        ps.check(schedule, matching=matching)
    except ps.IllegalSchedule as error:
        assert names_it_all(error), error
        return error
    return None


def with_row(schedule: Schedule, worker: int, row: list[Action]) -> Schedule:
    rows = [*schedule.workers[:worker], tuple(row), *schedule.workers[worker + 1 :]]
    return replace(schedule, workers=tuple(rows))


def messages(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """(worker, place in its row) of every send and receive."""
    for worker, row in enumerate(schedule.workers):
        yield from ((worker, place) for place, action in enumerate(row) if action.is_message)


def swaps(schedule: Schedule, with_compute: bool) -> Iterator[Schedule]:
    """`schedule` with two messages of one row swapped, or a message and a compute action."""
    for worker, row in enumerate(schedule.workers):
        for one, other in combinations(range(len(row)), 2):
            if row[one].is_message + row[other].is_message == (1 if with_compute else 2):
                mutated = list(row)
                mutated[one], mutated[other] = row[other], row[one]
                yield with_row(schedule, worker, mutated)


@every_case
@both_matchings
def test_judge_and_check_agree_that_the_schedule_itself_is_right(
    schedule: Schedule, matching: str
) -> None:
    assert harmless(schedule, matching)
    assert refusal(schedule, matching) is None


@every_case
@both_matchings
def test_every_dropped_message_is_refused(schedule: Schedule, matching: str) -> None:
    for worker, place in messages(schedule):
        row = list(schedule.workers[worker])
        dropped = row.pop(place)
        mutated = with_row(schedule, worker, row)
        assert not harmless(mutated, matching)
        error = refusal(mutated, matching)
        assert error is not None, f"without {dropped}:\n{mutated}"
        assert (error.worker, error.action) == (worker, dropped)


@every_case
@both_matchings
def test_every_duplicated_message_is_refused(schedule: Schedule, matching: str) -> None:
    for worker, place in messages(schedule):
        row = list(schedule.workers[worker])
        for again in range(len(row) + 1):
            mutated = with_row(schedule, worker, [*row[:again], row[place], *row[again:]])
            assert not harmless(mutated, matching)
            error = refusal(mutated, matching)
            assert error is not None, f"{row[place]} twice:\n{mutated}"
            assert (error.worker, error.action) == (worker, row[place])


@every_case
@both_matchings
def test_a_swap_of_two_messages_is_refused_exactly_where_it_does_harm(
    schedule: Schedule, matching: str
) -> None:
    for mutated in swaps(schedule, with_compute=False):
        right, error = harmless(mutated, matching), refusal(mutated, matching)
        assert right == (error is None), f"harmless: {right}, check: {error}\n{mutated}"


@every_case
@both_matchings
def test_a_swap_of_message_and_compute_is_refused_exactly_where_it_does_harm(
    schedule: Schedule, matching: str
) -> None:
    # Moving a forward past an update changes the staleness of an asynchronous schedule, and that
    # is another legal schedule, not a wrong one: there the gradients alone are compared.
    versions = schedule.synchronous
    for mutated in swaps(schedule, with_compute=True):
        right, error = harmless(mutated, matching, versions), refusal(mutated, matching)
        assert right == (error is None), f"harmless: {right}, check: {error}\n{mutated}"


@every_case
@pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])
@pytest.mark.parametrize("by_time", [False, True], ids=["as it is", "by time"])
def test_where_sends_wait_a_swap_is_refused_exactly_where_it_does_harm(
    schedule: Schedule, fused: bool, by_time: bool
) -> None:
    lowered = ps.lower(compute_only(schedule), fuse=True) if by_time else schedule
    swapped = swaps(lowered, with_compute=False), swaps(lowered, with_compute=True)
    for mutated in (lowered, *chain(*swapped)):
        mutated = replace(mutated, fused=fused)
        versions = schedule.synchronous  # as above
        right = Meetings(mutated).outcomes() == {"through"}
        right = right and harmless(mutated, "in_order", versions)
        error = refusal(mutated, "rendezvous")
        assert right == (error is None), f"harmless: {right}, check: {error}\n{mutated}"


def test_some_swaps_do_no_harm_and_some_do_it_only_without_tags() -> None:
    verdicts = [
        (harmless(mutated, "tag"), harmless(mutated, "in_order"))
        for schedule in CASES.values()
        for mutated in swaps(schedule, with_compute=False)
    ]
    assert (True, True) in verdicts, "harmless either way"
    assert (True, False) in verdicts, "harmless with tags alone"
    assert (False, False) in verdicts, "harmful either way"
    assert (False, True) not in verdicts, "matching in order is the stricter of the two"


# PyTorch's engine. Its names are private and move between versions: all of them are here.
TORCH_WORKER = """
import sys
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

rank, store, schedules = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
torch.set_num_threads(1)
torch.manual_seed(0)
halves = [torch.nn.Linear(4, 4).double() for _ in range(2)]
mine = halves[rank]
inputs, targets = torch.randn(2, 6, 4, dtype=torch.float64)
torch.nn.functional.mse_loss(halves[1](halves[0](inputs)), targets).backward()
expected = [parameter.grad for parameter in mine.parameters()]
for schedule in schedules:
    mine.zero_grad()
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    engine = _PipelineScheduleRuntime([stage], 2, loss_fn=torch.nn.functional.mse_loss)
    engine._load_csv(schedule, format="compute_comms")
    engine.step(inputs) if rank == 0 else engine.step(target=targets)
    found = [parameter.grad for parameter in mine.parameters()]
    print("error", max((a - b).abs().max().item() for a, b in zip(expected, found)))
dist.destroy_process_group()
"""


def gradient_errors_in_pytorch(schedules: list[Schedule], folder: Path) -> list[float]:
    """Largest gradient error when PyTorch's engine runs each schedule as it stands, p=2, m=2."""
    files = [folder / f"{number}.csv" for number in range(len(schedules))]
    for file, schedule in zip(files, schedules, strict=True):
        text = "".join(",".join(map(str, row)) + "\n" for row in schedule.workers)
        file.write_text(re.sub(r"U\d+", "REDUCE_GRAD", text))  # divides the gradients by m
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TORCH_WORKER, str(rank), folder / "store", *files],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    errors = [[float(e) for e in re.findall(r"error (\S+)", output)] for output in outputs]
    return [max(of_one_schedule) for of_one_schedule in zip(*errors, strict=True)]


def test_pytorch_trains_on_wrong_gradients_where_check_refuses(tmp_path: Path) -> None:
    rows = {
        0: "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
        1: "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1U0",
    }
    right = Schedule.from_workers(
        lambda worker, p, m: map(Action.parse, rows[worker].split()), p=2, m=2
    )
    one, other, *rest = right.workers[1]
    swapped = with_row(right, 1, [other, one, *rest])
    assert harmless(right, "in_order") and refusal(right, "in_order") is None
    assert not harmless(swapped, "in_order") and refusal(swapped, "in_order") is not None

    error_of_right, error_of_swapped = gradient_errors_in_pytorch([right, swapped], tmp_path)
    assert error_of_right < 1e-12
    assert error_of_swapped > 1e-3
