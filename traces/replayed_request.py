"""How one request of a replay fared, and what happened to it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from stream2llm_sdk.traces.run_folder import REQUEST_COLUMNS
from stream2llm_sdk.trail import EventTrail, EventType

__all__ = ["ReplayEvent", "ReplayedRequest", "trail_counters", "trail_events"]

DRIVER, ENGINE = "driver", "engine"


@dataclass(frozen=True, slots=True)
class ReplayEvent:
    """A row of `events.parquet`, without the request's names; see `run_folder`."""

    source: str
    event: str
    run_s: float
    monotonic_s: float
    wall_s: float
    duration_s: float | None
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRequest:
    """A row of `requests.parquet`: the attributes are its columns, see `run_folder`."""

    request_id: str
    query_id: str
    segment: int = 0
    tenant: str = ""
    tag: str = ""
    mode: str = "append"
    is_streaming: bool = True
    arrival_due_s: float = 0.0
    arrival_s: float = 0.0
    held_s: float = 0.0
    context_complete_due_s: float | None = None
    context_complete_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    send_due_s: Sequence[float] = ()
    send_s: Sequence[float] = ()
    send_taken_s: Sequence[float | None] = ()
    send_tokens: Sequence[int] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_tokens_computed: int | None = None
    num_tokens_recomputed: int | None = None
    num_tokens_invalidated: int | None = None
    num_tokens_cached: int | None = None
    num_tokens_loaded: int | None = None
    num_tokens_swapped: int | None = None
    num_recompute_preemptions: int | None = None
    num_swap_preemptions: int | None = None
    finish_reason: str = ""
    error: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether it need not be replayed again when a run is continued: it ended by itself, well or with an error."""
        return self.finish_reason != "abort"

    @property
    def has_succeeded(self) -> bool:
        """Whether it was answered."""
        return self.error is None and self.is_done and self.first_token_s is not None

    @property
    def ttft_from_context_complete_s(self) -> float | None:
        """From the last chunk to the first token: the published definition, without the retrieval."""
        return _difference(self.first_token_s, self.context_complete_s)

    @property
    def ttft_from_request_s(self) -> float | None:
        """From the question to the first token: what a person waits."""
        return _difference(self.first_token_s, self.arrival_s)

    @property
    def e2e_latency_s(self) -> float | None:
        """From the question to the last token."""
        return _difference(self.finished_s, self.arrival_s)

    @property
    def lags_s(self) -> list[float]:
        """How late each message was sent."""
        return [max(0.0, sent - due) for due, sent in zip(self.send_due_s, self.send_s, strict=True)]

    @property
    def max_lag_s(self) -> float | None:
        """The largest lag of its messages; None if nothing was sent."""
        return max(self.lags_s, default=None)

    @property
    def num_preemptions(self) -> int:
        """How often its KV was taken away, in either way; 0 where that is unknown."""
        return (self.num_recompute_preemptions or 0) + (self.num_swap_preemptions or 0)

    def row(self) -> dict[str, Any]:
        """The columns' values."""
        values = {name: getattr(self, name) for name in REQUEST_COLUMNS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> ReplayedRequest:
        """The request of a row."""
        values: dict[str, Any] = {field.name: row[field.name] for field in fields(cls) if field.name in row}
        for name in ("send_due_s", "send_s", "send_taken_s", "send_tokens"):
            values[name] = tuple(values[name])
        return cls(**values)


def trail_counters(trail: EventTrail) -> dict[str, Any]:
    """What an ended request's trail says of its tokens and preemptions; nothing for an empty trail."""
    last = next((event for event in reversed(trail) if event.type.is_terminal), None)
    if last is None:
        return {}
    names = [f"num_tokens_{name}" for name in ("computed", "recomputed", "invalidated", "cached", "loaded")]
    swapped = sum(event.data.get("num_tokens", 0) for event in trail if event.type is EventType.PREEMPTED_SWAP)
    return {
        **{name: last.data[name] for name in names if name in last.data},
        "num_tokens_swapped": swapped,
        "num_recompute_preemptions": trail.count(EventType.PREEMPTED_RECOMPUTE),
        "num_swap_preemptions": trail.count(EventType.PREEMPTED_SWAP),
    }


def trail_events(trail: EventTrail, zero_s: float) -> list[ReplayEvent]:
    """The trail's events on the run's clock, whose zero is at `zero_s` of the trail's monotonic clock."""
    states = [event for event in trail if event.type.is_state]
    lengths = {id(event): following.monotonic_s - event.monotonic_s for event, following in itertools.pairwise(states)}
    return [
        ReplayEvent(
            ENGINE,
            event.type.value,
            event.monotonic_s - zero_s,
            event.monotonic_s,
            event.wall_s,
            lengths.get(id(event)),
            event.data,
        )
        for event in trail
    ]


def _difference(end_s: float | None, start_s: float | None) -> float | None:
    return None if end_s is None or start_s is None else end_s - start_s
