"""Pages to record crawls of, and what two recordings of them have in common."""

from __future__ import annotations

import asyncio
import csv
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from web_server import WebServer, head

from stream2llm_sdk.traces import Trace

WORDS = [
    f"{first}{last}" for first in ("ta", "lo", "mer", "ni", "sol", "var") for last in ("den", "rik", "mo", "sa", "tul")
]


def article(number: int) -> str:
    """A page that is like no other."""
    draw = random.Random(number)
    text = " ".join(" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(30))
    return f"<html><head><title>Page {number}</title></head><body><main><p>{text}</p></main></body></html>"


def slow_page(web: WebServer, path: str, number: int, delay_s: float) -> str:
    """An article that is answered after a while; its URL."""
    body = article(number).encode()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        writer.write(head(200, {"Content-Length": str(len(body))}) + body)

    return web.add_handler(path, answer)


def questions_file(folder: Path, urls: Iterable[Sequence[str]]) -> Path:
    """A question for each list of URLs, in SimpleQA's form."""
    with (folder / "questions.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(("metadata", "problem", "answer"))
        for number, listed in enumerate(urls):
            rows.writerow((repr({"topic": "x", "urls": list(listed)}), f"What of number {number}?", "y"))
    return folder / "questions.csv"


def without_times(trace: Trace) -> Any:
    """All that is no matter of time, as is which page comes first."""
    failures = sorted((failure.source, failure.reason) for failure in trace.failures)
    chunks = sorted(trace.final_chunks, key=lambda chunk: chunk.source)
    return trace.trace_id, trace.query, trace.tag, trace.arrival_s, chunks, failures
