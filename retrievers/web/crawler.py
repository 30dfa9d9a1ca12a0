"""Pages from the web as context, each one as soon as it is there."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import warnings
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any
from urllib.parse import urlsplit

from stream2llm_sdk.context import Append, ContextMode, ContextUpdate, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError
from stream2llm_sdk.retrievers.search_provider import FixedSeeds, SearchProvider
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard, HostLookup, system_lookup
from stream2llm_sdk.retrievers.web.convert import prepare_crawl4ai
from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool
from stream2llm_sdk.retrievers.web.crawl import CrawlLimits, PageReader, read_pages, search_pages

__all__ = ["CrawlerRetriever"]

_DEFAULT_SEARCH_PAGES = 10
_DEFAULT_USER_AGENT = "Mozilla/5.0 (compatible; stream2llm-sdk)"


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all streams of one retriever use together, on one event loop."""

    loop: asyncio.AbstractEventLoop
    pool: ConverterPool
    permits: asyncio.Semaphore
    owns_pool: bool

    def kill(self) -> None:
        if self.owns_pool:
            self.pool.kill()


@dataclass(frozen=True, slots=True)
class _End:
    """The last item of a stream's queue."""

    error: Exception | None = None


class CrawlerRetriever:
    """Reads web pages with crawl4ai's HTTP mode and appends each to the context the moment it is converted.

    Pages come in the order of their arrival. A page that fails is reported as a `SourceFailure` and stops nothing;
    if every page fails, the stream ends with a `RetrievalError`, as it does if the search fails or finds nothing.
    Only public http(s) addresses are read, whatever a search result, a redirect or a DNS answer says.

    Several questions may stream at once: they share the converter processes and the concurrency limit. Closing a
    stream stops everything that it started. Use the retriever as an async context manager, or call `aclose` at the
    end; a later `stream` starts it again. One retriever serves one event loop.

    Args:
        urls: http(s) pages to read for every question; give these or `search`.
        search: turns each question into pages to read.
        max_pages: most pages read per question: the first ones of the search, 10 if left out, or of `urls`, all if
            left out.
        concurrency: pages fetched at the same time, over all questions.
        page_timeout_s: longest time for fetching and converting one page in seconds; waiting for a turn or for
            a free converter process is not counted.
        total_timeout_s: longest time from the question to the last page in seconds. Pages that are not there by
            then are reported as failures.
        max_page_bytes: bound on one page's body, both as sent and as decompressed.
        num_workers: pages converted at the same time, each in a process that shares the 130 MB of crawl4ai's import.
        converters: a pool of converter processes to use instead of an own one; it stays its owner's to close.
        allow_networks: networks that may be read although they are not public, such as `["127.0.0.0/8"]`.
        user_agent: the User-Agent header.
        lookup: how host names are resolved; by default as the operating system does it.

    Raises:
        ConfigurationError: an option has a value that cannot work.
        MissingExtraError: crawl4ai is not installed.
    """

    def __init__(
        self,
        urls: Iterable[str] | None = None,
        *,
        search: SearchProvider | None = None,
        max_pages: int | None = None,
        concurrency: int = 8,
        page_timeout_s: float = 10.0,
        total_timeout_s: float = 30.0,
        max_page_bytes: int = 4_000_000,
        num_workers: int = 2,
        converters: ConverterPool | None = None,
        allow_networks: Iterable[str] = (),
        user_agent: str = _DEFAULT_USER_AGENT,
        lookup: HostLookup = system_lookup,
    ) -> None:
        self._shared: _Shared | None = None
        self._search = _search_provider(urls, search)
        if max_pages is None:
            max_pages = len(self._search.urls) if isinstance(self._search, FixedSeeds) else _DEFAULT_SEARCH_PAGES
        self._limits = CrawlLimits(
            max_pages=max_pages,
            concurrency=concurrency,
            page_timeout_s=page_timeout_s,
            total_timeout_s=total_timeout_s,
            max_page_bytes=max_page_bytes,
            num_workers=num_workers,
        )
        self._converters = converters
        self._guard = AddressGuard(allow_networks, lookup=lookup)
        if not user_agent or not user_agent.isascii() or not user_agent.isprintable():
            raise ConfigurationError(f"user_agent={user_agent!r}: give one line of printable ASCII")
        self._user_agent = user_agent
        if importlib.util.find_spec("crawl4ai") is None:
            raise MissingExtraError("crawl4ai", "crawler")

    @property
    def mode(self) -> ContextMode:
        """Pages are appended."""
        return ContextMode.APPEND

    async def warm_up(self) -> None:
        """Starts the converter processes and imports crawl4ai, which takes seconds, ahead of the first question.

        Raises:
            RetrievalError: crawl4ai cannot be used.
        """
        shared = self._open()
        await _import_fetch()
        await shared.pool.warm_up()

    async def stream(self, query: str) -> AsyncIterator[ContextUpdate | SourceFailure]:
        """The pages for `query`, each as one `Append`, and the failures, in the order in which they happen.

        At most `2 * concurrency` pages are read ahead of a slow consumer.

        Raises:
            RetrievalError: the search failed or found nothing, or every page failed.
        """
        # Items leave through the queue, so that no task group or timeout is open across a `yield`.
        items: asyncio.Queue[Append | SourceFailure | _End] = asyncio.Queue(self._limits.concurrency)
        producer = asyncio.create_task(self._produce(query, items), name="crawl")
        try:
            while not isinstance(item := await items.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            await _cancel_and_wait(producer)

    async def aclose(self) -> None:
        """Ends the converter processes. Streams that still run get failures."""
        shared, self._shared = self._shared, None
        if shared is not None and shared.owns_pool:
            await shared.pool.aclose()

    async def __aenter__(self) -> CrawlerRetriever:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        shared = getattr(self, "_shared", None)
        if shared is not None and shared.owns_pool:
            message = "a CrawlerRetriever was never closed; use `async with`"
            warnings.warn(message, ResourceWarning, stacklevel=1, source=self)
            shared.kill()

    def _open(self) -> _Shared:
        loop = asyncio.get_running_loop()
        if self._shared is not None and self._shared.loop is not loop:
            if not self._shared.loop.is_closed():
                raise ConfigurationError("this CrawlerRetriever serves another event loop; make one for each loop")
            self._shared.kill()
            self._shared = None
        if self._shared is None:
            pool = self._converters or ConverterPool(self._limits.num_workers)
            permits = asyncio.Semaphore(self._limits.concurrency)
            self._shared = _Shared(loop, pool, permits, owns_pool=self._converters is None)
        return self._shared

    async def _produce(self, query: str, items: asyncio.Queue[Append | SourceFailure | _End]) -> None:
        """Owns everything that one stream starts; cancelling it ends all of it."""
        try:
            await self._crawl(query, items)
            end = _End()
        except Exception as error:
            end = _End(error)
        await items.put(end)

    async def _crawl(self, query: str, items: asyncio.Queue[Append | SourceFailure | _End]) -> None:
        shared, limits = self._open(), self._limits
        fetch = await _import_fetch()
        deadline = shared.loop.time() + limits.total_timeout_s
        hits = await search_pages(self._search, query, limits, deadline)
        strategy = fetch.GuardedHTTPStrategy(
            self._guard, max_page_bytes=limits.max_page_bytes, user_agent=self._user_agent
        )
        try:
            reader = PageReader(strategy, shared.pool, shared.permits, limits, deadline)
            await read_pages(hits, reader, items.put, num_readers=min(limits.concurrency, len(hits)))
        finally:
            await strategy.close()


def _search_provider(urls: Iterable[str] | None, search: SearchProvider | None) -> SearchProvider:
    if (urls is None) == (search is None):
        given = "neither" if urls is None else "both"
        raise ConfigurationError(f"a CrawlerRetriever takes either urls or search; {given} was given")
    if urls is None:
        if not isinstance(search, SearchProvider):
            raise ConfigurationError(f"search={search!r:.80}: give an object with `async search(query, k)`")
        return search
    seeds = FixedSeeds(urls)
    for url in seeds.urls:
        _check_form(url)
    return seeds


def _check_form(url: str) -> None:
    """What a person can get wrong in a URL. Where it leads is the address guard's to judge, when it is read."""
    try:
        parts = urlsplit(url.strip())
    except ValueError as error:
        raise ConfigurationError(f"urls holds {url!r:.200}, which is malformed: {error}") from None
    has_scheme = bool(parts.scheme) and not parts.path[:1].isdigit()  # "localhost:8000" has a port
    if parts.scheme in ("http", "https"):
        if not parts.hostname:
            raise ConfigurationError(f"urls holds {url!r:.200}, which names no host: write it as https://HOST/PATH")
    elif has_scheme:
        raise ConfigurationError(
            f"urls holds {url!r:.200}: only http and https are read, not {parts.scheme}. What is on this machine can "
            "be given as text by an async generator function"
        )
    else:
        raise ConfigurationError(f"urls holds {url!r:.200}, which has no scheme: write https:// or http:// before it")


async def _import_fetch() -> Any:
    """The module that imports crawl4ai, imported in a thread because that takes seconds."""
    return await asyncio.to_thread(_import_in_thread)


def _import_in_thread() -> ModuleType:
    prepare_crawl4ai()
    return importlib.import_module("stream2llm_sdk.retrievers.web.fetch")


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Returns when `task` is over, also if the caller is cancelled meanwhile."""
    task.cancel()
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is not None:
        raise interruption
