"""The schedule CSV: round trips, PyTorch's own reader, and faults that name their place."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import pipeschool as ps
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipeschool.dependencies import peer_of
from pipeschool.formats import SHARDING, from_csv, to_csv
from pipeschool.runtime.torch_engine.shipped import SHIPPED as SHIPPED_NAMES
from pipeschool.runtime.torch_engine.shipped import shipped

SIZES = {"p": st.integers(1, 6), "m": st.integers(1, 12)}
ONE_COPY = [name for name in ps.SCHEDULES if name != "chimera"]


def without_updates(schedule: ps.Schedule) -> list[list[ps.Action]]:
    return [[a for a in row if a.kind != "U"] for row in schedule.workers]


def test_text_is_one_row_per_worker() -> None:
    assert to_csv(ps.gpipe(p=2, m=2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


def test_lowered_text_has_the_messages() -> None:
    assert to_csv(ps.lower(ps.gpipe(p=2, m=1))) == (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    )


@pytest.mark.parametrize("name", ["naive", "gpipe", "one_f_one_b"])
@given(**SIZES, lowered=st.booleans())
def test_synchronous_schedules_come_back_whole(name: str, p: int, m: int, lowered: bool) -> None:
    schedule = ps.build(name, p, m)
    schedule = ps.lower(schedule) if lowered else schedule
    again = from_csv(to_csv(schedule), name=name)
    assert again == schedule
    assert ps.check(again) is again


@given(**SIZES, lowered=st.booleans())
def test_pipedream_comes_back_with_a_flush_in_place_of_its_updates(
    p: int, m: int, lowered: bool
) -> None:
    schedule = ps.pipedream(p, m)
    schedule = ps.lower(schedule) if lowered else schedule
    again = from_csv(to_csv(schedule))
    assert without_updates(again) == without_updates(schedule)
    assert [row[-1] for row in again.workers] == [ps.U(stage, 0) for stage in range(p)]
    ps.check(again)


def test_several_batches_with_flushes_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="holds one batch, but this gpipe flushes between 2"):
        to_csv(ps.gpipe(p=2, m=2, batches=2))
    assert to_csv(ps.pipedream(p=2, m=2, batches=2)) == to_csv(ps.pipedream(p=2, m=4))


@pytest.mark.parametrize("name", ONE_COPY)
@settings(max_examples=10, deadline=None)
@given(**SIZES, lowered=st.booleans())
def test_pytorch_reads_every_cell_as_we_wrote_it(name: str, p: int, m: int, lowered: bool) -> None:
    from torch.distributed.pipelining.schedules import _Action

    assume(name != "pipedream_2bw" or m >= p - 1)
    schedule = ps.build(name, p, m)
    text = to_csv(ps.lower(schedule) if lowered else schedule)
    for row in csv.reader(text.splitlines()):
        assert [str(_Action.from_str(cell)) for cell in row] == row


@pytest.mark.parametrize("name", [name for name in ONE_COPY if name != "forward_only"])
def test_pytorch_accepts_the_schedule_and_adds_the_same_messages(name: str) -> None:
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _validate_schedule

    schedule = ps.build(name, p=4, m=8)
    rows = csv.reader(to_csv(schedule).splitlines())
    order = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    stages = schedule.stages
    placement = _validate_schedule(order, pp_group_size=4, num_stages=stages, num_microbatches=8)
    assert placement == dict(enumerate(schedule.placement))
    lowered = _add_send_recv(order, stage_to_rank=placement.__getitem__, num_stages=stages)
    ours = without_updates(ps.lower(schedule))
    for rank, row in enumerate(ours):
        assert sorted(map(str, lowered[rank])) == sorted(map(str, row))


def test_idle_and_sharding_cells_are_left_out() -> None:
    text = "0UNSHARD,0F0,,0B0,0REDUCE_GRAD,0RESHARD\n,1F0,1B0,,,\n"
    assert from_csv(text, name="gpipe") == ps.gpipe(p=2, m=1)


def test_text_from_other_programs_is_read_too() -> None:
    assert from_csv("\ufeff0F0, 0B0\r\n1F0, 1B0\r\n\r\n", name="naive") == ps.naive(p=2, m=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1G0", r"row 2 \(worker 1\), column 2: '1G0' is no action"),
        ("0F0,B0", r"row 1 \(worker 0\), column 2: 'B0' is no action"),
        ("0F0\n(0F7;7W3)OVERLAP_F_B", r"row 2 \(worker 1\), column 1: .* must join one forward"),
        ("0F0\n(0F7)OVERLAP_F_B", r"row 2 \(worker 1\), column 1: .* must join one forward"),
        ("0F0\n(0F7;7B3OVERLAP_F_B", r"row 2 \(worker 1\), column 1: .* is no action"),
        ("0F0,0B0,0U0", r"row 1 \(worker 0\), column 3: 0U0 is an update"),
        ("0F0,7F0", r"row 1 \(worker 0\), column 2: 7F0 is of stage 7, but the file names only 2"),
        ("0F0,0F4", r"row 1 .*, column 2: 0F4 is of microbatch 4, but the file names only 2"),
        ("", "holds no action"),
        (",,\n,", "holds no action"),
        ('0F0,"' + "x" * 200_000, r"row 1: field larger than field limit"),
    ],
)
def test_faults_name_row_and_column_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        from_csv(text)
    assert "\n" not in str(caught.value)


def test_p_must_be_the_number_of_rows() -> None:
    with pytest.raises(ValueError, match="has 2 rows, one per worker, but p is 3"):
        from_csv("0F0,0B0\n1F0,1B0\n", p=3)
    assert from_csv("0F0,0B0\n1F0,1B0\n", p=2, m=1).p == 2


def test_too_few_microbatches_for_m_is_for_check_to_say() -> None:
    schedule = from_csv("0F0,0B0\n", m=2)
    with pytest.raises(ps.IllegalSchedule, match="worker 0 never does 0F1"):
        ps.check(schedule)


def test_cells_that_join_two_actions_give_both_and_are_joined_again() -> None:
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
    schedule = from_csv(text, name="one_f_one_b")
    pair = (ps.F(0, 1), ps.B(0, 0))
    assert schedule.workers == ps.one_f_one_b(p=2, m=2).workers
    assert schedule.overlapped == {pair}
    assert to_csv(schedule) == text
    twice = schedule.repeat(2)
    assert twice.overlapped == {pair, (ps.F(0, 3), ps.B(0, 2))}
    # A message between the two: each has a cell of its own again.
    assert to_csv(ps.lower(schedule)) == to_csv(ps.lower(ps.one_f_one_b(p=2, m=2)))


# What PyTorch ships. Its classes and tables are private; a stub stands for a process's stages.

SHIPPED = [
    ("gpipe", 4, 6, 1),
    ("1f1b", 4, 8, 1),
    ("interleaved_1f1b", 4, 8, 2),
    ("interleaved_1f1b", 3, 6, 3),
    ("looped_bfs", 4, 6, 2),
    ("interleaved_zero_bubble", 4, 8, 1),
    ("interleaved_zero_bubble", 2, 4, 2),
    ("zbv_zero_bubble", 4, 9, 2),
    ("dualpipe_v", 3, 8, 2),
]
Table = dict[int, list]


def stubs(p: int, v: int) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, submod=None) for _ in range(v)
    ]


def table(order: Table) -> list[list[str]]:
    """A table without idle and sharding cells, which carry no order of their own."""
    return [
        [str(cell) for cell in order[rank] if cell and not SHARDING.fullmatch(str(cell))]
        for rank in sorted(order)
    ]


def loaded(text: str, p: int, m: int, v: int, file: Path, form: str = "compute_only"):
    """PyTorch's engine after it has read `text`."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    file.write_text(text, encoding="utf-8")
    engine = _PipelineScheduleRuntime(stubs(p, v), m)
    engine._load_csv(str(file), format=form)
    return engine


@pytest.mark.parametrize(("name", "p", "m", "v"), SHIPPED)
def test_what_pytorch_ships_is_legal_and_can_be_simulated(name, p, m, v) -> None:
    schedule = shipped(name, p, m, v)
    assert (schedule.name, schedule.p, schedule.m, schedule.v) == (name, p, m, v)
    ps.check(ps.lower(ps.check(schedule)))
    trace = ps.simulate(schedule)
    assert trace.busy == [3 * m * v] * p
    assert len(ps.draw.gantt(trace).axes) > 0


def test_its_schedules_have_the_bubbles_of_ours() -> None:
    for name, ours in (("gpipe", ps.gpipe(4, 8)), ("1f1b", ps.one_f_one_b(4, 8))):
        theirs = shipped(name, 4, 8)
        assert theirs.workers == ours.workers
    # Zero bubble (Qi et al., ICLR 2024): with tF = tI = tW, ZB-H1 leaves p - 1, ZB-V nothing but
    # the way down to the last worker and back up, which its other stages fill.
    equal = ps.Cost(1, 2)
    h1 = ps.simulate(shipped("interleaved_zero_bubble", 4, 8), equal)
    assert h1.makespan - max(h1.busy) == 3
    assert h1.peak_activations == [4, 4, 4, 4]


def test_its_own_check_refuses_its_table_of_1f1b_and_ours_is_repaired() -> None:
    from torch.distributed.pipelining.schedules import Schedule1F1B, _Action, _validate_schedule

    order = Schedule1F1B(stubs(4, 1)[0], 8).pipeline_order
    assert _Action.from_str("3F8") in order[3] and _Action.from_str("3F0") not in order[3]
    with pytest.raises(AssertionError, match="without first running Forward"):
        _validate_schedule(order, 4, 4, 8)
    rows = csv.reader(to_csv(shipped("1f1b", 4, 8)).splitlines())
    repaired = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    assert _validate_schedule(repaired, 4, 4, 8) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert table(repaired)[:3] == table(order)[:3]


@pytest.mark.parametrize(("name", "p", "m", "v"), SHIPPED[2:])
def test_its_own_files_come_back_as_they_were(name, p, m, v, tmp_path) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    theirs = get_schedule_class(SHIPPED_NAMES[name][0])(stubs(p, v), m)
    for form, order in (
        ("compute_only", theirs.pipeline_order),
        ("compute_comms", theirs.pipeline_order_with_comms),
    ):
        file = tmp_path / "theirs.csv"
        theirs._dump_csv(str(file), format=form)
        schedule = ps.check(from_csv(file.read_text(encoding="utf-8"), p, m))
        assert schedule.lowered == (form == "compute_comms")
        again = loaded(to_csv(schedule), p, m, v, tmp_path / "ours.csv", form)
        back = again.pipeline_order if form == "compute_only" else again.pipeline_order_with_comms
        assert table(back) == table(order)


@pytest.mark.parametrize(("name", "p", "m", "v"), SHIPPED)
def test_what_it_ships_goes_there_and_back_with_its_messages(name, p, m, v, tmp_path) -> None:
    schedule = shipped(name, p, m, v)
    engine = loaded(to_csv(schedule), p, m, v, tmp_path / "compute.csv")
    engine._dump_csv(str(tmp_path / "comms.csv"), format="compute_comms")
    lowered = from_csv((tmp_path / "comms.csv").read_text(encoding="utf-8"), name=name)
    again = loaded(to_csv(lowered), p, m, v, tmp_path / "again.csv", "compute_comms")
    assert table(again.pipeline_order_with_comms) == table(engine.pipeline_order_with_comms)
    assert lowered.overlapped == schedule.overlapped


@pytest.mark.parametrize(("name", "p", "m", "v"), SHIPPED)
def test_its_messages_are_ours_in_the_same_order_on_every_link(name, p, m, v, tmp_path) -> None:
    schedule = shipped(name, p, m, v)
    engine = loaded(to_csv(schedule), p, m, v, tmp_path / "compute.csv")
    engine._dump_csv(str(tmp_path / "comms.csv"), format="compute_comms")
    theirs = from_csv((tmp_path / "comms.csv").read_text(encoding="utf-8"))
    ours = ps.lower(schedule)
    ps.check(theirs)  # both sides of a link agree, and nobody waits for ever
    assert sent(theirs) == sent(ours) and sent(ours)


def sent(schedule: ps.Schedule) -> dict[tuple[int, int], list[ps.Action]]:
    """The sends of each link, (source, target), in order."""
    links: dict[tuple[int, int], list[ps.Action]] = {}
    for worker, row in enumerate(schedule.workers):
        for action in row:
            if action.kind in ("SEND_F", "SEND_B"):
                links.setdefault((worker, peer_of(action, schedule)), []).append(action)
    return links


def test_what_it_does_not_ship_is_refused_in_one_sentence() -> None:
    for message, asked in (
        ("ships no schedule 'chimera'; choose one of gpipe, 1f1b, ", ("chimera", 2, 2)),
        ("1F1B refuses p=4, m=2, v=1: .* must be greater than or equal", ("1f1b", 4, 2)),
        ("v must be 1, not 2", ("gpipe", 2, 2, 2)),
        ("p must be at least 1, not 0", ("gpipe", 0, 2)),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            shipped(*asked)
        assert "\n" not in str(caught.value)


def test_a_file_of_forwards_alone_is_inference() -> None:
    schedule = ps.forward_only(3, 4)
    read = from_csv(to_csv(schedule))
    assert read.workers == schedule.workers
    assert not read.trains
    ps.check(read)
