"""Our retrievers as LlamaIndex's."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from stream2llm_sdk.context import Chunk, RetrieverLike, as_retriever
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError
from stream2llm_sdk.retrievers.adapters.loops import LoopOfOthers
from stream2llm_sdk.retrievers.adapters.whole_context import contexts, final_context

try:
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
except ImportError as error:
    raise MissingExtraError("llama-index-core", "llamaindex") from error

__all__ = ["LlamaIndexRetriever"]


class LlamaIndexRetriever(BaseRetriever):
    """One of our retrievers as a LlamaIndex `BaseRetriever`, which returns the final context.

        RetrieverQueryEngine.from_args(LlamaIndexRetriever(DiskANNRetriever("index")), llm=...)

    A chunk becomes a `TextNode` whose id depends on the chunk alone; its source and title are in `metadata` beside its
    own, its score is the node's. `aretrieve` runs on the event loop; `retrieve` on the loop that the retriever is used
    on already, or on one in a thread of its own, until `close`. What goes wrong after there was some context is
    logged, not raised.

    Args:
        retriever: the retriever, or an async generator function of the query. It stays its owner's to close.
        max_documents: most nodes; left out, all.
        options: arguments of `BaseRetriever`, such as `callback_manager`.

    Raises:
        ConfigurationError: it is no retriever, or `max_documents` is not positive.
    """

    def __init__(self, retriever: RetrieverLike, *, max_documents: int | None = None, **options: Any) -> None:
        if max_documents is not None and max_documents < 1:
            raise ConfigurationError(f"max_documents={max_documents!r}: give a whole number, 1 or more")
        self.retriever = as_retriever(retriever)
        self.max_documents = max_documents
        self._loop = LoopOfOthers()
        super().__init__(**options)

    async def astream_updates(self, query: str) -> AsyncGenerator[list[NodeWithScore], None]:
        """The whole context as nodes, each time it changes.

        Raises:
            RetrievalError: as the retriever does.
        """
        self._loop.note()
        async with aclosing(contexts(self.retriever, query)) as steps:
            async for context in steps:
                yield list(map(_node, context))[: self.max_documents]

    def close(self) -> None:
        """Ends the thread of `retrieve`, if there is one. Idempotent."""
        self._loop.close()

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self._loop.note()
        return list(map(_node, await final_context(self.retriever, query_bundle.query_str, self.max_documents)))

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        work = final_context(self.retriever, query_bundle.query_str, self.max_documents)
        return list(map(_node, self._loop.run(work)))


def _node(chunk: Chunk) -> NodeWithScore:
    own = {"source": chunk.source, "title": chunk.title}
    metadata = {**chunk.metadata, **{name: value for name, value in own.items() if value}}
    identity = "\0".join((chunk.source, chunk.title, chunk.text)).encode("utf-8", "surrogatepass")
    node = TextNode(id_=hashlib.blake2b(identity, digest_size=16).hexdigest(), text=chunk.text, metadata=metadata)
    return NodeWithScore(node=node, score=chunk.score)
