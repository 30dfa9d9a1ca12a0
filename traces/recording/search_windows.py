"""One vector search, taken down: which pool it held when, and after which iterations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stream2llm_sdk.context import Chunk, Replace
from stream2llm_sdk.retrievers.diskann.search import Pool, SearchStatus, SteppedSearch
from stream2llm_sdk.traces.anns_format import ANNS
from stream2llm_sdk.traces.trace import TimedUpdate, Trace

__all__ = ["SearchWindow", "search_in_windows", "trace_of_windows"]


@dataclass(frozen=True, slots=True)
class SearchWindow:
    """The part of a search that ends with a pool. The windows of a search follow one another without a gap.

    Attributes:
        begin_s, end_s: seconds after the question.
        iterations: how many the search had done at the window's begin, and at its end.
        pool: what the search held then.
    """

    begin_s: float
    end_s: float
    iterations: tuple[int, int]
    pool: Pool


def search_in_windows(begin_search: Callable[[], SteppedSearch], *, every_pool: bool) -> list[SearchWindow]:
    """Runs a search to its end, in the calling thread.

    The clock is read right behind the iterations, and nothing else is done between them: no document is read. The first
    window begins before `begin_search`, which embeds the question: whoever asks waits for that too. The last one ends
    with the search, even if its pool is that of the window before: only then is it known to be final.

    Args:
        begin_search: makes the search.
        every_pool: a window for each pool, whose documents or their order differ from those of the one before; else a
            window for each that the search's own gate lets out, and the final one.
    """
    began_s = time.perf_counter()
    search = begin_search()
    windows: list[SearchWindow] = []
    begin_s, first = 0.0, 0
    nodes: tuple[int, ...] = ()
    status = SearchStatus.RUNNING
    while status is not SearchStatus.FINISHED:
        status = search.advance(1) if every_pool else search.run()
        end_s = time.perf_counter() - began_s
        pool = search.pool
        if status is SearchStatus.FINISHED or (pool.nodes and pool.nodes != nodes):
            last = search.num_iterations
            windows.append(SearchWindow(begin_s, end_s, (first, last), pool))
            begin_s, first, nodes = end_s, last, pool.nodes
    return windows


def trace_of_windows(
    trace_id: str, query: str, windows: Sequence[SearchWindow], chunk: Callable[[int, float], Chunk]
) -> Trace:
    """The trace of a search: an update for each window, at its end.

    Args:
        chunk: the document of a node, with the score for a distance; called once for each node.
    """
    distances: Mapping[int, float] = {
        node: distance
        for window in windows
        for node, distance in zip(window.pool.nodes, window.pool.distances, strict=True)
    }
    chunks = {node: chunk(node, distance) for node, distance in distances.items()}
    updates = tuple(
        TimedUpdate(
            window.end_s, Replace([chunks[node] for node in window.pool.nodes]), window.begin_s, window.iterations
        )
        for window in windows
    )
    return Trace(trace_id, query, updates, tag=ANNS)
