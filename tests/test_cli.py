"""The command line: numbers, exit status, and one sentence for everything that is wrong."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pipeschool as ps
import psutil
import pytest
from pipeschool import cli
from pipeschool.formats import to_csv

Capture = pytest.CaptureFixture[str]


def run(capfd: Capture, line: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command line."""
    try:
        status = cli.main(line.split())
    except SystemExit as left:  # --help and --version
        status = int(left.code or 0)
    return (status, *capfd.readouterr())


def refused(capfd: Capture, line: str, status: int = 2) -> str:
    """The one sentence that `line` is refused with."""
    code, out, err = run(capfd, line)
    assert (code, out) == (status, "")
    assert err.startswith("pipeschool: ") and err.endswith("\n") and err.count("\n") == 1
    return err.removeprefix("pipeschool: ").strip()


def json_of(capfd: Capture, line: str) -> dict[str, object]:
    """The one JSON object that `line` prints, with nothing beside it."""
    status, out, err = run(capfd, line)
    assert (status, err) == (0, "")
    return json.loads(out)


# simulate


def test_simulate_prints_exactly_the_agreed_keys(capfd: Capture) -> None:
    assert json_of(capfd, "simulate gpipe -p 4 -m 8 --forward 1 --backward 2 --json") == {
        "schedule": "gpipe",
        "p": 4,
        "m": 8,
        "v": 1,
        "makespan": 33.0,
        "bubble_of_total": pytest.approx(3 / 11),
        "bubble_of_ideal": pytest.approx(3 / 8),
        "peak_activations": [8, 8, 8, 8],
        "weight_versions": [1, 1, 1, 1],
        "staleness": [0, 0, 0, 0],
    }


def test_simulate_knows_every_schedule(capfd: Capture) -> None:
    line = "simulate {} -p 4 -m 8 --json"
    found = {name: json_of(capfd, line.format(name)) for name in ("naive", "1f1b", "pipedream")}
    assert [found[name]["makespan"] for name in found] == [96, 33, 33]
    assert found["1f1b"]["schedule"] == "one_f_one_b"
    assert found["1f1b"]["peak_activations"] == [4, 3, 2, 1]
    assert found["pipedream"]["weight_versions"] == [4, 3, 2, 1]
    assert found["pipedream"]["staleness"] == [3, 2, 1, 0]


def test_simulate_takes_costs_batches_and_weights(capfd: Capture) -> None:
    # Each of the p - 1 boundaries is crossed once on the way there and once back.
    assert json_of(capfd, "simulate gpipe --comm 0.5 --json")["makespan"] == 33 + 2 * 3 * 0.5
    assert json_of(capfd, "simulate gpipe --forward 2 --backward 2 --json")["makespan"] == 44
    assert json_of(capfd, "simulate gpipe --batches 3 --json")["makespan"] == 3 * 33
    line = "simulate pipedream --batches 3 --weights stash --json"
    assert json_of(capfd, line)["makespan"] == 33 + 2 * 24


def test_simulate_without_json_is_a_table_with_denominators(capfd: Capture) -> None:
    _, out, err = run(capfd, "simulate 1f1b")
    assert out.splitlines() == [
        "one_f_one_b, p=4, m=8 (predicted)",
        "makespan          33",
        "bubble of total   0.2727      idle / (p * makespan)",
        "bubble of ideal   0.375       idle / busy",
        "peak activations  4, 3, 2, 1  of each worker, in A: one microbatch on one worker",
        "weight versions   1, 1, 1, 1  alive at once on each worker",
        "staleness         0, 0, 0, 0  of each worker, in updates",
    ]
    assert err == ""


# show, schedules, check


def test_show_draws_in_the_terminal(capfd: Capture) -> None:
    _, out, err = run(capfd, "show gpipe -p 2 -m 2")
    assert out.splitlines()[2:4] == [
        "worker 0 F0F1......B0==B1==",
        "worker 1 ..F0F1B0==B1==....",
    ]
    assert err == ""


def test_show_writes_files_that_check_and_pytorch_read(capfd: Capture, tmp_path: Path) -> None:
    png, csv = tmp_path / "chart", tmp_path / "schedule.csv"
    status, _, err = run(capfd, f"show 1f1b --png {png} --csv {csv}")
    assert (status, err) == (0, "")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert csv.read_text() == to_csv(ps.one_f_one_b(p=4, m=8))
    assert run(capfd, f"check {csv} -p 4 -m 8") == (
        0,
        f"{csv} is legal and free of deadlock: p=4, m=8, compute only\n",
        "",
    )


@pytest.mark.parametrize(
    ("schedule", "status"),
    [(ps.one_f_one_b(2, 4), 0), (ps.lower(ps.gpipe(2, 4)), 0), (ps.lower(ps.one_f_one_b(2, 4)), 1)],
    ids=["compute only", "right as it is", "facing sends"],
)
def test_check_can_let_sends_wait(
    capfd: Capture, tmp_path: Path, schedule: ps.Schedule, status: int
) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(schedule))
    assert run(capfd, f"check {file}")[0] == 0
    found, _, err = run(capfd, f"check {file} --matching rendezvous")
    assert found == status
    if status:
        assert "deadlock: worker 0 waits at 0SEND_F1" in err
        assert "for worker 1 to receive it" in err


def test_schedules_has_a_line_for_each(capfd: Capture) -> None:
    _, out, _ = run(capfd, "schedules")
    assert [line.split()[0] for line in out.splitlines()] == list(ps.SCHEDULES)
    assert "one_f_one_b (or 1f1b) " in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1B0,1F0\n", "worker 1 does 1B0 .* before 1F0"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlock: worker 0 waits at 0B0"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n", "worker 1 never does 1RECV_F0"),
    ],
)
def test_an_illegal_schedule_is_status_1(
    capfd: Capture, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    assert re.search(message, refused(capfd, f"check {file}", status=1))


def test_a_file_that_is_no_schedule_is_status_2(capfd: Capture, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0B0\n1F0,1X0\n")
    assert refused(capfd, f"check {file}").startswith("row 2 (worker 1), column 2: '1X0'")
    file.write_text("0F0,0B0\n1F0,1B0\n")
    assert refused(capfd, f"check {file} -p 3").endswith("has 2 rows, one per worker, but p is 3")
    file.write_bytes(b"\x89PNG\r\n")
    assert refused(capfd, f"check {file}") == "the schedule file is not UTF-8 text"
    assert refused(capfd, f"check {tmp_path}/none.csv") == (
        f"cannot use {tmp_path}/none.csv: No such file or directory"
    )


# Wrong input


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "required: COMMAND"),
        ("fly", "invalid choice: 'fly'.*lab.*schedules.*show.*simulate.*run.*check"),
        ("simulate", "required: NAME"),
        ("simulate gpie", "no schedule 'gpie'; choose one of naive, gpipe, one_f_one_b, pipedream"),
        ("run gpie", "no schedule 'gpie'"),
        ("simulate gpipe -p 0", "-p: must be at least 1, not 0"),
        ("simulate gpipe -m -1", "-m: must be at least 1, not -1"),
        ("show gpipe -p four", "-p: must be a whole number, not 'four'"),
        ("show gpipe -m 2.5", "-m: must be a whole number, not '2.5'"),
        ("simulate gpipe -v 2", "v must be 1 for gpipe, not 2"),
        ("simulate gpipe --batches 0", "--batches: must be at least 1, not 0"),
        ("simulate gpipe --forward fast", "--forward: must be a number of seconds.* not 'fast'"),
        ("simulate gpipe --backward -2", "--backward: must be a number of seconds.* not '-2'"),
        ("simulate gpipe --comm nan", "--comm: must be a number of seconds.* not 'nan'"),
        ("simulate gpipe --comm inf", "--comm: must be a number of seconds.* not 'inf'"),
        ("simulate gpipe --frward 1", "unrecognized arguments: --frward 1"),
        ("simulate gpipe --weights stash", "gpipe is synchronous and needs weights='flush', not"),
        (
            "simulate pipedream --weights flush",
            "pipedream never flushes, so it needs another policy",
        ),
        ("simulate pipedream_2bw -m 2", "pipedream_2bw needs m of at least p - 1 = 3, not 2"),
        ("simulate pipedream --weights newest", "no weight policy 'newest'; choose one of .*stash"),
        ("run gpipe --pace abc", "--pace: .* such as 0.005,0.010, not 'abc'"),
        ("run gpipe --pace 1", "--pace: .* not '1'"),
        ("run gpipe --pace 1,2,3", "--pace: .* not '1,2,3'"),
        ("run gpipe --pace -1,2", "--pace: .* each 0 or more.* not '-1,2'"),
        ("run gpipe --pace 1,-2", "--pace: .* each 0 or more.* not '1,-2'"),
        ("run gpipe --pace", "--pace: expected one argument"),
        ("run gpipe -p 9 --layers 8", "8 layers cannot be cut into 9 stages"),
        ("run gpipe -m 8 --batch-size 3", "3 samples cannot be cut into 8 microbatches"),
        ("run gpipe --device tpu", "device must be one of auto, cpu, cuda, not 'tpu'"),
        ("show gpipe --batches 2 --csv x.csv", "file holds one batch, but this gpipe flushes"),
        ("show gpipe --csv /no/such/folder/x.csv", "cannot use /no/such/folder/x.csv: No such"),
        ("show gpipe -p 100000", "a row for each worker: -p may be at most 1,000 here$"),
        ("lab --port 99999", "--port: must be between 1 and 65535, not 99999"),
    ],
)
def test_wrong_input_is_one_sentence_and_status_2(capfd: Capture, line: str, message: str) -> None:
    assert re.search(message, refused(capfd, line))


def test_help_lists_the_commands(capfd: Capture) -> None:
    status, out, _ = run(capfd, "--help")
    assert status == 0
    assert re.findall(r"^    (\w+) ", out, flags=re.MULTILINE) == [
        "lab",
        "schedules",
        "show",
        "simulate",
        "run",
        "bench",
        "check",
    ]


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m pipeschool.cli show gpipe -p 64 -m 200 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("gpipe, p=64, m=200")
    assert done.stderr == ""


@pytest.mark.parametrize("line", ["schedules", "simulate gpipe --json", "show gpipe", "check {}"])
def test_quick_commands_load_neither_torch_nor_matplotlib(line: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(ps.gpipe(p=2, m=2)))
    code = (
        "import sys; from pipeschool.cli import main; status = main(sys.argv[1:]); "
        "print(status, sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *line.format(file).split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert done.stderr == ""


# run


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_run_of_a_synchronous_schedule_equals_one_process(capfd: Capture, name: str) -> None:
    found = json_of(capfd, f"run {name} -p 3 -m 4 --batches 2 --pace 0.002,0.004 --json")
    assert found["gradient_max_error"] == 0.0
    assert (found["backend"], found["device"], found["paced"]) == ("local", "cpu", True)
    assert found["peak_activations"] == ps.simulate(ps.build(name, 3, 4)).peak_activations
    predicted, measured = found["predicted"], found["measured"]
    batch = {"naive": 3 * 4, "gpipe": 4 + 3 - 1, "1f1b": 4 + 3 - 1}[name] * 0.006
    assert predicted["makespan"] == pytest.approx(2 * batch)
    assert set(predicted) == set(measured) == {"makespan", "bubble_of_total", "bubble_of_ideal"}
    # A worker waits until the declared time is over, so nothing is quicker than predicted.
    assert measured["makespan"] >= predicted["makespan"] * 0.999
    assert {key: found[key] for key in measured} == measured
    assert found["start_seconds"] > 0


def test_run_on_pytorchs_engine_equals_one_process_too(capfd: Capture) -> None:
    found = json_of(capfd, "run 1f1b -p 2 -m 3 --batches 2 --engine torch --json")
    assert found["gradient_max_error"] < 1e-14
    assert (found["engine"], found["paced"]) == ("torch", False)
    assert "weights='stash'" in refused(capfd, "run pipedream -p 2 -m 3 --engine torch")
    assert "engine must be one of pipeschool, torch" in refused(capfd, "run gpipe --engine other")


def test_run_of_an_asynchronous_schedule_has_versions(capfd: Capture) -> None:
    found = json_of(capfd, "run pipedream -p 3 -m 4 --pace 0.002,0.004 --weights stash --json")
    assert found["gradient_max_error"] is None
    assert found["weight_versions"] == [3, 2, 1]
    assert found["staleness"] == [2, 1, 0]


def test_run_says_paced_and_draws(capfd: Capture, tmp_path: Path) -> None:
    png, trace = tmp_path / "chart.png", tmp_path / "trace.json"
    line = f"run gpipe -p 2 -m 2 --pace 0.002,0.004 --png {png} --trace {trace}"
    status, out, err = run(capfd, line)
    assert (status, err) == (0, "")
    assert out.startswith("gpipe, p=2, m=2 (measured, paced), local on cpu\n")
    assert "predicted from the declared times" in out
    assert out.endswith("largest difference from the gradients of one process: 0\n")
    assert png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"0F0", "0B1", "1F1", "1U0"}


def test_unpaced_run_says_what_its_prediction_is_made_of(capfd: Capture) -> None:
    status, out, err = run(capfd, "run gpipe -p 2 -m 2 --layers 2 --hidden 4")
    assert (status, err) == (0, "")
    assert "paced" not in out
    assert "predicted from the measured mean times per stage" in out


def test_a_failed_run_is_status_1(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise ps.RunError("worker 1 died at 1F0", worker=1)

    monkeypatch.setattr(ps, "run", fails)
    assert refused(capfd, "run gpipe", status=1) == "worker 1 died at 1F0"


def test_ctrl_c_is_no_traceback(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object, **options: object) -> None:
        raise ps.RunStopped

    monkeypatch.setattr(ps, "run", stopped)
    assert refused(capfd, "run gpipe", status=130) == "stopped"


# lab


def test_lab_without_a_course_says_so(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "lib" / "pipeschool" / "cli.py"))
    assert refused(capfd, "lab").startswith("there is no course/ folder here")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """A running lab on a course of its own, its address and its token."""
    (tmp_path / "course" / "00_first").mkdir(parents=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = tmp_path / "log"
    command = [sys.executable, "-m", "pipeschool.cli", "lab", "--no-browser", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"(http://localhost:\d+)/\S*token=(\w+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process, found[1], found[2]
    finally:
        process.kill()
        process.wait()


def test_lab_serves_the_course_until_ctrl_c(
    lab: tuple[subprocess.Popen[bytes], str, str],
) -> None:
    process, address, token = lab

    def ask(path: str, data: bytes | None = None) -> object:
        request = urllib.request.Request(f"{address}/api/{path}?token={token}", data)
        return json.load(urllib.request.urlopen(request))

    assert [entry["name"] for entry in ask("contents")["content"]] == ["00_first"]
    ask("kernels", b"{}")  # what Ctrl-C has to end as well
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
