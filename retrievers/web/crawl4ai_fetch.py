"""Pages as a crawl4ai crawler of the application's own fetches them."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from stream2llm_sdk.errors import ConfigurationError, FetchError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.fetched_page import FetchedPage

__all__ = ["Crawl4AIFetch", "Crawl4AIPages"]

_PAGE_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Crawl4AIFetch:
    """Lets a `CrawlerRetriever` fetch with crawl4ai, set up as the application likes: its browser, profile, hooks,
    sessions, scripts and proxies. Only the fetching is crawl4ai's; its conversion would hold up the event loop for
    seconds a page, so this project's is used::

        async with AsyncWebCrawler(config=BrowserConfig(...)) as crawler:
            retriever = CrawlerRetriever(search=..., fetch=Crawl4AIFetch(crawler, CrawlerRunConfig(js_code="...")))

    The address guard judges each page's URL, its host's addresses and where it ended. What the crawler's browser asks
    for beside that, and the addresses that it connects to, are not checked: `fetch="browser"` checks these.

    Args:
        crawler: a started `AsyncWebCrawler`, or one of crawl4ai's crawler strategies. It stays its owner's to close.
        config: a `CrawlerRunConfig` for every page. Left out, crawl4ai's defaults with the retriever's time limit.

    Raises:
        ConfigurationError: `crawler` is neither.
    """

    def __init__(self, crawler: Any, config: Any = None) -> None:
        strategy = getattr(crawler, "crawler_strategy", crawler)
        if isinstance(crawler, type) or not callable(getattr(strategy, "crawl", None)):
            raise ConfigurationError(
                f"{crawler!r:.80} is no crawl4ai crawler: give an AsyncWebCrawler that was started, or one of its "
                "crawler strategies"
            )
        self.strategy = strategy
        self.config = config

    def __repr__(self) -> str:
        return f"Crawl4AIFetch({type(self.strategy).__name__})"


class Crawl4AIPages:
    """What a `PageReader` asks for pages, on a `Crawl4AIFetch`."""

    process = None  # none that is ours to end

    def __init__(self, how: Crawl4AIFetch, guard: AddressGuard) -> None:
        self._how = how
        self._guard = guard

    async def fetch(self, url: str, *, timeout_s: float, max_page_bytes: int) -> FetchedPage:
        """The page's HTML.

        Raises:
            TimeoutError: it took longer.
            AddressNotAllowedError: the URL, its host or where it ended is forbidden.
            FetchError: crawl4ai reports a failure, or the page is no text or too large.
        """
        await self._check(url)
        async with asyncio.timeout(timeout_s):
            try:
                answer = await self._how.strategy.crawl(url, config=self._how.config or _run_config(timeout_s))
            except TimeoutError:
                raise
            except Exception as error:  # crawl4ai raises whatever its browser or client does
                raise FetchError(" ".join(f"crawl4ai: {type(error).__name__}: {error}".split())[:300]) from error
        final = answer.redirected_url or url
        if final != url:
            await self._check(final)
        if answer.status_code is not None and not 200 <= answer.status_code < 300:
            raise FetchError(f"HTTP {answer.status_code}")
        if len(answer.html) > max_page_bytes:
            raise FetchError(f"larger than max_page_bytes={max_page_bytes}")
        headers = {str(name).lower(): str(value) for name, value in (answer.response_headers or {}).items()}
        kind = headers.get("content-type", "text/html").partition(";")[0].strip().lower()
        if kind not in _PAGE_TYPES:
            raise FetchError(f"content type {kind!r:.80} is not text")
        return FetchedPage(final, answer.status_code or 200, headers, kind, answer.html)

    async def aclose(self) -> None:
        """Nothing: the crawler is its owner's."""

    def kill(self) -> None:
        """Nothing, too."""

    async def _check(self, url: str) -> None:
        self._guard.check_url(url)
        parts = urlsplit(url)
        await self._guard.resolve(parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme])


def _run_config(timeout_s: float) -> Any:
    from crawl4ai import CrawlerRunConfig

    return CrawlerRunConfig(page_timeout=int(timeout_s * 1000), verbose=False)
