"""Records the trails of live requests in the engine-core process, in bounded memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

from stream2llm_sdk.trail import EventType

__all__ = ["Clock", "SystemClock", "TrailRecorder"]

Record = tuple[str, float, float, dict[str, Any] | None]


class Clock(Protocol):
    """Where trail times come from."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """The host's clocks. On Linux the monotonic one is shared by all processes of the host."""

    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)


class TrailRecorder:
    """Events by request, until they are taken.

    A state is recorded when it changes, so a request that is scheduled in a hundred consecutive steps costs one
    record. Trails of ended requests that nobody takes are dropped, oldest first, beyond `max_ended`; a single trail
    keeps at most `max_events` (marks and the end are always kept, the last record says how many were left out).
    """

    def __init__(self, clock: Clock | None = None, *, max_ended: int = 1024, max_events: int = 20_000) -> None:
        self.clock: Clock = clock or SystemClock()
        self._max_ended = max_ended
        self._max_events = max_events
        self._records: dict[str, list[Record]] = {}
        self._states: dict[str, EventType] = {}
        self._left_out: dict[str, int] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __len__(self) -> int:
        """Trails held, of live and of ended requests."""
        return len(self._records)

    def begin(self, request_id: str, sent_s: float | None = None) -> None:
        self._ended.pop(request_id, None)
        self._records[request_id] = []
        self._states[request_id] = EventType.QUEUED
        self._add(request_id, EventType.QUEUED, sent_s, {})

    def current_state(self, request_id: str) -> EventType | None:
        return self._states.get(request_id)

    def state(self, request_id: str, state: EventType, at_s: float | None = None, **data: Any) -> None:
        """Records a live request's change of state; the same state again is no change."""
        if self._states.get(request_id, state) is state:
            return
        self._states[request_id] = state
        if len(self._records[request_id]) >= self._max_events:
            self._left_out[request_id] = self._left_out.get(request_id, 0) + 1
            return
        self._add(request_id, state, at_s, data)

    def mark(self, request_id: str, mark: EventType, at_s: float | None = None, **data: Any) -> None:
        if request_id in self._states:
            self._add(request_id, mark, at_s, data)

    def end(self, request_id: str, state: EventType, **data: Any) -> None:
        if self._states.pop(request_id, None) is None:
            return
        if left_out := self._left_out.pop(request_id, 0):
            data["num_events_left_out"] = left_out
        self._add(request_id, state, None, data)
        self._ended[request_id] = None
        while len(self._ended) > self._max_ended:
            self._records.pop(self._ended.popitem(last=False)[0], None)

    def take(self, request_ids: Iterable[str]) -> dict[str, list[Record]]:
        """The records so far, by request. Those of ended requests are forgotten."""
        taken = {}
        for request_id in request_ids:
            if request_id in self._ended:
                del self._ended[request_id]
                taken[request_id] = self._records.pop(request_id)
            elif request_id in self._records:
                taken[request_id] = list(self._records[request_id])
        return taken

    def _add(self, request_id: str, event: EventType, at_s: float | None, data: dict[str, Any]) -> None:
        now_s, wall_s = self.clock.monotonic_s(), self.clock.wall_s()
        if at_s is not None and at_s < now_s:
            wall_s -= now_s - at_s
            now_s = at_s
        self._records[request_id].append((event.value, now_s, wall_s, data or None))
