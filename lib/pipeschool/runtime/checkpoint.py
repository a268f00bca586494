"""A checkpoint on disk: plain values and tensors in one file, written whole or not at all.

It is what `torch.save` writes, and `torch.load` reads it; after that comes the SHA-256 of every
byte before. A file is written next to the one it replaces, under a name that says by which process:
whatever ends that process, the old checkpoint stays, and the next one to come clears up.
"""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import psutil
import torch

from pipeschool.runtime.errors import RunError

SEAL = b"\npipeschool checkpoint, sha256 "
SEAL_BYTES = len(SEAL) + 64
PIECE = 1 << 20  # bytes read at a time
NEW_START = "choose another file, or remove it to start anew"


def prepare(checkpoint: str | os.PathLike[str]) -> Path:
    """The file of that name, in a folder where one can be written; ValueError where it cannot.

    What writers that are no more have left half-written is removed.
    """
    try:
        given = Path(checkpoint)
    except TypeError:
        kind = type(checkpoint).__name__
        raise ValueError(f"checkpoint must be the name of a file, not {kind}") from None
    try:
        if given.exists() and not given.is_file():
            raise ValueError(f"checkpoint must be a file, and {given} is a folder or a device")
        file = given.resolve()  # the file that a link leads to, not the link, is to be replaced
        if not file.parent.is_dir():
            raise ValueError(
                f"the checkpoint {given} needs a folder that is not there: make {file.parent} "
                "first, or choose another file"
            )
        remove_abandoned(file)
        trial = unfinished(file)
        try:
            trial.touch()
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"the checkpoint {given} cannot be written there: {error.strerror}"
        ) from None
    return given


def write(checkpoint: Path, content: dict[str, Any], before: str) -> None:
    """Put `content` into the file, whole or not at all.

    RunError where that fails, with `before`: what the file holds then.
    """
    file = checkpoint.resolve()
    part = unfinished(file)
    try:
        with open(part, "wb") as stream:
            sealed = Sealed(stream)
            try:
                torch.save(content, cast(BinaryIO, sealed))
            except RuntimeError as error:  # torch's words for an error of the disk, as a rule
                raise (sealed.error or error) from None
            stream.write(sealed.seal())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except OSError as error:
        raise RunError(
            f"the checkpoint {checkpoint} could not be written: {error.strerror}; {before}"
        ) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    with suppress(OSError):  # not every system can do this with a folder
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(checkpoint: Path) -> dict[str, Any]:
    """What `write` has put into the file; ValueError where any byte of it has changed since."""
    try:
        with open(checkpoint, "rb") as stream:
            refuse_changed(checkpoint, stream)
            stream.seek(0)
            content: dict[str, Any] = torch.load(stream, weights_only=True)
    except OSError as error:
        raise ValueError(f"the checkpoint {checkpoint} cannot be read: {error.strerror}") from None
    return content


def refuse_changed(checkpoint: Path, stream: BinaryIO) -> None:
    """ValueError unless the seal is there, and is that of all bytes before it."""
    left = os.fstat(stream.fileno()).st_size - SEAL_BYTES
    digest = hashlib.sha256()
    while left > 0 and (piece := stream.read(min(PIECE, left))):
        digest.update(piece)
        left -= len(piece)
    seal = stream.read() if left == 0 else b""
    if not seal.startswith(SEAL):
        raise ValueError(
            f"{checkpoint} is no checkpoint of pipeschool, or one that was cut short or written "
            f"by an older version: {NEW_START}"
        )
    if seal != SEAL + digest.hexdigest().encode():
        raise ValueError(
            f"the checkpoint {checkpoint} is damaged: its bytes are not those that were written; "
            "go on from a copy, or remove it to start anew"
        )


class Sealed:
    """A stream that passes on what is written to it, and makes the seal of all that."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all of `data`."""
        self.digest.update(data)
        try:
            return self.stream.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Nothing is held back here."""

    def seal(self) -> bytes:
        """For the end of the file."""
        return SEAL + self.digest.hexdigest().encode()


def unfinished(file: Path, pid: int | str | None = None) -> Path:
    """The name of what a process of this machine, or this one, is writing for `file`."""
    return file.with_name(f".{file.name}.{platform.node()}.{os.getpid() if pid is None else pid}")


def remove_abandoned(file: Path) -> None:
    """Remove what processes of this machine that have ended left half-written."""
    start = unfinished(file, "").name
    for part in file.parent.iterdir():
        pid = part.name.removeprefix(start)
        if part.name.startswith(start) and pid.isdecimal():
            with suppress(FileNotFoundError):  # another worker was faster
                if has_ended(int(pid), since=part.stat().st_mtime):
                    part.unlink()


def has_ended(pid: int, since: float) -> bool:
    """Whether the process that had the number `pid` at the time `since` is no more."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or process.create_time() > since + 1
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
