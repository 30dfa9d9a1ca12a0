"""A retriever's stream, read by callers that want the context and not its updates."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from stream2llm_sdk.context import Append, Chunk, Retriever, SourceFailure

__all__ = ["contexts", "final_context"]

_logger = logging.getLogger(__name__)


async def contexts(retriever: Retriever, query: str) -> AsyncGenerator[tuple[Chunk, ...], None]:
    """The whole context after each update.

    Sources that cannot be used are logged, as is an error that ends the stream after there was some context.

    Raises:
        Exception: what ended the stream before there was any.
    """
    context: tuple[Chunk, ...] = ()
    items: Any = retriever.stream(query)
    async with aclosing(items):
        try:
            async for item in items:
                if isinstance(item, SourceFailure):
                    _logger.warning("%s could not be used: %s", item.source, item.reason)
                    continue
                context = (*context, *item.chunks) if isinstance(item, Append) else item.chunks
                yield context
        except Exception as error:
            if not context:
                raise
            _logger.warning("the retrieval ended early: %s: %s", type(error).__name__, error)


async def final_context(retriever: Retriever, query: str, max_documents: int | None = None) -> tuple[Chunk, ...]:
    """The context in the end, or its first `max_documents` chunks.

    Raises:
        Exception: what ended the stream before there was any context.
    """
    context: tuple[Chunk, ...] = ()
    async with aclosing(contexts(retriever, query)) as steps:
        async for latest in steps:
            context = latest
    return context[:max_documents]
