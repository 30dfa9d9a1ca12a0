"""Vector search as a retriever: the top-k of a DiskANN search, streamed while the search is still running."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from stream2llm_sdk.context import Chunk, ContextMode, Replace
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.search import BeamSearch, EmissionGate, Pool, SearchOptions, SearchStatus

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

    Args:
        index: an open index, which stays its opener's to close; or a directory, which is opened here (blocking
            while the quantiser's codes are read) and closed by `aclose()`.
        k: documents in the context.
        search_list_size: `L`; larger finds more of the true neighbours and takes longer.
        beam_width: `W`, nodes read from disk at once.
        gate: when a pool is good enough to be sent early; None means `EmissionGate()`.
        stream: False yields the final pool only.
        min_iteration_s: each iteration takes at least this long. It stands in for a slower disk in
            demonstrations and tests; leave it at 0 otherwise.
        max_concurrent_searches: worker threads; more questions than that take turns.

    Raises:
        ConfigurationError: a value is out of range, or the index was built with another embedder.
        IndexFormatError: the directory holds no index that can be read.
    """

    mode: ContextMode = ContextMode.UPDATE

    def __init__(
        self,
        index: DiskANNIndex | str | os.PathLike[str],
        *,
        k: int = 10,
        search_list_size: int = 100,
        beam_width: int = 4,
        gate: EmissionGate | None = None,
        stream: bool = True,
        min_iteration_s: float = 0.0,
        max_concurrent_searches: int = 8,
    ) -> None:
        if not 0 <= min_iteration_s <= 3600:
            raise ConfigurationError(f"min_iteration_s={min_iteration_s!r}: give seconds from 0 to 3600")
        if not 1 <= max_concurrent_searches <= 256:
            raise ConfigurationError(f"max_concurrent_searches={max_concurrent_searches!r}: give 1 to 256")
        self._options = SearchOptions(
            k=k,
            search_list_size=search_list_size,
            beam_width=beam_width,
            gate=(gate or EmissionGate()) if stream else None,
        )
        self._owns_index = not isinstance(index, DiskANNIndex)
        self._index = index if isinstance(index, DiskANNIndex) else DiskANNIndex.open(index)
        self._min_iteration_s = min_iteration_s
        self._executor = ThreadPoolExecutor(max_concurrent_searches, thread_name_prefix="diskann")
        self._stop_events: set[threading.Event] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"DiskANNRetriever({self._index!r}, {self._options})"

    async def stream(self, query: str) -> AsyncGenerator[Replace, None]:
        """Yields the current top-k, each time in place of the one before.

        Raises:
            RetrievalError: the query is empty, or the retriever or its index was closed.
            IndexFormatError: a file was cut short or is damaged.
        """
        stop = threading.Event()
        self._stop_events.add(stop)
        try:
            search = await self._in_thread(stop, self._index.begin_search, query, self._options)
            known: dict[int, Chunk] = {}
            emitted: tuple[int, ...] = ()
            status = SearchStatus.RUNNING
            while status is not SearchStatus.FINISHED:
                status = await self._next_status(search, stop)
                pool = search.pool
                if pool.nodes != emitted:
                    emitted = pool.nodes
                    yield Replace(await self._in_thread(stop, self._read_chunks, pool, known))
        finally:
            stop.set()
            self._stop_events.discard(stop)

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

    async def _next_status(self, search: BeamSearch, stop: threading.Event) -> SearchStatus:
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

    def _read_chunks(self, pool: Pool, known: dict[int, Chunk]) -> list[Chunk]:
        for node, distance in zip(pool.nodes, pool.distances, strict=True):
            if node not in known:
                known[node] = self._index.chunk(node, distance)
        return [known[node] for node in pool.nodes]

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
