"""What a request was doing at each time of a run, told from its trail.

A trail says that a request holds KV and is not in the step (`KV_ON_GPU`), but not why: it may have nothing to compute
until its next chunk comes, or be passed over for others. That is told from what came next. If it was scheduled again
without any news of its prompt, it had work all along. If there was news (a chunk, its application, or the end of the
context), it waited for the chunk before and for its turn after. If it lost its KV without news, it was waiting for a
chunk, unless its context was complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stream2llm_sdk.traces.replayed_request import ReplayedRequest
from stream2llm_sdk.trail import EventType

__all__ = ["Mark", "Phase", "RequestTrail", "Span", "phase_spans", "request_trail"]


class Phase(StrEnum):
    """What a request is doing. The value is what a reader is told.

    RETRIEVING: its question has come, and nothing of its context has been sent.
    QUEUED: it waits in the engine and holds no KV on the GPU.
    RUNNING: it is in the engine's current step.
    AWAITING_TURN: it holds KV and has tokens to compute, but is not in the step.
    AWAITING_CHUNK: it holds KV and has nothing to compute until its next chunk.
    DROPPED: its KV was dropped, to be computed again.
    SWAPPED: its KV was moved to host memory.
    UNKNOWN: it is in an engine that keeps no trail.
    """

    RETRIEVING = "retrieval, nothing sent yet"
    QUEUED = "queued, no KV on the GPU"
    RUNNING = "running"
    AWAITING_TURN = "KV on the GPU, waits for its turn"
    AWAITING_CHUNK = "KV on the GPU, waits for a chunk"
    DROPPED = "preempted, KV dropped"
    SWAPPED = "preempted, KV in host memory"
    UNKNOWN = "in the engine, no trail"


@dataclass(frozen=True, slots=True)
class Span:
    """A phase and when it lasted, in seconds of the run.

    Attributes:
        phase: what the request was doing.
        start_s: when it began.
        end_s: when it ended; not before `start_s`.
        data: figures of the event that began it.
    """

    phase: Phase
    start_s: float
    end_s: float
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Mark:
    """An event of a trail at a time of the run."""

    type: EventType
    run_s: float
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class RequestTrail:
    """What happened to one request.

    Attributes:
        request: its row.
        spans: what it was doing, in the order of time, without gaps or overlaps.
        marks: the trail's events, states too, in the order of time.
    """

    request: ReplayedRequest
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]

    @property
    def end_s(self) -> float:
        """When nothing of it was left."""
        return self.spans[-1].end_s if self.spans else self.request.arrival_s

    def seconds_in(self, *phases: Phase) -> float:
        """How long it was in any of these phases."""
        return sum(span.duration_s for span in self.spans if span.phase in phases)


_PHASES = {
    EventType.QUEUED: Phase.QUEUED,
    EventType.SCHEDULED: Phase.RUNNING,
    EventType.PREEMPTED_RECOMPUTE: Phase.DROPPED,
    EventType.PREEMPTED_SWAP: Phase.SWAPPED,
}
_NEWS = (EventType.CHUNK_ARRIVED, EventType.PROMPT_UPDATED, EventType.CONTEXT_COMPLETE)


def request_trail(request: ReplayedRequest, marks: Sequence[Mark]) -> RequestTrail:
    """The trail of a request, made of its engine's events; without any, of its own times."""
    has_trail = any(mark.type.is_state for mark in marks)
    spans = phase_spans(marks, request.arrival_s) if has_trail else _spans_without_trail(request)
    return RequestTrail(request, tuple(spans), tuple(marks))


def phase_spans(marks: Sequence[Mark], arrival_s: float) -> Iterator[Span]:
    """What a request was doing since its question came, told from its trail; nothing if there are no states in it."""
    states = [index for index, mark in enumerate(marks) if mark.type.is_state]
    if not states:
        return
    first_s = marks[states[0]].run_s
    if first_s > arrival_s:
        yield Span(Phase.RETRIEVING, arrival_s, first_s)
    news = _NewsCount()
    news.take(marks[: states[0]])
    for here, following in itertools.pairwise(states):
        state, between = marks[here], marks[here + 1 : following]
        if state.type is EventType.KV_ON_GPU:
            yield from _in_memory(state.run_s, marks[following], between, news)
        elif not state.type.is_terminal:
            yield Span(_PHASES[state.type], state.run_s, marks[following].run_s, state.data)
        news.take(between)


def _spans_without_trail(request: ReplayedRequest) -> Iterator[Span]:
    sent_s = request.send_s[0] if request.send_s else None
    end_s = request.finished_s
    if sent_s is not None and sent_s > request.arrival_s:
        yield Span(Phase.RETRIEVING, request.arrival_s, sent_s)
    if sent_s is not None and end_s is not None and end_s > sent_s:
        yield Span(Phase.UNKNOWN, sent_s, end_s)


class _NewsCount:
    """What has come of a prompt by some time."""

    def __init__(self) -> None:
        self._num_unapplied = 0
        self._is_complete = False

    @property
    def is_waiting(self) -> bool:
        """Whether something has come that the engine had not computed, for all that its trail says."""
        return self._num_unapplied > 0 or self._is_complete

    def take(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            self._is_complete |= mark.type is EventType.CONTEXT_COMPLETE
            self._num_unapplied += (mark.type is EventType.CHUNK_ARRIVED) - (mark.type is EventType.PROMPT_UPDATED)


def _in_memory(start_s: float, end: Mark, between: Sequence[Mark], news: _NewsCount) -> Iterator[Span]:
    first_news_s = next((mark.run_s for mark in between if mark.type in _NEWS), None)
    if news.is_waiting:
        turn_s = start_s
    elif first_news_s is not None:
        turn_s = first_news_s
    else:
        turn_s = start_s if end.type is EventType.SCHEDULED else end.run_s
    if turn_s > start_s:
        yield Span(Phase.AWAITING_CHUNK, start_s, turn_s)
    if end.run_s > turn_s:
        yield Span(Phase.AWAITING_TURN, turn_s, end.run_s)
