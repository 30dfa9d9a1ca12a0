"""Whether questions find their page: the 175 questions of the Python FAQ, as Debian's `python3.11-doc` installs it.

A question is a heading of a FAQ page that ends with a question mark; that page, of 500 that are served on the
loopback, is the truth. The questions stand on their pages word for word, so this is an easy task: it shows that nothing
gets lost on the way, not how well a search understands.

Figures: `search_hit_at_5` of the local index; `crawl_hit_at_5` of the whole crawler (local search, fetching, links,
extraction): the page is among the five that reached the prompt; `answer_in_prompt`: the question's heading stands in
one of these, after the cut to passages; `index_hit_at_5` of the DiskANN index over passages of the same pages: the page
is among the first five different ones; and milliseconds a question of the crawler, `crawl_ms`.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Measured, main

ROOT = Path("/usr/share/doc/python3.11-doc/html")
K = 5
MAX_QUESTIONS = int(os.environ.get("QUESTIONS", "0")) or None


def questions() -> Iterator[tuple[str, str]]:
    """Each question of the FAQ, and its page's path."""
    from lxml import html

    for file in sorted((ROOT / "faq").glob("*.html")):
        root = html.parse(str(file)).getroot()
        for heading in root.xpath("//div[@role='main']//*[self::h2 or self::h3]"):
            text = " ".join(heading.text_content().rstrip("¶ \n").split())
            if text.endswith("?"):
                yield text, f"faq/{file.name}"


def plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


async def crawl(base: str, search: Any, asked: list[tuple[str, str]]) -> list[dict[str, Any]]:
    from stream2llm_sdk.context import Append
    from stream2llm_sdk.retrievers import CrawlerRetriever

    runs = []
    async with CrawlerRetriever(search=search, max_pages=K, allow_networks=["127.0.0.0/8"]) as crawler:
        await crawler.warm_up()
        for question, page in asked:
            start = time.perf_counter()
            chunks = [
                chunk
                async for update in crawler.stream(question)
                if isinstance(update, Append)
                for chunk in update.chunks
            ]
            found = [chunk.source.removeprefix(base + "/") for chunk in chunks[:K]]
            seen = any(plain(question) in plain(chunk.text) for chunk in chunks[:K])
            ms = (time.perf_counter() - start) * 1e3
            runs.append({"question": question, "page": page, "crawl": page in found, "answer": seen, "ms": ms})
    return runs


async def index_hits(asked: list[tuple[str, str]], folder: str) -> list[bool]:
    from stream2llm_sdk.context import Chunk
    from stream2llm_sdk.retrievers import DiskANNRetriever, build_index
    from stream2llm_sdk.retrievers.search.known_pages import pages_in_folder
    from stream2llm_sdk.retrievers.web.passages import split_passages

    def build() -> Any:
        documents = (
            Chunk(passage.text, source=page.url, title=page.title)
            for page in pages_in_folder(ROOT, "http://docs")
            for passage in split_passages(page.text)
        )
        return build_index(documents, folder)

    hits = []
    async with DiskANNRetriever(await asyncio.to_thread(build), k=10 * K) as retriever:
        for question, page in asked:
            pool: list[str] = []
            async for update in retriever.stream(question):
                pool = list(dict.fromkeys(chunk.source for chunk in update.chunks))  # type: ignore[union-attr]
            hits.append(f"http://docs/{page}" in pool[:K])
    return hits


async def run() -> Measured:
    from aiohttp import web

    from stream2llm_sdk.retrievers.search.local import LocalIndexSearch

    asked = list(questions())[:MAX_QUESTIONS]
    application = web.Application()
    application.router.add_static("/", ROOT)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        search = await LocalIndexSearch.from_folder(ROOT, base)
        found = [f"{base}/{page}" in [hit.url for hit in await search.search(text, K)] for text, page in asked]
        runs = await crawl(base, search, asked)
    finally:
        await runner.cleanup()
    with tempfile.TemporaryDirectory() as folder:
        indexed = await index_hits(asked, str(Path(folder, "index")))
    for row, is_found, is_indexed in zip(runs, found, indexed, strict=True):
        row |= {"search": is_found, "index": is_indexed}
    figures = {
        "num_questions": float(len(asked)),
        "search_hit_at_5": statistics.fmean(found),
        "crawl_hit_at_5": statistics.fmean(row["crawl"] for row in runs),
        "answer_in_prompt": statistics.fmean(row["answer"] for row in runs),
        "index_hit_at_5": statistics.fmean(indexed),
        "crawl_ms": statistics.median(row["ms"] for row in runs),
    }
    return figures, runs


def measure() -> Measured:
    if not ROOT.is_dir():
        raise SystemExit("missing pages: apt-get install --no-install-recommends python3.11-doc")
    return asyncio.run(run())


if __name__ == "__main__":
    main(__doc__, measure)
