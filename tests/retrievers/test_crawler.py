"""Pages stream in as they arrive, failures stay single, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import gzip
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import children, until
from web_server import WebServer, head, page

from stream2llm_sdk.context import Append, ContextMode, Retriever, SourceFailure
from stream2llm_sdk.errors import AddressNotAllowedError, ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.search.provider import SearchHit
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.browser_options import BrowserOptions
from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool
from stream2llm_sdk.retrievers.web.crawl_options import PolitenessOptions
from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
from stream2llm_sdk.retrievers.web.http_cache import HTTPCache
from stream2llm_sdk.retrievers.web.page import ExtractionOptions

MakeCrawler = Callable[..., CrawlerRetriever]
FORBIDDEN = "http://10.0.0.1/"


class Panic(BaseException):
    """As extension modules in Rust raise it: no `Exception`."""


async def collect(retriever: CrawlerRetriever) -> tuple[list[Any], dict[str, str]]:
    """The chunks in order, and the failures' reasons by URL."""
    chunks: list[Any] = []
    failures: dict[str, str] = {}
    async for item in retriever.stream("question"):
        if isinstance(item, SourceFailure):
            failures[item.source] = item.reason
        else:
            assert isinstance(item, Append)
            chunks += item.chunks
    return chunks, failures


async def hang(writer: Any) -> None:
    await asyncio.Event().wait()


# --- order and content ------------------------------------------------------------------------------------------


async def test_pages_come_as_they_arrive(web: WebServer, crawler: MakeCrawler) -> None:
    gates = [asyncio.Event() for _ in range(3)]
    urls = [web.add(f"/{number}", page(f"text {number}"), gate=gate) for number, gate in enumerate(gates)]
    stream = crawler(*urls).stream("question")
    for number in (2, 0, 1):
        web.open(gates[number])
        item = await anext(stream)
        assert isinstance(item, Append)
        assert [(chunk.text, chunk.source) for chunk in item.chunks] == [(f"text {number}", urls[number])]
    assert [item async for item in stream] == []


async def test_content_types_charset_title_and_compression(web: WebServer, crawler: MakeCrawler) -> None:
    gzipped = gzip.compress(page("squeezed").encode())
    chunks, failures = await collect(
        crawler(
            web.add("/html", page("grün", "A title").encode("latin-1"), content_type="text/html; charset=iso-8859-1"),
            web.add("/xhtml", page("strict"), content_type="application/xhtml+xml"),
            web.add("/plain", " a < b & c\n ", content_type="text/plain"),
            web.add("/untyped", page("no type"), content_type=None),
            web.add("/wrong", page("gr\udcfcn").encode(errors="surrogateescape")),
            web.add("/gzip", gzipped, headers={"Content-Encoding": "gzip"}),
        )
    )
    texts = {chunk.source.rpartition("/")[2]: chunk.text for chunk in chunks}
    assert failures == {}
    assert texts == {
        "html": "grün",
        "xhtml": "strict",
        "plain": "a < b & c",
        "untyped": "no type",
        "wrong": "gr\ufffdn",
        "gzip": "squeezed",
    }
    assert [chunk.title for chunk in chunks if chunk.text == "grün"] == ["A title"]


async def test_redirects_lead_to_the_last_url(web: WebServer, crawler: MakeCrawler) -> None:
    web.add("/end", page("the end"))
    web.add_redirect("/middle", "end#part")
    start = web.add_redirect("/start", f"{web.base}/middle")
    chunks, _ = await collect(crawler(start + "#fragment"))
    assert [(chunk.text, chunk.source) for chunk in chunks] == [("the end", web.base + "/end")]


async def test_given_urls_are_all_read_unless_max_pages_says_less(web: WebServer, crawler: MakeCrawler) -> None:
    urls = [web.add(f"/{number}", page(f"text {number}")) for number in range(12)]
    chunks, failures = await collect(crawler(*urls))
    assert sorted(chunk.source for chunk in chunks) == sorted(urls)
    assert failures == {}
    chunks, _ = await collect(crawler(*urls, max_pages=3))
    assert sorted(chunk.source for chunk in chunks) == urls[:3]


async def test_a_search_is_asked_for_ten_pages_by_default(crawler: MakeCrawler) -> None:
    asked: list[int] = []

    class Search:
        async def search(self, query: str, k: int) -> list[SearchHit]:
            asked.append(k)
            return [SearchHit(FORBIDDEN)]

    with pytest.raises(RetrievalError, match="not public"):
        await collect(crawler(search=Search()))
    assert asked == [10]


async def test_search_chooses_the_pages(web: WebServer, crawler: MakeCrawler) -> None:
    asked: list[tuple[str, int]] = []

    class Search:
        async def search(self, query: str, k: int) -> list[SearchHit]:
            asked.append((query, k))
            urls = [web.add("/a", page("a")), web.add("/b", page("b", "own title")), web.add("/a", page("a"))]
            return [SearchHit(url, title="hit title") for url in [*urls, FORBIDDEN, FORBIDDEN + "x"]]

    chunks, failures = await collect(crawler(search=Search(), max_pages=3))
    assert asked == [("question", 3)]
    assert sorted((chunk.text, chunk.title) for chunk in chunks) == [("a", "hit title"), ("b", "own title")]
    assert list(failures) == [FORBIDDEN]


# --- failures ---------------------------------------------------------------------------------------------------


async def reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def rubbish(writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")


async def cut_short(writer: asyncio.StreamWriter) -> None:
    writer.write(head(headers={"Content-Length": "1000"}) + b"<p>only this")


async def huge_header(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda web: web.add("/bad", page("x"), status=404), "HTTP 404 Not Found"),
        (lambda web: web.add("/bad", page("x"), status=503), "HTTP 503 Service Unavailable"),
        (lambda web: web.add("/bad", page("x"), status=799), "HTTP 799"),
        (lambda web: web.add("/bad", b"%PDX", content_type="application/pdf"), "is no PDF"),
        (lambda web: web.add("/bad", page("x" * 200_000)), "max_page_bytes=100000"),
        (lambda web: web.add("/bad", page(""), headers={"Content-Encoding": "zstd"}), "'zstd' was not asked for"),
        (lambda web: web.add("/bad", page("")), "no text"),
        (lambda web: web.add("/bad", " \n", content_type="text/plain"), "no text"),
        (lambda web: web.add("/bad", "<!-- nothing -->"), "no text"),
        (lambda web: web.add_redirect("/bad", "/bad"), "in a circle"),
        (lambda web: web.add("/bad", "", status=301), "without a Location"),
        (lambda web: web.add_redirect("/bad", FORBIDDEN), r"10\.0\.0\.1 is not public"),
        (lambda web: web.add_redirect("/bad", "//169.254.169.254/latest/"), r"169\.254\.169\.254 is not public"),
        (lambda web: web.add_redirect("/bad", "http://[::ffff:10.0.0.1]/"), "is not public"),
        (lambda web: web.add_redirect("/bad", "http://2130706433/"), "not a dotted decimal"),
        (lambda web: web.add_redirect("/bad", "http://user@127.0.0.1/"), "user name"),
        (lambda web: web.add_redirect("/bad", "file:///etc/passwd"), "scheme 'file'"),
        (lambda web: web.add_handler("/bad", reset), "cannot connect|closed the connection|connection was lost"),
        (lambda web: web.add_handler("/bad", rubbish), "not valid HTTP"),
        (lambda web: web.add_handler("/bad", cut_short), "middle of the body"),
        (lambda web: web.add_handler("/bad", huge_header), "headers are too large"),
        (lambda web: "http://127.0.0.1:2/", "cannot connect"),
        (lambda web: "http://no-such-host.invalid/", "cannot be resolved"),
    ],
)
async def test_bad_page_is_reported_beside_a_good_one(
    web: WebServer, crawler: MakeCrawler, answer: Callable[[WebServer], str], reason: str
) -> None:
    bad, good = answer(web), web.add("/good", page("good"))
    chunks, failures = await collect(crawler(bad, good, max_page_bytes=100_000))
    assert [chunk.text for chunk in chunks] == ["good"]
    assert list(failures) == [bad]
    assert re.search(reason, failures[bad]), failures[bad]
    assert "\n" not in failures[bad]


async def test_endless_body_is_cut_off(web: WebServer, crawler: MakeCrawler) -> None:
    num_sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        writer.write(head())
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()
            num_sent += 65_536

    bad, good = web.add_handler("/endless", endless), web.add("/good", page("good"))
    _, failures = await collect(crawler(bad, good, max_page_bytes=100_000))
    assert "larger than max_page_bytes=100000" in failures[bad]
    await web.wait_until(lambda: web.num_connections == 0)
    assert num_sent < 30_000_000  # what the system's socket buffers take


async def test_page_timeout_ends_silent_and_dripping_pages(web: WebServer, crawler: MakeCrawler) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(head())
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    silent, dripping = web.add_handler("/silent", hang), web.add_handler("/dripping", drip)
    plain = web.add("/plain", "good", content_type="text/plain")
    chunks, failures = await collect(crawler(silent, dripping, plain, page_timeout_s=0.3))
    assert [chunk.text for chunk in chunks] == ["good"]
    assert failures == dict.fromkeys([silent, dripping], "not fetched within page_timeout_s=0.3")
    await web.wait_until(lambda: web.num_connections == 0)


async def test_slow_conversion_counts_for_the_page(web: WebServer, crawler: MakeCrawler) -> None:
    slow = web.add("/slow", "<p>a &amp b</p>" * 200_000)
    plain = web.add("/plain", "good", content_type="text/plain")
    chunks, failures = await collect(crawler(slow, plain, page_timeout_s=0.5))
    assert [chunk.text for chunk in chunks] == ["good"]
    assert failures == {slow: "not finished within page_timeout_s=0.5"}


async def test_total_timeout_reports_what_is_missing(web: WebServer, crawler: MakeCrawler) -> None:
    plain = web.add("/plain", "good", content_type="text/plain")
    silent = [web.add_handler(f"/silent{number}", hang) for number in range(3)]
    chunks, failures = await collect(crawler(plain, *silent, concurrency=1, total_timeout_s=0.5))
    assert [chunk.text for chunk in chunks] == ["good"]
    assert list(failures) == silent
    assert all("total_timeout_s=0.5" in reason for reason in failures.values())
    assert web.requests == ["/plain", "/silent0"]


async def test_if_all_pages_fail_the_reasons_are_in_the_error(web: WebServer, crawler: MakeCrawler) -> None:
    urls = [web.add(f"/{number}", "", status=404) for number in range(7)]
    seen: list[Any] = []

    async def consume() -> None:
        async for item in crawler(*urls).stream("question"):
            seen.append(item)  # noqa: PERF401 - what comes before the error counts

    with pytest.raises(RetrievalError) as raised:
        await consume()
    assert {item.source for item in seen} == set(urls)
    message = str(raised.value)
    assert message.count("HTTP 404 Not Found") == 5
    assert message.endswith("and 2 more")


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ([], "found no page for 'question'"),
        (["http://example.com/"], "not a SearchHit"),
        (RuntimeError("no quota left"), "the search failed: RuntimeError: no quota left"),
        (RetrievalError("said it well"), "^said it well$"),
        (Panic("index out of range"), "the search failed: Panic: index out of range"),
        (asyncio.CancelledError("by a library"), "the search failed: CancelledError: by a library"),
        (None, "longer than total_timeout_s=0.2"),
    ],
)
async def test_search_failure_ends_the_stream(crawler: MakeCrawler, outcome: Any, reason: str) -> None:
    class Search:
        async def search(self, query: str, k: int) -> list[SearchHit]:
            if outcome is None:
                await asyncio.Event().wait()
            if isinstance(outcome, BaseException):
                raise outcome
            return list(outcome)

    with pytest.raises(RetrievalError, match=reason):
        await collect(crawler(search=Search(), total_timeout_s=0.2 if outcome is None else 30.0))


# --- addresses --------------------------------------------------------------------------------------------------


async def test_loopback_is_refused_unless_named(web: WebServer, crawler: MakeCrawler) -> None:
    url = web.add("/", page("secret"))
    with pytest.raises(RetrievalError, match="allow_networks"):
        await collect(crawler(url, url.replace("127.0.0.1", "localhost"), allow_networks=[]))
    assert web.max_connections == 0


async def test_name_is_resolved_once_and_its_answer_is_what_is_connected_to(
    web: WebServer, crawler: MakeCrawler
) -> None:
    asked: list[str] = []

    async def lookup(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["10.0.0.1", "127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

    web.add("/", page("pinned"))
    url = f"http://rebinding.example:{web.port}/"
    retriever = crawler(url, lookup=lookup, allow_networks=["127.0.0.1/32"])
    chunks, _ = await collect(retriever)
    assert [(chunk.text, chunk.source) for chunk in chunks] == [("pinned", url)]
    assert (asked, web.hosts) == (["rebinding.example"], [f"rebinding.example:{web.port}"])
    with pytest.raises(RetrievalError, match=r"rebinding\.example.*10\.0\.0\.1 is not public"):
        await collect(retriever)


async def test_session_opens_no_socket_to_a_forbidden_address(web: WebServer) -> None:
    """The check at the socket stands by itself: it holds for a URL that no other check has seen."""
    from stream2llm_sdk.retrievers.web.fetch import guarded_session

    async with guarded_session(AddressGuard()) as session:
        for host in ("127.0.0.1", "[::ffff:127.0.0.1]", "localhost"):
            with pytest.raises(AddressNotAllowedError):
                await session.get(f"http://{host}:{web.port}/")
    assert web.max_connections == 0


# --- limits and leaving -----------------------------------------------------------------------------------------


async def test_concurrency_is_shared_by_all_streams(web: WebServer, crawler: MakeCrawler) -> None:
    gate = asyncio.Event()
    urls = [web.add(f"/{number}", str(number), content_type="text/plain", gate=gate) for number in range(6)]
    retriever = crawler(*urls, concurrency=3)
    streams = [asyncio.create_task(collect(retriever)) for _ in range(2)]
    await web.wait_until(lambda: web.num_active == 3)
    web.open(gate)
    for chunks, failures in await asyncio.gather(*streams):
        assert (sorted(chunk.text for chunk in chunks), failures) == (list("012345"), {})
    assert web.max_active == 3
    assert sorted(web.requests) == sorted(2 * list(web.routes))


async def test_slow_consumer_bounds_what_is_read_ahead_and_blocks_no_other(
    web: WebServer, crawler: MakeCrawler
) -> None:
    urls = [web.add(f"/{number}", str(number), content_type="text/plain") for number in range(30)]
    retriever = crawler(*urls, concurrency=2, read_ahead=2)
    stream = retriever.stream("question")
    await anext(stream)
    await web.wait_until(lambda: len(web.requests) == 5)  # one is taken, two wait, two are held by their readers
    await collect(retriever)
    assert len(web.requests) == 5 + 30
    assert len([item async for item in stream]) == 29


async def test_closing_the_stream_leaves_nothing(
    web: WebServer, crawler: MakeCrawler, converters: ConverterPool
) -> None:
    await until(lambda: not children(converters.server_process_id))
    before = asyncio.all_tasks()
    plain = web.add("/plain", "good", content_type="text/plain")
    slow_conversion = web.add("/slow", "<p>a &amp b</p>" * 200_000)
    silent = [web.add_handler(f"/silent{number}", hang) for number in range(3)]
    stream = crawler(plain, slow_conversion, *silent).stream("question")
    async for _ in stream:
        break
    await web.wait_until(lambda: len(web.requests) == 5)
    await until(lambda: len(children(converters.server_process_id)) == 1)
    await stream.aclose()
    assert asyncio.all_tasks() == before
    await until(lambda: not children(converters.server_process_id))
    await web.wait_until(lambda: web.num_connections == 0)


async def test_cancelling_at_any_await_leaves_nothing(web: WebServer, crawler: MakeCrawler) -> None:
    plain = web.add("/plain", "good", content_type="text/plain")
    urls = [plain, web.add("/html", page("text")), web.add_redirect("/moved", "/html"), FORBIDDEN]
    retriever = crawler(*urls, concurrency=2)
    await collect(retriever)
    before = asyncio.all_tasks()
    num_cancelled = 0
    for num_steps in range(60):
        consumer = asyncio.create_task(collect(retriever))
        await asyncio.sleep(num_steps * 0.0005)
        consumer.cancel()
        (outcome,) = await asyncio.gather(consumer, return_exceptions=True)
        num_cancelled += isinstance(outcome, asyncio.CancelledError)
        assert asyncio.all_tasks() == before
    assert num_cancelled > 10
    await web.wait_until(lambda: web.num_connections == 0)
    chunks, _ = await collect(retriever)
    assert sorted(chunk.text for chunk in chunks) == ["good", "text"]  # /moved leads to /html


async def test_event_loop_runs_on_while_a_large_page_is_converted(web: WebServer, crawler: MakeCrawler) -> None:
    words = "plain words " * 10
    sections = "".join(f"<h2>Part {number}</h2><p>Some <b>bold</b> and {words}</p>" for number in range(5_000))
    assert len(sections) > 700_000
    retriever = crawler(web.add("/large", page(sections)), extraction=ExtractionOptions(max_page_tokens=None))
    loop = asyncio.get_running_loop()
    gaps: list[float] = []

    async def beat() -> None:
        last = loop.time()
        while True:
            await asyncio.sleep(0.005)
            gaps.append(loop.time() - last)
            last = loop.time()

    heart = asyncio.create_task(beat())
    chunks, _ = await collect(retriever)
    heart.cancel()
    await asyncio.gather(heart, return_exceptions=True)
    assert len(chunks[0].text) > 300_000
    assert len(gaps) > 10
    assert max(gaps) < 1.0


# --- the retriever's own life -----------------------------------------------------------------------------------


async def test_is_an_appending_retriever(crawler: MakeCrawler) -> None:
    retriever = crawler(FORBIDDEN)
    assert isinstance(retriever, Retriever)
    assert retriever.mode is ContextMode.APPEND


async def test_own_processes_start_with_the_first_stream_and_end_with_aclose() -> None:
    retriever = CrawlerRetriever([FORBIDDEN])
    processes = []
    for _ in range(2):
        with pytest.raises(RetrievalError):
            await collect(retriever)
        processes.append(retriever._shared.pool.server_process_id)
        assert Path(f"/proc/{processes[-1]}").exists()
        await retriever.aclose()
        assert not Path(f"/proc/{processes[-1]}").exists()
    assert processes[0] != processes[1]


async def test_forgotten_retriever_warns_and_ends_its_processes() -> None:
    forgotten = [CrawlerRetriever([FORBIDDEN])]
    with pytest.raises(RetrievalError):
        await collect(forgotten[0])
    process = forgotten[0]._shared.pool.server_process_id

    def forget() -> None:
        forgotten.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="never closed"):
        forget()
    assert not Path(f"/proc/{process}").exists()


def test_retriever_that_lives_until_the_interpreter_ends_leaves_nothing() -> None:
    script = """
import asyncio
from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
retriever = CrawlerRetriever(["http://10.0.0.1/"])
retriever.itself = retriever
asyncio.run(retriever.warm_up())
print(retriever._shared.pool.server_process_id)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stderr == ""
    assert not Path(f"/proc/{int(run.stdout)}").exists()


async def test_what_the_crawl_raises_ends_the_stream(web: WebServer, crawler: MakeCrawler) -> None:
    async def lookup(host: str, port: int) -> Sequence[str]:
        raise Panic("lookup")

    with pytest.raises(BaseException, match=r"lookup|unhandled errors") as raised:
        await asyncio.wait_for(collect(crawler("http://host.example/", lookup=lookup)), 20)
    assert not isinstance(raised.value, TimeoutError)


async def test_cancelled_aclose_ends_everything_first() -> None:
    retriever = CrawlerRetriever([FORBIDDEN])
    await retriever.warm_up()
    process = retriever._shared.pool.server_process_id
    closing = asyncio.create_task(retriever.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    assert not Path(f"/proc/{process}").exists()
    await retriever.aclose()


async def test_closing_a_retriever_leaves_a_lent_pool_open(crawler: MakeCrawler, converters: ConverterPool) -> None:
    async with crawler(FORBIDDEN) as retriever:
        await retriever.warm_up()
    assert (await converters.convert("<p>still</p>", "", timeout_s=30)).markdown == "still"


async def test_second_event_loop_is_refused_while_the_first_lives(crawler: MakeCrawler) -> None:
    retriever = crawler(FORBIDDEN)
    await retriever.warm_up()
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(retriever.warm_up())
        except ConfigurationError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert "another event loop" in str(errors[0])


def test_retriever_moves_on_when_its_event_loop_is_gone() -> None:
    retriever = CrawlerRetriever([FORBIDDEN])

    async def ask() -> int:
        with pytest.raises(RetrievalError, match="not public"):
            await collect(retriever)
        return retriever._shared.pool.server_process_id

    first, second = asyncio.run(ask()), asyncio.run(ask())
    assert first != second
    assert not Path(f"/proc/{first}").exists()
    asyncio.run(retriever.aclose())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither was given"),
        ({"urls": ["http://a/"], "search": object()}, "both was given"),
        ({"search": object()}, "search=<object"),
        ({"urls": []}, "urls is empty"),
        (
            {"urls": ["https://a/", "docs.python.org/3/"]},
            r"'docs\.python\.org/3/', which has no scheme: write https://",
        ),
        ({"urls": ["localhost:8000/page"]}, "'localhost:8000/page', which has no scheme"),
        ({"urls": ["/etc/passwd"]}, "'/etc/passwd', which has no scheme"),
        ({"urls": ["file:///etc/passwd"]}, "'file:///etc/passwd': only http and https are read, not file"),
        ({"urls": ["mailto:a@b.example"]}, "only http and https are read, not mailto"),
        ({"urls": ["https:///page"]}, "names no host"),
        ({"urls": ["http://[::1/"]}, "is malformed"),
        ({"max_pages": 0}, "max_pages=0"),
        ({"concurrency": 1.5}, r"concurrency=1\.5"),
        ({"num_workers": True}, "num_workers=True"),
        ({"max_page_bytes": -1}, "max_page_bytes=-1"),
        ({"page_timeout_s": 0}, "page_timeout_s=0"),
        ({"total_timeout_s": float("inf")}, "total_timeout_s=inf"),
        ({"total_timeout_s": "30"}, "total_timeout_s='30'"),
        ({"allow_networks": ["localhost"]}, "allow_networks: 'localhost'"),
        ({"user_agent": "a\r\nb"}, "user_agent="),
        ({"user_agent": 5}, "user_agent=5"),
        ({"urls": 5}, "urls=5"),
        ({"urls": [5, []]}, "urls holds 5"),
        ({"urls": [[]]}, r"urls holds \[\]"),
        ({"allow_networks": None}, "allow_networks=None"),
        ({"allow_networks": b"127.0.0.0/8"}, "allow_networks=b'127"),
        ({"allow_networks": [5]}, "allow_networks: 5"),
        ({"total_timeout_s": 10**400}, "total_timeout_s=1000"),
        ({"fetch": []}, r"fetch=\[\]"),
        *(
            ({name: value}, rf"{name}={re.escape(repr(value))}: give")
            for name in ("links", "extraction", "politeness", "browser", "cache", "converters")
            for value in ("x", 5, 0, "", [])
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    if "browser" in options:
        options = {"fetch": "browser", **options}
    if options and not {"urls", "search"} & set(options):
        options = {"urls": ["http://example.com/"], **options}
    with pytest.raises(ConfigurationError, match=message):
        CrawlerRetriever(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConverterPool(0), "num_workers=0"),
        (lambda: ConverterPool("2"), "num_workers='2'"),  # type: ignore[arg-type]
        (lambda: ExtractionOptions(languages=None), "languages=None"),  # type: ignore[arg-type]
        (lambda: BrowserOptions(executable_path=5), "executable_path=5"),  # type: ignore[arg-type]
        (lambda: BrowserOptions(cdp_url=5), "cdp_url=5"),  # type: ignore[arg-type]
        (lambda: BrowserOptions(channel=5), "channel=5"),  # type: ignore[arg-type]
        (lambda: BrowserOptions(settle_s=10**400), "settle_s=1000"),
        (lambda: BrowserOptions(settle_s=float("nan")), "settle_s=nan"),
        (lambda: PolitenessOptions(max_wait_s=10**400), "max_wait_s=1000"),
        (lambda: PolitenessOptions(respect_robots="no"), "respect_robots='no'"),  # type: ignore[arg-type]
        (lambda: HTTPCache(5), "directory=5"),  # type: ignore[arg-type]
    ],
)
def test_values_that_no_part_can_use_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
