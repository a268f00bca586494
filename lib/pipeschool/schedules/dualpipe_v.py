"""DualPipeV: two chunks in a V, forwards and backwards in pairs that may overlap on the device."""

from __future__ import annotations

from pipeschool.actions import Action, Schedule
from pipeschool.schedules.pieces import phases, v_stages


def dualpipe_v(p: int, m: int, batches: int = 1) -> Schedule:
    """Bubble (p - 1)(tF + max(0, tI - tW)), with tF, tI, tW of one chunk, tI <= tF and m >= 2p.

    So simulated, with the two of a pair F&B executed one after the other: p - 1 chunk times where
    tF = tI = tW = 1. That is half of the published (p - 1)(F&B + B - 3W), where B is a whole
    backward (DeepSeek-AI, DualPipe, "cut in half"; p is half the number of chunks there). The
    published figure is that of the same order with each pair as one action, which needs both
    inputs at its start and has both results at its end, as when the two really overlap; here the
    forward's result leaves before the backward begins.

    Every worker keeps p + 1/2 activations (2p + 1 chunks), and one copy of its weights where
    DualPipe keeps two. With m < 2p this is the first part of the order for 2p microbatches:
    worker s keeps min(2m, m + 1 + s, 2p + 1) chunks.

    Worker w holds stages w and 2p - 1 - w. Some backwards are split and some are whole.
    """
    return Schedule.from_workers(_order, p, m, batches=batches, name="dualpipe_v")


def _order(worker: int, p: int, m: int) -> list[Action]:
    below = p - 1 - worker  # workers further down the V
    whole = (worker + 1) // 2
    plan = [
        ("F0", 2 * below),
        ("F0 F1", worker + 1),
        ("I1 W F1", below),
        ("F0 B1 F1 B0", max(m, 2 * p) - 2 * p + worker + 1),
        ("B1 F1 B0", below),
        ("B1 B0", whole),
    ]
    if worker % 2 == 0:
        plan += [("B1 I0", 1), ("I1 I0", worker - whole)]
    else:
        plan += [("I1 I0", worker + 1 - whole)]
    plan += [("W I0", below), ("W", worker + 1)]
    return phases(v_stages(worker, p), m, *plan)
