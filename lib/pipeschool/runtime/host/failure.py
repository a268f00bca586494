"""An exception on a worker, as plain data that can travel."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path

import torch

from pipeschool.actions import Action
from pipeschool.runtime.errors import LIBRARY, Frame, PeerLost, shortened, text_of
from pipeschool.runtime.host.job import Failure


def failure(action: Action | None, error: BaseException) -> Failure:
    """`error` as plain data: what it says, and the lines of the learner's code it came through."""
    torch_home = str(Path(torch.__file__).parent)
    frames = tuple(
        Frame(frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((str(LIBRARY), torch_home, contextlib.__file__, "<frozen"))
    )
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    text = f"{type(error).__name__}: {shortened(text_of(error))}{notes}"
    # Collectives inside a stage, as in tensor parallelism, lose their peers in gloo's own words.
    secondary = isinstance(error, PeerLost) or "gloo/transport" in text
    return Failure(action, shortened(text), frames, secondary)
