"""Several searches as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.search.provider import SearchHit, SearchProvider, StreamingSearchProvider
from stream2llm_sdk.retrievers.web.option_checks import check_seconds

__all__ = ["SearchAll"]

_logger = logging.getLogger(__name__)


class SearchAll:
    """Asks several providers at once and gives their hits as they come, each URL once.

    Every provider has an equal share of the `k` hits, which nobody else can take before it has answered, so a quick
    provider does not crowd out a slow one. A provider that fails is logged and missed; if all
    fail and there is no hit, so does the search.

    Args:
        providers: at least one.
        timeout_s: longest wait for each provider in seconds; None leaves it to the providers.

    Raises:
        ConfigurationError: `providers` is empty or holds something that cannot search.
    """

    def __init__(self, providers: Iterable[SearchProvider], *, timeout_s: float | None = None) -> None:
        if isinstance(providers, (str, SearchProvider)) or not isinstance(providers, Iterable):
            raise ConfigurationError(f"providers={providers!r:.80}: give a list of search providers")
        self._providers = tuple(providers)
        if not self._providers:
            raise ConfigurationError("providers is empty: give at least one search provider")
        for provider in self._providers:
            if not isinstance(provider, SearchProvider):
                raise ConfigurationError(f"{provider!r:.80} cannot search: it needs `async search(query, k)`")
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        self._timeout_s = timeout_s

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """At most `k` hits for `query` in the order of their coming.

        Raises:
            RetrievalError: every provider failed, and none gave a hit.
        """
        async with aclosing(self.stream(query, k)) as hits:
            return [hit async for hit in hits]

    async def stream(self, query: str, k: int) -> AsyncGenerator[SearchHit, None]:
        """At most `k` hits for `query` as they come.

        Raises:
            RetrievalError: every provider failed, and none gave a hit.
        """
        found: asyncio.Queue[tuple[int, SearchHit | BaseException | None]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._ask(number, query, k, found), name=f"search {number}")
            for number in range(len(self._providers))
        ]
        shares = _Shares(k, len(tasks))
        failures: list[str] = []
        has_hits = False
        try:
            while shares.is_open:
                number, item = await found.get()
                if isinstance(item, SearchHit):
                    shares.offer(number, item)
                else:
                    shares.close(number)
                    if item is not None:
                        failures.append(self._report(number, item))
                for hit in shares.take():
                    has_hits = True
                    yield hit
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if len(failures) == len(self._providers) and not has_hits:
            raise RetrievalError(f"every search failed: {'; '.join(failures)}")

    async def _ask(self, number: int, query: str, k: int, found: asyncio.Queue[Any]) -> None:
        """Ends with None, or with what went wrong; whatever it is, who waits for the end gets it."""
        bad: list[Any] = []
        end: BaseException | None = None
        try:
            async with (
                asyncio.timeout(self._timeout_s) as limit,
                aclosing(_hits(self._providers[number], query, k)) as hits,
            ):
                async for hit in hits:
                    if isinstance(hit, SearchHit) and isinstance(hit.url, str):
                        found.put_nowait((number, hit))
                    else:
                        bad.append(hit)
            if bad:
                end = RetrievalError(f"{len(bad)} of its results are no SearchHit with a URL, such as {bad[0]!r:.80}")
        except (KeyboardInterrupt, SystemExit) as error:
            found.put_nowait((number, error))
            raise
        except BaseException as error:  # an extension module's panic is no Exception
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            is_late = isinstance(error, TimeoutError) and limit.expired()
            end = RetrievalError(f"no answer within timeout_s={self._timeout_s}") if is_late else error
        found.put_nowait((number, end))

    def _report(self, number: int, error: BaseException) -> str:
        name = type(self._providers[number]).__name__
        reason = str(error) if isinstance(error, RetrievalError) else f"{type(error).__name__}: {error}"
        _logger.warning("%s failed and is missed: %s", name, reason)
        return f"{name}: {reason}"


async def _hits(provider: SearchProvider, query: str, k: int) -> AsyncGenerator[Any, None]:
    """What a provider finds, as it comes if it can stream."""
    if isinstance(provider, StreamingSearchProvider):
        async with aclosing(provider.stream(query, k)) as hits:  # type: ignore[type-var]
            async for hit in hits:
                yield hit
    else:
        for hit in await provider.search(query, k):
            yield hit


class _Shares:
    """Which hits may go on. A provider's share is its own until it has ended; what is over is for everybody."""

    def __init__(self, k: int, num_providers: int) -> None:
        self._room = k
        self._open = set(range(num_providers))
        self._left = [k // num_providers + (i < k % num_providers) for i in range(num_providers)]
        self._ready: list[SearchHit] = []
        self._waiting: dict[str, SearchHit] = {}
        self._seen: set[str] = set()

    @property
    def is_open(self) -> bool:
        return self._room > 0 and bool(self._open)

    def offer(self, number: int, hit: SearchHit) -> None:
        is_known = hit.url in self._seen
        if self._left[number] > 0 and (not is_known or hit.url in self._waiting):
            self._left[number] -= 1
            self._ready.append(self._waiting.pop(hit.url, hit))
        elif not is_known:
            self._waiting[hit.url] = hit
        self._seen.add(hit.url)

    def close(self, number: int) -> None:
        self._open.discard(number)
        self._left[number] = 0

    def take(self) -> list[SearchHit]:
        """The hits that may go on now."""
        hits, self._ready = self._ready[: self._room], []
        self._room -= len(hits)
        spare = self._room - sum(self._left[number] for number in self._open)
        more = [self._waiting.pop(url) for url in list(self._waiting)[: max(spare, 0)]]
        self._room -= len(more)
        return hits + more
