"""Par: the least makespan there is, from OR-tools' CP-SAT solver. What a schedule is judged by.

Every action is an interval on its worker's time line. The solver looks for starts that keep the
dependencies and the memory, and proves that no others end sooner.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from pipeschool.actions import Action, F, Schedule
from pipeschool.arguments import number
from pipeschool.cost import Cost
from pipeschool.dependencies import Channel
from pipeschool.greedy_schedule import greedy
from pipeschool.problem import Problem, problem
from pipeschool.simulator import simulate
from pipeschool.trace import Trace

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar, LinearExprT

FINEST = 10_000  # ticks of the solver's clock in the longest time there is


class Par(NamedTuple):
    """What `par` found. `proven`: no schedule is faster. `bound`: none takes fewer seconds."""

    schedule: Schedule
    proven: bool
    bound: float


def par(
    p: int,
    m: int,
    *,
    placement: str = "loop",
    v: int | None = None,
    split: bool = False,
    memory_cap: float | Sequence[float] | None = None,
    cost: Cost | None = None,
    seconds: float = 60.0,
    name: str = "par",
) -> Par:
    """The schedule of one batch with the least makespan, as `simulate` measures it with `cost`.

    placement, v, split, memory_cap: as in `problem`.
    seconds: how long to search. When they are over, the best schedule so far comes back with
        `proven` False, and `bound` says how much faster another could be. Where they are enough,
        the same arguments give the same schedule.

    Microbatches keep their order in each kind of work on each stage. That loses nothing, because
    they are all alike. When the n-th forward of a stage starts, in whatever order, n microbatches
    have arrived; so the first n to arrive have. Number them anew on every stage as they come, and
    the same starts and ends are a schedule in order.

    Raises ValueError where the times have no common measure that is coarse enough, where a forward
    or backward takes no time, and where an update takes any: it is not planned for.
    """
    number("seconds", seconds, positive=True)
    cost = cost or Cost()
    sizes = problem(p, m, placement=placement, v=v, split=split, memory_cap=memory_cap, cost=cost)
    ticks = _ticks_per_second(sizes)
    best = greedy(
        p, m, placement=placement, v=v, split=split, memory_cap=memory_cap, cost=cost, name=name
    )
    trace = simulate(best, cost)
    least = lower_bound(sizes)
    bound = float(least)
    if not math.isclose(trace.makespan, bound):
        rows, proved = _SolverModel(sizes, ticks, trace, least).solve(seconds)
        bound = max(bound, proved)
        if rows:
            best = Schedule.from_workers(lambda worker, p, m: rows[worker], p, m, name=name)
            trace = simulate(best, cost)
    return Par(best, math.isclose(trace.makespan, bound), bound)


def lower_bound(sizes: Problem) -> Fraction:
    """Seconds that no schedule can do without; not always enough for one.

    A worker needs the time of all its work, of what has to be done elsewhere before its first
    action, and of what has to be done elsewhere after its last.
    """
    before: dict[Action, Fraction] = {}
    after: dict[Action, Fraction] = {}

    def walk(action: Action, start: Fraction) -> Fraction:
        """Note the least time before and after `action`; return that from its start on."""
        before[action], after[action] = start, Fraction(0)
        end = start + sizes.duration(action)
        for following in sizes.followers(action):
            message = sizes.message(action, following)
            lag = message.transfer + message.latency if message else Fraction(0)
            after[action] = max(after[action], lag + walk(following, end + lag))
        return sizes.duration(action) + after[action]

    walk(F(0, 0), Fraction(0))  # one microbatch is like another
    rows = [[a for a in before if sizes.worker(a) == w] for w in range(sizes.unordered.p)]
    return max(
        min(before[a] for a in row)
        + sizes.unordered.m * sum(sizes.duration(a) for a in row)
        + min(after[a] for a in row)
        for row in rows
    )


def _ticks_per_second(sizes: Problem) -> int:
    """How fast the solver's clock has to tick so that every time is a whole number of ticks."""
    kinds = "FIW" if sizes.split else "FB"
    work = [time for kind in kinds for time in sizes.seconds[kind]]
    if any(sizes.seconds["U"]):
        raise ValueError("par plans forwards and backwards alone: update must be 0")
    if not all(work):
        raise ValueError("par needs forwards and backwards that take more than 0 seconds")
    times = [*work, *sizes.transfer, sizes.latency]
    ticks = math.lcm(*(time.denominator for time in times))
    if max(times) * ticks > FINEST:
        raise ValueError(
            f"par needs times that are multiples of one step, with at most {FINEST} steps in the "
            f"longest, not {int(max(times) * ticks)}: round them"
        )
    return ticks


class _SolverModel:
    """The problem as the solver sees it, in ticks. `known` is a schedule to start from."""

    def __init__(self, sizes: Problem, ticks: int, known: Trace, least: Fraction) -> None:
        from ortools.sat.python import cp_model  # slow to import, and most never need it

        self.solver, self.model = cp_model.CpSolver(), cp_model.CpModel()
        self.sizes, self.ticks = sizes, ticks
        self.horizon = round(known.makespan * ticks)
        self.rows = [[a for a in row if a.kind != "U"] for row in sizes.unordered.workers]
        self.length = {a: int(sizes.duration(a) * ticks) for row in self.rows for a in row}
        self.start = {a: self._time(str(a)) for a in self.length}
        self.end: dict[Action, LinearExprT] = {
            a: start + self.length[a] for a, start in self.start.items()
        }
        for span in known.spans:
            if span.action in self.start:
                self.model.add_hint(self.start[span.action], round(span.start * ticks))
        self._one_at_a_time()
        self._dependencies()
        self._memory()
        self.makespan = self.model.new_int_var(math.ceil(least * ticks), self.horizon, "makespan")
        self.model.add_max_equality(self.makespan, list(self.end.values()))
        self.model.minimize(self.makespan)

    def solve(self, seconds: float) -> tuple[list[list[Action]] | None, float]:
        """The rows found, None where there was no time for any; seconds that none can beat."""
        parameters = self.solver.parameters
        parameters.max_time_in_seconds = seconds
        parameters.num_workers, parameters.random_seed = 1, 0  # the same answer every time
        status = self.solver.status_name(self.solver.solve(self.model))
        bound = self.solver.best_objective_bound / self.ticks
        if status not in ("OPTIMAL", "FEASIBLE"):
            return None, bound
        start = {a: self.solver.value(variable) for a, variable in self.start.items()}
        return [sorted(row, key=start.__getitem__) for row in self.rows], bound

    def _time(self, name: str = "") -> IntVar:
        return self.model.new_int_var(0, self.horizon, name)

    def _one_at_a_time(self) -> None:
        """A worker does one action at a time; microbatches keep their order."""
        for row in self.rows:
            spans = [(self.start[a], self.length[a], str(a)) for a in row]
            self.model.add_no_overlap(
                [self.model.new_fixed_size_interval_var(*span) for span in spans]
            )
        for action, start in self.start.items():
            if action.microbatch:
                self.model.add(start >= self.end[action._replace(microbatch=action.microbatch - 1)])

    def _dependencies(self) -> None:
        """What an action needs has arrived; messages leave a channel as they entered it."""
        on_channel: defaultdict[Channel, list[tuple[Action, LinearExprT, int]]] = defaultdict(list)
        for action in self.start:
            for following in self.sizes.followers(action):
                arrival = self.end[action]
                if message := self.sizes.message(action, following):
                    if transfer := int(message.transfer * self.ticks):
                        left = self._time()
                        self.model.add(left >= arrival + transfer)
                        on_channel[message.channel].append((action, left, transfer))
                        arrival = left
                    arrival += int(message.latency * self.ticks)
                self.model.add(self.start[following] >= arrival)
        for messages in on_channel.values():
            for (one, one_left, one_takes), (two, two_left, two_takes) in combinations(messages, 2):
                first = self.model.new_bool_var("")
                for order, a, b in ((first, one, two), (~first, two, one)):
                    self.model.add(self.start[b] >= self.end[a]).only_enforce_if(order)
                self.model.add(two_left >= one_left + two_takes).only_enforce_if(first)
                self.model.add(one_left >= two_left + one_takes).only_enforce_if(~first)

    def _memory(self) -> None:
        """A chunk's activations lie on its worker from the forward to the end of the backward."""
        last = "W" if self.sizes.split else "B"
        for cap, row in zip(self.sizes.caps or (), self.rows, strict=False):
            forwards = [a for a in row if a.kind == "F"]
            if cap < len(forwards):
                held = [
                    self.model.new_interval_var(
                        self.start[a], self._time(), self.end[a._replace(kind=last)], ""
                    )
                    for a in forwards
                ]
                self.model.add_cumulative(held, [1] * len(held), cap)
