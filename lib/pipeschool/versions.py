"""Which weight version a forward and a backward use: pure book-keeping, no tensors.

A *policy* decides; a `Ledger` applies it to one stage and counts. The simulator keeps ledgers to
predict versions and staleness; the workers keep the same ledgers to know which tensors to use.
Version 0 is the weights at the start, update t makes version t + 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from pipeschool.actions import Action, IllegalSchedule, Schedule, require_schedule


class Policy:
    """Four questions about the weight versions of one stage. A subclass answers them otherwise.

    This one answers: a forward uses the newest version, its backward the same one again.

    Attributes: `stage` (counted from 0), `stages` (how many there are) and `m` (microbatches in
    one update).
    """

    name = "policy"
    in_place = False  # True: an update overwrites the version that microbatches in flight use

    def __init__(self, stage: int = 0, stages: int = 1, m: int = 1):
        self.stage = stage
        self.stages = stages
        self.m = m

    @property
    def most_in_flight(self) -> int | None:
        """With more microbatches in flight at a stage, a version may be asked for before it is
        there; None where there may be any number."""
        return None

    def forward(self, microbatch: int, newest: int) -> int:
        """The version that the forward of `microbatch` uses."""
        return newest

    def backward(self, microbatch: int, used: int, newest: int) -> int:
        """The version that the backward uses; `used` is the one that its forward used."""
        return used

    def oldest_needed(self, next_microbatch: int, newest: int) -> int:
        """The oldest version that forwards from `next_microbatch` on may still ask for.

        Older ones are dropped as soon as no microbatch in flight uses them.
        """
        return newest


class Flush(Policy):
    """Synchronous: an update waits until nothing is in flight, so one version is enough."""

    name = "flush"


class Frozen(Policy):
    """No training, and so one version: forwards alone."""

    name = "frozen"


class Latest(Policy):
    """No versions at all, wrong on purpose: the backward meets whatever the weights are by then."""

    name = "latest"
    in_place = True

    def backward(self, microbatch: int, used: int, newest: int) -> int:
        """The newest: the one that the forward used has been overwritten."""
        return newest


class Stash(Policy):
    """PipeDream's weight stashing: a version is kept while a microbatch in flight needs it."""

    name = "stash"


class VerticalSync(Policy):
    """PipeDream's vertical sync: a microbatch uses the same version at every stage.

    It is the newest one that stage 0 has when the microbatch enters, after k - (stages - 1)
    backwards. So every stage is as late as stage 0.
    """

    name = "vertical_sync"

    @property
    def most_in_flight(self) -> int:
        """As many as there are stages, as in 1F1B: that many forwards come before the version."""
        return self.stages

    def forward(self, microbatch: int, newest: int) -> int:
        """What stage 0 had when it let the microbatch in."""
        return max(microbatch - (self.stages - 1), 0) // self.m

    def oldest_needed(self, next_microbatch: int, newest: int) -> int:
        """The next microbatch's own version; later ones ask for newer versions only."""
        return self.forward(next_microbatch, newest)


class DoubleBuffer(Policy):
    """PipeDream-2BW: an update every m microbatches, and never more than two versions.

    The microbatches of batch b use version b - 1: the one before the newest, which they can be
    sure of while the batch before them is still on its way (Narayanan et al., ICML 2021).
    """

    name = "double_buffer"

    @property
    def most_in_flight(self) -> int:
        """The batch before, and the first microbatch of the one that enters."""
        return self.m + 1

    def forward(self, microbatch: int, newest: int) -> int:
        """One version behind the batch, at every stage."""
        return max(microbatch // self.m - 1, 0)

    def oldest_needed(self, next_microbatch: int, newest: int) -> int:
        """The version of the next microbatch's batch."""
        return self.forward(next_microbatch, newest)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Flush, Frozen, Latest, Stash, VerticalSync, DoubleBuffer)
}


def policy_named(policy: str | type[Policy]) -> type[Policy]:
    """The policy called that, or the class itself; ValueError, naming those there are, if none."""
    if isinstance(policy, type) and issubclass(policy, Policy):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]
    raise ValueError(
        f"there is no weight policy {policy!r}; choose one of {', '.join(POLICIES)}, "
        "or give a subclass of Policy"
    )


def with_weights(schedule: Schedule, weights: str | type[Policy] | None) -> Schedule:
    """`schedule` under the policy asked for; None leaves it its own. ValueError where a synchronous
    schedule is to do without its flush, or an asynchronous one to flush, and where it is none."""
    require_schedule(schedule)
    if weights is None or weights == schedule.weights:
        return schedule
    policy_named(weights)
    if schedule.synchronous:
        raise ValueError(
            f"{schedule.name} is synchronous and needs weights='flush', not {weights!r}"
        )
    if not schedule.trains:
        raise ValueError(f"{schedule.name} does not train, so it needs weights='frozen'")
    if weights in ("flush", "frozen"):
        why = "never flushes" if weights == "flush" else "trains"
        raise ValueError(
            f"{schedule.name} {why}, so it needs another policy than weights={weights!r}"
        )
    return replace(schedule, weights=weights)


def ledger(schedule: Schedule, stage: int, worker: int) -> Ledger:
    """A fresh ledger for `stage` on `worker`, with the policy that `schedule` names; where that
    leaves no choice of versions, a quicker one."""
    if schedule.synchronous or not schedule.trains:
        return OneVersion()
    policy = policy_named(schedule.weights)(stage, schedule.stages, schedule.updates_every)
    turns = schedule.microbatches_of(stage, worker)
    return Ledger(policy, first=turns.start, step=turns.step)


def ledgers(schedule: Schedule) -> list[dict[int, Ledger]]:
    """For each worker, a fresh ledger for every stage that it holds."""
    return [
        {stage: ledger(schedule, stage, worker) for stage in schedule.stages_of(worker)}
        for worker in range(schedule.p)
    ]


@dataclass
class Ledger:
    """The weight versions of one stage as its actions go by."""

    policy: Policy
    first: int = 0  # microbatch that comes here; others take turns where `step` is above 1
    step: int = 1
    newest: int = 0
    oldest: int = 0  # that a forward may still ask for
    entered: int = 0  # microbatches that have gone forward; they do so in order
    used: dict[int, int] = field(default_factory=dict)  # microbatch in flight -> its version
    users: Counter[int] = field(default_factory=Counter)  # version -> microbatches in flight

    def record(self, action: Action) -> tuple[int, int]:
        """Record `action`; returns the version that it uses (or, for U, makes) and how many
        versions the stage holds meanwhile. IllegalSchedule where there is no such version."""
        kind, _, microbatch = action
        if kind == "F":
            version = self._held(self.policy.forward(microbatch, self.newest), action)
            self.used[microbatch] = version
            self.users[version] += 1
            self.entered += 1
            held = self.alive
            self._look_ahead()
            return version, held
        if kind == "U":
            self.newest += 1
            self._look_ahead()
            return self.newest, self.alive
        used = self.used[microbatch]
        version = self._held(self.policy.backward(microbatch, used, self.newest), action)
        if version != used and not self.policy.in_place:
            raise IllegalSchedule(
                f"{action.describe()} asks for weight version {version}, but its forward used "
                f"{used}, and the graph holds on to that: only an in_place policy may differ",
                action=action,
            )
        held = self.alive
        if kind != "I":  # the input half of a split backward leaves the weight half to come
            del self.used[microbatch]
            self.users[used] -= 1
            if not self.users[used]:
                del self.users[used]
        return version, held

    def holds(self, version: int) -> bool:
        """Must `version` be in memory now?"""
        return version in range(self.oldest, self.newest + 1) or version in self.users

    @property
    def alive(self) -> int:
        """How many versions must be in memory now."""
        if self.policy.in_place:
            return 1
        recent = self.newest - self.oldest + 1
        return recent + sum(version < self.oldest for version in self.users)

    def _look_ahead(self) -> None:
        needed = self.policy.oldest_needed(self.first + self.entered * self.step, self.newest)
        if not hasattr(needed, "__index__"):
            raise ValueError(
                f"oldest_needed of {type(self.policy).__name__} must give the number of a weight "
                f"version, not {needed!r}"
            )
        self.oldest = min(max(needed, self.oldest), self.newest)

    def _held(self, version: int, action: Action) -> int:
        """`version`, where the stage has it; in place it has the newest and nothing else."""
        in_place = self.policy.in_place
        if version == self.newest if in_place else self.holds(version):
            return version
        held = [self.newest] if in_place else filter(self.holds, range(self.newest + 1))
        raise IllegalSchedule(
            f"{action.describe()} asks for weight version {version}, but the stage holds only "
            f"{', '.join(map(str, held))}",
            action=action,
        )


@dataclass
class OneVersion(Ledger):
    """The ledger of a stage that flushes before each update, or has none: there is no choice."""

    policy: Policy = field(default_factory=Flush)

    def record(self, action: Action) -> tuple[int, int]:
        """The newest version; `Ledger` would find the same."""
        if action.kind == "U":
            self.newest += 1
            self.oldest = self.newest
        return self.newest, 1
