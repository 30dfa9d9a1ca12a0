"""Retrievers that return a list of documents, as a stream: each one's documents are appended as soon as it has them."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from stream2llm_sdk.context import Append, Chunk, ContextMode, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.tasks import cancel_and_wait

__all__ = ["Call", "DocumentSource", "chunk_of", "first_text"]

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Call:
    """One retriever of another framework.

    Attributes:
        name: what it is called in failures.
        documents: returns its documents for a query; a coroutine function unless `is_blocking`.
        is_blocking: whether it is to be called in a thread.
        prepare: called in a thread before the first query.
    """

    name: str
    documents: Callable[[str], Awaitable[Any] | Any]
    is_blocking: bool = False
    prepare: Callable[[], object] | None = None


class DocumentSource:
    """Asks several retrievers at once, and appends the documents of each when it has them.

    A retriever that fails or takes too long is reported as a `SourceFailure` with its name; if all fail, that is a
    `RetrievalError`. Retrievers that are synchronous run in threads of this object's. A call that is under way cannot
    be interrupted there: its result is dropped, and its thread ends with it.

    Args:
        calls: the retrievers.
        to_chunk: a document as a chunk, or None for one without text.
        max_documents: most documents of each.
        timeout_s: seconds after which a retriever is given up.
        max_threads: most synchronous calls at a time.

    Raises:
        ConfigurationError: no retriever, or a value is out of range.
    """

    mode = ContextMode.APPEND

    def __init__(
        self,
        calls: Iterable[Call],
        to_chunk: Callable[[Any], Chunk | None],
        *,
        max_documents: int | None = None,
        timeout_s: float | None = None,
        max_threads: int = 8,
    ) -> None:
        self._calls = _numbered(calls)
        if not self._calls:
            raise ConfigurationError(f"no retriever: {type(self).__name__} takes one or more")
        for name, value in (("max_documents", max_documents), ("max_threads", max_threads)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name}={value!r}: give a whole number, 1 or more")
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise ConfigurationError(f"timeout_s={timeout_s!r}: give a number of seconds above 0")
        self._to_chunk = to_chunk
        self._max_documents = max_documents
        self._timeout_s = timeout_s
        self._max_threads = max_threads
        self._threads: ThreadPoolExecutor | None = None
        self._prepared: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._calls)})"

    async def stream(self, query: str) -> AsyncIterator[Append | SourceFailure]:
        """The documents, in the order in which the retrievers have them.

        Raises:
            RetrievalError: every retriever failed.
        """
        tasks = {
            asyncio.create_task(self._chunks(call, query), name=f"stream2llm-ask-{name}"): name
            for name, call in self._calls.items()
        }
        reasons: dict[str, str] = {}
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in (task for task in tasks if task in done):
                    name = tasks[task]
                    if (reason := self._reason(task)) is not None:
                        reasons[name] = reason
                        yield SourceFailure(name, reason)
                    elif chunks := task.result():
                        yield Append(chunks)
        finally:
            await cancel_and_wait(*tasks)
        if len(reasons) == len(tasks):
            raise RetrievalError(f"no retriever could be used: {'; '.join(f'{n}: {r}' for n, r in reasons.items())}")

    async def warm_up(self) -> None:
        """Prepares the retrievers that have something to prepare, at once.

        Raises:
            Exception: as theirs do.
        """
        await asyncio.gather(*map(self._prepare, self._calls.values()))

    async def aclose(self) -> None:
        """Ends the threads that are idle; the others end with what they do. A later `stream` makes new ones."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> DocumentSource:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _chunks(self, call: Call, query: str) -> list[Chunk]:
        async with asyncio.timeout(self._timeout_s):
            await self._prepare(call)
            if call.is_blocking:
                documents = await self._in_thread(call.documents, query)
            else:
                documents = await call.documents(query)
        if not isinstance(documents, Iterable) or isinstance(documents, (str, bytes, Mapping)):
            raise RetrievalError(f"it returned {type(documents).__name__}, not a list of documents: {documents!r:.80}")
        chunks = [chunk for chunk in map(self._to_chunk, documents) if chunk is not None]
        return chunks[: self._max_documents]

    async def _prepare(self, call: Call) -> None:
        if call.prepare is not None and call.name not in self._prepared:
            await self._in_thread(call.prepare)
            self._prepared.add(call.name)

    async def _in_thread(self, function: Callable[..., ResultT], *args: object) -> ResultT:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._max_threads, thread_name_prefix="stream2llm-documents")
        # Tracing of the frameworks goes by context variables.
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: context.run(function, *args))

    def _reason(self, task: asyncio.Task[list[Chunk]]) -> str | None:
        if task.cancelled():
            return "it was cancelled"
        error = task.exception()
        if isinstance(error, TimeoutError) and self._timeout_s is not None and not str(error):
            return f"no documents within timeout_s={self._timeout_s:g}"
        return None if error is None else f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def chunk_of(
    text: Any, metadata: Any, *, source: Any = None, score: Any = None, titles: Iterable[str] = ("title",)
) -> Chunk | None:
    """A chunk of what frameworks keep of a document; None if it has no text.

    The source is what the metadata name under `source`, `url` or the like, or else `source`; the score may be in the
    metadata too.
    """
    if not isinstance(text, str) or not text.strip():
        return None
    metadata = dict(metadata or {})
    for key in ("score", "relevance_score"):
        score = metadata.get(key) if score is None else score
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
    return Chunk(
        text,
        source=first_text(metadata, ("source", "url", "link", "file_path")) or (str(source) if source else ""),
        title=first_text(metadata, titles),
        score=float(score) if is_number else None,
        metadata=metadata,
    )


def first_text(metadata: Mapping[str, Any], keys: Iterable[str]) -> str:
    """The first of these that is there, as text."""
    return next((str(metadata[key]) for key in keys if metadata.get(key)), "")


def _numbered(calls: Iterable[Call]) -> dict[str, Call]:
    named: dict[str, Call] = {}
    for call in calls:
        name, number = call.name, 1
        while name in named:
            number += 1
            name = f"{call.name}-{number}"
        named[name] = Call(name, call.documents, call.is_blocking, call.prepare)
    return named
