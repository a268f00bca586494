"""Says where a worker is, for those who watch over the run."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from pipeschool.actions import Action
from pipeschool.runtime.observers.observer import Observer


class Position(Observer):
    """Writes into ``board[process]`` which action of its `row` is under way; -1 is before all."""

    def __init__(self, board: MutableSequence[int], process: int, row: Sequence[Action]):
        self.board = board
        self.process = process
        self.row = row
        self.place_of = {action: place for place, action in enumerate(row)}

    def before(self, action: Action) -> None:
        """`action` is under way."""
        self.board[self.process] = self.place_of[action]

    def move_to(self, place: int) -> None:
        """The action at `place` in the row is next; its length is the end."""
        self.board[self.process] = place
