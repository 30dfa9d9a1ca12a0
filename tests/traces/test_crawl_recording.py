"""Crawls are recorded as they happened: pages, failures, and the times at which they began and were there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from crawl_site import slow_page
from web_server import WebServer

from stream2llm_sdk.errors import ConfigurationError, RecordingError
from stream2llm_sdk.retrievers.search.provider import SearchHit
from stream2llm_sdk.traces import read_traces, record_crawls
from stream2llm_sdk.traces.recording.crawl import CrawlRecorder, CrawlSpec
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.searches import open_search

OPTIONS: dict[str, Any] = {
    "max_depth": 0,
    "allow_networks": ("127.0.0.0/8",),
    "respect_robots": False,
    "page_timeout_s": 20.0,
    "num_workers": 1,
}


@pytest.fixture
async def web() -> AsyncIterator[WebServer]:
    async with WebServer() as server:
        yield server


async def test_a_crawl_becomes_a_trace_with_its_times_and_failures(web: WebServer) -> None:
    urls = (
        slow_page(web, "/slow", 1, 0.4),
        slow_page(web, "/quick", 2, 0.05),
        web.add("/gone", "", status=404),
        web.add("/empty", "<html><body></body></html>"),
    )
    recorder = await CrawlSpec(per_host_concurrency=8, **OPTIONS).start()
    try:
        trace = await recorder.record(Question("7", "what is said of taden?", urls))
    finally:
        await recorder.aclose()
    search, quick, late = trace.updates
    assert (trace.tag, trace.query, trace.arrival_s) == ("crawler", "what is said of taden?", None)
    assert search.update.chunks == ()
    assert [chunk.source for chunk in trace.final_chunks] == [urls[1], urls[0]]
    assert [chunk.title for chunk in trace.final_chunks] == ["Page 2", "Page 1"]
    assert 0 <= search.begin_s <= search.offset_s <= quick.begin_s
    assert quick.begin_s + 0.05 <= quick.offset_s < late.offset_s
    assert late.begin_s + 0.4 <= late.offset_s < late.begin_s + 5
    assert {failure.source for failure in trace.failures} == {urls[2], urls[3]}
    assert "HTTP 404" in next(failure.reason for failure in trace.failures if failure.source == urls[2])
    assert all(search.offset_s <= failure.offset_s <= late.offset_s for failure in trace.failures)


async def test_waiting_for_a_turn_is_not_the_pages_own_time(web: WebServer) -> None:
    urls = tuple(slow_page(web, f"/{number}", number, 0.05) for number in range(3))
    recorder = await CrawlSpec(per_host_concurrency=1, per_host_interval_s=0.3, **OPTIONS).start()
    try:
        trace = await recorder.record(Question("0", "taden?", urls))
    finally:
        await recorder.aclose()
    begins_s = [timed.begin_s for timed in trace.updates[1:]]
    assert all(after - before >= 0.29 for before, after in pairwise(begins_s))


class Streamed:
    """A search whose second hit comes late."""

    def __init__(self, *urls: str) -> None:
        self._urls = urls

    async def search(self, query: str, k: int) -> list[SearchHit]:
        raise AssertionError("it streams")

    async def stream(self, query: str, k: int) -> AsyncIterator[SearchHit]:
        yield SearchHit(self._urls[0])
        await asyncio.sleep(0.5)
        yield SearchHit(self._urls[1])


async def test_a_search_that_streams_opens_the_prompt_with_its_first_page(web: WebServer) -> None:
    urls = tuple(slow_page(web, f"/{number}", number, 0.05) for number in range(2))
    async with CrawlSpec(**OPTIONS).crawler(Streamed(*urls)) as crawler:
        await crawler.warm_up()
        trace = await CrawlRecorder(crawler).record(Question("0", "taden?"))
    search, first, second = trace.updates
    assert search.offset_s < first.offset_s < 0.5 <= second.begin_s


async def test_a_slow_consumer_does_not_stretch_the_times(web: WebServer) -> None:
    urls = tuple(slow_page(web, f"/{number}", number, 0.05) for number in range(3))
    async with CrawlSpec(per_host_concurrency=8, **OPTIONS).crawler(
        await open_search("urls:" + ",".join(urls))
    ) as crawler:
        await crawler.warm_up()
        start = asyncio.get_running_loop().time()
        offsets_s = []
        async for event in crawler.events("taden?"):
            offsets_s.append(event.at - start)
            await asyncio.sleep(0.5)
    assert len(offsets_s) == 4
    assert offsets_s[-1] - offsets_s[0] < 1.0


async def test_where_there_is_nothing_to_record_it_is_said_why(web: WebServer) -> None:
    gone = web.add("/gone", "", status=404)
    recorder = await CrawlSpec(**OPTIONS).start()
    try:
        with pytest.raises(RecordingError, match="the search found no page"):
            await recorder.record(Question("0", "why?"))
        with pytest.raises(RecordingError, match=r"^no page could be read$") as caught:
            await recorder.record(Question("1", "why?", (gone,)))
    finally:
        await recorder.aclose()
    assert [(failure.source, failure.reason) for failure in caught.value.failures] == [(gone, "HTTP 404 Not Found")]


async def test_crawls_are_recorded_into_a_folder(web: WebServer, tmp_path: Path) -> None:
    """The same words may stand twice in a data set, with pages of their own."""
    questions = [Question(str(n), "taden?", (slow_page(web, f"/{n}", n, 0.02 * (3 - n)),)) for n in range(3)]
    summary = await record_crawls(questions, tmp_path / "out", **OPTIONS)
    assert (summary.num_traces, summary.num_updates, summary.num_failed) == (3, 3, 0)
    traces = read_traces(tmp_path / "out" / "traces.parquet").traces
    assert [trace.trace_id for trace in traces] == ["crawler-0", "crawler-1", "crawler-2"]
    assert [trace.final_chunks[0].source for trace in traces] == [question.urls[0] for question in questions]


@pytest.mark.parametrize(
    ("search", "match"),
    [
        ("google", "search='google': give one of dataset, searxng:URL"),
        ("searxng", "search='searxng'"),
        ("tavily:key", "search='tavily:key'"),
        ("local:/nowhere@http://a.org", "'/nowhere' is no folder"),
    ],
)
def test_a_search_that_there_is_not_is_refused_at_once(search: str, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        CrawlSpec(search=search)


def test_links_are_followed_as_far_as_the_search_leaves_open() -> None:
    assert CrawlSpec(search="urls:http://a").settings()["max_depth"] == 0
    assert CrawlSpec(search="urls:http://a", max_depth=1).settings()["max_depth"] == 1
    spec = CrawlSpec(scope="host")
    assert (spec.settings()["max_depth"], spec.settings()["scope"]) == (2, "host")
    assert (spec.asks_urls, CrawlSpec(search="duckduckgo").asks_urls) == (True, False)
    with pytest.raises(ConfigurationError, match="scope='planet'"):
        CrawlSpec(scope="planet")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"max_pages": 0}, {"max_depth": -1}, {"max_pages": True}, {"page_timeout_s": float("nan")}],
)
def test_numbers_that_cannot_work_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
        CrawlSpec(**options)
