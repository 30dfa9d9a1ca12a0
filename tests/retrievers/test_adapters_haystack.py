from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
pytest.importorskip("haystack")

from haystack import Document, Pipeline, component
from haystack.components.joiners import DocumentJoiner
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever, InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from stream2llm_sdk.context import Chunk, ContextMode, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.adapters import HaystackSource
from stream2llm_sdk.testing import check_retriever

pytestmark = pytest.mark.slow


@component
class Embedder:
    """A text embedder that has to be warmed up, as real ones have."""

    def __init__(self) -> None:
        self.is_warm = False
        self.threads: list[str] = []

    def warm_up(self) -> None:
        self.is_warm = True

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        assert self.is_warm
        self.threads.append(threading.current_thread().name)
        return {"embedding": [float(len(text)), 1.0]}


@component
class Synchronous:
    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.threads: list[str] = []
        self.is_warm = False

    def warm_up(self) -> None:
        self.is_warm = True

    @component.output_types(documents=list[Document])
    def run(self, query: str) -> dict[str, Any]:
        assert self.is_warm
        self.threads.append(threading.current_thread().name)
        if "fail" in self.texts:
            raise OSError("no connection")
        return {"documents": [Document(content=text) for text in self.texts]}


@component
class Asynchronous(Synchronous):
    @component.output_types(documents=list[Document])
    def run(self, query: str) -> dict[str, Any]:
        raise NotImplementedError

    @component.output_types(documents=list[Document])
    async def run_async(self, query: str) -> dict[str, Any]:
        return {"documents": [Document(content=text) for text in self.texts]}


FRUIT = {"title": "Fruit", "url": "http://a"}


def a_store() -> InMemoryDocumentStore:
    store = InMemoryDocumentStore()
    store.write_documents(
        [
            Document(
                id="a", content="apples grow on trees", meta={"title": "Fruit", "url": "http://a"}, embedding=[1.0, 1.0]
            ),
            Document(id="b", content="boats float on water", embedding=[-1.0, 0.1]),
            Document(id="c", content=None, embedding=[1.0, 1.0]),
        ]
    )
    return store


def embedding_pipeline() -> Pipeline:
    pipeline = Pipeline()
    pipeline.add_component("embedder", Embedder())
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(a_store(), top_k=3))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    return pipeline


async def all_of(retriever: Any, query: str = "apples") -> list[Any]:
    async with asyncio.timeout(20):
        return [item async for item in retriever.stream(query)]


def texts(items: list[Any]) -> list[str]:
    return [chunk.text for item in items if not isinstance(item, SourceFailure) for chunk in item.chunks]


async def test_a_component_is_a_source() -> None:
    async with HaystackSource(InMemoryBM25Retriever(a_store(), top_k=1)) as source:
        [update] = await all_of(source)
    [chunk] = update.chunks
    assert (chunk.text, chunk.source, chunk.title) == ("apples grow on trees", "http://a", "Fruit")
    assert chunk.score is not None
    assert source.mode is ContextMode.APPEND


async def test_a_pipeline_is_a_source_and_what_has_no_text_is_left_out() -> None:
    async with HaystackSource(embedding_pipeline()) as source:
        assert sorted(texts(await all_of(source))) == ["apples grow on trees", "boats float on water"]


async def test_a_pipeline_of_two_ways_gets_the_query_at_both() -> None:
    pipeline = embedding_pipeline()
    pipeline.add_component("words", InMemoryBM25Retriever(a_store(), top_k=1))
    pipeline.add_component("join", DocumentJoiner())
    pipeline.connect("retriever.documents", "join.documents")
    pipeline.connect("words.documents", "join.documents")
    assert len(texts(await all_of(HaystackSource(pipeline)))) == 2


async def test_what_is_synchronous_runs_in_threads_and_is_warmed_up_first() -> None:
    synchronous = Synchronous("a")
    async with HaystackSource(synchronous, Asynchronous("b")) as source:
        assert sorted(texts(await all_of(source))) == ["a", "b"]
    assert synchronous.threads[0].startswith("stream2llm-documents")
    warm = Synchronous("a")
    await HaystackSource(warm).warm_up()
    assert warm.is_warm


async def test_inputs_may_be_given() -> None:
    source = HaystackSource(
        InMemoryEmbeddingRetriever(a_store()), inputs=lambda query: {"query_embedding": [1.0, 1.0], "top_k": 1}
    )
    assert texts(await all_of(source)) in (["apples grow on trees"], [])


async def test_one_that_fails_is_named_and_all_failing_is_an_error() -> None:
    items = await all_of(HaystackSource(Synchronous("fail"), Synchronous("a")))
    assert SourceFailure("Synchronous", "OSError: no connection") in items
    pipeline = Pipeline()
    pipeline.add_component("embedder", Embedder())
    with pytest.raises(RetrievalError, match="no output called 'documents', only: embedder"):
        await all_of(HaystackSource(pipeline))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: HaystackSource(), "no retriever"),
        (lambda: HaystackSource("store"), "'store' is no Haystack component or pipeline"),
        (lambda: HaystackSource(InMemoryEmbeddingRetriever(a_store())), "takes query_embedding, .*no query"),
        (lambda: HaystackSource(Pipeline()), "no free input"),
    ],
)
def test_a_wrong_argument_is_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


async def test_the_source_conforms() -> None:
    def over(documents: Any) -> HaystackSource:
        return HaystackSource(Synchronous(*documents), Asynchronous())

    await check_retriever(
        lambda: over(["one", "two"]),
        over=over,
        failing_first=lambda: HaystackSource(Synchronous("fail")),
        failing_later=lambda: HaystackSource(Synchronous("fail"), Asynchronous("a")),
        settle_s=0.3,
    )


def test_documents_become_chunks() -> None:
    from stream2llm_sdk.retrievers.adapters.haystack import _chunk

    document = Document(id="a", content="text", meta={"page": 2}, score=0.25)
    assert _chunk(document) == Chunk("text", source="a", score=0.25, metadata={"page": 2})
