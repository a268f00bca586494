"""Arguments that are numbers: read, or refused in one sentence that names the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence


def whole_number(name: str, value: object, at_least: int = 1) -> int:
    """`value` as an int of `at_least` or more; otherwise ValueError, in one sentence."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be a whole number of at least {at_least}, not {value!r}")
    number = int(value.__index__())
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {number}")
    return number


def per_item(name: str, value: float | Sequence[float], count: int, item: str) -> list[float]:
    """`value` as a list of `count` numbers; ValueError where it is a list of another length."""
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise ValueError(f"{name} needs one number, or one per {item}: {count}, not {len(value)}")
    return [float(x) for x in value]


def number(name: str, value: object, positive: bool = False, infinite: bool = False) -> float:
    """`value` as a float of 0 or more; otherwise ValueError, in one sentence.

    `positive` refuses 0 as well, `infinite` allows infinity.
    """
    wrong = f"{name} must be a number, {'above 0' if positive else '0 or more'}, not {value!r}"
    if isinstance(value, (str, bytes, bool)):  # float() would take them
        raise ValueError(wrong)
    try:
        result = float(value)  # type: ignore[arg-type]  # whether it can is the question
    except (TypeError, ValueError):
        raise ValueError(wrong) from None
    finite = math.isfinite(result) or (infinite and result == math.inf)
    if not finite or result < 0 or (positive and result == 0):
        raise ValueError(wrong)
    return result


def numbers(
    name: str, value: object, positive: bool = False, infinite: bool = False
) -> float | tuple[float, ...]:
    """`value` as a float, or as floats where it is a list, a tuple or an array of numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(number(name, item, positive, infinite) for item in value)
    return number(name, value, positive, infinite)
