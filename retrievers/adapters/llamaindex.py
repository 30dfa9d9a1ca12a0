"""LlamaIndex's retrievers as a source of context."""

from __future__ import annotations

from typing import Any

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.adapters.document_source import Call, DocumentSource, chunk_of

__all__ = ["LlamaIndexSource"]


class LlamaIndexSource(DocumentSource):
    """LlamaIndex retrievers as one retriever that streams: each one's nodes are appended when it has them.

        StreamingRAG(model, LlamaIndexSource(index.as_retriever(similarity_top_k=8)))

    Each goes through `aretrieve`, so LlamaIndex's callbacks see it, and index nodes are followed. One that has no
    asynchronous implementation goes through `retrieve` in a thread of this object's: LlamaIndex itself would
    run it on the event loop.

    A node's text is the chunk's; `metadata` may name its `source` (or `url`, `file_path`) and `title` (or `file_name`).

    Args:
        retrievers: objects of `BaseRetriever`'s subclasses.
        max_documents: most nodes of each.
        timeout_s: seconds after which a retriever is given up.
        in_thread: True calls `retrieve` in a thread for all, such as for one whose embedding model computes on the
            event loop. Left out, only for those that have nothing asynchronous.
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
    if isinstance(retriever, type) or not (hasattr(retriever, "aretrieve") and hasattr(retriever, "retrieve")):
        raise ConfigurationError(
            f"{retriever!r:.80} is no LlamaIndex retriever: give a BaseRetriever, such as index.as_retriever()"
        )
    own = getattr(type(retriever), "_aretrieve", None)
    is_synchronous = getattr(own, "__qualname__", "").startswith("BaseRetriever.")
    is_blocking = is_synchronous if in_thread is None else in_thread
    return Call(type(retriever).__name__, retriever.retrieve if is_blocking else retriever.aretrieve, is_blocking)


def _chunk(found: Any) -> Chunk | None:
    node = getattr(found, "node", found)
    if not hasattr(node, "get_content"):
        raise ConfigurationError(f"{type(found).__name__} is no node: a retriever returns NodeWithScore objects")
    return chunk_of(
        node.get_content(),
        node.metadata,
        source=node.node_id,
        score=getattr(found, "score", None),
        titles=("title", "file_name"),
    )
