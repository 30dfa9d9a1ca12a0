from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import Field

from stream2llm_sdk.context import Append, Chunk, ContextMode, Replace, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.adapters import LangChainRetriever, LangChainSource
from stream2llm_sdk.testing import ScriptedRetriever, check_retriever

pytestmark = pytest.mark.slow

TRACE: ContextVar[str] = ContextVar("TRACE", default="")


class Synchronous(BaseRetriever):
    """As most are: only `_get_relevant_documents`."""

    texts: list[str]
    seen: list[Any] = Field(default_factory=list)

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.seen.append((threading.current_thread().name, TRACE.get()))
        if "fail" in self.texts:
            raise OSError("no connection")
        return [Document(page_content=text, metadata={"source": f"http://{text}"}) for text in self.texts]


class WithoutRunManager(BaseRetriever):
    def _get_relevant_documents(self, query: str) -> list[Document]:  # type: ignore[override]
        return [Document(page_content=threading.current_thread().name)]


class Asynchronous(Synchronous):
    event: Any = None

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        if self.event is not None:
            await self.event.wait()
        return self._get_relevant_documents(query, run_manager=None)


async def all_of(retriever: Any, query: str = "q") -> list[Any]:
    async with asyncio.timeout(20):
        return [item async for item in retriever.stream(query)]


def texts(items: list[Any]) -> list[str]:
    return [chunk.text for item in items if isinstance(item, Append) for chunk in item.chunks]


# ---- theirs as a source ----------------------------------------------------------------------------------------------


async def test_a_vector_store_is_a_source() -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
    await store.aadd_documents([Document(id="a", page_content="apples", metadata={"title": "Fruit", "page": 3})])
    async with LangChainSource(store.as_retriever(search_kwargs={"k": 1})) as source:
        [update] = await all_of(source)
    assert source.mode is ContextMode.APPEND
    assert update == Append(Chunk("apples", source="a", title="Fruit", metadata={"title": "Fruit", "page": 3}))


async def test_of_several_each_is_appended_when_it_has_its_documents() -> None:
    event = asyncio.Event()
    late, quick = Asynchronous(texts=["late"], event=event), Synchronous(texts=["one", "two"])
    async with LangChainSource(late, quick, max_documents=1) as source:
        stream = source.stream("q")
        assert texts([await anext(stream)]) == ["one"]
        event.set()
        assert texts([item async for item in stream]) == ["late"]


async def test_what_is_synchronous_runs_in_threads_of_its_own_and_keeps_its_context() -> None:
    TRACE.set("request 7")
    synchronous, asynchronous = Synchronous(texts=["a"], seen=[]), Asynchronous(texts=["b"], seen=[])
    async with LangChainSource(synchronous, asynchronous, WithoutRunManager()) as source:
        items = await all_of(source)
    [(thread, trace)] = synchronous.seen
    assert thread.startswith("stream2llm-documents")
    assert trace == "request 7"
    assert asynchronous.seen[0][0] == "MainThread"
    assert any(text.startswith("stream2llm-documents") for text in texts(items))

    asynchronous.seen.clear()
    async with LangChainSource(asynchronous, in_thread=True) as source:
        await all_of(source)
    assert asynchronous.seen[0][0].startswith("stream2llm-documents")


async def test_a_runnable_and_texts_are_taken_too() -> None:
    chain = RunnableLambda(lambda query: [f"{query} 1", Document(page_content=" "), Document(page_content="2")])
    assert texts(await all_of(LangChainSource(chain))) == ["q 1", "2"]


async def test_one_that_fails_is_named_and_all_failing_is_an_error() -> None:
    items = await all_of(LangChainSource(Synchronous(texts=["fail"]), Synchronous(texts=["a"])))
    assert SourceFailure("Synchronous", "OSError: no connection") in items
    assert texts(items) == ["a"]
    with pytest.raises(RetrievalError, match=r"Synchronous: OSError.*; Synchronous-2: OSError: no connection"):
        await all_of(LangChainSource(*[Synchronous(texts=["fail"])] * 2))


async def test_one_that_is_late_or_returns_no_documents_is_named() -> None:
    late = Asynchronous(texts=["a"], event=asyncio.Event())
    odd: Any = RunnableLambda(lambda query: {"documents": []})
    items = await all_of(
        LangChainSource(late, odd, RunnableLambda(lambda q: [1]), Synchronous(texts=["b"]), timeout_s=0.2)
    )
    reasons = {item.source: item.reason for item in items if isinstance(item, SourceFailure)}
    assert "timeout_s=0.2" in reasons["Asynchronous"]
    assert "returned dict" in reasons["RunnableLambda"]
    assert "int has no page_content" in reasons["RunnableLambda-2"]


async def test_a_call_that_cannot_be_interrupted_holds_nobody() -> None:
    going, end = threading.Event(), threading.Event()

    def wait(query: str) -> list[str]:
        going.set()
        end.wait(20)
        return []

    source = LangChainSource(RunnableLambda(wait), in_thread=True)
    task = asyncio.create_task(all_of(source))
    await asyncio.to_thread(going.wait)
    task.cancel()
    started_s = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    await source.aclose()
    assert time.monotonic() - started_s < 5
    end.set()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LangChainSource(), "no retriever"),
        (lambda: LangChainSource("store"), "'store' is no LangChain retriever"),
        (lambda: LangChainSource(Synchronous), "is no LangChain retriever"),
        (lambda: LangChainSource(WithoutRunManager(), max_documents=0), "max_documents=0"),
        (lambda: LangChainSource(WithoutRunManager(), timeout_s=0), "timeout_s=0"),
        (lambda: LangChainRetriever("index"), "is not a retriever"),
    ],
)
def test_a_wrong_argument_is_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


async def test_the_source_conforms() -> None:
    def over(documents: Any) -> LangChainSource:
        return LangChainSource(Synchronous(texts=list(documents)), Asynchronous(texts=[]))

    await check_retriever(
        lambda: over(["one", "two"]),
        over=over,
        failing_first=lambda: LangChainSource(Synchronous(texts=["fail"])),
        failing_later=lambda: LangChainSource(Synchronous(texts=["fail"]), Asynchronous(texts=["a"])),
        settle_s=0.3,
    )


# ---- ours as theirs --------------------------------------------------------------------------------------------------

POOL = [
    Replace([Chunk("x", source="s", title="t", score=0.5, metadata={"page": 1}), Chunk("y")]),
    Replace([Chunk("y"), Chunk("z")]),
]


async def test_ours_returns_the_final_context() -> None:
    retriever = LangChainRetriever(ScriptedRetriever(POOL, ContextMode.UPDATE))
    assert isinstance(retriever, BaseRetriever)
    assert [document.page_content for document in await retriever.ainvoke("q")] == ["y", "z"]
    only = LangChainRetriever(retriever=ScriptedRetriever(["a", "b"]), max_documents=1, tags=["ours"])
    assert [document.page_content for document in await only.ainvoke("q")] == ["a"]
    [document, _] = await LangChainRetriever(ScriptedRetriever(POOL[:1], ContextMode.UPDATE)).ainvoke("q")
    assert document.metadata == {"page": 1, "source": "s", "title": "t", "score": 0.5}


async def test_ours_streams_its_updates_and_its_callbacks_are_called() -> None:
    retriever = LangChainRetriever(ScriptedRetriever(POOL, ContextMode.UPDATE))
    updates = [[document.page_content for document in update] async for update in retriever.astream_updates("q")]
    assert updates == [["x", "y"], ["y", "z"]]

    seen: list[Any] = []

    class Handler(AsyncCallbackHandler):
        async def on_retriever_end(self, documents: Any, **rest: Any) -> None:
            seen.append(len(documents))

    async def count(documents: list[Document]) -> int:
        return len(documents)

    assert await (retriever | RunnableLambda(count)).ainvoke("q", {"callbacks": [Handler()]}) == 2
    assert seen == [2]


async def test_leaving_the_updates_closes_the_stream() -> None:
    scripted = ScriptedRetriever(["a", asyncio.Event()])
    updates = LangChainRetriever(scripted).astream_updates("q")
    await anext(updates)
    await updates.aclose()
    assert scripted.num_live == 0


async def test_ours_raises_what_leaves_no_context_and_logs_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RetrievalError, match="broken"):
        await LangChainRetriever(ScriptedRetriever([RetrievalError("broken")])).ainvoke("q")
    later = LangChainRetriever(ScriptedRetriever(["a", SourceFailure("http://x", "404"), RetrievalError("broken")]))
    assert len(await later.ainvoke("q")) == 1
    assert "http://x could not be used: 404" in caplog.text
    assert "broken" in caplog.text


def test_ours_works_without_an_event_loop_and_keeps_one_open() -> None:
    loops: set[int] = set()

    async def pages(query: str) -> AsyncIterator[str]:
        loops.add(id(asyncio.get_running_loop()))
        yield query

    retriever = LangChainRetriever(pages)
    assert [retriever.invoke(query)[0].page_content for query in ("a", "b")] == ["a", "b"]
    assert len(loops) == 1
    retriever.close()
    retriever.close()
    assert "stream2llm-loop" not in [thread.name for thread in threading.enumerate()]
    assert retriever.invoke("c")[0].page_content == "c"
    retriever.close()


async def test_from_a_thread_ours_runs_on_the_loop_that_it_belongs_to() -> None:
    loops = []

    async def pages(query: str) -> AsyncIterator[str]:
        loops.append(asyncio.get_running_loop())
        yield query

    retriever = LangChainRetriever(pages)
    await asyncio.to_thread(retriever.invoke, "a")
    assert loops == [asyncio.get_running_loop()]
    with pytest.raises(ConfigurationError, match="ainvoke"):
        retriever.invoke("b")


def test_without_langchain_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("langchain_core.retrievers", "langchain_core.language_models"):
        monkeypatch.setitem(sys.modules, module, None)
    from stream2llm_sdk.retrievers import adapters

    for name in ("langchain_retriever", "langchain_chat"):
        monkeypatch.delitem(sys.modules, f"{adapters.__name__}.{name}", raising=False)
    with pytest.raises(MissingExtraError, match=r"stream2llm-sdk\[langchain\]"):
        _ = adapters.LangChainRetriever
    with pytest.raises(MissingExtraError, match=r"stream2llm-sdk\[langchain\]"):
        _ = adapters.StreamingRAGChat
