"""Files of arrivals hold times or waits, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stream2llm_sdk.context import Append
from stream2llm_sdk.errors import ConfigurationError, TraceError
from stream2llm_sdk.traces.arrivals_file import read_arrival_times, with_arrivals, write_arrival_times
from stream2llm_sdk.traces.trace import TimedUpdate, Trace


def test_waits_add_up_and_times_stand_for_themselves(tmp_path: Path) -> None:
    (file := tmp_path / "poisson_delays_1.txt").write_text("0.5\n\n1.25\n1.25\n")
    assert read_arrival_times(file, delays=True) == [0.5, 1.75, 3.0]
    assert read_arrival_times(file, delays=False) == [0.5, 1.25, 1.25]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(times=st.lists(st.floats(0, allow_infinity=False), min_size=1, max_size=5).map(sorted), delays=st.booleans())
def test_times_are_read_exactly_as_they_were_written(times: list[float], delays: bool, tmp_path: Path) -> None:
    write_arrival_times(times, file := tmp_path / "arrivals.txt", delays=delays)
    assert read_arrival_times(file, delays=delays) == times


@pytest.mark.parametrize(
    ("content", "delays", "row"),
    [
        ("1\nsoon\n", True, 2),
        ("1\n-1\n", True, 2),
        ("1\nnan\n", False, 2),
        ("inf\n", False, 1),
        ("1e308\n1e308\n", True, 2),
        ("2\n1\n", False, 2),
        ("1 2\n", True, 1),
        ("", True, None),
        ("\n\n", True, None),
    ],
)
def test_a_bad_line_is_named(content: str, delays: bool, row: int | None, tmp_path: Path) -> None:
    (file := tmp_path / "arrivals.txt").write_text(content)
    with pytest.raises(TraceError) as caught:
        read_arrival_times(file, delays=delays)
    assert (caught.value.file, caught.value.row) == (file, row)


def test_a_missing_file_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_arrival_times(tmp_path / "missing.txt", delays=True)
    (file := tmp_path / "binary.txt").write_bytes(b"1\n\xff")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_arrival_times(file, delays=True)


@pytest.mark.parametrize("times", [[], [2.0, 1.0], [float("nan")], [-1.0], [float("inf")]])
def test_what_are_no_arrivals_are_not_written(times: list[float], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        write_arrival_times(times, tmp_path / "arrivals.txt", delays=True)
    assert not (tmp_path / "arrivals.txt").exists()


def test_traces_take_arrivals_in_their_order() -> None:
    traces = [Trace(name, "", (TimedUpdate(0, Append(())),)) for name in "ab"]
    assert [trace.arrival_s for trace in with_arrivals(traces, [1.0, 2.0, 3.0])] == [1.0, 2.0]
    with pytest.raises(ConfigurationError, match="1 arrivals for 2 traces"):
        with_arrivals(traces, [1.0])
