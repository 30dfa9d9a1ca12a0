"""From a query to URLs."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, urlsplit

import pytest
from web_server import WebServer

from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.search.provider import FixedSeeds, SearchHit, SearchProvider
from stream2llm_sdk.retrievers.search.searxng import SearxNGSearch


async def test_searxng_returns_hits_in_order_without_repetitions(web: WebServer) -> None:
    results = [
        {"url": "http://a.example/", "title": "A", "content": "about a"},
        {"url": "http://b.example/", "title": None},
        {"url": "http://a.example/", "title": "A again"},
        {"title": "no url"},
        "junk",
        {"url": "http://c.example/"},
    ]
    web.add("/searx/search", json.dumps({"results": results}), content_type="application/json")
    search = SearxNGSearch(web.base + "/searx/", language="en")

    assert isinstance(search, SearchProvider)
    assert await search.search("cats & dogs", 10) == [
        SearchHit("http://a.example/", "A", "about a"),
        SearchHit("http://b.example/"),
        SearchHit("http://c.example/"),
    ]
    assert len(await search.search("cats & dogs", 2)) == 2
    parameters = parse_qs(urlsplit(web.requests[0]).query)
    assert parameters == {"q": ["cats & dogs"], "format": ["json"], "categories": ["general"], "language": ["en"]}


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (403, "", "json format"),
        (500, "", "HTTP 500"),
        (200, "<html>", "not JSON"),
        (200, "[]", "without a list of results"),
        (200, '{"results": null}', "without a list of results"),
    ],
)
async def test_searxng_failure_says_what_is_wrong(web: WebServer, status: int, body: str, reason: str) -> None:
    web.add("/search", body, status=status, content_type="application/json")
    with pytest.raises(RetrievalError, match=reason):
        await SearxNGSearch(web.base).search("q", 3)


async def test_searxng_that_is_not_there() -> None:
    with pytest.raises(RetrievalError, match="cannot be asked"):
        await SearxNGSearch("http://127.0.0.1:1").search("q", 3)


async def test_fixed_seeds_keep_their_order() -> None:
    seeds = FixedSeeds(["http://b/", "http://a/", "http://b/"])
    assert await seeds.search("anything", 5) == [SearchHit("http://b/"), SearchHit("http://a/")]
    assert await seeds.search("anything", 1) == [SearchHit("http://b/")]


@pytest.mark.parametrize("urls", [[], "http://a/", ["http://a/", ""], ["http://a/", None]])
def test_seeds_that_are_none(urls: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="urls"):
        FixedSeeds(urls)


@pytest.mark.parametrize("options", [{"base_url": "127.0.0.1:8888"}, {"base_url": "http://x", "timeout_s": 0}])
def test_searxng_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        SearxNGSearch(**options)  # type: ignore[arg-type]
