"""Our crawler beside crawl4ai's own `arun_many(stream=True)`, in turn, on 100 loopback pages of 50 to 300 ms.

Both fetch 16 pages at a time by HTTP, without spacing and without robots.txt, and deliver each page's whole Markdown;
crawl4ai runs without its rate limiter. The pages lie on 20 host names of the loopback and are 20 to 60 kB of article,
navigation and tables each. Ours also removes boilerplate, judges each page's relevance and looks for duplicates.
Figures, medians of 5 runs each:
`pages_per_s_ratio`, ours over theirs; `first_page_ratio`, their time to the first page over ours;
`order_is_arrival`, whether 15 pages that were asked for at once came out in the order in which the server sent them,
150 ms apart;
`loop_stall_ms`, the longest time that the event loop did not run while 8 pages of 0.5 to 1 MB were read;
`pages_per_s` and `first_page_ms`, ours. Asked: ratios of at least 1.0, true order, a stall of at most 20 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from harness import main

NUM_PAGES, NUM_HOSTS, CONCURRENCY, RUNS = 100, 20, 16, 5
DELAYS_S = (0.05, 0.3)
QUESTION = "How does a task group cancel its tasks when one of them fails?"
NUM_SPACED, SPACING_S = 15, 0.15
WORDS = "event loop future queue worker result error cancel scope wait group task timeout handle signal lock"
BEAT_S = 0.001

SERVER = """
import asyncio, sys
from aiohttp import web

sys.path.insert(0, sys.argv[1])
from crawl import SPACING_S, delays, large_page, small_page

bodies = {}

async def page(request):
    number = int(request.match_info["number"])
    await asyncio.sleep(delays()[number])
    return web.Response(body=bodies[number], content_type="text/html", charset="utf-8")

async def large(request):
    return web.Response(body=bodies[-1 - int(request.match_info["number"])], content_type="text/html", charset="utf-8")

async def spaced(request):
    number = int(request.match_info["number"])
    await asyncio.sleep(SPACING_S * (1 + number))
    return web.Response(body=bodies[number], content_type="text/html", charset="utf-8")

async def serve():
    bodies.update({number: small_page(number) for number in range(100)})
    bodies.update({-1 - number: large_page(number) for number in range(8)})
    app = web.Application()
    app.add_routes([web.get("/page/{number}", page), web.get("/large/{number}", large)])
    app.add_routes([web.get("/spaced/{number}", spaced)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def delays() -> list[float]:
    draw = random.Random(1)
    return [draw.uniform(*DELAYS_S) for _ in range(NUM_PAGES)]


def small_page(number: int) -> bytes:
    return _page(random.Random(number), number, num_sections=random.Random(-number).randint(12, 36))


def large_page(number: int) -> bytes:
    return _page(random.Random(1000 + number), number, num_sections=360 + 48 * number)


def _page(draw: random.Random, number: int, num_sections: int) -> bytes:
    """An article with what surrounds one: 1.4 kB a section."""
    words = WORDS.split()
    words += [f"term{draw.randrange(5_000)}" for _ in range(200)]

    def sentence() -> str:
        return " ".join(draw.choices(words, k=14)).capitalize() + "."

    links = "".join(f'<li><a href="/page/{draw.randrange(100)}">{sentence()[:30]}</a></li>' for _ in range(60))
    parts = []
    for index in range(num_sections):
        text = " ".join(sentence() for _ in range(5))
        rows = "".join(
            f"<tr><td>{draw.choice(words)}</td><td><code>{draw.choice(words)}()</code></td></tr>" for _ in "12"
        )
        parts.append(
            f"<h2 id=s{index}>{sentence()[:40]}</h2><p>{text} <a href='/page/{index % 100}'>{words[index % 16]}</a> "
            f"<em>{sentence()}</em></p><table>{rows}</table>"
            f"<pre><code>async with group:\n    wait({index})</code></pre>"
        )
    return (
        f"<!doctype html><html lang=en><head><title>Page {number}</title><style>p{{margin:0}}</style>"
        f"<script>let n = {number};</script></head><body><nav><ul>{links}</ul></nav>"
        f"<main><h1>Page {number}</h1>{''.join(parts)}</main><footer>{sentence()}</footer></body></html>"
    ).encode()


@contextlib.contextmanager
def site() -> Iterator[int]:
    """The port of a server in a process of its own."""
    command = [sys.executable, "-c", SERVER, str(sys.path[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.kill()


def urls_of(port: int) -> list[str]:
    return [f"http://127.0.0.{1 + number % NUM_HOSTS}:{port}/page/{number}" for number in range(NUM_PAGES)]


async def timed(pages: AsyncIterator[str]) -> dict[str, Any]:
    """Reads all pages: when each came, in seconds from the start."""
    started, came = time.monotonic(), {}
    async for url in pages:
        came[url] = time.monotonic() - started
    times = list(came.values())
    return {"num_pages": len(came), "first_s": times[0], "total_s": times[-1], "order": list(came)}


async def pages_of(retriever: Any) -> AsyncIterator[str]:
    from stream2llm_sdk.context import Append

    async for item in retriever.stream(QUESTION):
        assert isinstance(item, Append), item
        yield item.chunks[0].source


async def theirs(crawler: Any, urls: list[str]) -> AsyncIterator[str]:
    from crawl4ai import CacheMode, CrawlerRunConfig, MemoryAdaptiveDispatcher

    dispatcher = MemoryAdaptiveDispatcher(
        memory_threshold_percent=99.0, max_session_permit=CONCURRENCY, rate_limiter=None, check_interval=0.05
    )
    config = CrawlerRunConfig(stream=True, cache_mode=CacheMode.BYPASS, verbose=False)
    async for result in await crawler.arun_many(urls, config=config, dispatcher=dispatcher):
        assert result.success, result.error_message
        assert len(result.markdown.raw_markdown) > 5_000
        yield result.url


async def is_in_order(port: int, converters: Any) -> bool:
    """Whether pages that are asked for in any order come out as they were sent."""
    numbers = list(range(NUM_SPACED))
    random.Random(2).shuffle(numbers)
    retriever = crawler_of([f"http://127.0.0.{1 + number}:{port}/spaced/{number}" for number in numbers], converters)
    order = [int(url.rpartition("/")[2]) for url in (await timed(pages_of(retriever)))["order"]]
    return order == sorted(numbers)


async def longest_stall_ms(retriever: Any) -> float:
    """The longest gap between two beats of the loop beyond their distance."""
    stall_s = 0.0

    async def beat() -> None:
        nonlocal stall_s
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            stall_s, last = max(stall_s, now - last - BEAT_S), now

    heart = asyncio.create_task(beat())
    assert (await timed(pages_of(retriever)))["num_pages"] == 8
    heart.cancel()
    return stall_s * 1e3


def crawler_of(urls: list[str], converters: Any) -> Any:
    from stream2llm_sdk.retrievers.web.crawl_options import PolitenessOptions
    from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
    from stream2llm_sdk.retrievers.web.page import ExtractionOptions

    return CrawlerRetriever(
        urls,
        concurrency=CONCURRENCY,
        allow_networks=["127.0.0.0/8"],
        politeness=PolitenessOptions(respect_robots=False, per_host_concurrency=CONCURRENCY),
        converters=converters,
        extraction=ExtractionOptions(max_page_tokens=None),
    )


async def run(port: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    from stream2llm_sdk.retrievers.web.convert import prepare_crawl4ai
    from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool

    prepare_crawl4ai()
    from crawl4ai import AsyncWebCrawler, HTTPCrawlerConfig
    from crawl4ai.async_crawler_strategy import AsyncHTTPCrawlerStrategy

    urls = urls_of(port)
    strategy = AsyncHTTPCrawlerStrategy(HTTPCrawlerConfig(), max_connections=CONCURRENCY)
    runs: list[dict[str, Any]] = []
    stalls: list[float] = []
    async with AsyncWebCrawler(crawler_strategy=strategy, verbose=False) as crawler, ConverterPool(2) as converters:
        ours = crawler_of(urls, converters)
        await ours.warm_up()
        await timed(theirs(crawler, urls[:4]))
        await timed(pages_of(crawler_of(urls[:4], converters)))
        for _ in range(RUNS):
            gc.collect()
            runs.append({"who": "ours", **await timed(pages_of(ours))})
            gc.collect()
            runs.append({"who": "crawl4ai", **await timed(theirs(crawler, urls))})
        in_order = await is_in_order(port, converters)
        large = crawler_of([f"http://127.0.0.{1 + n}:{port}/large/{n}" for n in range(8)], converters)
        stalls = []
        for _ in range(5):
            gc.collect()
            stalls.append(await longest_stall_ms(large))
    assert all(one.pop("order") and one["num_pages"] == NUM_PAGES for one in runs), runs
    runs.append({"who": "ours", "stalls_ms": stalls})

    def median(who: str, what: str) -> float:
        return statistics.median(one[what] for one in runs if one["who"] == who and what in one)

    figures = {
        "pages_per_s_ratio": median("crawl4ai", "total_s") / median("ours", "total_s"),
        "first_page_ratio": median("crawl4ai", "first_s") / median("ours", "first_s"),
        "order_is_arrival": in_order,
        "loop_stall_ms": statistics.median(stalls),
        "pages_per_s": NUM_PAGES / median("ours", "total_s"),
        "first_page_ms": 1e3 * median("ours", "first_s"),
    }
    return figures, runs


def measure() -> tuple[dict[str, float], list[dict[str, Any]]]:
    with site() as port:
        return asyncio.run(run(port))


if __name__ == "__main__":
    main(__doc__, measure)
