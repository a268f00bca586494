"""The file of a checkpoint: every byte counts, and nothing that happens while it is written harms
the one that was there."""

from __future__ import annotations

import errno
import io
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from pipeschool.runtime import checkpoint
from pipeschool.runtime.checkpoint import prepare, read, write
from pipeschool.runtime.errors import RunError
from pipeschool.runtime.keepable import keepable

SCRIPT = Path(__file__).with_name("saving_script.py")
KILLS = int(os.environ.get("PIPESCHOOL_KILLS", "2"))


def content(number: int, size: int = 50):
    return {"number": number, "weights": torch.full((size,), float(number))}


def assert_holds(file: Path, number: int, size: int = 50):
    found = read(file)
    assert found["number"] == number
    assert torch.equal(found["weights"], torch.full((size,), float(number)))
    assert list(file.parent.iterdir()) == [file]  # and no litter


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "tea.pt"
    write(file, content(1), "there is none yet")
    return file


def refused(file: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read(file)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) - len(str(file)) < 250
    return message


def test_what_was_written_is_read_also_by_torch(file):
    assert_holds(file, 1)
    assert torch.load(file, weights_only=True)["number"] == 1


def test_a_flipped_bit_in_any_byte_is_found(file):
    right = file.read_bytes()
    draw = random.Random(0)
    for place in range(len(right)):
        wrong = bytearray(right)
        wrong[place] ^= 1 << draw.randrange(8)
        file.write_bytes(wrong)
        assert "is damaged" in (said := refused(file)) or "no checkpoint of pipeschool" in said
    file.write_bytes(right)
    assert_holds(file, 1)


def test_a_file_that_was_cut_short_or_went_on_is_found(file):
    right = file.read_bytes()
    for end in [*range(0, len(right), 37), len(right) - 1]:
        file.write_bytes(right[:end])
        assert "no checkpoint of pipeschool" in refused(file)
    file.write_bytes(right + b"more")
    assert "no checkpoint of pipeschool" in refused(file)


def test_what_is_no_checkpoint_or_an_older_one_is_refused_in_one_sentence(file):
    torch.save(content(1), file)
    assert refused(file) == (
        f"{file} is no checkpoint of pipeschool, or one that was cut short or written by an older "
        "version: choose another file, or remove it to start anew"
    )
    file.write_text("tea leaves")
    assert "no checkpoint of pipeschool" in refused(file)


def test_a_full_disk_at_any_moment_leaves_the_old_one(file, monkeypatch):
    calls = left = 0

    class Full(io.FileIO):
        def write(self, data):
            nonlocal left
            left -= 1
            if left == 0:
                super().write(bytes(data)[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    # Only what is opened to be written: reading goes through the same name.
    monkeypatch.setattr(
        checkpoint,
        "open",
        lambda name, mode: Full(name, mode) if mode == "wb" else open(name, mode),
        raising=False,
    )
    while True:
        calls += 1
        left = calls
        try:
            write(file, content(2), "that of epoch 0, batch 3 is still there")
        except RunError as error:
            assert str(error) == (
                f"the checkpoint {file} could not be written: No space left on device; that of "
                "epoch 0, batch 3 is still there"
            )
            assert_holds(file, 1)
        else:
            break
    assert calls > 10
    assert_holds(file, 2)


def test_a_file_that_may_not_grow_so_large_leaves_the_old_one(file):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(RunError, match="could not be written: File too large; none"):
            write(file, content(2, size=100_000), "none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_holds(file, 1)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end_leaves_the_old_one(file, monkeypatch, call):
    def fails(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(RunError, match="could not be written: Input/output error; none"):
        write(file, content(2), "none")
    assert_holds(file, 1)


def test_an_interrupt_leaves_the_old_one(file, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(file, content(2), "none")
    assert_holds(file, 1)


@pytest.mark.parametrize(
    "kills", [KILLS, pytest.param(25, marks=pytest.mark.exhaustive)], ids=["some", "25"]
)
def test_a_kill_while_it_is_written_leaves_a_whole_one(file, kills):
    moments = random.Random(kills)
    for _ in range(kills):
        saving = subprocess.Popen([sys.executable, SCRIPT, file], stdout=subprocess.PIPE)
        assert saving.stdout.readline() == b"saving\n"
        time.sleep(moments.uniform(0, 0.3))
        saving.send_signal(signal.SIGKILL)
        saving.communicate(timeout=60)
        found = read(file)
        assert torch.equal(found["weights"], torch.full_like(found["weights"], found["number"]))
        prepare(file)
        assert list(file.parent.iterdir()) == [file]


def test_only_what_the_dead_have_left_is_removed(file):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = platform.node()
    dead = file.with_name(f".tea.pt.{here}.{ended.pid}")
    others = [
        file.with_name(f".tea.pt.{here}.{os.getppid()}"),  # lives
        file.with_name(f".tea.pt.elsewhere.{ended.pid}"),  # who knows
        file.with_name(f".coffee.pt.{here}.{ended.pid}"),
        file.with_name(f".tea.pt.{here}.notes"),
    ]
    for part in (dead, *others):
        part.touch()
    prepare(file)
    assert not dead.exists()
    assert all(part.exists() for part in others)


def test_a_number_that_another_process_has_now_is_known(file):
    part = file.with_name(f".tea.pt.{platform.node()}.{os.getppid()}")
    part.touch()
    os.utime(part, (1, 1))  # from long before that process began
    prepare(file)
    assert not part.exists()


def test_a_link_stays_a_link(file):
    link = file.with_name("link")
    link.symlink_to(file)
    write(prepare(link), content(2), "none")
    assert link.is_symlink()
    assert read(file)["number"] == read(link)["number"] == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no/such/x.pt", "needs a folder that is not there: make {folder}/no/such first"),
        ("tea.pt/x.pt", "needs a folder that is not there: make {folder}/tea.pt first"),
        (".", "checkpoint must be a file, and {folder} is a folder or a device"),
        ("/dev/null", "checkpoint must be a file, and /dev/null is a folder or a device"),
        ("/proc/x.pt", "the checkpoint /proc/x.pt cannot be written there: "),
        ("x" * 250, "cannot be written there: File name too long"),
    ],
)
def test_a_place_where_no_checkpoint_can_be_is_found_at_once(file, name, says):
    with pytest.raises(ValueError) as caught:
        prepare(file.parent / name)
    assert says.format(folder=file.parent) in str(caught.value)
    assert list(file.parent.iterdir()) == [file]


def test_what_is_no_name_is_refused():
    with pytest.raises(ValueError, match="^checkpoint must be the name of a file, not int$"):
        prepare(5)


# --- what can be kept ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (np.float64(0.1), 0.1),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("tea"), "tea"),
        ({"a": (np.float32(0.5), None, "x")}, {"a": (0.5, None, "x")}),
        (np.array(["a", "b"]), ["a", "b"]),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (OrderedDict(a=1), OrderedDict(a=1)),
        (Counter("tee"), Counter("tee")),
        ({1, 2}, {1, 2}),
        (3 + 4j, 3 + 4j),
        (b"tea", b"tea"),
        (torch.float32, torch.float32),
        (random.Random(0).getstate(), random.Random(0).getstate()),
    ],
)
def test_what_can_be_kept_is_read_again(tmp_path, value, kept):
    file = tmp_path / "x.pt"
    write(file, {"value": keepable(value, "it")}, "none")
    found = read(file)["value"]
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, bool])
def test_arrays_are_kept_as_tensors(tmp_path, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    write(tmp_path / "x.pt", {"value": keepable([array], "it")}, "none")
    (found,) = read(tmp_path / "x.pt")["value"]
    assert torch.equal(found, torch.from_numpy(array))


@pytest.mark.parametrize("value", [object(), {"a": [lambda: 0]}, range(3), np.longdouble(1)])
def test_what_could_not_be_read_again_is_refused(value):
    with pytest.raises(ValueError, match="^a checkpoint cannot keep the tea, with a value of type"):
        keepable(value, "the tea")


def test_a_view_brings_nothing_along(tmp_path):
    large = torch.randn(1000, 1000)
    views = [large[3], large[:, 3], large[:2].t(), large[0, 0], large[:0]]
    write(tmp_path / "x.pt", {"views": keepable(views, "it")}, "none")
    assert (tmp_path / "x.pt").stat().st_size < 40_000
    for found, view in zip(read(tmp_path / "x.pt")["views"], views, strict=True):
        assert torch.equal(found, view)
