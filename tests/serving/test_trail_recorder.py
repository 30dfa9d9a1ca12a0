"""Recording trails: changes only, in bounded memory, taken once."""

from __future__ import annotations

from typing import Any

import pytest

from stream2llm_sdk.serving.trail_recorder import SystemClock, TrailRecorder
from stream2llm_sdk.trail import EventTrail, EventType

QUEUED, SCHEDULED, HOLDS_KV = EventType.QUEUED, EventType.SCHEDULED, EventType.KV_ON_GPU
FINISHED, ABORTED = EventType.FINISHED, EventType.ABORTED
CHUNK = EventType.CHUNK_ARRIVED


class Clock:
    """Moves by hand; the wall clock is 1000 s ahead."""

    now_s = 10.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1000.0 + self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> TrailRecorder:
    return TrailRecorder(clock, max_ended=3, max_events=5)


def types(records: list[Any]) -> list[str]:
    return [record[0] for record in records]


def taken(recorder: TrailRecorder, request_id: str) -> list[Any]:
    return recorder.take([request_id]).get(request_id, [])


def test_a_state_is_recorded_when_it_changes(recorder: TrailRecorder, clock: Clock) -> None:
    recorder.begin("r")
    for at_s, state in ((11.0, SCHEDULED), (12.0, SCHEDULED), (13.0, HOLDS_KV), (14.0, HOLDS_KV)):
        clock.now_s = at_s
        recorder.state("r", state)
    clock.now_s = 15.0
    recorder.end("r", FINISHED, num_updates=0)
    assert taken(recorder, "r") == [
        ("QUEUED", 10.0, 1010.0, None),
        ("SCHEDULED", 11.0, 1011.0, None),
        ("KV_ON_GPU", 13.0, 1013.0, None),
        ("FINISHED", 15.0, 1015.0, {"num_updates": 0}),
    ]


def test_marks_do_not_end_a_state_and_repeat(recorder: TrailRecorder) -> None:
    recorder.begin("r")
    recorder.mark("r", CHUNK, num_tokens=1)
    recorder.mark("r", CHUNK, num_tokens=2)
    recorder.state("r", QUEUED)
    assert types(taken(recorder, "r")) == ["QUEUED", "CHUNK_ARRIVED", "CHUNK_ARRIVED"]
    assert recorder.current_state("r") is QUEUED


def test_an_event_is_stamped_when_it_was_sent_by_both_clocks(recorder: TrailRecorder, clock: Clock) -> None:
    recorder.begin("r", sent_s=9.5)
    clock.now_s = 12.0
    recorder.mark("r", CHUNK, at_s=11.0)
    assert [record[1:3] for record in taken(recorder, "r")] == [(9.5, 1009.5), (11.0, 1011.0)]


def test_a_sender_whose_clock_is_ahead_is_stamped_on_arrival(recorder: TrailRecorder) -> None:
    recorder.begin("r", sent_s=99.0)
    assert taken(recorder, "r") == [("QUEUED", 10.0, 1010.0, None)]


def test_nothing_is_recorded_of_requests_that_never_began_or_have_ended(recorder: TrailRecorder) -> None:
    recorder.begin("ended")
    recorder.end("ended", ABORTED)
    for request_id in ("ended", "unknown"):
        recorder.state(request_id, SCHEDULED)
        recorder.mark(request_id, CHUNK)
        recorder.end(request_id, FINISHED)
        assert request_id not in recorder
        assert recorder.current_state(request_id) is None
    assert types(taken(recorder, "ended")) == ["QUEUED", "ABORTED"]
    assert recorder.take(["unknown"]) == {}


def test_a_live_trail_can_be_taken_again_and_an_ended_one_once(recorder: TrailRecorder) -> None:
    recorder.begin("r")
    first = taken(recorder, "r")
    recorder.state("r", SCHEDULED)
    assert types(first) == ["QUEUED"], "what was taken is not written to any more"
    assert types(taken(recorder, "r")) == ["QUEUED", "SCHEDULED"]
    recorder.end("r", FINISHED)
    assert types(taken(recorder, "r")) == ["QUEUED", "SCHEDULED", "FINISHED"]
    assert recorder.take(["r"]) == {}
    assert len(recorder) == 0


def test_trails_that_nobody_takes_are_dropped_oldest_first(recorder: TrailRecorder) -> None:
    recorder.begin("live")
    for index in range(10):
        recorder.begin(f"r{index}")
        recorder.end(f"r{index}", FINISHED)
    assert len(recorder) == 1 + 3
    assert list(recorder.take([f"r{index}" for index in range(10)])) == ["r7", "r8", "r9"]
    assert types(taken(recorder, "live")) == ["QUEUED"]


def test_a_trail_is_bounded_but_keeps_its_marks_and_its_end(recorder: TrailRecorder) -> None:
    recorder.begin("r")
    for _ in range(50):
        recorder.state("r", SCHEDULED)
        recorder.state("r", HOLDS_KV)
    recorder.mark("r", CHUNK)
    recorder.end("r", FINISHED, num_updates=1)
    records = taken(recorder, "r")
    assert types(records) == ["QUEUED", *["SCHEDULED", "KV_ON_GPU"] * 2, "CHUNK_ARRIVED", "FINISHED"]
    assert records[-1][3] == {"num_updates": 1, "num_events_left_out": 96}
    recorder.begin("next")
    recorder.end("next", FINISHED)
    assert taken(recorder, "next")[-1][3] is None, "what one trail left out is not charged to another"


def test_a_name_that_is_used_again_begins_a_new_trail(recorder: TrailRecorder) -> None:
    recorder.begin("r")
    recorder.end("r", ABORTED)
    recorder.begin("r")
    for index in range(10):
        recorder.begin(f"other-{index}")
        recorder.end(f"other-{index}", FINISHED)
    assert types(taken(recorder, "r")) == ["QUEUED"], "it lives, and does not count among the ended"
    recorder.end("r", FINISHED)
    assert types(taken(recorder, "r")) == ["QUEUED", "FINISHED"]


def test_records_make_a_trail_on_the_hosts_clocks() -> None:
    recorder = TrailRecorder()
    recorder.begin("r")
    recorder.end("r", FINISHED)
    trail = EventTrail.from_records("r", taken(recorder, "r"))
    assert trail.is_complete
    assert SystemClock.monotonic_s() - 60 < trail[0].monotonic_s <= trail[-1].monotonic_s <= SystemClock.monotonic_s()
    assert abs(trail[0].wall_s - SystemClock.wall_s()) < 60
