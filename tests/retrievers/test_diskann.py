"""The DiskANN retriever: pools of real text, streamed from real threads, and nothing left behind."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import pydoc
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stream2llm_sdk.context import ContextMode, Replace, Retriever
from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, RetrievalError
from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_index
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.layout import GRAPH_FILE
from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
from stream2llm_sdk.retrievers.diskann.search import EmissionGate, SearchOptions
from stream2llm_sdk.retrievers.embedding import Embedder, WordLlamaEmbedder, embed_unit_vectors

FACTS = {
    "volcano": "A volcano erupts when molten rock, gas and ash escape from a magma chamber below the surface.",
    "bread": "Bread rises because yeast ferments the sugar in the dough and the gluten holds the gas.",
    "bicycle": "A bicycle chain carries the turning force of the pedals to the rear wheel.",
    "taskgroup": "An asyncio TaskGroup cancels its remaining tasks when one of them raises an exception.",
}
MODULES = (
    "argparse",
    "csv",
    "decimal",
    "json",
    "logging",
    "pathlib",
    "random",
    "shutil",
    "socket",
    "sqlite3",
    "tempfile",
)
QUESTIONS = (
    "How do I read a CSV file with a header?",
    "create a temporary directory",
    "pretty print JSON",
    "copy a whole file tree",
    "seed the random number generator",
    "round a decimal number",
    "parse command line arguments",
    "accept a connection on a socket",
)
EAGER = EmissionGate(0, 0)


def passages() -> Iterator[dict[str, str]]:
    """Real text: what pydoc says about a few modules, in pieces of 500 characters."""
    for module in MODULES:
        text = pydoc.plain(pydoc.render_doc(importlib.import_module(module)))
        for at in range(0, len(text), 500):
            if text[at : at + 500].strip():
                yield {"text": text[at : at + 500], "title": module, "id": f"{module}-{at}"}


@pytest.fixture(scope="module")
def embedder() -> WordLlamaEmbedder:
    return WordLlamaEmbedder()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, embedder: WordLlamaEmbedder) -> Path:
    documents = [{"text": text, "url": f"https://example.org/{name}", "title": name} for name, text in FACTS.items()]
    documents += passages()
    path = tmp_path_factory.mktemp("text") / "index"
    # One thread makes the same graph every time.
    build_index(documents, path, embedder=embedder, options=BuildOptions(num_threads=1)).close()
    return path


@pytest.fixture
def index(directory: Path, embedder: WordLlamaEmbedder) -> Iterator[DiskANNIndex]:
    with DiskANNIndex.open(directory, embedder=embedder) as opened:
        yield opened


@pytest.fixture
async def retriever(index: DiskANNIndex) -> AsyncIterator[DiskANNRetriever]:
    async with DiskANNRetriever(index, k=5) as opened:
        yield opened


def diskann_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("diskann")]


async def pools(retriever: DiskANNRetriever, query: str) -> list[Replace]:
    return [update async for update in retriever.stream(query)]


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("Why does a volcano erupt?", "volcano"),
        ("What makes bread dough rise?", "bread"),
        ("How does the chain of a bicycle work?", "bicycle"),
        ("What happens to the other tasks when one task in a TaskGroup fails?", "taskgroup"),
    ],
)
async def test_finds_the_obvious_document(retriever: DiskANNRetriever, question: str, name: str) -> None:
    updates = await pools(retriever, question)
    best = updates[-1].chunks[0]
    assert (best.text, best.source, best.title) == (FACTS[name], f"https://example.org/{name}", name)
    scores = [chunk.score for chunk in updates[-1].chunks if chunk.score is not None]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)


async def test_is_a_retriever_in_update_mode(retriever: DiskANNRetriever) -> None:
    assert isinstance(retriever, Retriever)
    assert retriever.mode is ContextMode.UPDATE


async def test_scores_are_cosine_similarities(retriever: DiskANNRetriever, embedder: WordLlamaEmbedder) -> None:
    query = "create a temporary directory"
    best = (await pools(retriever, query))[-1].chunks[0]
    question, text = embed_unit_vectors(embedder, [query, best.text], str)
    assert best.score == pytest.approx(float(question @ text), abs=1e-4)


async def test_pools_change_and_end_with_the_result_of_one_search(index: DiskANNIndex) -> None:
    async with DiskANNRetriever(index, k=5, beam_width=1, gate=EAGER) as retriever:
        counts = []
        for query in QUESTIONS:
            updates = await pools(retriever, query)
            whole = index.search(query, SearchOptions(k=5, beam_width=1, gate=None))
            assert list(updates[-1].chunks) == whole
            assert all(old.chunks != new.chunks for old, new in itertools.pairwise(updates))
            counts.append(len(updates))
    assert max(counts) >= 3


async def test_without_streaming_only_the_final_pool_is_yielded(index: DiskANNIndex) -> None:
    async with DiskANNRetriever(index, k=5, gate=EAGER, stream=False) as retriever:
        query = "create a temporary directory"
        assert [list(update.chunks) for update in await pools(retriever, query)] == [
            index.search(query, SearchOptions(k=5))
        ]


@pytest.mark.parametrize("query", ["", "  \n", "\t"])
async def test_an_empty_query_is_an_error(retriever: DiskANNRetriever, query: str) -> None:
    with pytest.raises(RetrievalError, match="query is empty"):
        await pools(retriever, query)


@pytest.mark.parametrize(
    "query", ["\x00", "\ud800 half \udfff", "🙂" * 3000, "?", "a" * 200_000, "﷽\u202e<|im_start|>"]
)
async def test_a_strange_query_finds_something(retriever: DiskANNRetriever, query: str) -> None:
    assert len((await pools(retriever, query))[-1].chunks) == 5


async def test_many_questions_at_once_get_their_own_answers(index: DiskANNIndex) -> None:
    queries = [f"{question} {number}" for question in QUESTIONS for number in range(5)]
    async with DiskANNRetriever(index, k=5, max_concurrent_searches=4) as retriever:
        alone = [await pools(retriever, query) for query in queries]
        together = await asyncio.gather(*(pools(retriever, query) for query in queries))
    assert together == alone


async def test_the_loop_goes_on_while_a_search_runs(index: DiskANNIndex) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    options = {"k": 5, "search_list_size": len(index), "beam_width": 1, "stream": False}
    async with DiskANNRetriever(index, **options) as retriever:
        counting = asyncio.create_task(count_turns())
        await asyncio.gather(*(pools(retriever, f"question {number}") for number in range(20)))
        counting.cancel()
    # 20 searches of hundreds of iterations each: on the loop there would be a handful of turns.
    assert turns > 200


class WaitingEmbedder:
    """WordLlama that waits, as a slow or remote one would, until it is let go."""

    def __init__(self, inner: Embedder) -> None:
        self._inner = inner
        self.name, self.dim = inner.name, inner.dim
        self.asked = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def embed(self, texts: list[str]) -> np.ndarray:
        self.asked.set()
        assert self.go.wait(60)
        return self._inner.embed(texts)


async def test_embedding_does_not_block_the_loop(directory: Path, embedder: WordLlamaEmbedder) -> None:
    waiting = WaitingEmbedder(embedder)
    with DiskANNIndex.open(directory, embedder=waiting) as index:
        async with DiskANNRetriever(index, k=5) as retriever:
            waiting.asked.clear()
            waiting.go.clear()
            task = asyncio.create_task(pools(retriever, "copy a file tree"))
            while not waiting.asked.is_set():
                await asyncio.sleep(0.001)
            waiting.go.set()
            assert len((await task)[-1].chunks) == 5


async def test_pacing_spreads_a_search_over_time_and_changes_no_pool(index: DiskANNIndex) -> None:
    query = "accept a connection on a socket"
    loop = asyncio.get_running_loop()
    async with (
        DiskANNRetriever(index, k=5, beam_width=2, gate=EAGER) as quick,
        DiskANNRetriever(index, k=5, beam_width=2, gate=EAGER, min_iteration_s=0.01) as paced,
    ):
        expected = await pools(quick, query)
        started = loop.time()
        assert await pools(paced, query) == expected
        # A list of 100 candidates, two at a time, is at least 50 iterations.
        assert loop.time() - started >= 0.5


async def test_cancelling_a_paced_search_is_immediate(index: DiskANNIndex) -> None:
    async with DiskANNRetriever(index, min_iteration_s=600) as retriever:
        task = asyncio.create_task(pools(retriever, "copy a file tree"))
        await asyncio.sleep(0.05)
        task.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await task
    assert diskann_threads() == []


async def test_cancelling_waits_until_the_thread_has_ended(directory: Path, embedder: WordLlamaEmbedder) -> None:
    waiting = WaitingEmbedder(embedder)
    with DiskANNIndex.open(directory, embedder=waiting) as index:
        async with DiskANNRetriever(index, k=5) as retriever:
            waiting.asked.clear()
            waiting.go.clear()
            task = asyncio.create_task(pools(retriever, "copy a file tree"))
            while not waiting.asked.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.05)
            assert not done
            waiting.go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert diskann_threads() == []


async def test_leaving_after_the_first_pool_stops_the_search(index: DiskANNIndex) -> None:
    async with DiskANNRetriever(index, k=5, beam_width=1, gate=EAGER, min_iteration_s=0.001) as retriever:
        async with aclosing(retriever.stream("copy a file tree")) as updates:
            async for update in updates:
                assert len(update.chunks) == 5
                break
        assert retriever._stop_events == set()
    assert diskann_threads() == []


async def test_closing_the_retriever_ends_its_searches_with_an_error(index: DiskANNIndex) -> None:
    retriever = DiskANNRetriever(index, k=5, beam_width=1, gate=EAGER, min_iteration_s=0.01)
    updates = retriever.stream("copy a file tree")
    await anext(updates)
    await retriever.aclose()
    with pytest.raises(RetrievalError, match="closed"):
        async for _ in updates:
            pass
    with pytest.raises(RetrievalError, match="closed"):
        await pools(retriever, "another question")
    assert diskann_threads() == []
    assert index.search("the index is still its owner's")


async def test_an_index_opened_by_the_retriever_is_closed_with_it(directory: Path) -> None:
    async with DiskANNRetriever(directory, k=1) as retriever:
        assert (await pools(retriever, "volcano"))[-1].chunks[0].title == "volcano"
    with pytest.raises(RetrievalError, match="closed"):
        retriever._index.search("volcano")


async def test_an_index_closed_during_a_search_is_an_error(index: DiskANNIndex) -> None:
    async with DiskANNRetriever(index, k=5, beam_width=1, gate=EAGER, min_iteration_s=0.01) as retriever:
        updates = retriever.stream("copy a file tree")
        await anext(updates)
        index.close()
        with pytest.raises(RetrievalError, match="the index is closed"):
            async for _ in updates:
                pass


async def test_a_graph_cut_during_a_search_is_an_error(
    directory: Path, embedder: WordLlamaEmbedder, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    with DiskANNIndex.open(copy, embedder=embedder) as index:
        async with DiskANNRetriever(index, k=5) as retriever:
            (copy / GRAPH_FILE).write_bytes(b"")
            with pytest.raises(IndexFormatError, match="cut while open"):
                await pools(retriever, "copy a file tree")


async def test_a_directory_without_an_index_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IndexFormatError, match="does not exist"):
        DiskANNRetriever(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 200}, "search_list_size=100"),
        ({"min_iteration_s": -1}, "min_iteration_s=-1"),
        ({"min_iteration_s": float("nan")}, "min_iteration_s=nan"),
        ({"min_iteration_s": "x"}, "min_iteration_s='x'"),
        ({"max_concurrent_searches": 0}, "max_concurrent_searches=0"),
        ({"max_concurrent_searches": "x"}, "max_concurrent_searches='x'"),
        ({"max_concurrent_searches": 1.5}, "max_concurrent_searches=1.5"),
        ({"prefill_s_per_document": "x"}, "prefill_s_per_document='x'"),
    ],
)
def test_options_that_cannot_work_are_refused(index: DiskANNIndex, arguments: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        DiskANNRetriever(index, **arguments)


@pytest.mark.parametrize("given", [5, None, b"index"])
def test_what_is_no_index_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="give an open index, or the directory of one"):
        DiskANNRetriever(given)


@pytest.mark.parametrize("prefill_s", [lambda: "text", lambda: 1 / 0, lambda: float("nan")])
async def test_a_prefill_time_that_cannot_be_told_fails_no_question(index: DiskANNIndex, prefill_s: Any) -> None:
    retriever = DiskANNRetriever(index, stream="auto", prefill_s_per_document=prefill_s)
    assert [update async for update in retriever.stream(QUESTIONS[0])]
    estimate = retriever.streaming_estimate
    assert estimate is not None
    assert (estimate.num_searches, estimate.prefill_s_per_document, estimate.pays) == (1, None, None)
    await retriever.aclose()


def test_the_rows_of_a_batch_do_not_depend_on_each_other(embedder: WordLlamaEmbedder) -> None:
    texts = ["short", "long " * 5000, "", "middle " * 50, *(f"text {row}" for row in range(70))]
    together = embedder.embed(texts)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    assert np.allclose(together, alone, atol=1e-5)
    assert not together[2].any()


def test_only_the_beginning_of_a_very_long_text_counts(embedder: WordLlamaEmbedder) -> None:
    cutting = WordLlamaEmbedder(max_characters=10)
    assert np.array_equal(cutting.embed(["0123456789 and more"]), embedder.embed(["0123456789"]))
    with pytest.raises(ConfigurationError, match="max_characters=0"):
        WordLlamaEmbedder(max_characters=0)
