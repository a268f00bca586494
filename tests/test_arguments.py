"""Arguments that are numbers: what passes, and what is refused in which words."""

from __future__ import annotations

import math

import pytest
from pipeschool.arguments import number, numbers, per_item, whole_number


@pytest.mark.parametrize("value", [3, True + 2])
def test_whole_numbers_pass(value: int) -> None:
    assert whole_number("n", value) == 3


def test_whole_numbers_of_other_libraries_pass_as_ints() -> None:
    numpy = pytest.importorskip("numpy")
    assert type(whole_number("n", numpy.int64(3))) is int


@pytest.mark.parametrize(
    ("value", "at_least", "says"),
    [
        (0, 1, "n must be at least 1, not 0"),
        (-1, 0, "n must be at least 0, not -1"),
        (True, 1, "n must be a whole number of at least 1, not True"),
        (1.0, 1, "n must be a whole number of at least 1, not 1.0"),
        ("3", 0, "n must be a whole number of at least 0, not '3'"),
        (None, 1, "n must be a whole number of at least 1, not None"),
    ],
)
def test_what_is_no_whole_number_is_refused(value: object, at_least: int, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        whole_number("n", value, at_least)
    assert str(caught.value) == says


def test_number_returns_a_float_of_what_it_is_given() -> None:
    assert number("x", 3) == 3.0
    assert isinstance(number("x", 3), float)
    assert number("x", math.inf, infinite=True) == math.inf


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1", None, [1]])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError) as caught:
        number("x", value)
    assert str(caught.value) == f"x must be a number, 0 or more, not {value!r}"


def test_zero_is_refused_where_a_number_must_be_positive() -> None:
    with pytest.raises(ValueError, match="^x must be a number, above 0, not 0$"):
        number("x", 0, positive=True)


def test_numbers_are_one_or_many() -> None:
    numpy = pytest.importorskip("numpy")
    assert numbers("x", 2) == 2.0
    assert numbers("x", [1, 2]) == numbers("x", numpy.array([1, 2])) == (1.0, 2.0)
    with pytest.raises(ValueError, match="^x must be a number, 0 or more, not '2'$"):
        numbers("x", [1, "2"])


def test_one_number_stands_for_every_item() -> None:
    assert per_item("x", 2, 3, "stage") == [2.0, 2.0, 2.0]
    assert per_item("x", (1, 2), 2, "stage") == [1.0, 2.0]
    with pytest.raises(ValueError, match="^x needs one number, or one per stage: 3, not 2$"):
        per_item("x", [1, 2], 3, "stage")
