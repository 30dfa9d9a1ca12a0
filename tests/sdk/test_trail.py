"""The trail of a request: order, intervals, figures and formats."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.trail import EventTrail, EventType, Interval, TrailEvent

Q, S, K = EventType.QUEUED, EventType.SCHEDULED, EventType.KV_ON_GPU
PREEMPTED, FINISHED, ABORTED = EventType.PREEMPTED_RECOMPUTE, EventType.FINISHED, EventType.ABORTED
CHUNK, COMPLETE, FIRST = EventType.CHUNK_ARRIVED, EventType.CONTEXT_COMPLETE, EventType.FIRST_TOKEN


def trail_of(*events: tuple[EventType, float], **data: Any) -> EventTrail:
    return EventTrail("r-1", (TrailEvent(kind, at_s, 1000 + at_s, data) for kind, at_s in events))


LIFE = (
    (Q, 10.0),
    (S, 11.0),
    (K, 13.0),
    (CHUNK, 14.0),
    (S, 15.0),
    (COMPLETE, 16.0),
    (FIRST, 18.0),
    (FINISHED, 20.0),
)


def test_intervals_are_the_states_from_the_first_event_to_the_last() -> None:
    trail = trail_of(*LIFE)
    assert trail.intervals() == [Interval(Q, 0, 1), Interval(S, 1, 3), Interval(K, 3, 5), Interval(S, 5, 10)]
    assert trail.duration_s(S) == 7
    assert trail.duration_s(PREEMPTED) == 0


def test_a_state_that_still_lasts_has_no_interval() -> None:
    trail = trail_of(*LIFE[:5])
    assert [interval.type for interval in trail.intervals()] == [Q, S, K]
    assert not trail.is_complete
    assert trail_of(*LIFE).is_complete
    assert trail_of((Q, 1), (ABORTED, 2)).is_complete
    assert trail_of((CHUNK, 1)).intervals() == trail_of().intervals() == []


def test_seconds_count_from_the_first_event_whatever_it_is() -> None:
    trail = trail_of((CHUNK, 1), (Q, 2), (FINISHED, 5))
    assert trail.intervals() == [Interval(Q, 1, 4)]
    assert [row["at_s"] for row in trail.rows()] == [0, 1, 4]


def test_both_ttfts() -> None:
    trail = trail_of(*LIFE)
    assert (trail.ttft_from_request_s, trail.ttft_from_context_complete_s) == (8, 2)
    before = trail_of(*LIFE[:6])
    assert (before.ttft_from_request_s, before.ttft_from_context_complete_s) == (None, None)


def test_events_of_two_processes_are_merged_by_time() -> None:
    engine = [
        ("QUEUED", 1.0, 101.0, None),
        ("SCHEDULED", 4.0, 104.0, {"num_tokens": 3}),
        ("FINISHED", 5.0, 105.0, None),
    ]
    late = [("CHUNK_ARRIVED", 2.0, 102.0, None), ("FIRST_TOKEN", 5.0, 105.0, None)]
    trail = EventTrail.from_records("r-1", [*engine, *late])
    assert [event.type for event in trail] == [Q, CHUNK, S, FIRST, FINISHED], "the end is last where times are equal"
    assert trail[2].data == {"num_tokens": 3}


def test_a_trail_is_a_sequence_of_its_events() -> None:
    trail = trail_of(*LIFE)
    assert (len(trail), trail[0].type, trail[-1].type) == (8, Q, FINISHED)
    assert [event.type for event in trail[1:3]] == [S, K]
    assert trail[0] in trail
    assert trail.count(S) == 2
    first, last = trail.first(S), trail.last(S)
    assert first is not None
    assert last is not None
    assert (first.monotonic_s, last.monotonic_s) == (11, 15)
    assert trail.first(PREEMPTED) is trail.last(ABORTED) is None
    assert repr(trail_of(*LIFE[:2])) == "EventTrail('r-1', QUEUED → SCHEDULED)"


def test_states_marks_and_ends_are_told_apart() -> None:
    marks = {CHUNK, EventType.PROMPT_UPDATED, COMPLETE, FIRST, EventType.RESUMED, EventType.POLICY_SWITCHED}
    assert {event for event in EventType if not event.is_state} == marks
    assert {event for event in EventType if event.is_terminal} == {FINISHED, ABORTED}


AWKWARD = {"reason": 'stop, "now"\nor <b>never</b>', "lcp": 3}


def test_jsonl_has_one_object_an_event(tmp_path: Path) -> None:
    trail = trail_of(*LIFE, **AWKWARD)
    trail.to_jsonl(tmp_path / "trail.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "trail.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == trail.rows()
    assert rows[1] == {
        "request_id": "r-1",
        "type": "SCHEDULED",
        "at_s": 1.0,
        "monotonic_s": 11.0,
        "wall_s": 1011.0,
        "data": AWKWARD,
    }


def test_csv_has_one_row_an_event(tmp_path: Path) -> None:
    trail = trail_of(*LIFE, **AWKWARD)
    trail.to_csv(str(tmp_path / "trail.csv"))
    with open(tmp_path / "trail.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{**row, "data": json.loads(row["data"])} for row in rows] == [
        {name: value if name == "data" else str(value) for name, value in row.items()} for row in trail.rows()
    ]


def test_the_table_shows_text_as_text() -> None:
    table = EventTrail("<i>r</i>", [TrailEvent(Q, 1, 1, AWKWARD)])._repr_html_()
    assert "<i>" not in table
    assert "<b>" not in table
    assert "&lt;b&gt;never" in table
    assert "QUEUED" in table


STATES = st.sampled_from([S, K, PREEMPTED, Q])


@given(
    states=st.lists(st.tuples(STATES, st.floats(0, 100)), max_size=20),
    marks=st.lists(st.tuples(st.sampled_from([CHUNK, COMPLETE, FIRST]), st.floats(0, 100)), max_size=10),
    end=st.sampled_from([FINISHED, ABORTED]),
    zero=st.floats(0, 1e6),
)
def test_intervals_add_up_to_the_requests_life(
    states: list[tuple[EventType, float]],
    marks: list[tuple[EventType, float]],
    end: EventType,
    zero: float,
) -> None:
    events = [(Q, zero), *((kind, zero + at_s) for kind, at_s in [*states, *marks]), (end, zero + 100)]
    trail = trail_of(*events)
    intervals = trail.intervals()
    assert (intervals[0].start_s, intervals[-1].end_s) == (0, zero + 100 - zero)
    assert all(one.end_s == other.start_s for one, other in itertools.pairwise(intervals))
    assert all(interval.duration_s >= 0 for interval in intervals)
    assert math.isclose(sum(trail.duration_s(kind) for kind in {i.type for i in intervals}), zero + 100 - zero)


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match="'DONE'"):
        EventTrail.from_records("r-1", [("DONE", 1.0, 1.0, None)])
