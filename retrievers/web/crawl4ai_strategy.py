"""The page fetcher as a strategy of crawl4ai, for any `AsyncWebCrawler`.

crawl4ai's own request connects to any address, reads a body of any size, and writes what is not HTML to disk.
Importing this module imports crawl4ai, which takes seconds: import it in a thread.
"""

from __future__ import annotations

import contextlib
from typing import Any

from crawl4ai.async_configs import HTTPCrawlerConfig
from crawl4ai.async_crawler_strategy import AsyncHTTPCrawlerStrategy
from crawl4ai.models import AsyncCrawlResponse

from stream2llm_sdk.errors import FetchError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.fetch import PageFetcher
from stream2llm_sdk.retrievers.web.fetched_page import FetchedPage
from stream2llm_sdk.retrievers.web.http_cache import HTTPCache
from stream2llm_sdk.retrievers.web.politeness import DEFAULT_USER_AGENT, Politeness

__all__ = ["GuardedHTTPStrategy"]


class GuardedHTTPStrategy(AsyncHTTPCrawlerStrategy):  # type: ignore[misc]
    """One page by HTTP as `PageFetcher` fetches it; see `PageFetcher` for the arguments."""

    def __init__(
        self,
        guard: AddressGuard,
        *,
        max_page_bytes: int,
        user_agent: str = DEFAULT_USER_AGENT,
        politeness: Politeness | None = None,
        cache: HTTPCache | None = None,
    ) -> None:
        super().__init__(HTTPCrawlerConfig())
        self._fetcher = PageFetcher(
            guard, max_page_bytes=max_page_bytes, user_agent=user_agent, politeness=politeness, cache=cache
        )

    async def start(self) -> None:
        """Nothing: the fetcher connects when it fetches."""

    async def close(self) -> None:
        """Closes all connections."""
        await self._fetcher.close()

    def turn(self, url: str, *, deadline: float | None = None) -> contextlib.AbstractAsyncContextManager[None]:
        """Waits until `url` may be requested; see `PageFetcher.turn` for the arguments."""
        return self._fetcher.turn(url, deadline=deadline)

    async def fetch(self, url: str, *, timeout_s: float | None = None, deadline: float | None = None) -> FetchedPage:
        """The page at `url`; see `PageFetcher.fetch` for the arguments."""
        return await self._fetcher.fetch(url, timeout_s=timeout_s, deadline=deadline)

    async def crawl(self, url: str, config: Any = None, **kwargs: object) -> AsyncCrawlResponse:
        """The page at `url` in crawl4ai's form. `redirected_url` is the last hop's; header names are in lower case.

        The `page_timeout` of `config`, in milliseconds, is kept to.

        Raises:
            AddressNotAllowedError: a hop leads where the guard forbids.
            FetchError: the page cannot be had, or is not text: crawl4ai's form has no place for bytes.
        """
        timeout_ms = getattr(config, "page_timeout", None)
        page = await self.fetch(url, timeout_s=timeout_ms / 1000 if timeout_ms else None)
        if page.text is None:
            raise FetchError(f"content type {page.content_type!r} is not text")
        headers = {**page.headers, "content-type": page.content_type}
        return AsyncCrawlResponse(
            html=page.text, response_headers=headers, status_code=page.status, redirected_url=page.url
        )
