"""Which weight version a forward and a backward use: pure book-keeping, no tensors.

A *policy* decides; a `Ledger` applies it to one stage and counts. The simulator keeps ledgers to
predict versions and staleness; the workers keep the same ledgers to know which tensors to use.
Version 0 is the weights at the start, update t makes version t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeschool.actions import Action


class Policy:
    """Every microbatch uses the newest version in its forward, and the same in its backward."""

    name = "policy"

    def forward(self, microbatch: int, newest: int) -> int:
        """The version that the forward of `microbatch` uses."""
        return newest

    def backward(self, microbatch: int, used: int, newest: int) -> int:
        """The version that the backward uses; `used` is the one that its forward used."""
        return used


class Flush(Policy):
    """Synchronous: an update waits until nothing is in flight, so one version is enough."""

    name = "flush"


class Stash(Policy):
    """PipeDream's weight stashing: a version is kept while a microbatch in flight needs it."""

    name = "stash"


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Flush, Stash)}


def policy_named(name: str) -> Policy:
    """The policy called `name`; ValueError, naming those there are, where there is none."""
    if name not in POLICIES:
        raise ValueError(f"there is no weight policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()


@dataclass
class Ledger:
    """The weight versions of one stage as its actions go by."""

    policy: Policy
    newest: int = 0
    used: dict[int, int] = field(default_factory=dict)  # microbatch in flight -> its version
    users: dict[int, int] = field(default_factory=dict)  # version -> how many in flight use it

    def note(self, action: Action) -> tuple[int, int]:
        """Note `action`; returns the version that it uses (or, for U, makes) and how many
        versions the stage holds meanwhile."""
        kind, _, microbatch = action
        if kind == "F":
            version = self.policy.forward(microbatch, self.newest)
            self.used[microbatch] = version
            self.users[version] = self.users.get(version, 0) + 1
            return version, self.alive
        if kind == "U":
            self.newest += 1
            return self.newest, self.alive
        forward_version = self.used[microbatch]
        version = self.policy.backward(microbatch, forward_version, self.newest)
        held = self.alive
        if kind != "I":  # the input half of a split backward leaves the weight half to come
            del self.used[microbatch]
            self.users[forward_version] -= 1
            if not self.users[forward_version]:
                del self.users[forward_version]
        return version, held

    @property
    def alive(self) -> int:
        """How many versions must be in memory now: the newest, and those still in use."""
        return len(self.users) + (self.newest not in self.users)
