"""Hosts are asked as they wish: robots.txt is kept to, requests are few and spaced, pauses are taken."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from email.utils import formatdate
from typing import Any

import pytest
from web_server import WebServer, head

from stream2llm_sdk.errors import ConfigurationError, FetchError, RobotsDisallowedError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.fetch import PageFetcher
from stream2llm_sdk.retrievers.web.politeness import DEFAULT_USER_AGENT, Politeness, parse_retry_after
from stream2llm_sdk.retrievers.web.robots import RobotsAnswer, robots_token

pytestmark = pytest.mark.slow

MakeFetcher = Callable[..., PageFetcher]


@pytest.fixture
async def fetcher() -> AsyncIterator[MakeFetcher]:
    made: list[PageFetcher] = []

    def make(politeness: Politeness) -> PageFetcher:
        made.append(PageFetcher(AddressGuard(["127.0.0.0/8"]), max_page_bytes=1_000_000, politeness=politeness))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def no_robots(url: str) -> RobotsAnswer:
    return RobotsAnswer(404)


def robots(web: WebServer, text: str | bytes, **options: Any) -> None:
    web.add("/robots.txt", text, content_type="text/plain", **options)


# --- robots.txt -------------------------------------------------------------------------------------------------


async def test_robots_txt_is_asked_for_once_and_kept_to(web: WebServer, fetcher: MakeFetcher) -> None:
    robots(web, "User-agent: stream2llm-sdk\nDisallow: /no\nAllow: /no/but\n\nUser-agent: *\nDisallow: /yes")
    for path in ("/yes", "/no", "/no/but"):
        web.add(path, "x")
    one = fetcher(Politeness())
    await asyncio.gather(one.fetch(web.base + "/yes"), one.fetch(web.base + "/no/but"))
    with pytest.raises(RobotsDisallowedError, match=r"robots\.txt of http://127.* forbids it for 'stream2llm-sdk'"):
        await one.fetch(web.base + "/no")
    assert sorted(web.requests) == ["/no/but", "/robots.txt", "/yes"]


async def test_robots_txt_can_be_switched_off(web: WebServer, fetcher: MakeFetcher) -> None:
    robots(web, "User-agent: *\nDisallow: /")
    await fetcher(Politeness(respect_robots=False)).fetch(web.add("/", "x"))
    assert web.requests == ["/"]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
async def test_no_robots_txt_allows_everything(web: WebServer, fetcher: MakeFetcher, status: int) -> None:
    robots(web, "User-agent: *\nDisallow: /", status=status)
    assert (await fetcher(Politeness()).fetch(web.add("/", "x"))).text == "x"


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_failing_server_is_left_alone_for_a_while(web: WebServer, fetcher: MakeFetcher, status: int) -> None:
    robots(web, "", status=status)
    one = fetcher(Politeness())
    for _ in range(2):
        with pytest.raises(RobotsDisallowedError, match=f"robots.txt cannot be read \\(HTTP {status}\\)"):
            await one.fetch(web.add("/", "x"))
    assert web.requests == ["/robots.txt"]


async def test_a_server_that_recovers_is_read(web: WebServer, fetcher: MakeFetcher) -> None:
    robots(web, "", status=500)
    one = fetcher(Politeness(robots_retry_s=0.0))
    with pytest.raises(RobotsDisallowedError):
        await one.fetch(web.add("/", "x"))
    robots(web, "User-agent: *\nDisallow: /no")
    assert (await one.fetch(web.base + "/")).text == "x"


async def test_known_rules_hold_while_new_ones_cannot_be_read(web: WebServer, fetcher: MakeFetcher) -> None:
    robots(web, "User-agent: *\nDisallow: /no")
    one = fetcher(Politeness(robots_ttl_s=0.0, robots_retry_s=0.0))
    await one.fetch(web.add("/", "x"))
    robots(web, "", status=500)
    await one.fetch(web.base + "/")
    with pytest.raises(RobotsDisallowedError, match="forbids it"):
        await one.fetch(web.add("/no", "x"))


async def test_unreachable_robots_txt_forbids(fetcher: MakeFetcher) -> None:
    with pytest.raises(RobotsDisallowedError, match="cannot connect"):
        await fetcher(Politeness()).fetch("http://127.0.0.1:2/")


async def test_redirected_robots_txt_is_followed(web: WebServer, fetcher: MakeFetcher) -> None:
    web.add_redirect("/robots.txt", "/real.txt")
    web.add("/real.txt", "User-agent: *\nDisallow: /no", content_type="text/plain")
    with pytest.raises(RobotsDisallowedError, match="forbids it"):
        await fetcher(Politeness()).fetch(web.add("/no", "x"))


async def test_a_huge_robots_txt_is_cut_and_does_not_hold_up_the_loop(web: WebServer, fetcher: MakeFetcher) -> None:
    robots(web, b"User-agent: *\nDisallow: /no\n" + b"Disallow: /a*b*c$\n" * 100_000 + b"Disallow: /\n")
    one = fetcher(Politeness())
    assert (await one.fetch(web.add("/", "x"))).text == "x"
    with pytest.raises(RobotsDisallowedError):
        await one.fetch(web.add("/no", "x"))


@pytest.mark.parametrize("text", [b"\xff\xfe\x00junk", b"", b"<html>not found</html>", b"\xef\xbb\xbfUser-agent: x\n"])
async def test_robots_txt_that_is_none_allows(web: WebServer, fetcher: MakeFetcher, text: bytes) -> None:
    robots(web, text)
    assert (await fetcher(Politeness()).fetch(web.add("/", "x"))).text == "x"


@pytest.mark.parametrize(
    ("user_agent", "token"),
    [
        (DEFAULT_USER_AGENT, "stream2llm-sdk"),
        ("my-crawler/1.0 (+https://example.com/bot)", "my-crawler"),
        ("Mozilla/5.0 (compatible; MyBot/2.1; +http://example.com)", "MyBot"),
        ("MyBot", "MyBot"),
    ],
)
def test_the_name_that_robots_txt_knows(user_agent: str, token: str) -> None:
    assert robots_token(user_agent) == token


async def test_who_fetches_robots_txt_may_be_cancelled(web: WebServer, fetcher: MakeFetcher) -> None:
    gate = asyncio.Event()
    robots(web, "User-agent: *\nDisallow: /no", gate=gate)
    one = fetcher(Politeness())
    first = asyncio.create_task(one.fetch(web.add("/1", "x")))
    await web.wait_until(lambda: web.requests == ["/robots.txt"])
    second = asyncio.create_task(one.fetch(web.add("/2", "x")))
    first.cancel()
    await web.wait_until(lambda: web.requests == ["/robots.txt"] * 2)
    web.open(gate)
    assert (await second).text == "x"
    with pytest.raises(asyncio.CancelledError):
        await first


# --- turns ------------------------------------------------------------------------------------------------------


async def test_few_requests_at_once_to_one_host_and_many_to_many(web: WebServer, fetcher: MakeFetcher) -> None:
    one = fetcher(Politeness(per_host_concurrency=2))
    gate, other_gate = asyncio.Event(), asyncio.Event()
    async with WebServer() as other:
        urls = [web.add(f"/{number}", "x", gate=gate) for number in range(6)]
        urls += [other.add(f"/{number}", "x", gate=other_gate) for number in range(2)]
        pages = asyncio.gather(*(one.fetch(url) for url in urls))
        await web.wait_until(lambda: web.num_active == 2)
        await other.wait_until(lambda: other.num_active == 2)
        web.open(gate)
        other.open(other_gate)
        await pages
        assert (web.max_active, other.max_active) == (2, 2)


@pytest.mark.parametrize("text", ["User-agent: *\nCrawl-delay: 0.2", "User-agent: *\nRequest-rate: 5/1s", ""])
async def test_requests_are_spaced(web: WebServer, fetcher: MakeFetcher, text: str) -> None:
    robots(web, text)
    starts: list[float] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        starts.append(time.monotonic())
        writer.write(head() + b"x")

    one = fetcher(Politeness(per_host_interval_s=0.0 if text else 0.2))
    await asyncio.gather(*(one.fetch(web.add_handler(f"/{number}", answer)) for number in range(4)))
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert min(gaps) > 0.15, gaps


async def test_a_cancelled_wait_takes_nobodys_turn() -> None:
    politeness = Politeness(per_host_interval_s=0.2, per_host_concurrency=20)

    async def use() -> float:
        async with politeness.turn("http://a.example/", no_robots):
            return time.monotonic()

    started = await use()
    waiting = [asyncio.create_task(use()) for _ in range(10)]
    last = asyncio.create_task(use())
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    assert await last - started < 0.6
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_wait_that_cannot_end_in_time_fails_at_once() -> None:
    politeness = Politeness(per_host_interval_s=100.0, max_wait_s=150.0)
    loop = asyncio.get_running_loop()

    async def use(deadline: float | None = None) -> None:
        async with politeness.turn("http://a.example/x", no_robots, deadline=deadline):
            pass

    await use()
    with pytest.raises(FetchError, match=r"http://a\.example gets one request in 100 s; .* the time left: .* 100 s"):
        await use(loop.time() + 10)
    waiting = asyncio.create_task(use())
    await asyncio.sleep(0.01)
    with pytest.raises(FetchError, match=r"beyond max_wait_s=150: try again in 200 s"):
        await use()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_crawl_delay_of_an_hour_is_said(web: WebServer, fetcher: MakeFetcher) -> None:
    robots(web, "User-agent: *\nCrawl-delay: 3600")
    one = fetcher(Politeness())
    await one.fetch(web.add("/1", "x"))
    with pytest.raises(FetchError, match="gets one request in 3600 s"):
        await one.fetch(web.add("/2", "x"))


@pytest.mark.parametrize("text", ["Crawl-delay: inf", "Crawl-delay: -1", "Crawl-delay: soon", "Request-rate: 1/0"])
async def test_a_delay_that_is_none_is_not_kept_to(web: WebServer, fetcher: MakeFetcher, text: str) -> None:
    robots(web, f"User-agent: *\n{text}")
    one = fetcher(Politeness())
    for number in range(3):
        await one.fetch(web.add(f"/{number}", "x"))


async def test_a_rate_beyond_all_numbers_is_a_day(web: WebServer, fetcher: MakeFetcher) -> None:
    robots(web, f"User-agent: *\nRequest-rate: 1/{'9' * 400}")
    one = fetcher(Politeness())
    await one.fetch(web.add("/1", "x"))
    with pytest.raises(FetchError, match="one request in 86400 s"):
        await one.fetch(web.add("/2", "x"))


async def test_hosts_are_forgotten_but_not_while_in_use() -> None:
    politeness = Politeness(max_hosts=10)

    async def use(number: int, inside: Callable[[], Awaitable[None]]) -> None:
        async with politeness.turn(f"http://host-{number}.example/", no_robots):
            await inside()

    async def nothing() -> None:
        pass

    async def use_many() -> None:
        for number in range(1, 100):
            await use(number, nothing)

    await use(0, use_many)
    assert len(politeness._hosts) <= 11


# --- pauses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        ("7", 7.0),
        (" 0 ", 0.0),
        ("99999999999999999999", 86_400.0),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("²", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 86_400.0),
        ("Wed, 99 Oct 99999 07:28:00 GMT", None),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value) == seconds


def test_retry_after_as_a_date_counts_from_now() -> None:
    seconds = parse_retry_after(formatdate(time.time() + 60, usegmt=True))
    assert seconds is not None
    assert 57 < seconds <= 60


def test_pauses_double_without_a_header_and_end_with_success() -> None:
    politeness = Politeness()
    pauses = [politeness.note_response("http://a.example/", 503) for _ in range(9)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert politeness.note_response("http://b.example/", 503) == 1
    assert politeness.note_response("http://a.example/", 404) == 0
    assert politeness.note_response("http://a.example/", 200) == 0
    assert politeness.note_response("http://a.example/", 429, "3") == 3
    assert politeness.note_response("http://a.example:80/x", 429) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"per_host_concurrency": 0},
        {"per_host_concurrency": True},
        {"per_host_interval_s": -1},
        {"per_host_interval_s": float("nan")},
        {"max_wait_s": "1"},
        {"max_hosts": 0},
        {"robots_ttl_s": float("inf")},
        {"user_agent": " "},
    ],
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Politeness(**options)
