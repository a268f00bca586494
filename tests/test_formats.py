"""The schedule CSV: round trips, PyTorch's own reader, and faults that name their place."""

from __future__ import annotations

import csv

import pipeschool as ps
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipeschool.formats import from_csv, to_csv

SIZES = {"p": st.integers(1, 6), "m": st.integers(1, 12)}


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


@pytest.mark.parametrize("name", [name for name in ps.SCHEDULES if name != "chimera"])
@settings(max_examples=10, deadline=None)
@given(**SIZES, lowered=st.booleans())
def test_pytorch_reads_every_cell_as_we_wrote_it(name: str, p: int, m: int, lowered: bool) -> None:
    from torch.distributed.pipelining.schedules import _Action

    assume(name != "pipedream_2bw" or m >= p - 1)
    schedule = ps.build(name, p, m)
    text = to_csv(ps.lower(schedule) if lowered else schedule)
    for row in csv.reader(text.splitlines()):
        assert [str(_Action.from_str(cell)) for cell in row] == row


# PyTorch trains, and one model: it knows neither forwards alone nor a second copy.
@pytest.mark.parametrize("name", [n for n in ps.SCHEDULES if n not in ("chimera", "forward_only")])
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
        ("0F0\n(0F7;7B3)OVERLAP_F_B", r"row 2 \(worker 1\), column 1: .* overlaps a forward"),
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
