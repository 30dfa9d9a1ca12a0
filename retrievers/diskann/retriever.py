"""Vector search as a retriever: the top-k of a DiskANN search, streamed while the search is still running."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, TypeVar

from stream2llm_sdk.context import Chunk, ContextMode, Replace
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.diskann.dynamic import DynamicDiskANN
from stream2llm_sdk.retrievers.diskann.filters import MetadataFilter
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex, FilterLike
from stream2llm_sdk.retrievers.diskann.search import SearchStatus, SteppedSearch
from stream2llm_sdk.retrievers.diskann.search_options import EarlyStop, EmissionGate, SearchOptions
from stream2llm_sdk.retrievers.diskann.streaming_policy import (
    StreamingEstimate,
    StreamingPolicy,
    documents_prefilled_again,
)

__all__ = ["DiskANNRetriever"]

ResultT = TypeVar("ResultT")


class DiskANNRetriever:
    """Streams the `k` most similar documents of an index as `Replace` updates, best first.

    The search runs in worker threads without the interpreter lock. A pool is yielded when the gate opens, and
    the final one when it differs from the last. Closing or cancelling the iterator stops the search within a few
    iterations (after loading and compiling, when it is the first question and `warm_up()` was not awaited). Any
    number of questions may be streamed at once.

    ::

        async with DiskANNRetriever("my-index", k=8) as retriever:
            async for update in retriever.stream("How does a TaskGroup cancel its tasks?"):
                print([chunk.title for chunk in update.chunks])

    With `stream="auto"` a search is streamed where that pays, by `StreamingPolicy`: the first few are, to learn.

    Args:
        index: an open index, on disk or a `DynamicDiskANN`, which stays its opener's to close; or the directory of one
            on disk, which is opened here (blocking while the quantiser's codes are read) and closed by `aclose()`.
        k: documents in the context.
        search_list_size: `L`; larger finds more of the true neighbours and takes longer.
        beam_width: `W`, nodes read from disk at once.
        gate: when a pool is good enough to be sent early; None means `EmissionGate()`.
        early_stop: when a search may end before its candidate list is worked off; None works it off.
        filter: which documents may be in the context, as `MetadataFilter` says; None means all.
        stream: True sends pools early, False the final one only, "auto" decides search by search.
        prefill_s_per_document: for "auto", the seconds in which the model prefills one document, or a function that
            gives them, None while it does not know.
        min_iteration_s: each iteration takes at least this long. It stands in for a slower disk in
            demonstrations and tests; leave it at 0 otherwise.
        max_concurrent_searches: worker threads; more questions than that take turns.

    Raises:
        ConfigurationError: a value is out of range, the index was built with another embedder, or has no column
            that the filter needs.
        IndexFormatError: the directory holds no index that can be read.
    """

    mode: ContextMode = ContextMode.UPDATE

    def __init__(
        self,
        index: DiskANNIndex | DynamicDiskANN | str | os.PathLike[str],
        *,
        k: int = 10,
        search_list_size: int = 100,
        beam_width: int = 4,
        gate: EmissionGate | None = None,
        early_stop: EarlyStop | None = None,
        filter: FilterLike = None,
        stream: bool | Literal["auto"] = True,
        prefill_s_per_document: float | Callable[[], float | None] | None = None,
        min_iteration_s: float = 0.0,
        max_concurrent_searches: int = 8,
    ) -> None:
        if not isinstance(index, (DiskANNIndex, DynamicDiskANN, str, os.PathLike)):
            raise ConfigurationError(f"index={index!r:.80}: give an open index, or the directory of one")
        if not _is_number(min_iteration_s, (int, float)) or not 0 <= min_iteration_s <= 3600:
            raise ConfigurationError(f"min_iteration_s={min_iteration_s!r}: give seconds from 0 to 3600")
        if not _is_number(max_concurrent_searches, int) or not 1 <= max_concurrent_searches <= 256:
            raise ConfigurationError(f"max_concurrent_searches={max_concurrent_searches!r}: give 1 to 256")
        if not (isinstance(stream, bool) or stream == "auto"):
            raise ConfigurationError(f"stream={stream!r}: give True, False or 'auto'")
        if stream == "auto" and prefill_s_per_document is None:
            raise ConfigurationError(
                "stream='auto' weighs searching against prefilling: give prefill_s_per_document=, the seconds in which "
                "the model prefills one document, or a function that returns them"
            )
        self._policy = StreamingPolicy(prefill_s_per_document) if prefill_s_per_document is not None else None
        self._stream = stream
        self._filter = MetadataFilter.of(filter)
        self._options = SearchOptions(
            k=k,
            search_list_size=search_list_size,
            beam_width=beam_width,
            gate=(gate or EmissionGate()) if stream else None,
            early_stop=early_stop,
        )
        self._owns_index = not isinstance(index, (DiskANNIndex, DynamicDiskANN))
        self._index: Any = DiskANNIndex.open(index) if isinstance(index, (str, os.PathLike)) else index
        if isinstance(self._index, DiskANNIndex):
            self._index.allowed(self._filter)  # a filter that the index cannot answer is told now
        self._min_iteration_s = min_iteration_s
        self._executor = ThreadPoolExecutor(max_concurrent_searches, thread_name_prefix="diskann")
        self._stop_events: set[threading.Event] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"DiskANNRetriever({self._index!r}, {self._options})"

    @property
    def streaming_estimate(self) -> StreamingEstimate | None:
        """What `stream="auto"` has learnt; None without `prefill_s_per_document`."""
        return None if self._policy is None else self._policy.estimate

    async def stream(self, query: str, *, filter: FilterLike = None) -> AsyncGenerator[Replace, None]:
        """Yields the current top-k, each time in place of the one before.

        Args:
            query: the question.
            filter: for this question, in place of the retriever's own.

        Raises:
            RetrievalError: the query is empty, or the retriever or its index was closed.
            IndexFormatError: a file was cut short or is damaged.
            ConfigurationError: the filter is not written right, or the index has no such column.
        """
        checked = self._filter if filter is None else MetadataFilter.of(filter)
        options = self._options_now()
        stop = threading.Event()
        self._stop_events.add(stop)
        try:
            search = await self._in_thread(stop, self._index.begin_search, query, options, checked)
            known: dict[int, Chunk] = {}
            emitted: list[Chunk] | None = None
            took = _Took()
            status = SearchStatus.RUNNING
            while status is not SearchStatus.FINISHED:
                began_s = time.perf_counter()
                status = await self._next_status(search, stop)
                took.add(time.perf_counter() - began_s, search.pool.nodes)
                chunks = await self._in_thread(stop, self._index.chunks, search, known)
                if chunks != emitted:
                    emitted = chunks
                    yield Replace(chunks)
            if self._policy is not None:
                self._policy.observe(
                    took.search_s,
                    first_pool_s=None if options.gate is None else took.first_pool_s,
                    prefilled_again=took.prefilled_again,
                )
        finally:
            stop.set()
            self._stop_events.discard(stop)

    def _options_now(self) -> SearchOptions:
        if self._stream == "auto" and self._policy is not None and not self._policy.should_stream():
            return replace(self._options, gate=None)
        return self._options

    async def warm_up(self) -> None:
        """Loads the embedder and the compiled search, which the first question would otherwise wait for.

        Compiling takes a few seconds once; the result is cached on disk where that is possible.
        """
        await self._in_thread(threading.Event(), self._index.warm_up, self._options)

    async def aclose(self) -> None:
        """Ends the searches in progress with a RetrievalError, then closes the threads and an index opened here."""
        self._closed = True
        for stop in self._stop_events:
            stop.set()
        await asyncio.to_thread(self._executor.shutdown)
        if self._owns_index:
            self._index.close()

    async def __aenter__(self) -> DiskANNRetriever:
        """Warms up."""
        try:
            await self.warm_up()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _next_status(self, search: SteppedSearch, stop: threading.Event) -> SearchStatus:
        """Runs until the gate opens or the search is finished, at the pace that was asked for."""
        if self._min_iteration_s == 0:
            status = await self._in_thread(stop, search.run, stop)
        else:
            status = SearchStatus.RUNNING
            loop = asyncio.get_running_loop()
            while status is SearchStatus.RUNNING and not stop.is_set():
                earliest = loop.time() + self._min_iteration_s
                status = await self._in_thread(stop, search.advance, 1)
                await asyncio.sleep(earliest - loop.time())
        if stop.is_set():
            raise self._closed_error()
        return status

    async def _in_thread(self, stop: threading.Event, function: Callable[..., ResultT], *args: object) -> ResultT:
        """Calls `function` in a worker thread; when cancelled, stops it and waits until it has ended."""
        if self._closed:
            raise self._closed_error()
        call = self._executor.submit(function, *args)
        result = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            stop.set()
            if not call.cancel():
                await asyncio.wait([result])
            raise

    def _closed_error(self) -> RetrievalError:
        return RetrievalError("the DiskANN retriever was closed while it was used")


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class _Took:
    """What one search has taken so far."""

    def __init__(self) -> None:
        self.search_s = 0.0
        self.first_pool_s = 0.0
        self.prefilled_again = 0
        self._in_prompt: list[int] | None = None

    def add(self, seconds: float, pool: Sequence[int]) -> None:
        self.search_s += seconds
        if self._in_prompt is None:
            self.first_pool_s = self.search_s
            self._in_prompt = list(pool)
            return
        again, self._in_prompt = documents_prefilled_again(self._in_prompt, pool)
        self.prefilled_again += again
