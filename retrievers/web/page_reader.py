"""One page: fetched by HTTP or in a browser, then converted."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.context import SourceFailure
from stream2llm_sdk.errors import FetchError, RetrievalError
from stream2llm_sdk.retrievers.web.browser import Browser, DownloadError
from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool
from stream2llm_sdk.retrievers.web.crawl4ai_fetch import Crawl4AIPages
from stream2llm_sdk.retrievers.web.crawl_options import CrawlLimits, FetchMode
from stream2llm_sdk.retrievers.web.fetched_page import FetchedPage
from stream2llm_sdk.retrievers.web.page import ConvertedPage, ExtractionOptions

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.web.fetch import PageFetcher

__all__ = ["PageReader", "ReadPage"]

_NEARLY_EMPTY_WORDS = 25

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadPage:
    """A page that was fetched and converted; its text may be empty.

    Attributes:
        url: where it was, after redirects.
        page: what it says.
        note: what a person should know about how it was read; empty if nothing.
        began: when its fetch began, in the event loop's time: with the first request, after any wait for a turn at its
            host.
    """

    url: str
    page: ConvertedPage
    note: str = ""
    began: float = 0.0


class PageReader:
    """Reads single pages until `deadline` (in the event loop's time).

    Args:
        fetcher: fetches by HTTP.
        browser: reads pages that scripts fill; None with `mode="http"`.
        pool: converts.
        permits: bounds how many pages are fetched at the same time, over all questions.
        mode: by HTTP, in the browser, or `"auto"`: by HTTP, and in the browser what has scripts and fewer than 25
            words.
        extraction: what to take from a page.
        limits: the time and bytes of a page.
        deadline: when the crawl ends.
    """

    def __init__(
        self,
        fetcher: PageFetcher,
        browser: Browser | Crawl4AIPages | None,
        pool: ConverterPool,
        permits: asyncio.Semaphore,
        *,
        mode: FetchMode,
        extraction: ExtractionOptions,
        limits: CrawlLimits,
        deadline: float,
    ) -> None:
        self._fetcher = fetcher
        self._browser = browser
        self._pool = pool
        self._permits = permits
        self._mode = mode
        self._extraction = extraction
        self._limits = limits
        self._deadline = deadline

    async def read(self, url: str) -> ReadPage | SourceFailure:
        """The page, or why it could not be had. Raises nothing but CancelledError."""
        try:
            async with asyncio.timeout_at(self._deadline) as total:
                return await self._read(url)
        except TimeoutError:
            name = "total_timeout_s" if total.expired() else "page_timeout_s"
            reason = f"not finished within {name}={getattr(self._limits, name)}"
        except RetrievalError as error:
            reason = str(error)
        except Exception as error:
            _logger.exception("Unexpected error while reading %s", url)
            reason = f"{type(error).__name__}: {error}"
        return SourceFailure(url, " ".join(reason.split()))

    async def _read(self, url: str) -> ReadPage:
        if asyncio.get_running_loop().time() >= self._deadline:
            raise FetchError(f"not started within total_timeout_s={self._limits.total_timeout_s}")
        if self._mode == "browser":
            try:
                return await self._rendered(url)
            except DownloadError:
                pass  # a PDF, or something else that only HTTP can get
        async with self._permits:
            asked = asyncio.get_running_loop().time()
            fetched = await self._fetcher.fetch(url, timeout_s=self._limits.page_timeout_s, deadline=self._deadline)
        read = await self._converted(fetched, asked if fetched.began is None else fetched.began)
        if self._mode == "auto" and read.page.has_scripts and read.page.num_words < _NEARLY_EMPTY_WORDS:
            return await self._fuller(read)
        return read

    async def _rendered(self, url: str) -> ReadPage:
        assert self._browser is not None, "the mode needs a browser"
        limits = self._limits
        async with self._permits, self._fetcher.turn(url, deadline=self._deadline):
            began = asyncio.get_running_loop().time()
            fetched = await self._browser.fetch(
                url, timeout_s=limits.page_timeout_s, max_page_bytes=limits.max_page_bytes
            )
        return await self._converted(fetched, began)

    async def _fuller(self, read: ReadPage) -> ReadPage:
        """The page as a browser shows it, if it says more there; else as it was read, with a note."""
        try:
            rendered = await self._rendered(read.url)
        except TimeoutError:
            if asyncio.get_running_loop().time() >= self._deadline:
                raise
            reason = f"not finished within page_timeout_s={self._limits.page_timeout_s}"
        except (RetrievalError, ImportError) as error:
            reason = str(error)
        else:
            if rendered.page.num_words <= read.page.num_words:
                return read
            return replace(rendered, began=read.began)
        return replace(read, note=f"its text is written by scripts, and a browser could not read it: {reason}")

    async def _converted(self, fetched: FetchedPage, began: float) -> ReadPage:
        content: Any = fetched.body if fetched.text is None else fetched.text
        page = await self._pool.convert(
            content,
            fetched.url,
            timeout_s=self._limits.page_timeout_s,
            options=self._extraction,
            content_type=fetched.content_type,
        )
        return ReadPage(fetched.url, page, began=began)
