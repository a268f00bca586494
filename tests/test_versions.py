"""The ledger of weight versions, step by step, against sequences worked out by hand."""

from __future__ import annotations

import pytest
from pipeschool.actions import Action
from pipeschool.versions import POLICIES, Flush, Ledger, Policy, Stash, policy_named


def replay(policy: Policy, text: str) -> list[tuple[int, int]]:
    """(version used or made, versions held) of each action in `text`."""
    ledger = Ledger(policy)
    return [ledger.note(Action.parse(word)) for word in text.split()]


def test_a_flush_keeps_one_version() -> None:
    text = "0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0B3 0U1"
    assert replay(Flush(), text) == [(0, 1)] * 4 + [(1, 1)] * 5 + [(2, 1)]


def test_stashing_gives_the_backward_the_version_of_its_forward() -> None:
    # Worker 0 of two: one microbatch deep, so one update late.
    text = "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2"
    assert replay(Stash(), text) == [
        (0, 1), (0, 1), (0, 1), (1, 2),  # 0F1 still needs version 0
        (1, 2), (0, 2), (2, 2),  # 0F2 needs version 1
        (1, 2), (3, 1),
    ]  # fmt: skip


def test_a_version_is_dropped_with_its_last_user_and_not_before() -> None:
    text = "0F0 0F1 0B0 0U0 0B1 0U1"
    assert replay(Stash(), text) == [(0, 1), (0, 1), (0, 1), (1, 2), (0, 2), (2, 1)]


def test_a_split_backward_holds_its_version_until_the_weight_half() -> None:
    text = "0F0 0I0 0F1 0W0 0U0 0I1 0W1 0U1"
    assert replay(Stash(), text) == [
        (0, 1), (0, 1), (0, 1), (0, 1), (1, 2), (0, 2), (0, 2), (2, 1),
    ]  # fmt: skip


def test_a_ledger_asks_its_policy_with_what_it_knows() -> None:
    class Curious(Policy):
        """Forwards on the first version, backwards on the newest; notes what it is asked."""

        in_place = True

        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[int, ...]] = []

        def forward(self, microbatch: int, newest: int) -> int:
            self.asked.append((microbatch, newest))
            return 0

        def backward(self, microbatch: int, used: int, newest: int) -> int:
            self.asked.append((microbatch, used, newest))
            return newest

        def oldest_needed(self, next_microbatch: int, newest: int) -> int:
            return 0

    policy = Curious()
    assert [version for version, _ in replay(policy, "0F0 0U0 0F1 0U1 0B1 0B0")] == [
        0,
        1,
        0,
        2,
        2,
        2,
    ]
    assert policy.asked == [(0, 0), (1, 1), (1, 0, 2), (0, 0, 2)]


def test_every_policy_is_found_by_its_name() -> None:
    for name, policy in POLICIES.items():
        assert policy_named(name) is policy
        assert policy.name == name
    assert {"flush", "stash"} <= POLICIES.keys()


@pytest.mark.parametrize("name", ["", "Stash", "guess"])
def test_an_unknown_policy_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        policy_named(name)
    assert str(caught.value) == (
        f"there is no weight policy {name!r}; choose one of {', '.join(POLICIES)}, "
        "or give a subclass of Policy"
    )
