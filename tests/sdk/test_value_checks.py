"""What counts as a number, and what as a whole one."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stream2llm_sdk.value_checks import is_number, is_whole, plain


@pytest.mark.parametrize("value", [True, "1", None, [1], math.nan, math.inf, -1, 10**400, np.int64(1), 1j])
def test_what_is_no_number_of_0_or_more(value: Any) -> None:
    assert not is_number(value)


@pytest.mark.parametrize("value", [True, "1", None, 1.0, -1, 9, np.int64(1)])
def test_what_is_no_whole_number_of_0_to_8(value: Any) -> None:
    assert not is_whole(value, 0, 8)


def test_bounds_are_part_of_what_they_bound_unless_it_is_to_be_above() -> None:
    assert is_number(2, 2, 3)
    assert is_number(3.0, 2, 3)
    assert not is_number(2, 2, 3, above=True)
    assert is_whole(2, 2, 3)
    assert is_whole(3, 2, 3)


@pytest.mark.parametrize(
    ("value", "expected"), [(np.int8(5), 5), (np.float32(0.5), 0.5), (Fraction(1, 2), 0.5), ("1", "1"), (True, True)]
)
def test_numbers_of_others_become_plain_ones(value: Any, expected: Any) -> None:
    found = plain(value)
    assert (found, type(found)) == (expected, type(expected))
