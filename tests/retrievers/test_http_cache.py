"""What is kept is used as HTTP allows, shared between processes, bounded, and never in a page's way."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from pathlib import Path

import pytest
from web_server import WebServer, head, page

from stream2llm_sdk.errors import AddressNotAllowedError, ConfigurationError, FetchError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.fetch import PageFetcher
from stream2llm_sdk.retrievers.web.http_cache import HTTPCache
from stream2llm_sdk.retrievers.web.politeness import Politeness

MakeFetcher = Callable[..., PageFetcher]


@pytest.fixture
async def cache(tmp_path: Path) -> AsyncIterator[HTTPCache]:
    async with HTTPCache(tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
async def fetcher(cache: HTTPCache) -> AsyncIterator[PageFetcher]:
    async with PageFetcher(AddressGuard(["127.0.0.0/8"]), max_page_bytes=1_000_000, cache=cache) as made:
        yield made


async def test_a_fresh_page_is_not_asked_for_again(web: WebServer, fetcher: PageFetcher) -> None:
    url = web.add("/", page("grün"), headers={"Cache-Control": "max-age=60", "Set-Cookie": "a=b"})
    first, second = await fetcher.fetch(url), await fetcher.fetch(url)
    assert (first.text, second.text) == (page("grün"),) * 2
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.content_type == "text/html"
    assert "set-cookie" not in second.headers
    assert web.requests == ["/"]


@pytest.mark.parametrize(
    ("headers", "condition"),
    [
        ({"ETag": '"v1"'}, ("if-none-match", '"v1"')),
        ({"ETag": 'W/"v1"', "Cache-Control": "no-cache"}, ("if-none-match", 'W/"v1"')),
        ({"ETag": '"v1"', "Cache-Control": "max-age=0"}, ("if-none-match", '"v1"')),
        (
            {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", "Cache-Control": "max-age=0"},
            ("if-modified-since", "Wed, 21 Oct 2015 07:28:00 GMT"),
        ),
    ],
)
async def test_a_stale_page_is_asked_about_and_taken_from_the_disk(
    web: WebServer, fetcher: PageFetcher, headers: dict[str, str], condition: tuple[str, str]
) -> None:
    url = web.add("/", page("kept"), headers=headers)
    await fetcher.fetch(url)
    web.add("/", "", status=304, content_type=None, headers=headers)
    again = await fetcher.fetch(url)
    assert (again.text, again.status, again.from_cache) == (page("kept"), 200, True)
    assert web.headers[1][condition[0]] == condition[1]
    web.add("/", page("new"), headers={"ETag": '"v2"'})
    assert [(await fetcher.fetch(url)).text for _ in range(1)] == [page("new")]
    web.add("/", "", status=304, content_type=None, headers={"ETag": '"v2"'})
    assert (await fetcher.fetch(url)).text == page("new")
    assert web.headers[3]["if-none-match"] == '"v2"'


@pytest.mark.parametrize("value", ["no-store", "private", "private, max-age=60", "no-store, max-age=60"])
async def test_what_must_not_be_kept_is_not_on_the_disk(
    web: WebServer, fetcher: PageFetcher, cache: HTTPCache, value: str
) -> None:
    url = web.add("/", page("a secret thing"), headers={"Cache-Control": value, "ETag": '"v1"'})
    await fetcher.fetch(url)
    await fetcher.fetch(url)
    assert web.requests == ["/", "/"]
    assert "if-none-match" not in web.headers[1]
    kept = b"".join(file.read_bytes() for file in cache.directory.iterdir() if file.is_file())
    assert b"a secret thing" not in kept


async def test_an_unconditional_page_is_asked_for_each_time(web: WebServer, fetcher: PageFetcher) -> None:
    url = web.add("/", "x")
    assert [(await fetcher.fetch(url)).from_cache for _ in range(2)] == [False, False]


async def test_a_page_that_varies_with_what_we_send_alike_is_kept(web: WebServer, fetcher: PageFetcher) -> None:
    url = web.add("/", "x", headers={"Cache-Control": "max-age=60", "Vary": "Accept-Encoding, User-Agent"})
    assert [(await fetcher.fetch(url)).from_cache for _ in range(2)] == [False, True]
    url = web.add("/all", "x", headers={"Cache-Control": "max-age=60", "Vary": "*"})
    assert [(await fetcher.fetch(url)).from_cache for _ in range(2)] == [False, False]


async def test_failures_are_not_kept(web: WebServer, fetcher: PageFetcher) -> None:
    url = web.add("/", "", status=404, headers={"Cache-Control": "max-age=60"})
    with pytest.raises(FetchError, match="404"):
        await fetcher.fetch(url)
    web.add("/", "x")
    assert (await fetcher.fetch(url)).text == "x"


async def test_half_a_page_is_not_kept(web: WebServer, fetcher: PageFetcher) -> None:
    async def cut_short(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, {"Content-Length": "1000", "Cache-Control": "max-age=60"}) + b"half")

    url = web.add_handler("/", cut_short)
    with pytest.raises(FetchError, match="middle of the body"):
        await fetcher.fetch(url)
    web.add("/", "whole")
    assert (await fetcher.fetch(url)).text == "whole"


async def test_a_kept_redirect_is_checked_like_any_other(
    web: WebServer, fetcher: PageFetcher, cache: HTTPCache
) -> None:
    web.add("/end", "x")
    headers = {"Location": "/end", "Cache-Control": "max-age=60"}
    start = web.add("/start", "", status=301, headers=headers)
    for _ in range(2):
        assert (await fetcher.fetch(start)).url == web.base + "/end"
    assert web.requests == ["/start", "/end", "/end"]


async def test_a_kept_page_needs_no_turn(web: WebServer, cache: HTTPCache) -> None:
    url = web.add("/", "x", headers={"Cache-Control": "max-age=60"})
    manners = Politeness(per_host_interval_s=1000.0)
    guard = AddressGuard(["127.0.0.0/8"])
    async with PageFetcher(guard, max_page_bytes=1000, politeness=manners, cache=cache) as fetcher:
        assert [(await fetcher.fetch(url)).from_cache for _ in range(2)] == [False, True]
        with pytest.raises(FetchError, match="one request in 1000 s"):
            await fetcher.fetch(web.add("/other", "x"))


async def test_a_private_networks_page_is_for_those_who_may_read_it(web: WebServer, cache: HTTPCache) -> None:
    """A name that leads inside is refused also when its page is kept, by someone who may read it."""

    async def lookup(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    web.add("/", "inside", headers={"Cache-Control": "max-age=60"})
    url = f"http://wiki.example:{web.port}/"
    inside, outside = AddressGuard(["127.0.0.0/8"], lookup=lookup), AddressGuard(lookup=lookup)
    async with PageFetcher(inside, max_page_bytes=1000, cache=cache) as fetcher:
        assert [(await fetcher.fetch(url)).from_cache for _ in range(2)] == [False, True]
    async with PageFetcher(outside, max_page_bytes=1000, cache=cache) as fetcher:
        with pytest.raises(AddressNotAllowedError):
            await fetcher.fetch(url)


async def test_a_kept_page_is_bounded_like_any_other(web: WebServer, fetcher: PageFetcher, cache: HTTPCache) -> None:
    url = web.add("/", "x" * 5000, headers={"Cache-Control": "max-age=60"})
    await fetcher.fetch(url)
    async with PageFetcher(AddressGuard(["127.0.0.0/8"]), max_page_bytes=1000, cache=cache) as small:
        with pytest.raises(FetchError, match="max_page_bytes=1000"):
            await small.fetch(url)
    assert web.requests == ["/"]


async def test_a_pdf_and_an_empty_page_are_kept(web: WebServer, fetcher: PageFetcher) -> None:
    headers = {"Cache-Control": "max-age=60"}
    urls = [web.add("/pdf", b"%PDF-1.4\n\xff", content_type="application/pdf", headers=headers)]
    urls.append(web.add("/empty", b"", headers=headers))
    for from_cache in (False, True):
        pdf, empty = [await fetcher.fetch(url) for url in urls]
        assert (pdf.body, empty.text) == (b"%PDF-1.4\n\xff", "")
        assert (pdf.from_cache, empty.from_cache) == (from_cache,) * 2


async def test_cancelled_in_the_middle_nothing_is_left_open(web: WebServer, fetcher: PageFetcher) -> None:
    gate = asyncio.Event()
    url = web.add("/", "x", gate=gate, headers={"Cache-Control": "max-age=60"})
    task = asyncio.create_task(fetcher.fetch(url))
    await web.wait_until(lambda: web.requests == ["/"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await web.wait_until(lambda: web.num_connections == 0)
    web.add("/", "y")
    assert (await fetcher.fetch(url)).text == "y"


_OTHER_PROCESS = """
import asyncio, sys
from stream2llm_sdk.retrievers.web.http_cache import HTTPAnswer, HTTPCache

async def main():
    async with HTTPCache(sys.argv[1]) as cache:
        async def send(headers):
            return HTTPAnswer(200, {"cache-control": "max-age=60"}, sys.argv[2].encode())
        for number in range(30):
            await cache.answer(f"http://a.example/{sys.argv[2]}/{number}", {}, send)
asyncio.run(main())
"""


async def test_processes_share_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OTHER_PROCESS, str(tmp_path)]
    others = [subprocess.Popen([*command, name]) for name in ("a", "b", "c")]
    assert [await asyncio.to_thread(other.wait) for other in others] == [0, 0, 0]

    async def never(headers: object) -> None:
        raise AssertionError("this page is kept")

    async with HTTPCache(tmp_path) as cache:
        for name in ("a", "b", "c"):
            for number in range(30):
                answer = await cache.answer(f"http://a.example/{name}/{number}", {}, never)  # type: ignore[arg-type]
                assert (answer.body, answer.from_cache) == (name.encode(), True)


async def test_it_stays_small(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream2llm_sdk.retrievers.web.http_cache._IN_USE_S", 0.0)
    directory = tmp_path / "cache"
    async with HTTPCache(directory, max_bytes=1_000_000) as cache:
        fetcher = PageFetcher(AddressGuard(["127.0.0.0/8"]), max_page_bytes=1_000_000, cache=cache)
        async with fetcher:
            for number in range(40):
                url = web.add(f"/{number}", b"x" * 100_000, headers={"Cache-Control": "max-age=60"})
                await fetcher.fetch(url)
            assert (await fetcher.fetch(url)).from_cache
            assert not (await fetcher.fetch(web.base + "/0")).from_cache
    assert sum(file.stat().st_size for file in directory.iterdir()) < 1_300_000


async def test_a_page_larger_than_the_bound_is_read_and_not_kept(web: WebServer, tmp_path: Path) -> None:
    url = web.add("/", b"x" * 1_500_000, headers={"Cache-Control": "max-age=60"})
    async with HTTPCache(tmp_path, max_entry_bytes=1_000_000) as cache:
        async with PageFetcher(AddressGuard(["127.0.0.0/8"]), max_page_bytes=2_000_000, cache=cache) as fetcher:
            assert [(await fetcher.fetch(url)).from_cache for _ in range(2)] == [False, False]


@pytest.mark.parametrize("rubbish", [b"this is no database" * 100, b"SQLite format 3\x00" + b"\xff" * 5000, b""])
async def test_a_damaged_cache_starts_anew(web: WebServer, tmp_path: Path, rubbish: bytes) -> None:
    (tmp_path / "pages-v1.sqlite3").write_bytes(rubbish)
    url = web.add("/", "x", headers={"Cache-Control": "max-age=60"})
    async with HTTPCache(tmp_path) as cache:
        async with PageFetcher(AddressGuard(["127.0.0.0/8"]), max_page_bytes=1000, cache=cache) as fetcher:
            assert [(await fetcher.fetch(url)).from_cache for _ in range(2)] == [False, True]


async def test_a_cache_that_breaks_costs_no_page(web: WebServer, fetcher: PageFetcher, cache: HTTPCache) -> None:
    url = web.add("/", "x", headers={"Cache-Control": "max-age=60"})
    await fetcher.fetch(url)
    cache._storage.close()
    assert (await fetcher.fetch(url)).text == "x"
    await cache.aclose()
    assert (await fetcher.fetch(url)).text == "x"
    assert web.requests == ["/"] * 3


def test_it_is_this_users_alone(tmp_path: Path) -> None:
    cache = HTTPCache(tmp_path / "a" / "b")
    cache.close()
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_by_default_it_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = HTTPCache()
    cache.close()
    assert cache.directory == tmp_path / "stream2llm-sdk" / "http"


def test_options_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="give another directory"):
        HTTPCache(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="max_bytes=10"):
        HTTPCache(tmp_path, max_bytes=10)
    with pytest.raises(ConfigurationError, match="max_entry_bytes=True"):
        HTTPCache(tmp_path, max_entry_bytes=True)


async def test_a_page_modified_long_ago_is_fresh_for_a_while(web: WebServer, fetcher: PageFetcher) -> None:
    """RFC 9111, section 4.2.2: a tenth of the time since it was changed."""
    modified = {"Last-Modified": formatdate(0, usegmt=True), "Date": formatdate(usegmt=True)}
    url = web.add("/", "x", headers=modified)
    assert [(await fetcher.fetch(url)).from_cache for _ in range(2)] == [False, True]
