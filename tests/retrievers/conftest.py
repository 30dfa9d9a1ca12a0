from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import their helpers by name

from web_server import WebServer

from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool
from stream2llm_sdk.retrievers.web.crawl_options import PolitenessOptions
from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever


@pytest.fixture
async def web() -> AsyncIterator[WebServer]:
    async with WebServer() as server:
        yield server


@pytest.fixture(scope="session")
async def converters() -> AsyncIterator[ConverterPool]:
    """One for all tests, because its start takes seconds."""
    async with ConverterPool(2) as pool, CrawlerRetriever(["http://10.0.0.1/"], converters=pool) as retriever:
        await retriever.warm_up()
        yield pool


@pytest.fixture
def crawler(converters: ConverterPool) -> Iterator[Callable[..., CrawlerRetriever]]:
    """Makes crawlers that may read the loopback."""

    def make(*urls: str, **options: Any) -> CrawlerRetriever:
        defaults = {"allow_networks": ["127.0.0.0/8"], "converters": converters, "page_timeout_s": 30.0}
        defaults["politeness"] = PolitenessOptions(respect_robots=False, per_host_concurrency=8)
        options = {**defaults, **options}
        return CrawlerRetriever(urls or None, **options)

    return make
