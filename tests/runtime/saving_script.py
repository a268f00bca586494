"""Saves one checkpoint after the other until a test kills it: ``python saving_script.py FILE``."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from pipeschool.runtime.checkpoint import prepare, write

file = prepare(Path(sys.argv[1]))
print("saving", flush=True)
for number in itertools.count(2):
    write(file, {"number": number, "weights": torch.full((100_000,), float(number))}, "none")
