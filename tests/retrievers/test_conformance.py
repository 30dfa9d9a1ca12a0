"""Every retriever of this project goes through the conformance kit that it gives to others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from web_server import WebServer

from stream2llm_sdk.context import Chunk, ContextMode, Replace, SourceFailure, as_retriever
from stream2llm_sdk.errors import FetchError
from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_index
from stream2llm_sdk.retrievers.diskann.dynamic import DynamicDiskANN
from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
from stream2llm_sdk.retrievers.diskann.search_options import EmissionGate
from stream2llm_sdk.retrievers.embedding import WordLlamaEmbedder
from stream2llm_sdk.retrievers.merge import Merge, Weighted
from stream2llm_sdk.retrievers.rerank import Rerank
from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
from stream2llm_sdk.testing import ScriptedRetriever, check_retriever
from stream2llm_sdk.testing.conformance_checks import CHECKS

pytestmark = pytest.mark.slow

QUERY = "How does a volcano erupt?"
FACTS = (
    "A volcano erupts when molten rock, gas and ash escape from a magma chamber below the surface.",
    "Bread rises because yeast ferments the sugar in the dough and the gluten holds the gas.",
    "A bicycle chain carries the turning force of the pedals to the rear wheel of the bicycle.",
    "An asyncio TaskGroup cancels its remaining tasks when one of them raises an exception.",
)


class Long:
    """Many texts, and how many of them were taken."""

    num_taken = 0

    async def __call__(self, query: str) -> AsyncIterator[str]:
        for number in range(200):
            self.num_taken += 1
            await asyncio.sleep(0)
            yield f"{query} {number}"


# ---- plain functions and Merge ---------------------------------------------------------------------------------------


async def test_a_function_conforms() -> None:
    def over(texts: Sequence[str]) -> Any:
        async def pieces(query: str) -> AsyncIterator[str]:
            for text in texts:
                await asyncio.sleep(0)
                yield text

        return as_retriever(pieces)

    def failing(*texts: str) -> Any:
        async def pieces(query: str) -> AsyncIterator[str]:
            for text in texts:
                yield text
            raise OSError("broken")

        return as_retriever(pieces)

    await check_retriever(
        lambda: over(FACTS), over=over, failing_first=failing, failing_later=lambda: failing("a"), same_order=True
    )


@pytest.mark.parametrize("second_mode", list(ContextMode))
async def test_merged_sources_conform(second_mode: ContextMode) -> None:
    pools: list[Any] = [Replace([Chunk("x"), Chunk("y")]), 0.001, Replace([Chunk("y"), Chunk("z")])]
    second_steps = pools if second_mode is ContextMode.UPDATE else ["x", 0.001, "y"]

    def over(texts: Sequence[str], *more: Any) -> Merge:
        inner = Merge(ScriptedRetriever([*texts[:1], 0.0, *texts[1:], *more]))
        return Merge(inner, Weighted(ScriptedRetriever(more or [], second_mode), timeout_s=10))

    def make() -> Merge:
        return Merge(
            ScriptedRetriever(["a", 0.001, SourceFailure("b", "404"), "c"]),
            ScriptedRetriever(second_steps, second_mode),
        )

    await check_retriever(
        make,
        over=over,
        failing_first=lambda: over([], OSError("broken")),
        failing_later=lambda: over(["a"], OSError("broken")),
    )


async def test_merged_sources_do_not_read_far_ahead() -> None:
    source = Long()
    await check_retriever(
        lambda: Merge(source, ScriptedRetriever(["a"])),
        produced=lambda: source.num_taken,
        max_read_ahead=16,
        skip=[name for name in CHECKS if name != "read_ahead"],
    )


# ---- the crawler -----------------------------------------------------------------------------------------------------


def a_page(text: str) -> bytes:
    body = text.encode("utf-8", "surrogatepass").replace(b"\x00", b"&#0;")
    return b"<html><head><title>Page</title></head><body><main><p>" + body + b"</p></main></body></html>"


async def test_the_crawler_conforms(web: WebServer, crawler: Callable[..., CrawlerRetriever]) -> None:
    def over(texts: Sequence[str]) -> Any:
        urls = [web.add(f"/text-{number}", a_page(text)) for number, text in enumerate(texts)]
        return crawler(*urls) if urls else crawler(web.add("/empty", "<html><body></body></html>"))

    gone = web.add("/gone", "", status=404)
    urls = [web.add(f"/{number}", a_page(text * 3)) for number, text in enumerate(FACTS)]
    await check_retriever(
        lambda: crawler(*urls),
        query=QUERY,
        over=over,
        failing_first=lambda: crawler(gone),
        failing_later=lambda: crawler(gone, urls[0]),
        produced=lambda: len(web.requests),
        max_cancellations=20,
        num_concurrent=4,
    )


# ---- DiskANN ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder() -> WordLlamaEmbedder:
    return WordLlamaEmbedder()


@pytest.fixture(scope="module")
def over_index(
    tmp_path_factory: pytest.TempPathFactory, embedder: WordLlamaEmbedder
) -> Callable[..., DiskANNRetriever]:
    def over(texts: Sequence[str]) -> DiskANNRetriever:
        path = tmp_path_factory.mktemp("conformance") / "index"
        documents = [{"text": text, "title": str(number)} for number, text in enumerate(texts)]
        build_index(documents, path, embedder=embedder, options=BuildOptions(num_threads=1)).close()
        return DiskANNRetriever(path, k=8, search_list_size=20, gate=EmissionGate(0, 0))

    return over


@pytest.fixture(scope="module")
def index_directory(tmp_path_factory: pytest.TempPathFactory, embedder: WordLlamaEmbedder) -> Path:
    path = tmp_path_factory.mktemp("conformance") / "index"
    documents = [{"text": f"{text} ({number})", "title": str(number)} for number in range(40) for text in FACTS]
    build_index(documents, path, embedder=embedder, options=BuildOptions(num_threads=1)).close()
    return path


async def test_diskann_conforms(over_index: Callable[..., DiskANNRetriever], index_directory: Path) -> None:
    await check_retriever(
        lambda: DiskANNRetriever(index_directory, k=4, gate=EmissionGate(0, 0)),
        query=QUERY,
        over=over_index,
        same_order=True,
        max_cancellations=20,
    )


async def test_a_search_of_a_dynamic_index_conforms(embedder: WordLlamaEmbedder) -> None:
    def over(texts: Sequence[str]) -> DiskANNRetriever:
        index = DynamicDiskANN(embedder=embedder, graph_degree=24, complexity=50)
        index.add([{"id": str(number), "text": text} for number, text in enumerate(texts)])
        return DiskANNRetriever(index, k=8)

    await check_retriever(lambda: over(FACTS), query=QUERY, over=over, same_order=True, max_cancellations=10)


async def test_a_reranked_search_conforms() -> None:
    def scores(query: str, texts: Sequence[str]) -> list[float]:
        return [float(len(set(query.split()) & set(text.split()))) for text in texts]

    def over(texts: Sequence[str], *more: Any) -> Rerank:
        first: list[Any] = [Replace([Chunk(text) for text in texts])] if texts else []
        return Rerank(ScriptedRetriever([*first, 0.001, *more], ContextMode.UPDATE), scores)

    await check_retriever(
        lambda: over(FACTS),
        query=QUERY,
        over=over,
        failing_first=lambda: over([], OSError("broken")),
        failing_later=lambda: over(["a"], OSError("broken")),
        same_order=True,
    )


# ---- all of it together ----------------------------------------------------------------------------------------------


async def test_a_crawl_and_a_search_merged_conform(
    web: WebServer, crawler: Callable[..., CrawlerRetriever], index_directory: Path
) -> None:
    urls = [web.add(f"/{number}", a_page(text * 3)) for number, text in enumerate(FACTS[:2])]
    search = DiskANNRetriever(index_directory, k=4, gate=EmissionGate(0, 0))

    async def broken(query: str) -> AsyncIterator[str]:
        raise FetchError("broken")
        yield ""

    await check_retriever(
        lambda: Merge(crawler(*urls), search, broken),
        query=QUERY,
        max_cancellations=10,
        num_concurrent=3,
        skip=["close"],
    )
