"""LangChain's retrievers as a source of context."""

from __future__ import annotations

from typing import Any

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.adapters.document_source import Call, DocumentSource, chunk_of

__all__ = ["LangChainSource"]


class LangChainSource(DocumentSource):
    """LangChain retrievers as one retriever that streams: each one's documents are appended when it has them.

        StreamingRAG(model, LangChainSource(store.as_retriever(), BM25Retriever.from_documents(...)))

    Each goes through `ainvoke`, so LangChain's callbacks and tracing see it. One that has no asynchronous
    implementation goes through `invoke` in a thread of this object's.

    A document's `page_content` is the text; `metadata` may name its `source` (or `url`), `title` and `score`.

    Args:
        retrievers: objects of `BaseRetriever`'s subclasses, or any `Runnable` from a query to a list of documents.
        max_documents: most documents of each.
        timeout_s: seconds after which a retriever is given up.
        in_thread: True calls `invoke` in a thread for all, such as for one whose `ainvoke` blocks. Left out, only for
            those that have nothing asynchronous.
        max_threads: most such calls at a time.

    Raises:
        ConfigurationError: one is no retriever, or a value is out of range.
    """

    def __init__(
        self,
        *retrievers: Any,
        max_documents: int | None = None,
        timeout_s: float | None = None,
        in_thread: bool | None = None,
        max_threads: int = 8,
    ) -> None:
        super().__init__(
            [_call(retriever, in_thread) for retriever in retrievers],
            _chunk,
            max_documents=max_documents,
            timeout_s=timeout_s,
            max_threads=max_threads,
        )


def _call(retriever: Any, in_thread: bool | None) -> Call:
    if isinstance(retriever, type) or not (hasattr(retriever, "ainvoke") and hasattr(retriever, "invoke")):
        raise ConfigurationError(
            f"{retriever!r:.80} is no LangChain retriever: give a BaseRetriever, or a Runnable that takes the query"
        )
    is_blocking = _is_synchronous(retriever) if in_thread is None else in_thread
    return Call(type(retriever).__name__, retriever.invoke if is_blocking else retriever.ainvoke, is_blocking)


def _is_synchronous(retriever: Any) -> bool:
    # What BaseRetriever gives its subclasses runs `_get_relevant_documents` in the loop's own few threads, where it
    # would be in the way of others.
    method = getattr(type(retriever), "_aget_relevant_documents", None)
    return getattr(method, "__qualname__", "").startswith("BaseRetriever.")


def _chunk(document: Any) -> Chunk | None:
    if isinstance(document, str):
        return chunk_of(document, {})
    if not hasattr(document, "page_content"):
        raise ConfigurationError(f"{type(document).__name__} has no page_content: a retriever returns Documents")
    return chunk_of(document.page_content, document.metadata, source=getattr(document, "id", None))
