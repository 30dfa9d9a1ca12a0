from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("llama_index.core")

    from llama_index.core import QueryBundle, VectorStoreIndex
    from llama_index.core.embeddings import MockEmbedding
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, TextNode

from stream2llm_sdk.context import Chunk, ContextMode, Replace, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.adapters import LlamaIndexRetriever, LlamaIndexSource
from stream2llm_sdk.testing import ScriptedRetriever, check_retriever

pytestmark = pytest.mark.slow


class Synchronous(BaseRetriever):
    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.threads: list[str] = []
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.threads.append(threading.current_thread().name)
        if "fail" in self.texts:
            raise OSError("no connection")
        nodes = [TextNode(id_=str(number), text=text) for number, text in enumerate(self.texts)]
        return [NodeWithScore(node=node, score=0.5) for node in nodes]


class Asynchronous(Synchronous):
    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._retrieve(query_bundle)


async def all_of(retriever: Any, query: str = "q") -> list[Any]:
    async with asyncio.timeout(20):
        return [item async for item in retriever.stream(query)]


async def test_a_vector_index_is_a_source() -> None:
    nodes = [TextNode(id_="a", text="apples", metadata={"file_name": "fruit.txt", "url": "http://fruit"})]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    async with LlamaIndexSource(index.as_retriever(similarity_top_k=1)) as source:
        [update] = await all_of(source)
    [chunk] = update.chunks
    assert (chunk.text, chunk.source, chunk.title) == ("apples", "http://fruit", "fruit.txt")
    assert isinstance(chunk.score, float)
    assert source.mode is ContextMode.APPEND


async def test_what_is_synchronous_stays_off_the_event_loop() -> None:
    synchronous, asynchronous = Synchronous("a"), Asynchronous("b")
    async with LlamaIndexSource(synchronous, asynchronous) as source:
        items = await all_of(source)
    assert sorted(chunk.text for item in items for chunk in item.chunks) == ["a", "b"]
    assert synchronous.threads[0].startswith("stream2llm-documents")
    assert asynchronous.threads == ["MainThread"]
    async with LlamaIndexSource(asynchronous, in_thread=True) as source:
        await all_of(source)
    assert asynchronous.threads[1].startswith("stream2llm-documents")


async def test_one_that_fails_is_named_and_all_failing_is_an_error() -> None:
    items = await all_of(LlamaIndexSource(Synchronous("fail"), Synchronous("a")))
    assert SourceFailure("Synchronous", "OSError: no connection") in items
    with pytest.raises(RetrievalError, match="Synchronous: OSError: no connection"):
        await all_of(LlamaIndexSource(Synchronous("fail")))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LlamaIndexSource(), "no retriever"),
        (lambda: LlamaIndexSource("index"), "'index' is no LlamaIndex retriever"),
        (lambda: LlamaIndexRetriever("index"), "is not a retriever"),
        (lambda: LlamaIndexRetriever(ScriptedRetriever([]), max_documents=0), "max_documents=0"),
    ],
)
def test_a_wrong_argument_is_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


async def test_the_source_conforms() -> None:
    def over(documents: Any) -> LlamaIndexSource:
        return LlamaIndexSource(Asynchronous(*documents), Synchronous())

    await check_retriever(
        lambda: over(["one", "two"]),
        over=over,
        failing_first=lambda: LlamaIndexSource(Synchronous("fail")),
        failing_later=lambda: LlamaIndexSource(Synchronous("fail"), Asynchronous("a")),
        settle_s=0.3,
        max_stall_s=1.0,  # LlamaIndex hashes the text of every node that it hands out
    )


# ---- ours as theirs --------------------------------------------------------------------------------------------------

POOL = [
    Replace([Chunk("x", source="s", title="t", score=0.5, metadata={"page": 1}), Chunk("y")]),
    Replace([Chunk("y"), Chunk("z")]),
]


async def test_ours_returns_the_final_context() -> None:
    retriever = LlamaIndexRetriever(ScriptedRetriever(POOL, ContextMode.UPDATE))
    assert isinstance(retriever, BaseRetriever)
    assert [found.text for found in await retriever.aretrieve("q")] == ["y", "z"]
    only = LlamaIndexRetriever(ScriptedRetriever(["a", "b"]), max_documents=1)
    [found] = await only.aretrieve("q")
    [again] = await only.aretrieve("q")
    assert found.text == "a"
    assert found.node_id == again.node_id
    [found, _] = await LlamaIndexRetriever(ScriptedRetriever(POOL[:1], ContextMode.UPDATE)).aretrieve("q")
    assert found.metadata == {"page": 1, "source": "s", "title": "t"}
    assert found.score == 0.5


async def test_ours_streams_its_updates() -> None:
    retriever = LlamaIndexRetriever(ScriptedRetriever(POOL, ContextMode.UPDATE))
    updates = [[found.text for found in update] async for update in retriever.astream_updates("q")]
    assert updates == [["x", "y"], ["y", "z"]]


def test_ours_works_without_an_event_loop() -> None:
    retriever = LlamaIndexRetriever(ScriptedRetriever(["a"]))
    assert [found.text for found in retriever.retrieve("q")] == ["a"]
    assert [found.text for found in retriever.retrieve("q")] == ["a"]
    retriever.close()
    assert "stream2llm-loop" not in [thread.name for thread in threading.enumerate()]


def test_without_llamaindex_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_index.core.base.base_retriever", None)
    from stream2llm_sdk.retrievers import adapters

    monkeypatch.delitem(sys.modules, f"{adapters.__name__}.llamaindex_retriever", raising=False)
    with pytest.raises(MissingExtraError, match=r"stream2llm-sdk\[llamaindex\]"):
        _ = adapters.LlamaIndexRetriever
