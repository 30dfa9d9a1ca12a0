"""Who may come in: bounds on what is open at once, and the end of streams that nobody feeds."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from stream2llm_sdk.errors import (
    ConfigurationError,
    EngineBusyError,
    PromptTooLongError,
    StreamIdleError,
    UnknownRequestError,
)

__all__ = ["DEFAULT_LIMITS", "Admission", "StreamLimits"]

_RECENT_S = 60.0
_MAX_RECENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """How much may be under way at once. None is no limit.

    Attributes:
        max_open_streams: streams whose prompt is not finished.
        max_open_tokens: prompt tokens of those streams together.
        max_open_streams_per_tenant: the same for each tenant.
        max_open_tokens_per_tenant: the same for each tenant.
        max_waiting_requests: requests with a complete prompt, from then to their end. At this number no request of
            any kind is admitted; streams that are open already may still finish.
        idle_timeout_s: seconds without a chunk after which an open stream is ended.

    Raises:
        ConfigurationError: a limit is not positive.
    """

    max_open_streams: int | None = None
    max_open_tokens: int | None = None
    max_open_streams_per_tenant: int | None = None
    max_open_tokens_per_tenant: int | None = None
    max_waiting_requests: int | None = None
    idle_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            kinds: tuple[type, ...] = (int,)
            wanted = "a whole number, at least 1"
            if field.name == "idle_timeout_s":
                kinds, wanted = (int, float), "seconds, more than 0"
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise ConfigurationError(f"{field.name}={value!r}: give {wanted}, or None for no limit")


DEFAULT_LIMITS = StreamLimits(max_open_streams=1_000, max_waiting_requests=4_000)
"""What an engine takes unless told otherwise: more would only wait in its queues."""


@dataclass(slots=True)
class _Request:
    tenant: str
    num_tokens: int
    is_open: bool


class _Quota:
    """One limit: what is taken of it, and how fast it came free of late."""

    def __init__(self, name: str, limit: int | None) -> None:
        self.name = name
        self.limit = limit
        self.taken = 0
        self._returned: deque[tuple[float, int]] = deque(maxlen=_MAX_RECENT)

    def take(self, amount: int) -> None:
        self.taken += amount

    def give_back(self, amount: int, now_s: float) -> None:
        assert 0 <= amount <= self.taken
        self.taken -= amount
        if amount:
            self._returned.append((now_s, amount))

    def shortage(self, amount: int) -> int:
        """How much would have to come free before `amount` can be taken."""
        return 0 if self.limit is None else max(0, self.taken + amount - self.limit)

    def wait_s(self, amount: int, now_s: float) -> float | None:
        """Seconds in which `amount` comes free at the rate of the last minute; None if too little did to tell."""
        recent = [(at_s, returned) for at_s, returned in self._returned if at_s >= now_s - _RECENT_S]
        if len(recent) < 2 or now_s <= recent[0][0]:
            return None
        return amount * (now_s - recent[0][0]) / sum(returned for _, returned in recent[1:])


class _Book:
    """What open streams take: all of them, or those of one tenant."""

    def __init__(self, limits: StreamLimits, suffix: str = "") -> None:
        self.streams = _Quota(f"max_open_streams{suffix}", getattr(limits, f"max_open_streams{suffix}"))
        self.tokens = _Quota(f"max_open_tokens{suffix}", getattr(limits, f"max_open_tokens{suffix}"))


class Admission:
    """The books of an engine's front end: which requests are in it, and what each of them takes.

    A request is admitted once and released once. Until its prompt is finished it is open, and counts with its tokens;
    from then on it counts as waiting until it ends. A call that is refused changes nothing, an idle stream's clock
    included, so that streams that keep one another from growing end at last.

    Args:
        limits: the bounds.
        now: seconds on a clock that never goes back.
    """

    def __init__(self, limits: StreamLimits, now: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._now = now
        self._requests: dict[str, _Request] = {}
        self._open = _Book(limits)
        # A tenant is in here as long as it has an open stream.
        self._open_by_tenant: dict[str, _Book] = {}
        self._waiting = _Quota("max_waiting_requests", limits.max_waiting_requests)
        # Open streams by their last chunk, the longest silent one first.
        self._last_chunk_s: OrderedDict[str, float] = OrderedDict()
        self._num_refused: Counter[str] = Counter()

    def __repr__(self) -> str:
        return (
            f"<Admission {self._open.streams.taken} open streams with {self._open.tokens.taken} tokens, "
            f"{self._waiting.taken} waiting>"
        )

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def snapshot(self) -> dict[str, Any]:
        """What is taken now, and how many calls each limit refused so far, by name."""
        return {
            "num_open_streams": self._open.streams.taken,
            "num_open_tokens": self._open.tokens.taken,
            "num_waiting": self._waiting.taken,
            "num_refused": dict(self._num_refused),
        }

    # ---- a request's life ---------------------------------------------------------------------------------------

    def admit(self, request_id: str, tenant: str, num_tokens: int, *, finished: bool = False) -> None:
        """Lets a request in.

        Args:
            request_id: its name, which no request in the books has.
            tenant: whom it is counted for.
            num_tokens: the length of its prompt so far.
            finished: whether the prompt is complete already (a plain request).

        Raises:
            EngineBusyError: a limit is reached.
            PromptTooLongError: the prompt alone is more than a limit allows all open streams together.
            ConfigurationError: the name is that of a request in the books.
        """
        if request_id in self._requests:
            raise ConfigurationError(f"request_id={request_id!r} is that of a live request; give another")
        request = _Request(tenant, num_tokens, is_open=not finished)
        if request.is_open:
            self._check_fits(request_id, num_tokens)
        self._check(request_id, tenant, self._waiting, 1)
        if request.is_open:
            self._take(request_id, request)
        else:
            self._waiting.take(1)
        self._requests[request_id] = request

    def resize(self, request_id: str, num_tokens: int) -> None:
        """Changes the length of an open stream's prompt, which is a sign of life as well. A shorter one is never
        refused; that of a finished prompt counts no more.

        Raises:
            EngineBusyError: a limit is reached; the stream is as it was.
            PromptTooLongError: the prompt alone would be more than a limit allows all open streams together.
            UnknownRequestError: the request is not in the books.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise UnknownRequestError(f"{request_id} is not in the engine: it ended, or was never admitted")
        if not request.is_open:
            return
        growth = num_tokens - request.num_tokens
        books = (self._open, self._open_by_tenant[request.tenant])
        self._check_fits(request_id, num_tokens)
        for book in books:
            self._check(request_id, request.tenant, book.tokens, growth)
        for book in books:
            if growth > 0:
                book.tokens.take(growth)
            else:
                book.tokens.give_back(-growth, self._now())
        request.num_tokens = num_tokens
        self.touched(request_id)

    def touched(self, request_id: str) -> None:
        """Starts an open stream's idle time anew; nothing for any other."""
        request = self._requests.get(request_id)
        if request is not None and request.is_open:
            self._last_chunk_s[request_id] = self._now()
            self._last_chunk_s.move_to_end(request_id)

    def finished(self, request_id: str) -> None:
        """Counts an open stream as waiting, now that its prompt is complete. Never refused: it only gives tokens back.
        Nothing for any other, since a request may end before its sender hears that the last chunk was taken."""
        request = self._requests.get(request_id)
        if request is not None and request.is_open:
            self._give_back(request_id, request)
            request.is_open = False
            self._waiting.take(1)

    def release(self, request_id: str) -> None:
        """Takes a request off the books, however it ended. Nothing for one that is not in them."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.is_open:
            self._give_back(request_id, request)
        else:
            self._waiting.give_back(1, self._now())

    # ---- idle streams -------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When the next stream will have been idle for too long, on the clock `now`; None if none can be."""
        timeout_s = self.limits.idle_timeout_s
        if timeout_s is None or not self._last_chunk_s:
            return None
        return next(iter(self._last_chunk_s.values())) + timeout_s

    def expired(self) -> dict[str, StreamIdleError]:
        """Streams that have been idle for too long, with what is to be said of each. They are to be ended now, and
        are named once; they are in the books until they are released."""
        found = {}
        while (deadline_s := self.next_deadline()) is not None and deadline_s <= self._now():
            request_id, _ = self._last_chunk_s.popitem(last=False)
            found[request_id] = StreamIdleError(
                f"{request_id}: the stream was ended, because no chunk came for "
                f"idle_timeout_s={self.limits.idle_timeout_s:g}. Finish the prompt sooner, or raise the limit"
            )
        return found

    # ---- the books ----------------------------------------------------------------------------------------------

    def _take(self, request_id: str, request: _Request) -> None:
        tenant, num_tokens = request.tenant, request.num_tokens
        books = (self._open, self._open_by_tenant.get(tenant) or _Book(self.limits, "_per_tenant"))
        for book in books:
            self._check(request_id, tenant, book.streams, 1)
            self._check(request_id, tenant, book.tokens, num_tokens)
        self._open_by_tenant[tenant] = books[1]
        for book in books:
            book.streams.take(1)
            book.tokens.take(num_tokens)
        self._last_chunk_s[request_id] = self._now()

    def _give_back(self, request_id: str, request: _Request) -> None:
        self._last_chunk_s.pop(request_id, None)
        now_s = self._now()
        for book in (self._open, self._open_by_tenant[request.tenant]):
            book.streams.give_back(1, now_s)
            book.tokens.give_back(request.num_tokens, now_s)
        if not book.streams.taken:
            del self._open_by_tenant[request.tenant]

    def _check_fits(self, request_id: str, num_tokens: int) -> None:
        for name in ("max_open_tokens", "max_open_tokens_per_tenant"):
            limit = getattr(self.limits, name)
            if limit is not None and num_tokens > limit:
                raise PromptTooLongError(
                    f"{request_id}: an open prompt of {num_tokens} tokens is more than {name}={limit} ever allows. "
                    "Send less, or raise the limit"
                )

    def _check(self, request_id: str, tenant: str, quota: _Quota, amount: int) -> None:
        shortage = quota.shortage(amount)
        if not shortage:
            return
        self._num_refused[quota.name] += 1
        wait_s = quota.wait_s(shortage, self._now())
        when = "later" if wait_s is None else f"in about {wait_s:.1f} s"
        whose = f" for tenant {tenant!r}" if quota.name.endswith("_per_tenant") else ""
        raise EngineBusyError(
            f"{request_id}: the engine is full{whose}: {quota.taken} are taken of "
            f"{quota.name}={quota.limit}, and this needs {amount} more. Try again {when}, or raise the limit",
            limit=quota.name,
            tenant=tenant,
            retry_after_s=wait_s,
        )
