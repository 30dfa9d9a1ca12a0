"""Our retrievers as LangChain's."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from stream2llm_sdk.context import Chunk, RetrieverLike, as_retriever
from stream2llm_sdk.errors import MissingExtraError
from stream2llm_sdk.retrievers.adapters.loops import LoopOfOthers
from stream2llm_sdk.retrievers.adapters.whole_context import contexts, final_context

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from pydantic import Field, PrivateAttr
except ImportError as error:
    raise MissingExtraError("langchain-core", "langchain") from error

__all__ = ["LangChainRetriever"]


class LangChainRetriever(BaseRetriever):
    """One of our retrievers as a LangChain `BaseRetriever`, which returns the final context.

        LangChainRetriever(retriever=DiskANNRetriever("index")) | format_documents | ...

    A chunk's text is the document's `page_content`; its source, title and score are in `metadata` beside its own.
    `ainvoke` runs on the event loop; `invoke` on the loop that the retriever is used on already, or on one in a
    thread of its own, until `close`. What goes wrong after there was some context is logged, not raised.

    Args:
        retriever: the retriever, or an async generator function of the query. It stays its owner's to close.
        max_documents: most documents; left out, all.
        fields: others of LangChain's `BaseRetriever`, such as `tags`.

    Raises:
        ConfigurationError: it is no retriever.
    """

    retriever: Any
    max_documents: int | None = Field(default=None, ge=1)

    _loop: LoopOfOthers = PrivateAttr(default_factory=LoopOfOthers)

    def __init__(self, retriever: RetrieverLike, **fields: Any) -> None:
        super().__init__(**{"retriever": as_retriever(retriever), **fields})

    async def astream_updates(self, query: str) -> AsyncGenerator[list[Document], None]:
        """The whole context as documents, each time it changes: what LangChain's own `astream` cannot give.

        Raises:
            RetrievalError: as the retriever does.
        """
        self._loop.note()
        async with aclosing(contexts(self.retriever, query)) as steps:
            async for context in steps:
                yield list(map(_document, context))[: self.max_documents]

    def close(self) -> None:
        """Ends the thread of `invoke`, if there is one. Idempotent."""
        self._loop.close()

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        self._loop.note()
        return list(map(_document, await final_context(self.retriever, query, self.max_documents)))

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return list(map(_document, self._loop.run(final_context(self.retriever, query, self.max_documents))))


def _document(chunk: Chunk) -> Document:
    own = {"source": chunk.source, "title": chunk.title, "score": chunk.score}
    metadata = {**chunk.metadata, **{name: value for name, value in own.items() if value not in ("", None)}}
    return Document(page_content=chunk.text, metadata=metadata)
