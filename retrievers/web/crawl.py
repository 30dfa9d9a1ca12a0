"""One question's crawl: its limits, the reading of one page, and the reading of all of them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stream2llm_sdk.context import Append, Chunk, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, FetchError, RetrievalError
from stream2llm_sdk.retrievers.search_provider import SearchHit, SearchProvider
from stream2llm_sdk.retrievers.web.convert import ConvertedPage
from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool

if TYPE_CHECKING:
    from crawl4ai.models import AsyncCrawlResponse

    from stream2llm_sdk.retrievers.web.fetch import GuardedHTTPStrategy

__all__ = ["CrawlLimits", "PageReader", "read_pages", "search_pages"]

_MAX_REASONS = 5

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrawlLimits:
    """What one crawl may use; `CrawlerRetriever` explains each.

    Raises:
        ConfigurationError: a limit is not a positive number.
    """

    max_pages: int
    concurrency: int
    page_timeout_s: float
    total_timeout_s: float
    max_page_bytes: int
    num_workers: int

    def __post_init__(self) -> None:
        for name in ("max_pages", "concurrency", "max_page_bytes", "num_workers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name}={value!r}: give a whole number of at least 1")
        for name in ("page_timeout_s", "total_timeout_s"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                raise ConfigurationError(f"{name}={value!r}: give a positive number of seconds")


class PageReader:
    """Fetches and converts single pages until `deadline` (in the event loop's time)."""

    def __init__(
        self,
        strategy: GuardedHTTPStrategy,
        pool: ConverterPool,
        permits: asyncio.Semaphore,
        limits: CrawlLimits,
        deadline: float,
    ) -> None:
        self._strategy = strategy
        self._pool = pool
        self._permits = permits
        self._limits = limits
        self._deadline = deadline

    async def read(self, hit: SearchHit) -> Append | SourceFailure:
        """The page, or why it could not be had. Raises nothing but CancelledError."""
        try:
            async with asyncio.timeout_at(self._deadline) as total:
                return Append(await self._chunk(hit))
        except TimeoutError:
            name = "total_timeout_s" if total.expired() else "page_timeout_s"
            reason = f"not finished within {name}={getattr(self._limits, name)}"
        except RetrievalError as error:
            reason = str(error)
        except Exception as error:
            _logger.exception("Unexpected error while reading %s", hit.url)
            reason = f"{type(error).__name__}: {error}"
        return SourceFailure(hit.url, " ".join(reason.split()))

    async def _chunk(self, hit: SearchHit) -> Chunk:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._deadline:
            raise FetchError(f"not started within total_timeout_s={self._limits.total_timeout_s}")
        async with self._permits:
            started = loop.time()
            async with asyncio.timeout(self._limits.page_timeout_s):
                response = await self._strategy.crawl(hit.url)
        time_left_s = self._limits.page_timeout_s - (loop.time() - started)
        page = await self._text(response, time_left_s)
        if not page.markdown:
            raise FetchError("the page has no text")
        return Chunk(page.markdown, source=response.redirected_url, title=page.title or hit.title)

    async def _text(self, response: AsyncCrawlResponse, timeout_s: float) -> ConvertedPage:
        if response.response_headers.get("content-type", "").lower().startswith("text/plain"):
            return ConvertedPage("", response.html.strip())
        return await self._pool.convert(response.html, response.redirected_url, timeout_s=timeout_s)


async def search_pages(search: SearchProvider, query: str, limits: CrawlLimits, deadline: float) -> list[SearchHit]:
    """The pages to read for `query`, at least one, none twice.

    Raises:
        RetrievalError: the search fails, is too slow, or finds nothing.
    """
    try:
        async with asyncio.timeout_at(deadline) as total:
            hits = await search.search(query, limits.max_pages)
    except RetrievalError:
        raise
    except Exception as error:
        if total.expired():
            message = f"the search took longer than total_timeout_s={limits.total_timeout_s}"
            raise RetrievalError(message) from error
        raise RetrievalError(f"the search failed: {type(error).__name__}: {error}") from error
    for hit in hits:
        if not isinstance(hit, SearchHit):
            raise RetrievalError(f"the search returned {hit!r:.80}, which is not a SearchHit")
    unique = {hit.url.strip(): hit for hit in reversed(hits)}
    if not unique:
        raise RetrievalError(f"the search found no page for {query!r:.200}")
    pages = [SearchHit(url, hit.title, hit.snippet) for url, hit in reversed(unique.items())]
    return pages[: limits.max_pages]


async def read_pages(
    hits: Iterable[SearchHit],
    reader: PageReader,
    emit: Callable[[Append | SourceFailure], Awaitable[None]],
    num_readers: int,
) -> None:
    """Reads all pages, `num_readers` at a time, and emits each when it is there. A slow `emit` holds its reader
    back, so at most `num_readers` pages wait here.

    Raises:
        RetrievalError: every page failed.
    """
    pending = iter(hits)
    failures: list[SourceFailure] = []
    num_read = 0

    async def read_some(pages: Iterator[SearchHit]) -> None:
        nonlocal num_read
        for hit in pages:
            outcome = await reader.read(hit)
            if isinstance(outcome, SourceFailure):
                failures.append(outcome)
            else:
                num_read += 1
            await emit(outcome)

    async with asyncio.TaskGroup() as readers:
        for _ in range(num_readers):
            readers.create_task(read_some(pending))
    if not num_read:
        raise RetrievalError(f"no page could be read: {_summary(failures)}")


def _summary(failures: list[SourceFailure]) -> str:
    reasons = [f"{failure.source}: {failure.reason}" for failure in failures[:_MAX_REASONS]]
    if len(failures) > _MAX_REASONS:
        reasons.append(f"and {len(failures) - _MAX_REASONS} more")
    return "; ".join(reasons)
