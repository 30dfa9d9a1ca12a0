"""A trace holds what was recorded, and refuses what cannot have been."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stream2llm_sdk.context import Append
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces import TimedFailure, TimedUpdate, Trace


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"offset_s": -1}, "offset_s=-1"),
        ({"offset_s": math.nan}, "offset_s=nan"),
        ({"update": ()}, "not tuple"),
        ({"begin_s": -0.5}, "begin_s=-0.5"),
        ({"begin_s": 1.5}, "begin_s=1.5 is after offset_s=1.0"),
        ({"begin_s": "0"}, "begin_s='0'"),
        ({"iterations": (3, 2)}, "iterations=.3, 2."),
        ({"iterations": (-1, 2)}, "iterations"),
        ({"iterations": [0, 2]}, "iterations"),
        ({"iterations": (0.5, 2)}, "iterations"),
    ],
)
def test_an_update_that_cannot_be_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        TimedUpdate(**{"offset_s": 1.0, "update": Append(()), **fields})


def test_a_failure_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="offset_s=-1"):
        TimedFailure(-1, "a", "b")
    with pytest.raises(ConfigurationError, match="source is a text, not NoneType"):
        TimedFailure(1, None, "b")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'a': failures holds 'b'"):
        Trace("a", "", (TimedUpdate(1, Append(())),), failures=("b",))  # type: ignore[arg-type]


def test_stretching_moves_begins_and_failures_too() -> None:
    updates = (TimedUpdate(1.0, Append(()), 0.0), TimedUpdate(2.0, Append(()), 0.5), TimedUpdate(4.0, Append(()), 3.0))
    trace = Trace("a", "", updates, failures=(TimedFailure(0.5, "x", "no"), TimedFailure(3.0, "y", "no")))

    def moments(trace: Trace) -> list[tuple[float | None, float]]:
        return [(timed.begin_s, timed.offset_s) for timed in trace.updates]

    assert moments(trace.stretched(2.0)) == [(0.0, 2.0), (1.0, 4.0), (6.0, 8.0)]
    assert [failure.offset_s for failure in trace.stretched(2.0).failures] == [1.0, 6.0]
    assert moments(trace.stretched(2.0, first=False)) == [(0.0, 1.0), (0.5, 3.0), (5.0, 7.0)]
    assert [failure.offset_s for failure in trace.stretched(2.0, first=False).failures] == [0.5, 5.0]
