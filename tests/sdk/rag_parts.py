"""What the tests of `StreamingRAG` share: an engine without a model, a real tokenizer, and a check that all is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from stream2llm_sdk import StreamingRAG
from stream2llm_sdk.chunk_tokens import format_chunk
from stream2llm_sdk.context import Chunk
from stream2llm_sdk.testing import FakeEngine, FakeRequest, ScriptedRetriever

from .tiny_tokenizer import byte_tokenizer

tokenizer: Callable[[], Any] = cache(byte_tokenizer)


def rag_of(retrievers: Any, engine: FakeEngine | None = None, **options: Any) -> StreamingRAG:
    """A `StreamingRAG` on one token a byte, with short answers and instructions, and without markers."""
    options = {"max_answer_tokens": 16, "system": "Answer.", "markers": None, **options}
    return StreamingRAG("no-model", retrievers, engine=engine or FakeEngine(), tokenizer=tokenizer(), **options)


def engine_of(rag: StreamingRAG) -> FakeEngine:
    engine = rag.engine
    assert isinstance(engine, FakeEngine)
    return engine


def context_of(request: FakeRequest) -> str:
    """The context in a request's prompt, as text."""
    text: str = tokenizer().decode(list(request.token_ids))
    return text.partition("Documents:\n\n")[2].rpartition("Question:")[0]


def text_in_prompt(*chunks: Chunk) -> str:
    """What chunks look like in a prompt."""
    return "".join(f"{format_chunk(chunk)}\n\n" for chunk in chunks)


def kinds_of(request: FakeRequest) -> list[str]:
    return [operation.kind for operation in request.operations]


async def until(condition: Callable[[], bool]) -> None:
    """Lets everything else run until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def nothing_left(engine: FakeEngine, *retrievers: ScriptedRetriever, within: int = 0) -> AsyncIterator[None]:
    """Checks that no task, no open stream and no live iterator stays behind, `within` so many loop iterations."""
    before = asyncio.all_tasks()
    yield
    for _ in range(within):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    assert not left, left
    assert engine.num_open_streams == 0
    assert [retriever.num_live for retriever in retrievers] == [0] * len(retrievers)
