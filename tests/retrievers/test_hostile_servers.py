"""A server that misbehaves costs one line, bounded time and bounded memory, and no other page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hostile import CHUNKED, chunk, compressed, endless, hang, nested_gzip, raw, reset, reset_after, slow
from web_server import Handler, WebServer, head, page

from stream2llm_sdk.errors import FetchError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.fetch import PageFetcher
from stream2llm_sdk.retrievers.web.politeness import Politeness

pytestmark = pytest.mark.slow

MAX_PAGE_BYTES = 1_000_000
TIMEOUT_S = 0.5
BIG = b"x" * 65_536
RUSSIAN = "<p>Эта страница написана без указания кодировки, как это часто бывает на старых сайтах." * 5
BOMB = {encoding: compressed(encoding, 100_000_000) for encoding in ("gzip", "deflate", "br")}


@pytest.fixture
async def fetcher() -> AsyncIterator[PageFetcher]:
    async with PageFetcher(AddressGuard(["127.0.0.0/8"]), max_page_bytes=MAX_PAGE_BYTES) as made:
        yield made


def with_body(body: bytes, **headers: str) -> Handler:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return raw(head(200, {"Content-Length": str(len(body)), **names}) + body)


FAILURES: dict[str, tuple[Handler, str]] = {
    # time
    "never answers": (hang, r"within page_timeout_s=0\.5"),
    "never ends its headers": (raw(b"HTTP/1.1 200 OK\r\nX: y\r\n", then_hang=True), "page_timeout_s"),
    "never begins its body": (raw(head(), then_hang=True), "page_timeout_s"),
    "drips its body": (slow(head(), b"x", 0.02), "page_timeout_s"),
    "drips its headers": (slow(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", 0.02), "page_timeout_s"),
    "drips chunks": (slow(CHUNKED, chunk(b"x"), 0.02), "page_timeout_s"),
    "sends nothing but interim answers": (slow(b"", b"HTTP/1.1 103 Early\r\n\r\n", 0.01), "page_timeout_s"),
    "sends interim answers as fast as it can": (
        endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        "page_timeout_s|headers",
    ),
    # size
    "endless body": (endless(head(), BIG), "larger than max_page_bytes=1000000"),
    "endless chunks": (endless(CHUNKED, chunk(BIG)), "larger than max_page_bytes"),
    "endless tiny chunks": (endless(CHUNKED, chunk(b"x") * 1000), "larger than max_page_bytes|page_timeout_s"),
    "says 50 MB": (raw(head(200, {"Content-Length": "50000000"}), then_hang=True), "larger than max_page_bytes"),
    "sends 50 MB": (raw(head(), *[BIG] * 800), "larger than max_page_bytes"),
    "gzip bomb": (with_body(BOMB["gzip"], Content_Encoding="gzip"), "larger than max_page_bytes"),
    "deflate bomb": (with_body(BOMB["deflate"], Content_Encoding="deflate"), "larger than max_page_bytes"),
    "brotli bomb": (with_body(BOMB["br"], Content_Encoding="br"), "larger than max_page_bytes"),
    "gzip in gzip": (with_body(nested_gzip(3), Content_Encoding="gzip, gzip, gzip"), "was not asked for"),
    "gzip in gzip, once declared": (with_body(nested_gzip(3), Content_Encoding="gzip"), "gzip archive"),
    "endless gzip": (endless(head(200, {"Content-Encoding": "gzip"}) + BOMB["gzip"][:1000], BIG), "damaged|larger"),
    "huge header": (raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"), "headers are too large"),
    "endless header": (endless(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 1000), "headers are too large"),
    "endless headers": (endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 100), "headers are too large|too many"),
    "endless status line": (endless(b"HTTP/1.1 200 ", b"y" * 1000), "headers are too large"),
    "endless chunk header": (endless(CHUNKED + b"1;", b"y" * 1000), "headers are too large|page_timeout_s|body"),
    "endless trailers": (endless(CHUNKED + b"0\r\n", b"X: y\r\n" * 100), "headers|too many|body|page_timeout_s"),
    "huge Location": (
        raw(head(302, {"Location": "/" + "y" * 16_000, "Content-Length": "0"})),
        "HTTP 404|headers are too large",
    ),
    # lies
    "fewer bytes than it says": (raw(head(200, {"Content-Length": "1000"}) + b"short"), "middle of the body"),
    "fewer chunks than it says": (raw(CHUNKED + b"100\r\nshort"), "middle of the body"),
    "more bytes than it says": (raw(head(200, {"Content-Length": "4"}) + b"<p>xyz"), "not valid HTTP: Data after"),
    "negative length": (raw(head(200, {"Content-Length": "-1"}) + b"x"), "Content-Length|not valid HTTP"),
    "length that is none": (raw(head(200, {"Content-Length": "ten"}) + b"x"), "Content-Length|not valid HTTP"),
    "chunk size that is none": (raw(CHUNKED + b"zz\r\nx\r\n"), "chunk|not valid HTTP|body"),
    "not gzip": (with_body(b"<p>x", Content_Encoding="gzip"), "compressed body is damaged"),
    "half a gzip": (with_body(BOMB["gzip"][:-9][:3000], Content_Encoding="gzip"), "ends early|larger"),
    "rubbish": (raw(b"\x00\xff" * 1000), "not valid HTTP"),
    "another protocol": (raw(b"SSH-2.0-OpenSSH_9.2\r\n"), "not valid HTTP"),
    "an old protocol": (raw(b"<html>HTTP/0.9</html>"), "not valid HTTP"),
    # connections
    "nothing at all": (raw(), "closed the connection without an answer"),
    "reset at once": (reset, "closed|reset|lost"),
    "reset in the headers": (reset_after(b"HTTP/1.1 200 OK\r\n"), "closed|reset|lost"),
    "reset in the body": (reset_after(head(200, {"Content-Length": "1000"}) + b"x"), "lost|reset"),
    # refusals
    "busy for long": (raw(head(503, {"Retry-After": "3600", "Content-Length": "0"})), "HTTP 503 .*again in 3600 s"),
    "busy until the next century": (
        raw(head(429, {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT", "Content-Length": "0"})),
        "HTTP 429 .*again in 86400 s",
    ),
    "busy for a time that is none": (
        raw(head(429, {"Retry-After": "a while", "Content-Length": "0"})),
        "HTTP 429 .*again in 1 s",
    ),
    "own status": (raw(head(799, {"Content-Length": "0"})), "^HTTP 799$"),
    "huge error page": (endless(head(500), BIG), "^HTTP 500 Internal Server Error$"),
    "no content": (raw(b"HTTP/1.1 304 -\r\n\r\n"), "HTTP 304"),
    "switches protocols": (
        raw(b"HTTP/1.1 101 -\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
        "HTTP 101|page_timeout",
    ),
}

PAGES: dict[str, tuple[Handler, str]] = {
    "empty": (with_body(b""), ""),
    "no length and no chunks": (raw(head() + b"<p>x"), "<p>x"),
    "two equal types": (raw(head(200, {"Content-Length": "1", "content-type": "text/html"}) + b"x"), "x"),
    "no status text": (raw(b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx"), "x"),
    "bare newlines in headers": (raw(b"HTTP/1.1 200 OK\nContent-Length: 1\n\nx"), "x"),
    "wrong charset": (with_body("grün".encode("latin-1"), Content_Type="text/html; charset=utf-8"), "gr\ufffdn"),
    "charset that is none": (with_body("grün".encode(), Content_Type="text/html; charset=klingon"), "grün"),
    "quoted charset": (with_body("мир".encode("cp1251"), Content_Type='text/html; charset="windows-1251"'), "мир"),
    "utf-8 with a broken character": (with_body("größer ".encode() * 40 + b"\xff"), "größer " * 40 + "\ufffd"),
    "Russian without a charset": (with_body(RUSSIAN.encode("koi8-r")), RUSSIAN),
    "interim answers first": (
        raw(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 5, head(200, {"Content-Length": "1"}) + b"x"),
        "x",
    ),
    "chunk extensions and trailers": (raw(CHUNKED + b"4;a=b\r\n<p>x\r\n0\r\nX: y\r\n\r\n"), "<p>x"),
    "fifty large headers": (
        raw(head(200, {f"X-{number}": "y" * 2000 for number in range(50)} | {"Content-Length": "1"}) + b"x"),
        "x",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_failure_is_one_clear_line_in_time(web: WebServer, fetcher: PageFetcher, name: str) -> None:
    handler, reason = FAILURES[name]
    bad, good = web.add_handler("/bad", handler), web.add("/good", page("good"))
    loop = asyncio.get_running_loop()
    started = loop.time()
    outcomes = asyncio.gather(fetcher.fetch(bad, timeout_s=TIMEOUT_S), fetcher.fetch(good), return_exceptions=True)
    failure, fetched = await outcomes
    assert not isinstance(fetched, BaseException), fetched
    assert fetched.text == page("good")
    assert isinstance(failure, FetchError), failure
    assert "\n" not in str(failure)
    assert len(str(failure)) < 400
    assert re.search(reason, str(failure)), failure
    pause_s = 1.0 if "a time that is none" in name else 0.0
    assert loop.time() - started < TIMEOUT_S + pause_s + 10.0  # of a machine that may be busy
    await fetcher.close()
    await web.wait_until(lambda: web.num_connections == 0)


@pytest.mark.parametrize("name", PAGES)
async def test_page_is_read_all_the_same(web: WebServer, fetcher: PageFetcher, name: str) -> None:
    handler, text = PAGES[name]
    assert (await fetcher.fetch(web.add_handler("/", handler), timeout_s=5)).text == text


async def test_a_slow_page_gets_its_time_over_all_hops(web: WebServer, fetcher: PageFetcher) -> None:
    def redirect_after(delay_s: float, target: str) -> Handler:
        async def answer(writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(delay_s)
            writer.write(head(302, {"Location": target, "Content-Length": "0"}))

        return answer

    for number in range(5):
        web.add_handler(f"/{number}", redirect_after(0.2, f"/{number + 1}"))
    with pytest.raises(FetchError, match="page_timeout_s"):
        await fetcher.fetch(web.base + "/0", timeout_s=TIMEOUT_S)
    assert 1 < len(web.requests) <= 3


@pytest.fixture
def peak_memory() -> list[int]:
    """Starts measuring this process's peak resident memory anew; call `grown_by` with it."""
    Path("/proc/self/clear_refs").write_text("5")
    return [_memory_kib("VmRSS")]


def grown_by(peak_memory: list[int]) -> int:
    """Bytes by which the peak is above what was used at the start."""
    return (_memory_kib("VmHWM") - peak_memory[0]) * 1024


def _memory_kib(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[1])  # type: ignore[index]


@pytest.mark.parametrize(
    "name",
    [
        *("sends 50 MB", "endless body", "gzip bomb", "deflate bomb", "brotli bomb", "endless header"),
        *("endless chunk header", "endless trailers", "sends interim answers as fast as it can"),
    ],
)
async def test_memory_is_bounded(web: WebServer, fetcher: PageFetcher, peak_memory: list[int], name: str) -> None:
    """Eight at once: each may hold its page twice, a socket's buffers on both sides, and Brotli its window."""
    url = web.add_handler("/", FAILURES[name][0])
    outcomes = await asyncio.gather(*(fetcher.fetch(url, timeout_s=3) for _ in range(8)), return_exceptions=True)
    assert all(isinstance(outcome, FetchError) for outcome in outcomes)
    print(f"{name}: {grown_by(peak_memory) / 1e6:.1f} MB")
    window_bytes = 16_000_000 if name == "brotli bomb" else 0
    assert grown_by(peak_memory) < 8 * (3 * MAX_PAGE_BYTES + window_bytes) + 10_000_000


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (endless(head(200, {"Content-Type": "text/plain"}), BIG), None),
        (reset, "robots.txt cannot be read"),
        (with_body(BOMB["gzip"], Content_Encoding="gzip"), None),
        (raw(b"\x00\xff" * 100), "robots.txt cannot be read"),
        (raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"), "robots.txt cannot be read"),
        (raw(head(302, {"Location": "/robots.txt", "Content-Length": "0"})), None),
    ],
)
async def test_robots_txt_may_misbehave_too(web: WebServer, handler: Handler, reason: str | None) -> None:
    web.add_handler("/robots.txt", handler)
    guard = AddressGuard(["127.0.0.0/8"])
    async with PageFetcher(guard, max_page_bytes=MAX_PAGE_BYTES, politeness=Politeness()) as fetcher:
        if reason is None:
            assert (await fetcher.fetch(web.add("/", "x"))).text == "x"
            return
        with pytest.raises(FetchError, match=reason):
            await fetcher.fetch(web.add("/", "x"))


async def test_a_robots_txt_that_never_comes_is_not_waited_for(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream2llm_sdk.retrievers.web.fetch._ROBOTS_TIMEOUT_S", 0.1)
    web.add_handler("/robots.txt", slow(head(), b"#", 0.01))
    guard = AddressGuard(["127.0.0.0/8"])
    async with PageFetcher(guard, max_page_bytes=MAX_PAGE_BYTES, politeness=Politeness()) as fetcher:
        with pytest.raises(FetchError, match=r"no answer within 0\.1 s"):
            await fetcher.fetch(web.add("/", "x"))
