"""A crawl follows what matters for the question, says nothing twice, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from web_server import WebServer

from stream2llm_sdk.context import Append, Chunk, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.search.provider import SearchHit
from stream2llm_sdk.retrievers.web.crawl_options import PolitenessOptions
from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
from stream2llm_sdk.retrievers.web.frontier import LinkOptions
from stream2llm_sdk.retrievers.web.page import ExtractionOptions

MakeCrawler = Callable[..., CrawlerRetriever]
QUESTION = "How does a task group cancel its tasks?"
ABOUT = "A task group cancels the remaining tasks when one of them fails, and then waits for each of them to end."


def document(text: str, *links: tuple[str, str], head: str = "", title: str = "") -> str:
    listed = "".join(f'<p>{text} <a href="{url}">{text}</a>.</p>' for url, text in links)
    body = f"<main><h1>{title}</h1><p>{text}</p>{listed}</main>"
    return f"<html><head><title>{title}</title>{head}</head><body>{body}</body></html>"


async def read(retriever: CrawlerRetriever, question: str = QUESTION) -> tuple[list[Chunk], list[SourceFailure]]:
    chunks: list[Chunk] = []
    failures: list[SourceFailure] = []
    async for item in retriever.stream(question):
        if isinstance(item, SourceFailure):
            failures.append(item)
        else:
            assert isinstance(item, Append)
            chunks += item.chunks
    return chunks, failures


def paths(chunks: list[Chunk]) -> list[str]:
    return ["/" + chunk.source.split("/", 3)[3] for chunk in chunks]


class Search:
    """Answers with these URLs at once."""

    def __init__(self, *urls: str) -> None:
        self.urls = urls

    async def search(self, query: str, k: int) -> list[SearchHit]:
        return [SearchHit(url) for url in self.urls[:k]]


# --- links ------------------------------------------------------------------------------------------------------


async def test_links_are_followed_best_first_to_a_depth_of_two(web: WebServer, crawler: MakeCrawler) -> None:
    web.add("/cancel", document(f"{ABOUT} Cancelling in full.", ("/deeper", "how task groups cancel tasks, in depth")))
    web.add("/deeper", document(f"Deeper: {ABOUT}", ("/deepest", "tasks of a group, cancelled in great depth")))
    web.add("/deepest", document(ABOUT))
    web.add("/tasks", document("What tasks are and how one is made, run and awaited in an event loop."))
    web.add("/privacy", document("We keep your data."))
    links = [("/privacy", "Privacy"), ("/tasks", "About tasks"), ("/cancel", "How a task group cancels its tasks")]
    start = web.add("/", document("An overview of this library for programs that wait a lot.", *links))
    retriever = crawler(search=Search(start), concurrency=1)
    chunks, failures = await read(retriever)
    assert paths(chunks) == ["/", "/cancel", "/deeper", "/tasks"]
    assert [chunk.metadata["depth"] for chunk in chunks] == [0, 1, 2, 1]
    assert failures == []
    scores = {path: chunk.score for path, chunk in zip(paths(chunks), chunks, strict=True)}
    assert scores["/cancel"] > scores["/tasks"]


async def test_given_urls_are_not_left_unless_asked(web: WebServer, crawler: MakeCrawler) -> None:
    web.add("/cancel", document(f"{ABOUT} In full."))
    start = web.add("/", document(ABOUT, ("/cancel", "How a task group cancels its tasks")))
    assert paths((await read(crawler(start)))[0]) == ["/"]
    assert paths((await read(crawler(start, links=LinkOptions(max_depth=1))))[0]) == ["/", "/cancel"]


async def test_max_pages_bounds_what_is_read_and_max_fetches_what_is_tried(
    web: WebServer, crawler: MakeCrawler
) -> None:
    links = [(f"/{number}", f"task group cancel {number}") for number in range(20)]
    for number in range(20):
        is_broken = number < 12
        web.add(
            f"/{number}", "" if is_broken else document(f"{ABOUT} {number * 37}" * 3), status=404 if is_broken else 200
        )
    start = web.add("/", document("An overview of what there is about cancelling.", *links))
    options = {"search": Search(start), "max_pages": 4, "links": LinkOptions(max_pages_per_host=None)}
    chunks, failures = await read(crawler(**options, duplicate_threshold=1.0))
    assert len(chunks) == 4
    assert len(web.requests) == len(chunks) + len(failures) <= 12
    web.requests.clear()
    await read(crawler(**options, max_fetches=3))
    assert len(web.requests) == 3


async def test_pages_without_text_lead_on(web: WebServer, crawler: MakeCrawler) -> None:
    web.add("/cancel", document(ABOUT))
    start = web.add("/", '<html><body><a href="/cancel"><img alt="cancel tasks" src="x.png"></a></body></html>')
    retriever = crawler(search=Search(start), links=LinkOptions(min_relevance=0.0))
    chunks, failures = await read(retriever)
    assert paths(chunks) == ["/cancel"]
    assert [failure.source for failure in failures] == [start]


async def test_link_to_a_forbidden_address_is_a_failure_of_its_own(web: WebServer, crawler: MakeCrawler) -> None:
    link = "http://169.254.169.254/latest/task-group-cancel"
    chunks, failures = await read(crawler(search=Search(web.add("/", document(ABOUT, (link, "cancel tasks"))))))
    assert paths(chunks) == ["/"]
    assert [failure.source for failure in failures] == [link]
    assert "not public" in failures[0].reason


async def test_busy_host_leaves_the_turn_to_others(web: WebServer, crawler: MakeCrawler) -> None:
    gate = asyncio.Event()
    slow = [web.add(f"/slow{number}", document(f"{ABOUT} slow {number}"), gate=gate) for number in range(3)]
    quick = web.add("/quick", document(f"{ABOUT} quick")).replace("127.0.0.1", "localhost")
    retriever = crawler(
        *slow,
        quick,
        concurrency=2,
        duplicate_threshold=1.0,
        politeness=PolitenessOptions(respect_robots=False, per_host_concurrency=1),
    )
    stream = retriever.stream(QUESTION)
    first = await anext(stream)
    assert isinstance(first, Append)
    assert first.chunks[0].source.endswith("/quick")
    assert web.max_active == 2
    web.open(gate)
    assert len([item async for item in stream]) == 3


async def test_robots_are_respected_by_default(web: WebServer, crawler: MakeCrawler) -> None:
    web.add("/robots.txt", "User-agent: *\nDisallow: /private", content_type="text/plain")
    allowed, private = web.add("/open", document(ABOUT)), web.add("/private", document(ABOUT))
    chunks, failures = await read(crawler(allowed, private, politeness=PolitenessOptions()))
    assert paths(chunks) == ["/open"]
    assert "robots.txt" in failures[0].reason
    assert web.requests.count("/robots.txt") == 1
    assert "/private" not in web.requests


# --- duplicates -------------------------------------------------------------------------------------------------


async def test_no_page_comes_twice_by_url(web: WebServer, crawler: MakeCrawler) -> None:
    web.add("/a/", document(ABOUT))
    forms = ["/a/", "/a/index.html", "/a/?utm_source=x", "/a/#part", "/b/../a/"]
    chunks, failures = await read(crawler(*[web.base + form for form in forms]))
    assert (paths(chunks), failures, web.requests) == (["/a/"], [], ["/a/"])


async def test_no_page_comes_twice_by_redirect_or_its_own_word(web: WebServer, crawler: MakeCrawler) -> None:
    first = web.add("/a", document(ABOUT))
    moved = web.add_redirect("/moved", "/a")
    named = web.add("/print", document(f"Printed. {ABOUT * 2}", head='<link rel="canonical" href="/a">'))
    chunks, failures = await read(crawler(moved, first, named, concurrency=1))
    assert (paths(chunks), failures) == (["/a"], [])
    assert web.requests == ["/moved", "/a", "/print"]  # /a itself is not asked for again


async def test_no_text_comes_twice(web: WebServer, crawler: MakeCrawler) -> None:
    words = " ".join(f"word{number} of the text." for number in range(200))
    urls = [web.add(f"/{name}", document(words)) for name in ("one", "mirror")]
    urls.append(web.add("/changed", document(words.replace("word7 ", "other "))))
    urls.append(web.add("/different", document(words.replace("of the", "in a"))))
    chunks, failures = await read(crawler(*urls, concurrency=1))
    assert (paths(chunks), failures) == (["/one", "/different"], [])
    chunks, _ = await read(crawler(*urls, concurrency=1, duplicate_threshold=1.0))
    assert paths(chunks) == ["/one", "/changed", "/different"]


# --- search -----------------------------------------------------------------------------------------------------


class Streaming(Search):
    """Names the next URL when it is told to, and fails at the end if it has an error."""

    def __init__(self, *urls: str, error: Exception | None = None) -> None:
        super().__init__(*urls)
        self.go_on = asyncio.Event()
        self.error = error
        self.is_closed = False

    async def stream(self, query: str, k: int) -> AsyncIterator[SearchHit]:
        try:
            for url in self.urls:
                yield SearchHit(url)
                await self.go_on.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


async def test_pages_are_read_while_the_search_goes_on(web: WebServer, crawler: MakeCrawler) -> None:
    search = Streaming(web.add("/a", document(ABOUT)), web.add("/b", document(f"Other words: {ABOUT * 3}")))
    stream = crawler(search=search, duplicate_threshold=1.0).stream(QUESTION)
    assert isinstance(await anext(stream), Append)
    assert not search.is_closed
    search.go_on.set()
    assert len([item async for item in stream]) == 1
    assert search.is_closed


async def test_search_that_breaks_off_is_a_failure_beside_its_pages(web: WebServer, crawler: MakeCrawler) -> None:
    search = Streaming(web.add("/a", document(ABOUT)), error=RuntimeError("no quota left"))
    search.go_on.set()
    chunks, failures = await read(crawler(search=search))
    assert paths(chunks) == ["/a"]
    assert failures == [SourceFailure("Streaming", "the search failed: RuntimeError: no quota left")]
    with pytest.raises(RetrievalError, match="no quota left"):
        await read(crawler(search=Streaming(error=RuntimeError("no quota left"))))


async def test_search_that_never_ends_does_not_hold_a_full_crawl(web: WebServer, crawler: MakeCrawler) -> None:
    web.add("/b", document(f"Other words: {ABOUT * 3}"))
    search = Streaming(web.add("/a", document(ABOUT, ("/b", "task group cancels"))), web.base + "/c")
    chunks, _ = await read(crawler(search=search, max_pages=2, total_timeout_s=60.0))
    assert len(chunks) == 2
    assert search.is_closed


async def test_closing_the_stream_closes_the_search(web: WebServer, crawler: MakeCrawler) -> None:
    before = asyncio.all_tasks()
    search = Streaming(web.add("/a", document(ABOUT)), web.base + "/b")
    stream = crawler(search=search).stream(QUESTION)
    await anext(stream)
    await stream.aclose()
    assert search.is_closed
    assert asyncio.all_tasks() == before


# --- what is taken from pages -----------------------------------------------------------------------------------


async def test_extraction_options_reach_the_conversion(web: WebServer, crawler: MakeCrawler) -> None:
    filler = "".join(
        f"<p>Paragraph {number} speaks of the weather and of nothing else at all.</p>" for number in range(300)
    )
    body = f"<html><body><main>{filler}<p>{ABOUT}</p>{filler}</main></body></html>"
    german = (
        "Eine Aufgabengruppe bricht die übrigen Aufgaben ab, sobald eine von ihnen scheitert, und wartet dann. " * 5
    )
    urls = web.add("/long", body), web.add("/german", document(german))
    chunks, failures = await read(crawler(*urls, extraction=ExtractionOptions(max_page_tokens=200, languages=("en",))))
    assert paths(chunks) == ["/long"]
    assert ABOUT in chunks[0].text
    assert len(chunks[0].text) < 1_500
    assert [failure.source for failure in failures] == [urls[1]]
    assert "de" in failures[0].reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_fetches": 0}, "max_fetches=0"),
        ({"read_ahead": 0}, "read_ahead=0"),
        ({"fetch": "ftp"}, "fetch='ftp': choose one of 'http', 'browser', 'auto'"),
        ({"duplicate_threshold": 2}, "duplicate_threshold=2"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CrawlerRetriever(["http://example.com/"], **options)
