"""A page is fetched politely from where it may be, and taken for what it is."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import brotli
import pytest
from crawl4ai import AsyncWebCrawler, CacheMode, CrawlerRunConfig
from web_server import WebServer, head, page

from stream2llm_sdk.errors import AddressNotAllowedError, FetchError, RobotsDisallowedError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.crawl4ai_strategy import GuardedHTTPStrategy
from stream2llm_sdk.retrievers.web.fetch import PageFetcher
from stream2llm_sdk.retrievers.web.guarded_session import guarded_session
from stream2llm_sdk.retrievers.web.politeness import DEFAULT_USER_AGENT, Politeness

PDF = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj\n"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
MakeFetcher = Callable[..., PageFetcher]


@pytest.fixture
async def fetcher() -> AsyncIterator[MakeFetcher]:
    made: list[PageFetcher] = []

    def make(**options: Any) -> PageFetcher:
        guard = options.pop("guard", None) or AddressGuard(["127.0.0.0/8"])
        made.append(PageFetcher(guard, **{"max_page_bytes": 1_000_000, **options}))
        return made[-1]

    yield make
    for one in made:
        await one.close()


# --- what a body is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "declared", "kind"),
    [
        (b"<p>x", "text/html", "text/html"),
        (b"just text", "text/html", "text/html"),
        (b"<p>x", "TEXT/HTML;charset=utf-8", "text/html"),
        (b"<p>x", "application/xhtml+xml", "application/xhtml+xml"),
        (b"<p>x", "text/plain", "text/plain"),
        (b"# x", "text/markdown", "text/plain"),
        (b"<p>x", None, "text/html"),
        (b" \n<!DOCTYPE html><title>x", None, "text/html"),
        (b"\xef\xbb\xbf<html>", None, "text/html"),
        (b"just text", None, "text/plain"),
        (b"<p>x", "application/octet-stream", "text/html"),
        (b"just text", "application/octet-stream", "text/plain"),
        (b"<!doctype html><p>x", "application/pdf", "text/html"),
        (b'<?xml version="1.0"?><!-- x --><html xmlns="http://www.w3.org/1999/xhtml">', "application/xml", "text/html"),
        (PDF, "application/pdf", "application/pdf"),
        (PDF, "text/html", "application/pdf"),
        (PDF, "application/octet-stream", "application/pdf"),
        (PDF, None, "application/pdf"),
        ("<p>grün".encode("utf-16"), "text/html", "text/html"),
        ("<p>grün".encode("utf-16-le"), "text/html; charset=utf-16le", "text/html"),
        (b"<p>" + bytes(2) + b"x" * 100, "text/html", "text/html"),
        (b"", "text/html", "text/html"),
    ],
)
async def test_content_type_is_what_the_bytes_are(
    web: WebServer, fetcher: MakeFetcher, body: bytes, declared: str | None, kind: str
) -> None:
    fetched = await fetcher().fetch(web.add("/", body, content_type=declared))
    assert fetched.content_type == kind
    assert (fetched.body, fetched.text is None) == ((body, True) if kind == "application/pdf" else (None, False))
    assert fetched.text != "" or not body


@pytest.mark.parametrize(
    ("body", "declared", "reason"),
    [
        (PNG, "text/html", "PNG image, although its content type is 'text/html'"),
        (PNG, None, "PNG image"),
        (PNG, "application/octet-stream", "PNG image"),
        (PNG, "image/png", "'image/png' is not text"),
        (gzip.compress(b"x" * 100, mtime=0), "text/html", "gzip archive"),
        (b"PK\x03\x04" + bytes(50), "text/html", "ZIP archive"),
        (bytes(range(32)) * 40, "text/html", "binary data"),
        (bytes(range(32)) * 40, None, "binary data"),
        (b"{}", "application/json", "'application/json' is not text"),
        (b'<?xml version="1.0"?><rss>', "application/xml", "data for programs"),
        (b'<?xml version="1.0"?><rss>', None, "data for programs"),
        (b"not one", "application/pdf", "is no PDF"),
    ],
)
async def test_what_is_no_page_is_refused(
    web: WebServer, fetcher: MakeFetcher, body: bytes, declared: str | None, reason: str
) -> None:
    with pytest.raises(FetchError, match=reason):
        await fetcher().fetch(web.add("/", body, content_type=declared))


async def test_a_false_type_is_noticed_before_the_body_is_read(web: WebServer, fetcher: MakeFetcher) -> None:
    async def endless_image(writer: asyncio.StreamWriter) -> None:
        writer.write(head() + PNG.ljust(2000, b"x"))
        await asyncio.Event().wait()

    with pytest.raises(FetchError, match="PNG"):
        await fetcher().fetch(web.add_handler("/", endless_image), timeout_s=20)


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("br", brotli.compress)]
)
async def test_compression(
    web: WebServer, fetcher: MakeFetcher, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    url = web.add("/", compress(page("grün " * 1000).encode()), headers={"Content-Encoding": encoding})
    assert (await fetcher().fetch(url)).text == page("grün " * 1000)
    assert encoding in web.headers[0]["accept-encoding"].split(", ")


async def test_it_says_who_it_is(web: WebServer, fetcher: MakeFetcher) -> None:
    await fetcher().fetch(web.add("/", "x"))
    assert web.headers[0]["user-agent"] == DEFAULT_USER_AGENT
    assert "stream2llm" in DEFAULT_USER_AGENT
    assert "cookie" not in web.headers[0]


# --- redirects --------------------------------------------------------------------------------------------------


async def test_relative_links_count_from_the_last_hop(web: WebServer, fetcher: MakeFetcher) -> None:
    web.add("/b/end", "x")
    web.add_redirect("/a/middle", "../b/end?q=1#part")
    fetched = await fetcher().fetch(web.add_redirect("/start", "a/middle") + "#top")
    assert (fetched.url, fetched.status) == (web.base + "/b/end?q=1", 200)


async def test_circle_and_long_chain(web: WebServer, fetcher: MakeFetcher) -> None:
    web.add_redirect("/a", "/b")
    web.add_redirect("/b", "/a")
    with pytest.raises(FetchError, match=r"in a circle, back to .*/a"):
        await fetcher().fetch(web.base + "/a")
    assert web.requests == ["/a", "/b"]
    for number in range(20):
        web.add_redirect(f"/{number}", f"/{number + 1}")
    with pytest.raises(FetchError, match="more than 8 redirects"):
        await fetcher().fetch(web.base + "/0")


async def test_every_hop_needs_its_hosts_permission(web: WebServer, fetcher: MakeFetcher) -> None:
    async with WebServer() as other:
        other.add("/robots.txt", "User-agent: *\nDisallow: /secret", content_type="text/plain")
        start = web.add_redirect("/start", other.add("/secret", "x"))
        with pytest.raises(RobotsDisallowedError, match=r"robots\.txt of .* forbids"):
            await fetcher(politeness=Politeness()).fetch(start)
        assert other.requests == ["/robots.txt"]


# --- addresses --------------------------------------------------------------------------------------------------


class Answers:
    """A name server that says something else every time it is asked."""

    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def lookup(self, host: str, port: int) -> Sequence[str]:
        self.num_asked += 1
        return [self._answers[min(self.num_asked, len(self._answers)) - 1]]


async def test_the_address_that_was_checked_is_the_one_that_is_used(web: WebServer, fetcher: MakeFetcher) -> None:
    """First an allowed address, then another: the first is connected to, and nothing asks again."""
    names = Answers("127.0.0.1", "127.0.0.2")
    guard = AddressGuard(["127.0.0.1/32"], lookup=names.lookup)
    fetched = await fetcher(guard=guard).fetch(f"http://changing.example:{web.port}{_path(web.add('/', 'x'))}")
    assert (fetched.text, names.num_asked) == ("x", 1)


async def test_an_address_that_appears_after_the_check_is_not_used(web: WebServer, fetcher: MakeFetcher) -> None:
    """The server waits at the second, forbidden answer and is never asked."""
    names = Answers("127.0.0.2", "127.0.0.1")
    guard = AddressGuard(["127.0.0.2/32"], lookup=names.lookup)
    web.add("/", "x")
    with pytest.raises(FetchError, match="cannot connect"):
        await fetcher(guard=guard).fetch(f"http://changing.example:{web.port}/")
    assert (web.requests, names.num_asked) == ([], 1)


async def test_a_refused_name_is_not_tried_again(web: WebServer, fetcher: MakeFetcher) -> None:
    """First a forbidden address, then an allowed one."""
    names = Answers("10.0.0.1", "127.0.0.1")
    guard = AddressGuard(["127.0.0.1/32"], lookup=names.lookup)
    web.add("/", "x")
    with pytest.raises(AddressNotAllowedError, match=r"changing\.example.*10\.0\.0\.1 is not public"):
        await fetcher(guard=guard).fetch(f"http://changing.example:{web.port}/")
    assert (web.requests, names.num_asked) == ([], 1)


async def test_a_redirect_to_the_same_name_is_checked_again(web: WebServer, fetcher: MakeFetcher) -> None:
    names = Answers("127.0.0.1", "10.0.0.1")
    guard = AddressGuard(["127.0.0.1/32"], lookup=names.lookup)
    web.add("/end", "x")
    web.add_redirect("/", "/end")
    with pytest.raises(AddressNotAllowedError):
        await fetcher(guard=guard).fetch(f"http://changing.example:{web.port}/")
    assert (web.requests, names.num_asked) == (["/"], 2)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://2130706433:{port}/end", "not a dotted decimal"),
        ("http://0177.0.0.1:{port}/end", "not a dotted decimal"),
        ("http://user@127.0.0.1:{port}/end", "user name"),
        ("http://127.0.0.1:22/end", "port 22"),
        ("http://[::ffff:10.0.0.1]/end", "is not public"),
        ("//10.0.0.1/end", "is not public"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("http://[::1", "malformed"),
        ("http://[::1#fragment", "malformed"),
        ("\\\\127.0.0.1:{port}/end", "backslash"),
    ],
)
async def test_forms_that_mislead_are_refused_first_and_after_a_redirect(
    web: WebServer, fetcher: MakeFetcher, target: str, reason: str
) -> None:
    web.add("/end", "x")
    url = target.format(port=web.port)
    with pytest.raises(AddressNotAllowedError, match=reason):
        await fetcher().fetch(web.add_redirect("/start", url))
    if "://" in url:
        with pytest.raises(AddressNotAllowedError, match=reason):
            await fetcher().fetch(url)
    assert web.requests == ["/start"]


async def test_robots_txt_may_not_lead_inside(web: WebServer, fetcher: MakeFetcher) -> None:
    web.add_redirect("/robots.txt", "http://10.0.0.1/robots.txt")
    with pytest.raises(RobotsDisallowedError, match="is not public"):
        await fetcher(politeness=Politeness()).fetch(web.add("/", "x"))


async def test_a_literal_address_is_checked_at_the_socket() -> None:
    async with guarded_session(AddressGuard()) as session:
        with pytest.raises(AddressNotAllowedError):
            await session.get("http://127.0.0.1:8000/")


# --- asking again -----------------------------------------------------------------------------------------------


def busy_then(web: WebServer, path: str, status: int, retry_after: str | None, num_busy: int = 1) -> str:
    """A page that answers `status` at first."""
    asked = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        headers = {"Content-Length": "1"} | ({"Retry-After": retry_after} if retry_after else {})
        writer.write(head(status if asked <= num_busy else 200, headers) + b"x")

    return web.add_handler(path, answer)


@pytest.mark.parametrize("politeness", [None, Politeness(respect_robots=False)])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_short_pause_is_taken_and_the_page_asked_for_again(
    web: WebServer, fetcher: MakeFetcher, status: int, politeness: Politeness | None
) -> None:
    url = busy_then(web, "/", status, "1")
    started = asyncio.get_running_loop().time()
    fetched = await fetcher(politeness=politeness).fetch(url, timeout_s=0.9)  # the pause is not counted
    assert fetched.text == "x"
    assert 0.9 < asyncio.get_running_loop().time() - started < 5


@pytest.mark.parametrize("retry_after", ["120", "Wed, 21 Oct 2099 07:28:00 GMT"])
async def test_a_long_pause_is_a_failure_that_says_how_long(
    web: WebServer, fetcher: MakeFetcher, retry_after: str
) -> None:
    politeness = Politeness(respect_robots=False)
    url = busy_then(web, "/", 429, retry_after, num_busy=9)
    with pytest.raises(FetchError, match=r"HTTP 429 Too Many Requests: try again in (120|86400) s"):
        await fetcher(politeness=politeness).fetch(url)
    with pytest.raises(FetchError, match=r"asked to be left alone.*try again in (120|119|86400|86399) s"):
        await fetcher(politeness=politeness).fetch(web.add("/other", "x"))
    assert web.requests == ["/"]


async def test_a_page_is_asked_for_twice_and_not_more(web: WebServer, fetcher: MakeFetcher) -> None:
    with pytest.raises(FetchError, match="HTTP 503 Service Unavailable: try again in"):
        await fetcher().fetch(busy_then(web, "/", 503, "0", num_busy=9))
    assert web.requests == ["/", "/"]


# --- as a strategy of crawl4ai ----------------------------------------------------------------------------------


async def test_crawl4ai_takes_it_as_its_strategy(web: WebServer) -> None:
    web.add("/end", page("some text " * 20, "A title"), headers={"X-Y": "z"})
    url = web.add_redirect("/start", "/end")
    strategy = GuardedHTTPStrategy(AddressGuard(["127.0.0.0/8"]), max_page_bytes=1_000_000)
    config = CrawlerRunConfig(cache_mode=CacheMode.BYPASS, verbose=False)
    async with AsyncWebCrawler(crawler_strategy=strategy, verbose=False) as crawler:
        result = await crawler.arun(url, config=config)
        assert (result.success, result.redirected_url) == (True, web.base + "/end")
        assert "some text" in str(result.markdown)
        refused = await crawler.arun("http://10.0.0.1/", config=config)
        assert not refused.success
        assert "is not public" in refused.error_message


async def test_a_strategy_keeps_to_page_timeout_and_has_no_place_for_a_pdf(web: WebServer) -> None:
    async def hang(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    strategy = GuardedHTTPStrategy(AddressGuard(["127.0.0.0/8"]), max_page_bytes=1_000_000)
    try:
        with pytest.raises(FetchError, match=r"page_timeout_s=0\.1"):
            await strategy.crawl(web.add_handler("/hang", hang), CrawlerRunConfig(page_timeout=100))
        with pytest.raises(FetchError, match="'application/pdf' is not text"):
            await strategy.crawl(web.add("/pdf", PDF))
        async with strategy.turn(web.base):
            assert (await strategy.fetch(web.base + "/pdf")).body == PDF
    finally:
        await strategy.close()


def _path(url: str) -> str:
    return "/" + url.split("/", 3)[3]
