"""What values that somebody gives must be, whatever their type. NumPy's numbers are numbers."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

__all__ = ["is_number", "is_whole"]


def is_number(value: Any, least: float = 0.0, most: float = math.inf, *, above: bool = False) -> bool:
    """Whether it is a finite number, no bool, of `least` to `most`; `above`, if `least` itself is too little."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        number = float(value)
    except OverflowError:
        return False
    return least <= number <= most and number < math.inf and (number > least or not above)


def is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    """Whether it is a whole number, no bool, of `least` to `most`."""
    return not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) <= most
