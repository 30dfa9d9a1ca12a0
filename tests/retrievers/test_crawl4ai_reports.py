"""What users of crawl4ai reported about crawling in a stream does not happen here.

The numbers are those of the reports at https://github.com/unclecode/crawl4ai/issues.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hostile import hang
from web_server import WebServer, head

from stream2llm_sdk.context import Append, SourceFailure
from stream2llm_sdk.errors import RetrievalError
from stream2llm_sdk.retrievers.web.crawl_options import PolitenessOptions
from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
from stream2llm_sdk.retrievers.web.frontier import LinkOptions

pytestmark = pytest.mark.slow

MakeCrawler = Callable[..., CrawlerRetriever]
FOLLOW = LinkOptions(max_depth=2, scope="site", max_pages_per_host=None)
QUESTION = "streaming prefill"
# Unlike texts, so that no page counts as another's duplicate.
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "glade", "heron", "inlet", "junco", "knoll", "larch")


def linking(web: WebServer, name: str, *targets: str) -> str:
    """A page about the question with links to `targets`. Returns its URL."""
    number = sum(name.encode())
    own = " ".join(WORDS[(number + 7 * step) % len(WORDS)] + f" {name}{step}" for step in range(40))
    links = " ".join(
        f'<p>Read more on <a href="/{target}">streaming prefill of {target}</a>.</p>' for target in targets
    )
    html = f"<html><body><main><h1>{name}</h1><p>On streaming prefill: {own}.</p>{links}</main></body></html>"
    return web.add(f"/{name}", html)


async def collect(retriever: CrawlerRetriever) -> tuple[list[str], dict[str, str]]:
    """The chunks' sources in order, and the failures' reasons by URL."""
    sources: list[str] = []
    failures: dict[str, str] = {}
    async for item in retriever.stream(QUESTION):
        if isinstance(item, SourceFailure):
            failures[item.source] = item.reason
        else:
            assert isinstance(item, Append)
            sources += [chunk.source for chunk in item.chunks]
    return sources, failures


def names(web: WebServer, sources: list[str]) -> list[str]:
    return sorted(source.removeprefix(web.base + "/") for source in sources)


async def test_2071_a_closed_stream_leaves_no_crawl_tasks(web: WebServer, crawler: MakeCrawler) -> None:
    """#2071: closing the dispatcher's stream left its tasks crawling, so that the next crawl met them."""
    hanging = [web.add_handler(f"/hang{number}", hang) for number in range(6)]
    retriever = crawler(linking(web, "good"), *hanging, concurrency=7)
    tasks = asyncio.all_tasks()
    for _ in range(2):
        stream = retriever.stream(QUESTION)
        assert isinstance(await anext(stream), Append)
        await web.wait_until(lambda: web.num_active == 6)
        await stream.aclose()  # type: ignore[attr-defined]
        assert asyncio.all_tasks() == tasks
        await web.wait_until(lambda: web.num_connections == 0)
    assert web.max_active <= 7, "the second crawl met pages of the first"


async def test_2083_closing_waits_for_the_end_also_through_a_wrapper(web: WebServer, crawler: MakeCrawler) -> None:
    """#2083: `aclose()` of the public stream returned before the tasks of the stream inside had ended."""
    retriever = crawler(linking(web, "good"), *[web.add_handler(f"/{number}", hang) for number in range(6)])

    async def wrapped() -> AsyncIterator[Any]:
        inner = retriever.stream(QUESTION)
        try:
            async for item in inner:
                yield item
        finally:
            await inner.aclose()  # type: ignore[attr-defined]

    tasks = asyncio.all_tasks()
    outer = wrapped()
    await anext(outer)
    await outer.aclose()  # type: ignore[attr-defined]
    assert asyncio.all_tasks() == tasks  # at once, without the loop running once more


async def test_703_a_bound_on_concurrency_streams(web: WebServer, crawler: MakeCrawler) -> None:
    """#703: the dispatcher with a plain bound on concurrency raised AttributeError with `stream=True`."""
    gates = [asyncio.Event() for _ in range(6)]

    def gated(number: int, gate: asyncio.Event) -> str:
        async def answer(writer: asyncio.StreamWriter) -> None:
            await gate.wait()
            writer.write(head() + f"<p>{WORDS[number]} {WORDS[number + 6]} number {number}".encode())

        return web.add_handler(f"/{number}", answer)

    stream = crawler(*[gated(number, gate) for number, gate in enumerate(gates)], concurrency=2).stream(QUESTION)
    for number, gate in enumerate(gates):
        coming = asyncio.ensure_future(anext(stream))
        num_left = min(2, len(gates) - number)
        await web.wait_until(lambda num_left=num_left: web.num_active == num_left)  # type: ignore[misc]
        web.open(gate)
        item = await coming
        assert isinstance(item, Append), item
        assert item.chunks[0].source == f"{web.base}/{number}"
    assert [item async for item in stream] == []
    assert web.max_active == 2


@pytest.mark.parametrize("max_pages", [1, 4, 10])
async def test_927_no_more_pages_than_max_pages(web: WebServer, crawler: MakeCrawler, max_pages: int) -> None:
    """#927: a deep crawl with `max_pages=10` read 17 pages, since all links of a batch were followed."""
    children = [f"child{number}" for number in range(12)]
    start = linking(web, "start", *children)
    for child in children:
        linking(web, child, *[f"grand-{child}-{number}" for number in range(3)])
        for number in range(3):
            linking(web, f"grand-{child}-{number}")
    sources, failures = await collect(crawler(start, links=FOLLOW, max_pages=max_pages, concurrency=4))
    assert failures == {}
    assert len(set(sources)) == len(sources) == max_pages
    assert len(web.requests) <= max_pages + 3, "more was fetched than was under way when the last page came"


async def test_941_a_second_crawl_does_not_freeze(web: WebServer, crawler: MakeCrawler) -> None:
    """#941: breadth-first crawling froze at random, after the first page or on the second run."""
    linking(web, "a", "b", "c")
    linking(web, "b", "a", "c", "d")
    linking(web, "c", "a", "b", "missing")
    linking(web, "d", "a")
    retriever = crawler(web.base + "/a", links=FOLLOW, max_pages=10)
    async with asyncio.timeout(60):
        for _ in range(3):
            sources, failures = await collect(retriever)
            assert names(web, sources) == ["a", "b", "c", "d"]
            assert list(failures.values()) == ["HTTP 404 Not Found"]
        results = await asyncio.gather(*(collect(retriever) for _ in range(3)))
    assert [names(web, sources) for sources, _ in results] == [["a", "b", "c", "d"]] * 3


async def test_1017_a_page_that_hangs_holds_up_no_other(web: WebServer, crawler: MakeCrawler) -> None:
    """#1017: deep crawling got stuck after two pages and neither went on nor timed out."""
    linking(web, "start", "hang1", "b", "hang2", "c", "hang3", "d")
    for name in "bcd":
        linking(web, name)
    for number in (1, 2, 3):
        web.add_handler(f"/hang{number}", hang)
    # Also with as many hanging pages as may be fetched at once.
    retriever = crawler(web.base + "/start", links=FOLLOW, max_pages=10, concurrency=3, page_timeout_s=1.5)
    async with asyncio.timeout(30):
        sources, failures = await collect(retriever)
    assert names(web, sources) == ["b", "c", "d", "start"]
    assert set(failures.values()) == {"not fetched within page_timeout_s=1.5"}
    assert names(web, list(failures)) == ["hang1", "hang2", "hang3"]


async def test_1017_a_crawl_ends_when_its_time_is_over(web: WebServer, crawler: MakeCrawler) -> None:
    retriever = crawler(web.add_handler("/", hang), links=FOLLOW, total_timeout_s=0.3)
    with pytest.raises(RetrievalError, match=r"total_timeout_s=0\.3"):
        await collect(retriever)


async def test_1818_a_server_that_takes_two_at_a_time_is_not_overrun(web: WebServer, crawler: MakeCrawler) -> None:
    """#1818: a deep crawl timed out on every page that a simple crawl read within a second. It asked the server for 20
    pages at once, whatever the configuration said."""
    children = [f"child{number}" for number in range(9)]
    routes = [linking(web, "start", *children), *[linking(web, child) for child in children]]
    for route in routes:
        path = route.removeprefix(web.base)
        answer = web.routes[path]

        async def overrun(writer: asyncio.StreamWriter, answer: Any = answer) -> None:
            if web.num_active > 2:
                await hang(writer)
            await asyncio.sleep(0.02)  # long enough for others to come in between
            await answer(writer)

        web.routes[path] = overrun
    simple, _ = await collect(crawler(web.base + "/child5"))
    options = {"politeness": PolitenessOptions(), "links": FOLLOW, "max_pages": 10, "page_timeout_s": 5.0}
    sources, failures = await collect(crawler(web.base + "/start", concurrency=20, **options))
    assert failures == {}
    assert names(web, sources) == sorted(["start", *children])
    assert set(simple) <= set(sources)
    assert web.max_active == 2
