"""What recording costs a crawl: the same questions with the bare crawler and recorded, in turn.

12 questions of the Python FAQ, four at a time, each with the three best pages of a local search, on the installed
documentation that is served on the loopback. One crawler reads for both, warm. A recorded run takes the times, keeps
each question in the journal, and writes the Parquet file at its end. Figures:
`crawl_record_overhead_ratio`, the time of a recorded run over that of a bare one, median of the ratios of 15 pairs, the
first of each alternating; asked: at most 1.05. `crawl_record_added_ms`, what a question takes longer by that, and
`crawl_ms`, what it takes bare. Expected: a ratio of 1.00 to 1.03, since the conversion of a page takes 20 to 100 ms of
two processes, and a question's traces 2 to 5 ms of one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doc_site import link_sections, questions, serve
from harness import Measured, main

NUM_QUESTIONS, CONCURRENCY, PAGES, PAIRS = 12, 4, 3, 15


@dataclass(frozen=True)
class SharedCrawler:
    """Records with a crawler that is there already, and stays."""

    recorder: Any
    tag: str = "crawler"
    concurrency: int = CONCURRENCY

    def settings(self) -> dict[str, Any]:
        return {}

    async def start(self) -> SharedCrawler:
        return self

    async def record(self, question: Any) -> Any:
        return await self.recorder.record(question)

    async def aclose(self) -> None:
        pass


async def bare(crawler: Any, asked: Sequence[Any]) -> int:
    """All questions, without a record; how many pages came."""
    from stream2llm_sdk.context import Append

    remaining, num_pages = iter(asked), 0

    async def ask() -> None:
        nonlocal num_pages
        for question in remaining:
            async with contextlib.aclosing(crawler.stream(question.text)) as items:
                async for item in items:
                    num_pages += isinstance(item, Append)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENCY):
            tasks.create_task(ask())
    return num_pages


async def recorded(crawler: Any, asked: Sequence[Any]) -> int:
    from stream2llm_sdk.traces.recording.crawl import CrawlRecorder
    from stream2llm_sdk.traces.recording.run import run_recording

    with tempfile.TemporaryDirectory() as folder:
        summary = await run_recording(SharedCrawler(CrawlRecorder(crawler)), asked, Path(folder, "out"))
    return summary.num_updates


async def run(base: str) -> Measured:
    from stream2llm_sdk.retrievers.search.local import LocalIndexSearch
    from stream2llm_sdk.traces.recording.crawl import CrawlSpec
    from stream2llm_sdk.traces.recording.questions import Question

    asked = [Question(str(n), text) for n, (text, _) in enumerate(questions())][:NUM_QUESTIONS]
    spec = CrawlSpec(
        max_pages=PAGES,
        max_depth=0,
        allow_networks=("127.0.0.0/8",),
        respect_robots=False,
        per_host_concurrency=8,
        concurrency=CONCURRENCY,
    )
    ways = {"bare": bare, "recorded": recorded}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        search = await LocalIndexSearch.from_folder(link_sections(Path(folder)), base)
    async with spec.crawler(search) as crawler:
        await crawler.warm_up()
        for way in ways.values():
            await way(crawler, asked)
        for number in range(PAIRS):
            for name in sorted(ways, reverse=bool(number % 2)):
                gc.collect()
                start = time.perf_counter()
                num_pages = await ways[name](crawler, asked)
                runs.append({"pair": number, "who": name, "s": time.perf_counter() - start, "num_pages": num_pages})
    assert len({one["num_pages"] for one in runs}) == 1, runs
    times = {name: [one["s"] for one in runs if one["who"] == name] for name in ways}
    ratio = statistics.median(with_s / bare_s for with_s, bare_s in zip(times["recorded"], times["bare"], strict=True))
    crawl_ms = 1e3 * statistics.median(times["bare"]) / NUM_QUESTIONS
    return {
        "crawl_record_overhead_ratio": ratio,
        "crawl_record_added_ms": (ratio - 1) * crawl_ms,
        "crawl_ms": crawl_ms,
    }, runs


def measure() -> Measured:
    with serve() as base:
        return asyncio.run(run(base))


if __name__ == "__main__":
    main(__doc__, measure)
