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

from stream2llm_sdk.traces.json_values import is_flat_json


class Kind(IntEnum):
    ONE = 1


SCALARS = st.one_of(
    st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.dictionaries(st.text(), SCALARS))
def test_flat_values_come_back_equal(value: dict[str, Any]) -> None:
    assert is_flat_json(value)
    assert json.loads(json.dumps(value, allow_nan=False)) == value


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
    ],
    ids=repr,
)
def test_others_are_to_be_looked_into(value: Any) -> None:
    assert not is_flat_json(value)
