"""Pages from the web as context, each one as soon as it is there."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stream2llm_sdk.context import ContextMode, ContextUpdate, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.search.provider import FixedSeeds, SearchProvider
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard, HostLookup, system_lookup
from stream2llm_sdk.retrievers.web.browser import Browser
from stream2llm_sdk.retrievers.web.browser_options import BrowserOptions
from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool
from stream2llm_sdk.retrievers.web.crawl import Crawl, CrawlEvent
from stream2llm_sdk.retrievers.web.crawl4ai_fetch import Crawl4AIFetch, Crawl4AIPages
from stream2llm_sdk.retrievers.web.crawl_options import CrawlLimits, FetchMode, PolitenessOptions, check_fetch_mode
from stream2llm_sdk.retrievers.web.duplicates import SeenTexts
from stream2llm_sdk.retrievers.web.frontier import Frontier, LinkOptions
from stream2llm_sdk.retrievers.web.option_checks import check_instance
from stream2llm_sdk.retrievers.web.page import ExtractionOptions
from stream2llm_sdk.retrievers.web.page_reader import PageReader
from stream2llm_sdk.retrievers.web.politeness import DEFAULT_USER_AGENT, Politeness
from stream2llm_sdk.tasks import cancel_and_wait, ended

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.web.fetch import PageFetcher
    from stream2llm_sdk.retrievers.web.http_cache import HTTPCache

__all__ = ["CrawlerRetriever"]

_DEFAULT_PAGES = 10
_DEFAULT_DEPTH = 2
_FETCHES_PER_PAGE = 3


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all streams of one retriever use together, on one event loop."""

    loop: asyncio.AbstractEventLoop
    pool: ConverterPool
    permits: asyncio.Semaphore
    politeness: Politeness
    browser: Browser | Crawl4AIPages | None
    owns_pool: bool

    @property
    def holds_processes(self) -> bool:
        return self.owns_pool or (self.browser is not None and self.browser.process is not None)

    def kill(self) -> None:
        if self.owns_pool:
            self.pool.kill()
        if self.browser is not None:
            self.browser.kill()

    async def aclose(self) -> None:
        try:
            if self.browser is not None:
                await self.browser.aclose()
            if self.owns_pool:
                await self.pool.aclose()
        except BaseException:  # also the end of the event loop
            self.kill()
            raise


@dataclass(frozen=True, slots=True)
class _End:
    """The last item of a stream's queue."""

    error: BaseException | None = None


class CrawlerRetriever:
    """Reads web pages and appends each to the context the moment it is converted.

    It begins with the pages that a search finds, each fetched as soon as the search names it, and goes on with their
    links, those first that speak most of the question. Pages come in the order of their arrival, as Markdown of the
    passages that matter for the question. No page comes twice, by its URL or by its text. A page that fails is
    reported as a `SourceFailure` and stops nothing; if every page fails, the stream ends with a `RetrievalError`, as
    it does if the search fails or finds nothing.

    Only public http(s) addresses are read, whatever a search result, a redirect, a DNS answer or a page's script says.
    Hosts are asked as their robots.txt allows.

    Several questions may stream at once: they share the converter processes, the browser, the concurrency limit and
    the turns at hosts. Closing a stream stops everything that it started. Use the retriever as an async context
    manager, or call `aclose` at the end; a later `stream` starts it again. One retriever serves one event loop.

    Args:
        urls: http(s) pages to read for every question; give these or `search`.
        search: turns each question into pages to read.
        links: how links are followed. If left out, to a depth of 2 from a search's pages, for what `max_pages` leaves
            room for, and not at all from `urls`.
        max_pages: most pages per question that reach the prompt. The search is asked for as many. If left out: 10, or
            all of `urls`, and 10 more if their links are followed.
        max_fetches: most pages per question that are tried, since some fail or repeat others; three times `max_pages`
            if left out.
        concurrency: pages fetched at the same time, over all questions.
        page_timeout_s: longest time in seconds for fetching one page, and again for converting it. Waiting for a turn
            at its host, for a free tab or for a free converter process is not counted.
        total_timeout_s: longest time from the question to the last page in seconds. Pages of the search that are not
            there by then are reported as failures.
        max_page_bytes: bound on one page's body, both as sent and as decompressed.
        read_ahead: pages and failures kept for a consumer that is slower than the crawl. Until so many wait, it does
            not hold up the crawl.
        duplicate_threshold: resemblance of two texts, from 0 to 1, from which the later one is left out as a
            duplicate; see `SeenTexts`.
        extraction: what to take from a page: tokens, languages, quality. Its `query` is the question.
        fetch: `"http"`; `"browser"`, for pages that are written by scripts, at a second and some 100 MB a page; or
            `"auto"`, by HTTP, and in the browser what has scripts and nearly no text without them. Without a browser,
            `"auto"` reads what there is and says so in the chunk's or the failure's text. Or a `Crawl4AIFetch`, for a
            crawl4ai crawler of your own.
        browser: which browser, and its bounds.
        politeness: robots.txt, and requests to one host at a time and in time.
        cache: pages kept from earlier. It stays its owner's to close.
        num_workers: pages converted at the same time, each in a process of its own.
        converters: a pool of converter processes to use instead of an own one; it stays its owner's to close.
        allow_networks: networks that may be read although they are not public, such as `["127.0.0.0/8"]`.
        user_agent: the User-Agent header; the name in it is looked for in robots.txt.
        lookup: how host names are resolved; by default as the operating system does it.

    Raises:
        ConfigurationError: an option has a value that cannot work.
        MissingExtraError: what the extra `crawler` brings is not installed.
    """

    def __init__(
        self,
        urls: Iterable[str] | None = None,
        *,
        search: SearchProvider | None = None,
        links: LinkOptions | None = None,
        max_pages: int | None = None,
        max_fetches: int | None = None,
        concurrency: int = 8,
        page_timeout_s: float = 10.0,
        total_timeout_s: float = 30.0,
        max_page_bytes: int = 4_000_000,
        read_ahead: int = 32,
        duplicate_threshold: float = 0.8,
        extraction: ExtractionOptions | None = None,
        fetch: FetchMode | Crawl4AIFetch = "http",
        browser: BrowserOptions | None = None,
        politeness: PolitenessOptions | None = None,
        cache: HTTPCache | None = None,
        num_workers: int = 2,
        converters: ConverterPool | None = None,
        allow_networks: Iterable[str] = (),
        user_agent: str = DEFAULT_USER_AGENT,
        lookup: HostLookup = system_lookup,
    ) -> None:
        self._shared: _Shared | None = None
        self._closing: asyncio.Task[None] | None = None
        self._finalizer: weakref.finalize[Any, Any]  # of `_shared`
        _check_kinds(links, extraction, browser, politeness, cache, converters)
        self._search = _search_provider(urls, search)
        seeds = self._search.urls if isinstance(self._search, FixedSeeds) else None
        default_depth = _DEFAULT_DEPTH if seeds is None else 0
        self._links = LinkOptions(max_depth=default_depth) if links is None else links
        if max_pages is None:
            max_pages = _default_max_pages(seeds, self._links)
        self._limits = CrawlLimits(
            max_pages=max_pages,
            max_fetches=_FETCHES_PER_PAGE * max_pages if max_fetches is None else max_fetches,
            concurrency=concurrency,
            page_timeout_s=page_timeout_s,
            total_timeout_s=total_timeout_s,
            max_page_bytes=max_page_bytes,
            num_workers=num_workers,
            read_ahead=read_ahead,
        )
        self._duplicate_threshold = SeenTexts(duplicate_threshold).threshold
        self._extraction = extraction or ExtractionOptions()
        if not self._links.max_depth:
            self._extraction = replace(self._extraction, max_links=0)  # looking for them takes time
        self._crawl4ai = fetch if isinstance(fetch, Crawl4AIFetch) else None
        self._fetch: FetchMode = "browser" if isinstance(fetch, Crawl4AIFetch) else fetch
        check_fetch_mode(self._fetch)
        if browser is not None and (self._crawl4ai or fetch == "http"):
            raise ConfigurationError(f"browser is given, but fetch={fetch!r} uses none: give fetch='browser' or 'auto'")
        self._browser = browser or BrowserOptions()
        self._politeness = politeness or PolitenessOptions()
        self._cache = cache
        self._converters = converters
        self._guard = AddressGuard(allow_networks, lookup=lookup)
        is_text = isinstance(user_agent, str) and bool(user_agent.strip())
        if not is_text or not user_agent.isascii() or not user_agent.isprintable():
            raise ConfigurationError(f"user_agent={user_agent!r:.200}: give one line of printable ASCII")
        self._user_agent = user_agent
        if importlib.util.find_spec("trafilatura") is None:
            raise MissingExtraError("trafilatura", "crawler")

    @property
    def mode(self) -> ContextMode:
        """Pages are appended."""
        return ContextMode.APPEND

    async def warm_up(self) -> None:
        """Starts the converter processes and imports what they need, which takes seconds, ahead of the first question.
        A browser starts with the first page that needs it.

        Raises:
            RetrievalError: the converter processes cannot be used.
        """
        shared = self._open()
        await asyncio.to_thread(_import_libraries)
        await shared.pool.warm_up()

    async def stream(self, query: str) -> AsyncIterator[ContextUpdate | SourceFailure]:
        """The pages for `query`, each as one `Append`, and the failures, in the order in which they happen.

        At most `read_ahead + concurrency` of them are read ahead of a slow consumer.

        Raises:
            RetrievalError: the search failed or found nothing, or every page failed.
        """
        async with contextlib.aclosing(self.events(query)) as events:
            async for event in events:
                if event.item is not None:
                    yield event.item

    async def events(self, query: str) -> AsyncGenerator[CrawlEvent, None]:
        """What `stream` gives, with the search, and with the times at which all of it began and was there.

        Raises:
            RetrievalError: the search failed or found nothing, or every page failed.
        """
        # Items leave through the queue, so that no task group or timeout is open across a `yield`.
        items: asyncio.Queue[CrawlEvent | _End] = asyncio.Queue(self._limits.read_ahead)
        producer = asyncio.create_task(self._produce(query, items), name="crawl")
        try:
            while not isinstance(item := await items.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            await cancel_and_wait(producer)

    async def aclose(self) -> None:
        """Ends the converter processes and the browser. Streams that still run get failures.

        If it is cancelled meanwhile, that is raised when everything has ended.
        """
        shared, self._shared = self._shared, None
        if shared is not None:
            self._closing = asyncio.create_task(_close(shared, self._finalizer), name="close the crawler")
        closing = self._closing
        if closing is not None and closing.get_loop() is asyncio.get_running_loop():
            await ended(closing)
            closing.result()

    async def __aenter__(self) -> CrawlerRetriever:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _open(self) -> _Shared:
        loop = asyncio.get_running_loop()
        if self._shared is not None and self._shared.loop is not loop:
            if not self._shared.loop.is_closed():
                raise ConfigurationError("this CrawlerRetriever serves another event loop; make one for each loop")
            self._finalizer.detach()
            self._shared.kill()
            self._shared = None
        if self._shared is None:
            pool = ConverterPool(self._limits.num_workers) if self._converters is None else self._converters
            permits = asyncio.Semaphore(self._limits.concurrency)
            politeness = self._politeness.start(self._user_agent)
            browser: Browser | Crawl4AIPages | None = None
            if self._crawl4ai is not None:
                browser = Crawl4AIPages(self._crawl4ai, self._guard)
            elif self._fetch != "http":
                browser = Browser(self._browser, self._guard, user_agent=self._user_agent)
            self._shared = _Shared(loop, pool, permits, politeness, browser, owns_pool=self._converters is None)
            # Not `__del__`, which may run when the interpreter can import nothing more.
            self._finalizer = weakref.finalize(self, _end_forgotten, self._shared)
        return self._shared

    async def _produce(self, query: str, items: asyncio.Queue[CrawlEvent | _End]) -> None:
        """Owns everything that one stream starts; cancelling it ends all of it."""
        try:
            await self._crawl(query, items)
            end = _End()
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            end = _End(RetrievalError(f"the crawl was cancelled from within: {error!r:.200}"))
        except BaseException as error:  # whatever it is, the consumer waits for the end
            end = _End(error)
        await items.put(end)

    async def _crawl(self, query: str, items: asyncio.Queue[CrawlEvent | _End]) -> None:
        shared, limits = self._open(), self._limits
        deadline = shared.loop.time() + limits.total_timeout_s
        shared.pool.prepare()
        page_fetcher = await asyncio.to_thread(_import_libraries)
        fetcher = page_fetcher(
            self._guard,
            max_page_bytes=limits.max_page_bytes,
            user_agent=self._user_agent,
            politeness=shared.politeness,
            cache=self._cache,
        )
        async with fetcher:
            reader = PageReader(
                fetcher,
                shared.browser,
                shared.pool,
                shared.permits,
                mode=self._fetch,
                extraction=replace(self._extraction, query=query),
                limits=limits,
                deadline=deadline,
            )
            crawl = Crawl(
                query,
                self._search,
                Frontier(query, self._links),
                reader,
                SeenTexts(self._duplicate_threshold),
                limits,
                per_host_concurrency=self._politeness.per_host_concurrency,
                deadline=deadline,
            )
            await crawl.run(items.put)


def _import_libraries() -> type[PageFetcher]:
    """Imports what would hold up the event loop, for a thread."""
    from stream2llm_sdk.retrievers.lexical import terms
    from stream2llm_sdk.retrievers.web.canonical_url import canonical_url
    from stream2llm_sdk.retrievers.web.fetch import PageFetcher

    canonical_url("https://a.example/")
    terms("warm")
    return PageFetcher


async def _close(shared: _Shared, finalizer: weakref.finalize[Any, Any]) -> None:
    await shared.aclose()
    finalizer.detach()


def _end_forgotten(shared: _Shared) -> None:
    """What is left to do for a retriever that nobody has closed, when it goes or the interpreter ends."""
    if shared.holds_processes:
        try:
            warnings.warn("a CrawlerRetriever was never closed; use `async with`", ResourceWarning, stacklevel=1)
        finally:
            shared.kill()


def _check_kinds(links: Any, extraction: Any, browser: Any, politeness: Any, cache: Any, converters: Any) -> None:
    from stream2llm_sdk.retrievers.web.http_cache import HTTPCache

    check_instance("links", links, LinkOptions, "LinkOptions(), or None for the default")
    check_instance("extraction", extraction, ExtractionOptions, "ExtractionOptions(), or None for the default")
    check_instance("browser", browser, BrowserOptions, "BrowserOptions(), or None for the default")
    check_instance("politeness", politeness, PolitenessOptions, "PolitenessOptions(), or None for the default")
    check_instance("cache", cache, HTTPCache, "an HTTPCache, or None for none")
    check_instance("converters", converters, ConverterPool, "a ConverterPool, or None for an own one")


def _default_max_pages(seeds: Sequence[str] | None, links: LinkOptions) -> int:
    if seeds is None:
        return _DEFAULT_PAGES
    return len(seeds) + (_DEFAULT_PAGES if links.max_depth else 0)


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
