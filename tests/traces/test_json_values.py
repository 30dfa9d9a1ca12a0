"""What JSON gives back as it was."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.traces.json_values import is_flat_json, json_text


class Kind(IntEnum):
    ONE = 1


# Halves of surrogate pairs too.
TEXTS = st.text(st.characters(exclude_categories=())) | st.lists(st.sampled_from(["a", "\ud83d", "\ude00"])).map(
    "".join
)
SCALARS = st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False))


@given(st.dictionaries(TEXTS, SCALARS))
def test_flat_values_come_back_equal(value: dict[str, Any]) -> None:
    if is_flat_json(value):
        assert json.loads(json.dumps(value, allow_nan=False)) == value


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.floats(-1e300, 1e300), st.none())))
def test_ordinary_values_are_flat(value: dict[str, Any]) -> None:
    assert is_flat_json(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "text",
        OrderedDict(a=1),
        {1: "a"},
        {"a": [1]},
        {"a": {"b": 1}},
        {"a": math.nan},
        {"a": 1, "b": math.inf},
        {"a": (1,)},
        {"a": b"bytes"},
        {"a": Kind.ONE},
        {"a": "\ud83d\ude00"},
        {"\ud83d": 1},
    ],
    ids=ascii,
)
def test_others_are_to_be_looked_into(value: Any) -> None:
    assert not is_flat_json(value)


@pytest.mark.parametrize(
    "value",
    [{"a": 10**5000}, {"a": math.nan}, {"a": (1,)}, {"a": "\ud83d\ude00"}, {1: 2}],
    ids=["long", "nan", "tuple", "halves", "number"],
)
def test_there_is_no_text_of_what_would_not_come_back(value: Any) -> None:
    assert json_text(value) is None


def test_the_text_of_a_value_gives_it_back() -> None:
    value = {"a": [1, {"b": None}], "c": 0.1}
    assert json.loads(json_text(value) or "") == value
