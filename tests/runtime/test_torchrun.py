"""The same training under torchrun: two launchers, as on two machines, and faults on one."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

# A launcher and its workers are four interpreters that import torch.
exhaustive = pytest.mark.exhaustive
pytestmark = pytest.mark.xdist_group("alone")

SCRIPT = Path(__file__).with_name("distributed_script.py")
PATIENCE = 90  # seconds for a whole test, on a busy machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launcher(
    arguments: list[str],
    log: Path,
    address: str,
    port: int,
    machine: int,
    local: str = "",
    prefix: tuple[str, ...] = (),
    n: int = 2,
) -> subprocess.Popen:
    """One torchrun: half of the workers. Machine 0 is where all meet."""
    command = [
        *prefix,
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={n}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", "--rdzv-id=test"),
        *(f"--rdzv-conf=is_host={machine == 0}", f"--local-addr={local or address}"),
        *(str(SCRIPT), *arguments),
    ]
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def two_launchers(folder: Path, fault: str = "-", keep: str = "-", n: int = 2) -> list[str]:
    """Run the script under two launchers on this machine; what each of them printed."""
    folder.mkdir(exist_ok=True)
    arguments, port = [str(folder), keep, "4", fault], free_port()
    logs = [folder / f"launcher{i}.log" for i in range(2)]
    both = [
        launcher(arguments, log, "127.0.0.1", port, machine, n=n)
        for machine, log in enumerate(logs)
    ]
    return finish(both, logs)


def finish(both: list[subprocess.Popen], logs: list[Path]) -> list[str]:
    try:
        for process in both:
            process.wait(PATIENCE)
    finally:
        for process in both:
            for child in (
                [*psutil.Process(process.pid).children(recursive=True)]
                if (process.poll() is None)
                else []
            ):
                child.kill()
            process.kill()
            process.wait()
    return [log.read_text() for log in logs]


def sentences(output: str) -> list[str]:
    return re.findall(r"^pipeschool: (.*)$", output, flags=re.MULTILINE)


def saved(folder: Path) -> list[dict]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    """What the script gives on one machine, without torchrun."""
    folder = tmp_path_factory.mktemp("alone")
    environment = os.environ | {"RANK": "0", "GROUP_RANK": "0"}
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), "-", "4", "-"],
        check=True,
        env=environment,
        timeout=PATIENCE,
        capture_output=True,
    )
    return torch.load(folder / "rank0.pt")


def assert_equal(found: dict, expected: dict) -> None:
    assert found["losses"] == expected["losses"]
    for ours, theirs in zip(found["states"], expected["states"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_two_launchers_train_to_the_very_weights_of_one_machine(tmp_path, undisturbed):
    outputs = two_launchers(tmp_path)
    for found in saved(tmp_path):
        assert_equal(found, undisturbed)
    assert "epoch 1, batch 4" in "".join(outputs)  # worker 0 tells how it goes, nobody else
    assert "".join(outputs).count("epoch 1, batch 4") == 1


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        pytest.param(
            "raise:2:6",
            r"worker 2 failed at 2F5 \(.*\): ValueError: the tea is cold",
            marks=exhaustive,
        ),
        pytest.param(
            "kill:0:6",
            r"worker 0 was lost.*: its process or its machine has gone",
            marks=exhaustive,
        ),
        ("kill:3:6", r"worker 3 was lost.*: its process or its machine has gone"),
        pytest.param(
            "sleep:1:6", r"worker 1 is stuck at 1F5 .* nothing has moved for", marks=exhaustive
        ),
        (
            "stop:2:6",
            r"worker 2 is frozen, last heard of at .*: its process was stopped or its",
        ),
    ],
)
def test_a_fault_on_one_machine_ends_both_with_one_message(tmp_path, fault, says):
    outputs = two_launchers(tmp_path, fault)
    for output in outputs:  # everybody hears it, once
        (sentence,) = sentences(output)
        # The store lives in the first launcher: if that ends very early, the others know no more.
        gone = "the launcher on the first machine has gone" in sentence and fault.startswith("kill")
        assert re.match(says, sentence) or gone
    assert not list(tmp_path.glob("rank*.pt"))


@exhaustive
def test_after_a_loss_the_training_goes_on_from_its_checkpoint(tmp_path, undisturbed):
    keep = str(tmp_path / "checkpoint")
    two_launchers(tmp_path, "kill:2:14", keep)
    left = [torch.load(f"{keep}.{machine}", weights_only=True)["place"] for machine in (0, 1)]
    assert left[0] == left[1] == (0, 2)  # it was killed in the second leg
    outputs = two_launchers(tmp_path, "-", keep)
    assert "going on from" in "".join(outputs)
    for found in saved(tmp_path):
        assert_equal(found, undisturbed)
    Path(f"{keep}.1").unlink()  # as if a new machine had taken the place of an old one
    for output in two_launchers(tmp_path, "-", keep):
        assert "the checkpoints of the machines differ" in output
    Path(f"{keep}.1").write_text("tea leaves")
    for output in two_launchers(tmp_path, "-", keep):
        assert "the checkpoints of the machines differ" in output
        assert "is no checkpoint of pipeschool" in output


@exhaustive
def test_a_wrong_number_of_processes_is_one_sentence(tmp_path):
    outputs = two_launchers(tmp_path, n=1)
    message = (
        "torchrun started 2 processes, but one_f_one_b needs 4, one for each worker: "
        "--nnodes times --nproc-per-node must be 4"
    )
    assert all(message in output for output in outputs)


TWO_COPIES = """
import os, signal, sys
import pipeschool as ps, torch

class Stage(torch.nn.Linear):
    def forward(self, x):
        if len(sys.argv) > 1 and x[0, 0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

torch.manual_seed(0)
x = torch.ones(4, 4)
x[1::2] = -1.0  # worker 1 gets these
schedule = ps.replicate(ps.gpipe(1, 2), 2)  # no messages: the workers meet at the update
for _ in range(6):
    ps.run(schedule, [Stage(4, 4)], [(x, x)], device="cpu")
    if os.environ["RANK"] == "0":
        print("open:", len(os.listdir("/proc/self/fd")), flush=True)
"""


SLOW_LINK = """
import os
import pipeschool as ps, torch

torch.manual_seed(0)
x = torch.ones(1, 4)
stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
done = ps.run(ps.gpipe(2, 1), stages, [(x, x)], device="cpu", bandwidth=10, timeout=1.0)
if os.environ["RANK"] == "0":
    print("makespan:", done.trace.makespan, flush=True)
"""


def two_processes(folder: Path, text: str, *arguments: str) -> str:
    """What the script `text` prints under one launcher."""
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    done = subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, timeout=PATIENCE
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to count what is open")
def test_a_run_closes_its_connections_though_its_process_lives_on(tmp_path):
    counts = re.findall(r"open: (\d+)", two_processes(tmp_path, TWO_COPIES))
    assert len(counts) == 6
    assert counts[-1] == counts[1]  # the first run may open what stays


def test_a_worker_lost_where_all_sum_gradients_is_named(tmp_path):
    (sentence,) = sentences(two_processes(tmp_path, TWO_COPIES, "kill"))
    assert re.match(
        r"worker 1 was lost.*: its process or its machine has gone, and worker 0", sentence
    )


@exhaustive
def test_a_declared_link_does_not_count_as_a_standstill(tmp_path):
    """A message of 4 float32 has 16 bytes at least: 1.6 s at 10 bytes a second, there and back."""
    output = two_processes(tmp_path, SLOW_LINK)
    assert (found := re.search(r"makespan: (\S+)", output)), output
    assert float(found[1]) > 2 * 1.6


@exhaustive
def test_processes_that_make_different_models_are_told_so(tmp_path):
    for output in two_launchers(tmp_path, "seed"):
        assert "the models of the machines differ" in output
        assert "set the same seed" in output


def namespaces() -> str:
    """Why two network namespaces cannot be had; empty where they can."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs the commands ip and tc"
    name = f"probe{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if probe.returncode == 0 else f"no namespaces here: {probe.stderr.decode().strip()}"


NO_NAMESPACES = namespaces()


@pytest.fixture
def shaped_link():
    """The names of two network namespaces, joined by a link of 20 Mbit a second."""
    ends = [f"tea{os.getpid()}-{i}" for i in range(2)]  # at most 15 letters; another test's differ
    steps = ["ip link add {} type veth peer name {}".format(*ends)]
    for i, end in enumerate(ends):
        inside = f"ip netns exec {end}"
        steps += [
            f"ip netns add {end}",
            f"ip link set {end} netns {end}",
            f"{inside} ip addr add 10.77.0.{i + 1}/24 dev {end}",
            f"{inside} ip link set lo up",
            f"{inside} ip link set {end} up",
            f"{inside} tc qdisc add dev {end} root tbf rate 20mbit burst 32kbit latency 400ms",
        ]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no shaped link here: {step}: {done.stderr.strip()}")
        yield ends
    finally:
        subprocess.run(["ip", "link", "del", ends[0]], capture_output=True)  # where it still is
        for end in ends:
            subprocess.run(["ip", "netns", "del", end], capture_output=True)


@exhaustive
@pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)
@pytest.mark.parametrize("fault", ["-", "kill:2:6"])
def test_across_two_networks_with_a_slow_link(tmp_path, shaped_link, undisturbed, fault):
    arguments = [str(tmp_path), "-", "4", fault]
    logs = [tmp_path / f"launcher{i}.log" for i in range(2)]
    both = [
        launcher(
            arguments,
            log,
            "10.77.0.1",
            29400,
            machine,
            local=f"10.77.0.{machine + 1}",
            prefix=("ip", "netns", "exec", shaped_link[machine]),
        )
        for machine, log in enumerate(logs)
    ]
    outputs = finish(both, logs)
    if fault == "-":
        for found in saved(tmp_path):
            assert_equal(found, undisturbed)
    else:
        for output in outputs:
            (sentence,) = sentences(output)
            assert re.match(r"worker 2 was lost", sentence)


def has_ended(process: psutil.Process) -> bool:
    """Also where its launcher, which waits for the store itself, has not taken note of it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@exhaustive
@pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)
def test_a_machine_that_vanishes_ends_the_others(tmp_path, shaped_link, monkeypatch):
    """No packets and no end of a connection: the cable is cut in the middle of a training."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    logs = [tmp_path / f"launcher{i}.log" for i in range(2)]
    both = [
        launcher(
            [str(tmp_path), "-", "4", "sleep:3:14"],  # in its second leg
            log,
            "10.77.0.1",
            29400,
            machine,
            local=f"10.77.0.{machine + 1}",
            prefix=("ip", "netns", "exec", shaped_link[machine]),
        )
        for machine, log in enumerate(logs)
    ]
    workers = []
    try:
        deadline = time.monotonic() + PATIENCE
        while "epoch 0, batch 2" not in logs[0].read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        workers = [w for one in both for w in psutil.Process(one.pid).children(recursive=True)]
        inside = f"ip netns exec {shaped_link[1]}"
        subprocess.run(f"{inside} ip link set {shaped_link[1]} down".split(), check=True)
        deadline = time.monotonic() + PATIENCE
        while not all(map(has_ended, workers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert all(map(has_ended, workers))
    finally:
        for process in [*workers, *both]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in both:
            process.wait()
    first, second = (sentences(log.read_text()) for log in logs)
    assert re.match(r"worker [23] is frozen, last heard of at .* its machine has gone", first[0])
    assert "the launcher on the first machine has not answered for" in second[0]
    assert (len(first), len(second)) == (1, 1)
