"""The requests that may be scheduled, kept in the policy's order while they come, change and go."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["RequestOrder", "SortKey"]

SortKey = tuple[Any, ...]
"""A policy's key and behind it a tie-breaker, so that no two requests have the same."""

_KEY = itemgetter(0)


class RequestOrder:
    """A sorted list of `(key, request)`. Putting and removing cost a binary search, walking costs nothing to begin:
    a step that can serve few requests looks at few."""

    def __init__(self) -> None:
        self._entries: list[tuple[SortKey, Request]] = []
        self._keys: dict[str, SortKey] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def __iter__(self) -> Iterator[tuple[SortKey, Request]]:
        return iter(self._entries)

    def put(self, request: Request, key: SortKey) -> None:
        """Adds a request, or moves it to where its new key belongs."""
        request_id = request.request_id
        old = self._keys.get(request_id)
        if old is not None:
            if old == key:
                return
            del self._entries[self._index(old)]
        self._keys[request_id] = key
        insort(self._entries, (key, request), key=_KEY)

    def discard(self, request_id: str) -> None:
        key = self._keys.pop(request_id, None)
        if key is not None:
            del self._entries[self._index(key)]

    def _index(self, key: SortKey) -> int:
        return bisect_left(self._entries, key, key=_KEY)
