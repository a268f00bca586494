"""A trace: what every worker did, from when to when. Simulated and measured runs give the same."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pipeschool.actions import Action, peak_in_flight
from pipeschool.memory import MemorySample, StageBytes, levels


class Span(NamedTuple):
    """One action as it happened. Times in seconds from the start of the run."""

    worker: int
    action: Action
    start: float
    end: float
    version: int = 0  # weight version that an F, B, I or W used, or that a U made
    alive: int = 1  # weight versions that the stage held while it ran
    bytes: float = 0.0  # size of what it handed to a neighbour stage
    # Measured: seconds for which something else had its worker's core, since its last compute.
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Trace:
    """Spans of compute and updates, and what can be read off them.

    `label` says where it comes from: ``predicted``, ``measured`` or ``measured, paced``.
    `messages` holds spans of sends and receives; a receive lasts while its worker waits.
    `stage_bytes` are the sizes of the stages, as far as they are known. `measured_memory` is what
    a run has counted, one list of levels per worker. `updates_meet`: do all workers wait for each
    other before the updates of a batch?
    """

    name: str
    p: int
    m: int
    v: int
    spans: tuple[Span, ...]
    label: str = "predicted"
    messages: tuple[Span, ...] = field(default=(), repr=False)
    stage_bytes: tuple[StageBytes, ...] = field(default=(), repr=False)
    measured_memory: tuple[tuple[MemorySample, ...], ...] = field(default=(), repr=False)
    updates_meet: bool = field(default=False, repr=False)

    @cached_property
    def rows(self) -> list[list[Span]]:
        """The spans of each worker, in the order in which it did them."""
        rows: list[list[Span]] = [[] for _ in range(self.p)]
        for span in self.spans:
            rows[span.worker].append(span)
        return rows

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    @cached_property
    def busy(self) -> list[float]:
        """Seconds of forward and backward work, one sum per worker; updates do not count."""
        return [sum(s.end - s.start for s in row if s.action.kind != "U") for row in self.rows]

    @property
    def bubble_of_total(self) -> float:
        """Idle share of all worker time: bubble / (p * makespan). GPipe's denominator."""
        total = self.p * self.makespan
        return (total - sum(self.busy)) / total if total else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over useful time: bubble / (m (tF + tB)). Megatron-LM's denominator (SC'21)."""
        useful = sum(self.busy)
        return (self.p * self.makespan - useful) / useful if useful else 0.0

    @cached_property
    def peak_activations(self) -> list[float]:
        """The most microbatches held at once, one per worker, in units of A.

        A is what one worker keeps for one microbatch, so a chunk counts 1/v.
        """
        peaks = [peak_in_flight(span.action for span in row) for row in self.rows]
        return [peak / self.v if peak % self.v else peak // self.v for peak in peaks]

    @cached_property
    def weight_versions(self) -> list[int]:
        """The most weight versions that a stage of each worker held at once."""
        return [max((span.alive for span in row), default=1) for row in self.rows]

    @cached_property
    def weight_copies(self) -> list[float]:
        """How often a worker holds its share of the model: versions, and copies of other stages.

        The unit is 1/p of one model, so a chunk counts 1/v. Above one for PipeDream, which keeps
        versions, and for Chimera, whose workers hold a stage of each of two models.
        """
        held: list[dict[int, int]] = [{} for _ in range(self.p)]
        for span in self.spans:
            stages = held[span.worker]
            stages[span.action.stage] = max(span.alive, stages.get(span.action.stage, 0))
        return [sum(stages.values()) / self.v for stages in held]

    @cached_property
    def staleness(self) -> list[int]:
        """How many updates old the weights behind a gradient were; the largest, one per worker.

        Update t makes version t + 1. If its gradients were computed on version u, it is t - u
        updates late. The largest value is that of the steady state.
        """
        late = [0] * self.p
        for worker, row in enumerate(self.rows):
            forward: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> version
            used: defaultdict[int, list[int]] = defaultdict(list)  # by the gradients of an update
            for span in row:
                kind, stage, microbatch = span.action
                if kind == "F":
                    forward[stage, microbatch] = span.version
                elif kind in ("B", "W"):
                    used[stage].append(
                        min(span.version, forward.pop((stage, microbatch), span.version))
                    )
                elif kind == "U" and used[stage]:
                    late[worker] = max(late[worker], span.version - 1 - min(used.pop(stage)))
        return late

    @cached_property
    def mismatched(self) -> list[list[tuple[int, int]]]:
        """(stage, microbatch) whose forward and backward used different weights, per worker."""
        mismatched: list[list[tuple[int, int]]] = []
        for row in self.rows:
            forward = {s.action[1:]: s.version for s in row if s.action.kind == "F"}
            mismatched.append(
                [
                    (s.action.stage, s.action.microbatch)
                    for s in row
                    if s.action.kind in ("B", "W")
                    and s.version != forward.get(s.action[1:], s.version)
                ]
            )
        return mismatched

    @property
    def version_bytes(self) -> list[float]:
        """Bytes of the weight versions that a worker held at its peak; 0 where not known.

        With several stages on a worker: if all held their most at the same time.
        """
        return [
            count * size
            for count, size in zip(self.weight_versions, self.parameter_bytes, strict=True)
        ]

    @property
    def parameter_bytes(self) -> list[float]:
        """Bytes of one version of the weights of each worker; 0 where not known."""
        sizes = self.stage_bytes
        stages = [sorted({span.action.stage for span in row}) for row in self.rows]
        return [sum(sizes[s].parameters for s in mine) if sizes else 0.0 for mine in stages]

    @cached_property
    def memory(self) -> list[list[MemorySample]]:
        """Bytes in the memory of each worker over time, level by level.

        Counted in a run that was asked to (`memory=True`), and empty in any other; of a simulation
        predicted from the sizes of the stages, and empty where they are not known.
        """
        if self.measured_memory:
            return [list(row) for row in self.measured_memory]
        if not self.stage_bytes or self.label.startswith("measured"):
            return []
        return [levels(row, self.stage_bytes) for row in self.rows]

    @property
    def peak_bytes(self) -> list[float]:
        """The most bytes in the memory of each worker at once; empty where not known."""
        return [max(level.total for level in row) for row in self.memory]

    def metrics(self) -> dict[str, object]:
        """The numbers above by name, as plain data."""
        return {
            "makespan": self.makespan,
            "bubble_of_total": self.bubble_of_total,
            "bubble_of_ideal": self.bubble_of_ideal,
            "peak_activations": self.peak_activations,
            "weight_versions": self.weight_versions,
            "staleness": self.staleness,
        }

    def to_chrome(self) -> str:
        """JSON for chrome://tracing and Perfetto: one thread per worker, times in microseconds."""
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": self._title()}}
        ]
        for worker in range(self.p):
            args = {"name": f"worker {worker}"}
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": worker, "args": args})
        for span in (*self.spans, *self.messages):
            events.append(
                {
                    "ph": "X",
                    "name": str(span.action),
                    "cat": span.action.kind,
                    "pid": 0,
                    "tid": span.worker,
                    "ts": span.start * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"microbatch": span.action.microbatch, "version": span.version},
                }
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def _title(self) -> str:
        return f"{self.name}, p={self.p}, m={self.m} ({self.label})"
