"""What values that somebody gives must be, whatever their type."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

__all__ = ["is_number", "is_whole", "plain", "plain_numbers"]


def is_number(value: Any, least: float = 0.0, most: float = math.inf, *, above: bool = False) -> bool:
    """Whether it is a finite number, no bool, of `least` to `most`; `above`, if `least` itself is too little."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        number = float(value)
    except OverflowError:
        return False
    return least <= number <= most and number < math.inf and (number > least or not above)


def is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    """Whether it is a whole number, no bool, of `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def plain(value: Any) -> Any:
    """A number of another library, such as NumPy, as one of Python, which does not overflow and which JSON takes;
    anything else as it is."""
    if isinstance(value, (int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def plain_numbers(options: Any) -> None:
    """Makes all numbers of a frozen dataclass plain ones."""
    for field in fields(options):
        object.__setattr__(options, field.name, plain(getattr(options, field.name)))
