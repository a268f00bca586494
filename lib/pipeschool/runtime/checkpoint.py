"""A checkpoint on disk: plain values and tensors in one file, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def write(file: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all: a run may be killed at any moment."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    torch.save(content, unfinished)
    os.replace(unfinished, file)


def read(file: Path) -> dict[str, Any]:
    """What `write` has put into `file`; ValueError where it is no checkpoint."""
    try:
        content: dict[str, Any] = torch.load(file, weights_only=True)
        content["identity"]
    except Exception as error:
        raise ValueError(f"{file} is no checkpoint of pipeschool: {error}") from error
    return content
