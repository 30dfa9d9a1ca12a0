"""The requests that may be scheduled, kept in the policy's order while they come, change and go."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from stream2llm_sdk.serving.fair_share import FairShare

__all__ = ["Entry", "RequestOrder", "SortKey"]

SortKey = tuple[Any, ...]
"""A policy's key and behind it a tie-breaker, so that no two requests have the same."""

Entry = tuple[SortKey, "Request"]

_KEY = itemgetter(0)


class RequestOrder:
    """Sorted lists of `(key, request)`, one for each tenant. Putting and removing cost a binary search, walking costs
    nothing to begin: a step that can serve few requests looks at few."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Entry]] = {}
        self._places: dict[str, tuple[str, SortKey]] = {}
        self._first_changed = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    def __iter__(self) -> Iterator[Entry]:
        """All of them in the order of their keys."""
        if len(self._lists) == 1:
            return iter(next(iter(self._lists.values())))
        return heapq.merge(*self._lists.values(), key=_KEY)

    def starting_at(self, index: int) -> Iterator[Entry]:
        """The same without the first `index`, which must all be one tenant's."""
        if index == 0:
            return iter(self)
        (entries,) = self._lists.values()
        return islice(entries, index, None)

    def take_num_unchanged(self) -> int:
        """Leading entries that are the same, at the same places, as when this was asked last."""
        num_unchanged, self._first_changed = self._first_changed, len(self._places)
        return min(num_unchanged, len(self._places))

    def by_share(
        self, shares: FairShare, num_served: Callable[[str], int], can_wait: Callable[[Request], bool]
    ) -> Iterator[Entry]:
        """The tenants in turn, whose counter is least first, and each one's requests in the order of their keys.

        `num_served` tells how many tokens a request got since it was given here: they count at once. A tenant whose
        next request `can_wait` comes after all whose next one cannot.
        """
        heap: list[tuple[bool, float, SortKey, str, int]] = []
        for tenant, entries in self._lists.items():
            key, request = entries[0]
            heap.append((can_wait(request), shares.counter(tenant), key, tenant, 0))
        heapq.heapify(heap)  # of equal counters, the one whose request comes first
        while heap:
            _, counter, _, tenant, index = heap[0]
            entries = self._lists[tenant]
            entry = entries[index]
            yield entry
            counter += num_served(entry[1].request_id) / shares.weight(tenant)
            if index + 1 < len(entries):
                key, request = entries[index + 1]
                heapq.heapreplace(heap, (can_wait(request), counter, key, tenant, index + 1))
            else:
                heapq.heappop(heap)

    @property
    def tenants(self) -> Iterable[str]:
        """Those that have a request here."""
        return self._lists.keys()

    def put(self, request: Request, key: SortKey, tenant: str = "") -> None:
        """Adds a request, or moves it to where its new key belongs."""
        request_id = request.request_id
        place = self._places.get(request_id)
        if place == (tenant, key):
            return
        if place is not None and place[0] == tenant:
            entries = self._lists[tenant]
            index = bisect_left(entries, place[1], key=_KEY)
            if _lies_between(entries, index, key):  # often: being admitted does not change who comes first
                entries[index] = key, request
                self._places[request_id] = tenant, key
                self._first_changed = min(self._first_changed, index)
                return
        self.discard(request_id)
        self._places[request_id] = tenant, key
        entries = self._lists.setdefault(tenant, [])
        index = bisect_left(entries, key, key=_KEY)
        entries.insert(index, (key, request))
        self._first_changed = min(self._first_changed, index)

    def discard(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is not None:
            tenant, key = place
            entries = self._lists[tenant]
            index = bisect_left(entries, key, key=_KEY)
            del entries[index]
            self._first_changed = min(self._first_changed, index)
            if not entries:
                del self._lists[tenant]


def _lies_between(entries: list[Entry], index: int, key: SortKey) -> bool:
    """Whether the entry at `index` would stay where it is with another key."""
    return (index == 0 or entries[index - 1][0] < key) and (index + 1 == len(entries) or key < entries[index + 1][0])
