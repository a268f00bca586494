"""What happens around every action of a row: pace, clock, meter and the like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeschool.actions import Action


class Observer:
    """Is told before and after each action of a worker. A subclass overrides one or both."""

    def before(self, action: Action) -> None:
        """`action` is about to start; its worker has nothing else under way."""

    def after(self, action: Action) -> None:
        """`action` has been done."""


def observed(row: Sequence[Action], observers: Sequence[Observer]) -> Iterator[Action]:
    """The actions of `row`, with every observer told before and after each: in their order before,
    in the opposite order after, so that the first one sees what all others add."""
    before = [o.before for o in observers if type(o).before is not Observer.before]
    after = [o.after for o in reversed(observers) if type(o).after is not Observer.after]
    for action in row:
        for tell in before:
            tell(action)
        yield action
        for tell in after:
            tell(action)
