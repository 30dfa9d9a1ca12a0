"""What recording its traffic costs `StreamingRAG`: the same questions with and without `record=DIR`, in turn.

A question is eight pages of 400 characters, 5 ms apart, and an answer of 32 tokens. Figures:
`rag_record_overhead_ratio`, a recorded question's time over that of one that is not recorded, ratio of the medians of
100 each, which goes first alternating; asked: at most 1.01. The engine is one without a model that takes the time of a
fast one on a GPU (25,000 tokens a second of prefill, 5 ms a token), so that a question takes a third of a second and
differs by little from the next, and what recording costs is to be seen.
`rag_record_vllm_ratio`, the same of 40 each on vLLM with a tiny model; on two cores that do the model's work as well
equal series differ by 3 % or more, so it tells of nothing smaller.
`rag_record_loop_us`, time on the event loop that a question spends in recording; `rag_record_thread_us`, processor
time of the writer's thread for a trace, with texts kept; both medians of 400. `rag_record_added_us`, by how much a
question is longer on an engine that takes no time, with nothing else to do while the thread works: median of 400 pairs.
Expected: 1.000 to 1.003; 0.97 to 1.03; 30 to 80 us; 200 to 500 us; about the sum of the two.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving"))

PAIRS, VLLM_PAIRS, INSTANT_PAIRS, WARM_UP = 100, 40, 400, 5
PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S = 25_000.0, 200.0
NUM_PAGES, PAGE_CHARACTERS, SPACING_S, ANSWER_TOKENS = 8, 400, 0.005, 32
WORDS = ("event", "loop", "future", "queue", "worker", "result", "error", "cancel", "scope", "wait", "group", "task")
ENGINE_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 128 << 20,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}


def page(question: str, number: int) -> str:
    """A text of its own for each question and page."""
    shift = sum(map(ord, question)) + 7 * number
    return " ".join(WORDS[(shift * place) % len(WORDS)] for place in range(1, PAGE_CHARACTERS))[:PAGE_CHARACTERS]


def crawler(spacing_s: float) -> Callable[[str], AsyncIterator[Any]]:
    from stream2llm_sdk import Chunk

    async def pages(question: str) -> AsyncIterator[Any]:
        for number in range(NUM_PAGES):
            await asyncio.sleep(spacing_s)
            yield Chunk(page(question, number), source=f"https://example.org/{number}", title="A page")

    return pages


class Spent:
    """Seconds that calls took, in all threads, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            clock = time.thread_time if name == "thread" else time.perf_counter
            started_s = clock()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + clock() - started_s

        return call

    def take(self) -> dict[str, float]:
        """What was spent since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


@contextmanager
def recording_timed(spent: Spent) -> Any:
    """Times what recording does on the event loop and in its thread."""
    from stream2llm_sdk.answer_stream import AnswerStream
    from stream2llm_sdk.context_log import ContextLog
    from stream2llm_sdk.traffic_recorder import TrafficRecorder

    parts = [
        ("loop", AnswerStream, "_record"),
        ("loop", ContextLog, "changed"),
        ("loop", TrafficRecorder, "wants_next"),
    ]
    parts.append(("thread", TrafficRecorder, "_write"))
    kept = [(owner, name, getattr(owner, name)) for _, owner, name in parts]
    for kind, owner, name in parts:
        setattr(owner, name, spent.timed(kind, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)


async def pairs(rags: dict[str, Any], num_pairs: int) -> list[dict[str, float]]:
    """Seconds of a question with and without recording, in turn."""
    runs: list[dict[str, float]] = []
    for number in range(-WARM_UP, num_pairs):
        times: dict[str, float] = {}
        for name in ("plain", "recorded") if number % 2 else ("recorded", "plain"):
            await asyncio.sleep(0.002)  # what the one before left to do is done
            started_s = time.perf_counter()
            await rags[name].ask(f"What does part {number} of the library do?")
            times[name] = time.perf_counter() - started_s
        if number >= 0:
            runs.append(times)
    return runs


async def costs(rag: Any, num_questions: int) -> list[dict[str, float]]:
    """Seconds on the event loop and in the thread, for each of some questions."""
    spent, found, num_before = Spent(), [], rag.recording.num_written + rag.recording.num_dropped
    with recording_timed(spent):
        for number in range(-WARM_UP, num_questions):
            await rag.ask(f"What does part {number} of the library do?")
            while rag.recording.num_written + rag.recording.num_dropped <= num_before + number + WARM_UP:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.001)
            found.append(spent.take())
    return found[WARM_UP:]


async def on_vllm(model: Path, folder: Path) -> list[dict[str, float]]:
    from stream2llm_sdk import StreamingRAG
    from stream2llm_sdk.serving.vllm_engine import Stream2LLMEngine

    options: dict[str, Any] = {"max_answer_tokens": ANSWER_TOKENS, "sampling": {"ignore_eos": True}}
    async with Stream2LLMEngine(str(model), policy="FCFS", progress=None, **ENGINE_OPTIONS) as engine:
        async with (
            StreamingRAG(model, crawler(SPACING_S), engine=engine, **options) as plain,
            StreamingRAG(model, crawler(SPACING_S), engine=engine, record=folder, **options) as recorded,
        ):
            return await pairs({"plain": plain, "recorded": recorded}, VLLM_PAIRS)


async def without_model(model: Path, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Questions to an engine with the speed of a fast one, to one that takes no time, and their parts."""
    from stream2llm_sdk import StreamingRAG
    from stream2llm_sdk.testing import FakeEngine

    answer, options = "word " * ANSWER_TOKENS, {"max_answer_tokens": ANSWER_TOKENS}
    fast = FakeEngine(answer, prefill_tokens_per_s=PREFILL_TOKENS_PER_S, decode_tokens_per_s=DECODE_TOKENS_PER_S)
    found: dict[str, list[dict[str, float]]] = {}
    for name, engine, spacing_s, num_pairs in (
        ("fast", fast, SPACING_S, PAIRS),
        ("instant", FakeEngine(answer), 0.0, INSTANT_PAIRS),
    ):
        async with (
            engine,
            StreamingRAG(model, crawler(spacing_s), engine=engine, **options) as plain,
            StreamingRAG(model, crawler(spacing_s), engine=engine, record=folder / name, **options) as recorded,
        ):
            found[name] = await pairs({"plain": plain, "recorded": recorded}, num_pairs)
            if name == "instant":
                found["spent"] = await costs(recorded, num_pairs)
    return found


def ratio(runs: list[dict[str, float]]) -> float:
    """Ratio of the medians."""
    return statistics.median(run["recorded"] for run in runs) / statistics.median(run["plain"] for run in runs)


def measure() -> tuple[dict[str, float], list[dict[str, Any]]]:
    import tiny_models

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_models.make_llama(folder / "model")
        found = asyncio.run(without_model(model, folder / "free"))
        runs = asyncio.run(on_vllm(model, folder / "vllm"))
    spent, instant = found["spent"], found["instant"]
    figures = {
        "rag_record_overhead_ratio": ratio(found["fast"]),
        "rag_record_vllm_ratio": ratio(runs),
        "rag_record_question_ms": 1e3 * statistics.median(run["plain"] for run in found["fast"]),
        "rag_record_loop_us": 1e6 * statistics.median(run["loop"] for run in spent),
        "rag_record_thread_us": 1e6 * statistics.median(run["thread"] for run in spent),
        "rag_record_added_us": 1e6 * statistics.median(run["recorded"] - run["plain"] for run in instant),
    }
    return figures, [{"engine": name, **run} for name, part in {**found, "vllm": runs}.items() for run in part]


if __name__ == "__main__":
    main(__doc__, measure)
