"""The trail of a request: what happened to it, when, and how long each state lasted."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

__all__ = ["EventTrail", "EventType", "Interval", "TrailEvent"]


class EventType(StrEnum):
    """What can happen to a request. The states, which come first here, last until the next state; marks do not end a
    state.

    Attributes:
        QUEUED: waits in the engine and holds no KV.
        SCHEDULED: has tokens in the engine's current step.
        KV_ON_GPU: holds KV, but is not scheduled in the current step.
        PREEMPTED_RECOMPUTE: its KV was freed for others; it will be computed again (`num_tokens`, `num_blocks`, and
            `predicted_s`, what the cost model expects that to cost).
        PREEMPTED_SWAP: its KV was moved to host memory (the same data).
        FINISHED: the answer is complete; nothing of the request is left in the engine.
        ABORTED: ended from outside, or refused; nothing of the request is left in the engine.
        CHUNK_ARRIVED: a mark: more prompt was sent (`num_tokens`: the new part).
        PROMPT_UPDATED: the engine applied it (`lcp`: tokens in common with the prompt before, `num_tokens`: the
            prompt's length now, `num_invalidated`: computed tokens that became void).
        CONTEXT_COMPLETE: the prompt was finished by its sender.
        FIRST_TOKEN: the first output token was sampled.
        RESUMED: a preempted request has again all tokens that it had (`num_loaded` from host memory, `num_found` in
            the prefix cache, `num_recomputed`, and `actual_s` since it was admitted again).
        POLICY_SWITCHED: the ADAPTIVE policy changed while the request was there (`policy`, `reason`).
    """

    QUEUED = "QUEUED"
    SCHEDULED = "SCHEDULED"
    KV_ON_GPU = "KV_ON_GPU"
    PREEMPTED_SWAP = "PREEMPTED_SWAP"
    PREEMPTED_RECOMPUTE = "PREEMPTED_RECOMPUTE"
    FINISHED = "FINISHED"
    ABORTED = "ABORTED"
    CHUNK_ARRIVED = "CHUNK_ARRIVED"
    PROMPT_UPDATED = "PROMPT_UPDATED"
    CONTEXT_COMPLETE = "CONTEXT_COMPLETE"
    FIRST_TOKEN = "FIRST_TOKEN"
    RESUMED = "RESUMED"
    POLICY_SWITCHED = "POLICY_SWITCHED"

    @property
    def is_state(self) -> bool:
        """Whether it lasts until the next state."""
        return self not in _MARKS

    @property
    def is_terminal(self) -> bool:
        """Whether nothing comes after it."""
        return self in _TERMINAL


_MARKS = frozenset(
    {
        EventType.CHUNK_ARRIVED,
        EventType.PROMPT_UPDATED,
        EventType.CONTEXT_COMPLETE,
        EventType.FIRST_TOKEN,
        EventType.RESUMED,
        EventType.POLICY_SWITCHED,
    }
)
_TERMINAL = frozenset({EventType.FINISHED, EventType.ABORTED})


@dataclass(frozen=True, slots=True)
class TrailEvent:
    """One event.

    Attributes:
        type: what happened.
        monotonic_s: seconds on the host's monotonic clock; differences are meaningful, the zero is not.
        wall_s: seconds since the epoch.
        data: figures of this event, by name.
    """

    type: EventType
    monotonic_s: float
    wall_s: float
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Interval:
    """One state and how long it lasted.

    Attributes:
        type: the state.
        start_s, end_s: when, in seconds from the trail's first event.
    """

    type: EventType
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long, in seconds."""
        return self.end_s - self.start_s


class EventTrail(Sequence[TrailEvent]):
    """The events of one request in order of time.

    Events stamped by the application and events stamped by the engine come from one monotonic clock (both run on
    one host), and are merged by time.

    Args:
        request_id: the request's name in the engine.
        events: in any order.
    """

    def __init__(self, request_id: str, events: Iterable[TrailEvent]) -> None:
        self.request_id = request_id
        self._events = tuple(sorted(events, key=lambda event: (event.monotonic_s, event.type.is_terminal)))

    @classmethod
    def from_records(cls, request_id: str, records: Iterable[Sequence[Any]]) -> EventTrail:
        """Builds the trail of `request_id` of the engine's `records`: `(type, monotonic_s, wall_s, data)` each."""
        return cls(request_id, (TrailEvent(EventType(t), m, w, d or {}) for t, m, w, d in records))

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def __iter__(self) -> Iterator[TrailEvent]:
        return iter(self._events)

    def __repr__(self) -> str:
        return f"EventTrail({self.request_id!r}, {' → '.join(event.type.value for event in self._events)})"

    def first(self, event_type: EventType) -> TrailEvent | None:
        """The first event of a type, or None."""
        return next((event for event in self._events if event.type is event_type), None)

    def last(self, event_type: EventType) -> TrailEvent | None:
        """The last event of a type, or None."""
        return next((event for event in reversed(self._events) if event.type is event_type), None)

    def count(self, value: Any) -> int:
        """How many events of a type there are."""
        return sum(event.type is value for event in self._events)

    def intervals(self) -> list[Interval]:
        """The states in order. They follow each other without gaps, from the first event to the last state."""
        states = [event for event in self._events if event.type.is_state]
        if not states:
            return []
        zero = self._events[0].monotonic_s
        return [
            Interval(event.type, event.monotonic_s - zero, following.monotonic_s - zero)
            for event, following in itertools.pairwise(states)
        ]

    def duration_s(self, event_type: EventType) -> float:
        """Seconds spent in a state, over all its intervals."""
        return sum(interval.duration_s for interval in self.intervals() if interval.type is event_type)

    @property
    def is_complete(self) -> bool:
        """Whether the request has ended."""
        return any(event.type.is_terminal for event in self._events)

    @property
    def ttft_from_context_complete_s(self) -> float | None:
        """Seconds from the end of the context to the first token: the published definition. None before either."""
        return self._seconds_between(EventType.CONTEXT_COMPLETE, EventType.FIRST_TOKEN)

    @property
    def ttft_from_request_s(self) -> float | None:
        """Seconds from the request to the first token: what a person waits. None before either."""
        return self._seconds_between(EventType.QUEUED, EventType.FIRST_TOKEN)

    def _seconds_between(self, start: EventType, end: EventType) -> float | None:
        a, b = self.first(start), self.first(end)
        return None if a is None or b is None else b.monotonic_s - a.monotonic_s

    def rows(self) -> list[dict[str, Any]]:
        """One flat row an event: request_id, type, at_s (from the first event), monotonic_s, wall_s, data."""
        zero = self._events[0].monotonic_s if self._events else 0.0
        return [
            {
                "request_id": self.request_id,
                "type": event.type.value,
                "at_s": event.monotonic_s - zero,
                "monotonic_s": event.monotonic_s,
                "wall_s": event.wall_s,
                "data": dict(event.data),
            }
            for event in self._events
        ]

    def to_jsonl(self, path: str | Path) -> None:
        """Writes one JSON object an event."""
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows())

    def to_csv(self, path: str | Path) -> None:
        """Writes one row an event; `data` is a JSON object in its column."""
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["request_id", "type", "at_s", "monotonic_s", "wall_s", "data"])
            writer.writerows([*list(row.values())[:-1], json.dumps(row["data"])] for row in self.rows())

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.trail_view import trail_html

        return trail_html(self)
