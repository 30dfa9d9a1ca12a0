"""Pages fetched by a crawl4ai crawler of the application's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from web_server import WebServer, page

from stream2llm_sdk.context import Append, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers import BrowserOptions, Crawl4AIFetch, CrawlerRetriever
from stream2llm_sdk.retrievers.web.convert import prepare_crawl4ai

TEXT = "A task group cancels the tasks that are left as soon as one of them has failed with an error."


@pytest.fixture(scope="module")
def crawl4ai() -> Any:
    prepare_crawl4ai()
    return pytest.importorskip("crawl4ai")


async def outcomes(retriever: CrawlerRetriever) -> list[Any]:
    async with retriever:
        return [update async for update in retriever.stream("How does a task group cancel its tasks?")]


async def test_pages_come_from_the_given_crawler_with_its_own_settings(
    web: WebServer, crawler: Callable[..., CrawlerRetriever], crawl4ai: Any
) -> None:
    from crawl4ai.async_crawler_strategy import AsyncHTTPCrawlerStrategy

    strategy = AsyncHTTPCrawlerStrategy(crawl4ai.HTTPCrawlerConfig(headers={"X-Ours": "yes"}))
    good = web.add("/good", page(TEXT, "Groups"))
    web.add_redirect("/moved", good)
    missing = web.base + "/missing"
    async with crawl4ai.AsyncWebCrawler(crawler_strategy=strategy, verbose=False) as theirs:
        found = await outcomes(crawler(web.base + "/moved", missing, fetch=Crawl4AIFetch(theirs)))
    assert [update.chunks[0].text for update in found if isinstance(update, Append)] == [TEXT]
    assert [update.source for update in found if isinstance(update, SourceFailure)] == [missing]
    assert all(headers["x-ours"] == "yes" for headers in web.headers)


@pytest.mark.parametrize("url", ["http://10.0.0.1/", "http://169.254.169.254/", "http://[::ffff:10.0.0.1]/"])
async def test_forbidden_addresses_are_not_given_to_it(
    crawler: Callable[..., CrawlerRetriever], crawl4ai: Any, url: str
) -> None:
    class Strategy:
        async def crawl(self, url: str, config: Any = None) -> Any:
            raise AssertionError(url)

    with pytest.raises(RetrievalError, match="is not public"):
        await outcomes(crawler(url, fetch=Crawl4AIFetch(Strategy())))


async def test_one_that_hangs_or_breaks_costs_its_page_only(
    web: WebServer, crawler: Callable[..., CrawlerRetriever], crawl4ai: Any
) -> None:
    from crawl4ai.models import AsyncCrawlResponse

    class Strategy:
        async def crawl(self, url: str, config: Any = None) -> AsyncCrawlResponse:
            if url.endswith("/hangs"):
                await asyncio.Event().wait()
            if url.endswith("/breaks"):
                raise RuntimeError("the tab\ncrashed")
            return AsyncCrawlResponse(html=page(TEXT), response_headers={}, status_code=200)

    urls = [web.base + path for path in ("/hangs", "/breaks", "/good")]
    found = await outcomes(crawler(*urls, fetch=Crawl4AIFetch(Strategy()), page_timeout_s=1.0))
    reasons = {update.source: update.reason for update in found if isinstance(update, SourceFailure)}
    assert "page_timeout_s=1.0" in reasons[urls[0]]
    assert reasons[urls[1]] == "crawl4ai: RuntimeError: the tab crashed"
    assert sum(isinstance(update, Append) for update in found) == 1


def test_what_is_no_crawler_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is no crawl4ai crawler"):
        Crawl4AIFetch("http://a.example/")
    with pytest.raises(ConfigurationError, match="uses none"):
        CrawlerRetriever(["https://a.example/"], fetch=Crawl4AIFetch(_Strategy()), browser=BrowserOptions())


class _Strategy:
    async def crawl(self, url: str) -> None: ...
