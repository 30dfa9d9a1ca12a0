"""A beam search over a DiskANN index that can be stopped, looked at and continued.

When a pool is worth emitting: the exact top-k of all expanded nodes (the *pool*) usually holds most of the final
result long before the search ends, but also changes often at its beginning, and every change costs the model a
prefill. The gate therefore opens when the pool's set survived a number of node expansions and the best candidate
still unexpanded lies well behind rank k: what is left to expand is then unlikely to enter the pool.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.diskann.layout import GRAPH_FILE, SECTOR_BYTES, DiskLayout
from stream2llm_sdk.retrievers.diskann.shared_file import SharedFile

__all__ = ["BeamSearch", "EmissionGate", "Graph", "Pool", "SearchOptions", "SearchStatus", "load_kernel"]

# Cancelling waits for one slice: about a millisecond on a warm file.
_SLICE_ITERATIONS = 16
_EXHAUSTIVE_UP_TO_NODES = 4096


@dataclass(frozen=True, slots=True)
class EmissionGate:
    """When the pool of an unfinished search is emitted.

    Attributes:
        min_stable_expansions: node expansions that the pool's set must have survived. Smaller emits earlier
            and more often.
        min_rank_factor: the best unexpanded candidate must be at rank `min_rank_factor * k` or behind it. With
            a search list shorter than that the gate never opens and only the final pool is emitted.

    Raises:
        ConfigurationError: a value is negative, or the number of expansions is no integer.
    """

    min_stable_expansions: int = 16
    min_rank_factor: float = 2.0

    def __post_init__(self) -> None:
        stable, factor = self.min_stable_expansions, self.min_rank_factor
        if not isinstance(stable, int) or not 0 <= stable < 2**31:
            raise ConfigurationError(f"EmissionGate.min_stable_expansions={stable!r}: give an integer from 0 up")
        if not 0 <= factor <= 1e6:
            raise ConfigurationError(f"EmissionGate.min_rank_factor={factor!r}: give 0 or more")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How one search runs.

    Attributes:
        k: size of the result. An index with fewer documents gives all of them.
        search_list_size: `L`, candidates kept; larger finds more of the true neighbours and takes longer.
        beam_width: `W`, nodes read from disk at once.
        gate: when an intermediate pool is emitted; None never emits one.

    Raises:
        ConfigurationError: a value is not positive, or `search_list_size` is below `k`.
    """

    k: int = 10
    search_list_size: int = 100
    beam_width: int = 4
    gate: EmissionGate | None = EmissionGate()

    def __post_init__(self) -> None:
        for name, most in (("k", 10_000), ("search_list_size", 1_000_000), ("beam_width", 512)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigurationError(f"{name}={value!r}: give an integer from 1 to {most}")
        if self.search_list_size < self.k:
            raise ConfigurationError(f"search_list_size={self.search_list_size} is below k={self.k}: give at least k")


class SearchStatus(Enum):
    """Where a search stands. GATE_OPEN: its pool is worth emitting now. STOPPED: it was told to stop."""

    RUNNING = auto()
    GATE_OPEN = auto()
    FINISHED = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True)
class Pool:
    """The best nodes found so far, best first, with their exact squared L2 distances."""

    nodes: tuple[int, ...]
    distances: tuple[float, ...]


class Graph:
    """An open graph file and its layout, shared by all searches on it."""

    def __init__(self, layout: DiskLayout, file: SharedFile) -> None:
        self.layout = layout
        self.file = file

    @cached_property
    def compiled(self) -> Any:
        """The layout in the form that the compiled search takes."""
        layout = self.layout
        return load_kernel().GraphArrays(
            codes=layout.codes,
            node_words=layout.node_bytes // 4,
            nodes_per_sector=layout.nodes_per_sector,
            sectors_per_node=layout.sectors_per_node,
            dim=layout.dim,
        )


class BeamSearch:
    """One search. Used by one thread at a time; any number of searches may share a `Graph`.

    Args:
        query: float32, shape `(dim,)`, finite.

    Raises:
        MissingExtraError: numba is not installed.
        RetrievalError: the query has another shape or is not finite.
    """

    def __init__(self, graph: Graph, query: npt.NDArray[np.float32], options: SearchOptions) -> None:
        layout = graph.layout
        vector = np.array(query, np.float32)
        if vector.shape != (layout.dim,) or not np.isfinite(vector).all():
            raise RetrievalError(
                f"the query vector has shape {vector.shape}; give {layout.dim} finite numbers for this index"
            )
        self._graph = graph
        self._kernel = load_kernel()
        gate = options.gate
        self._min_stable_expansions = -1 if gate is None else gate.min_stable_expansions
        self._min_unexpanded_rank = 0 if gate is None else round(gate.min_rank_factor * options.k)
        self._state = self._new_state(vector, options)
        self._kernel.fill_distance_table(
            vector, layout.pivots, layout.centroid, layout.chunk_offsets, self._state.distance_table
        )
        self._begin(options.search_list_size)

    def advance(self, max_iterations: int) -> SearchStatus:
        """Runs up to `max_iterations` iterations, or until the gate opens or nothing is left to expand.

        Raises:
            IndexFormatError: the graph file was cut short or is damaged.
            RetrievalError: the index was closed, or the read failed.
        """
        kernel = self._kernel
        with self._graph.file.reading() as descriptor:
            code = kernel.advance(
                self._graph.compiled,
                self._state,
                descriptor,
                max_iterations,
                self._min_stable_expansions,
                self._min_unexpanded_rank,
            )
        if code == kernel.RUNNING:
            return SearchStatus.RUNNING
        if code == kernel.GATE_OPEN:
            return SearchStatus.GATE_OPEN
        if code == kernel.FINISHED:
            return SearchStatus.FINISHED
        raise self._error(code)

    def run(self, stop: threading.Event | None = None) -> SearchStatus:
        """Runs until the gate opens, the search is finished, or `stop` is set from another thread."""
        while stop is None or not stop.is_set():
            status = self.advance(_SLICE_ITERATIONS)
            if status is not SearchStatus.RUNNING:
                return status
        return SearchStatus.STOPPED

    @property
    def pool(self) -> Pool:
        size = int(self._state.counters[self._kernel.POOL_SIZE])
        return Pool(tuple(self._state.pool_node[:size].tolist()), tuple(self._state.pool_distance[:size].tolist()))

    @property
    def num_iterations(self) -> int:
        return int(self._state.counters[self._kernel.NUM_ITERATIONS])

    @property
    def num_expansions(self) -> int:
        """Nodes read from disk."""
        return int(self._state.counters[self._kernel.NUM_EXPANSIONS])

    @property
    def num_comparisons(self) -> int:
        """Distances estimated from the product quantiser's codes."""
        return int(self._state.counters[self._kernel.NUM_COMPARISONS])

    def _new_state(self, query: npt.NDArray[np.float32], options: SearchOptions) -> Any:
        layout, kernel = self._graph.layout, self._kernel
        size = min(options.search_list_size, layout.num_nodes)
        width = min(options.beam_width, layout.num_nodes)
        k = min(options.k, layout.num_nodes)
        sectors = np.empty(width * layout.sectors_per_node * SECTOR_BYTES // 4, np.uint32)
        return kernel.SearchState(
            counters=np.zeros(kernel.NUM_COUNTERS, np.int64),
            query=query,
            distance_table=np.empty((len(layout.chunk_offsets) - 1, layout.pivots.shape[1]), np.float32),
            candidate_node=np.empty(size, np.int64),
            candidate_distance=np.empty(size, np.float32),
            candidate_expanded=np.zeros(size, np.uint8),
            seen_bits=np.zeros(layout.num_nodes // 8 + 1, np.uint8),
            pool_node=np.empty(k, np.int64),
            pool_distance=np.empty(k, np.float32),
            emitted_node=np.full(k, -1, np.int64),
            sectors=sectors,
            vectors=sectors.view(np.float32),
            beam_node=np.empty(width, np.int64),
            beam_offset=np.empty(width, np.int64),
            neighbours=np.empty(width * layout.max_degree, np.int64),
        )

    def _begin(self, search_list_size: int) -> None:
        """Puts the medoid into the candidate list, or every node of a graph that is smaller than the list.

        Such a search expands every node it can reach anyway. Beginning with all of them costs nothing more, and
        finds those that no edge leads to.
        """
        layout, kernel, state = self._graph.layout, self._kernel, self._state
        exhaustive = layout.num_nodes <= min(search_list_size, _EXHAUSTIVE_UP_TO_NODES)
        nodes = np.arange(layout.num_nodes) if exhaustive else np.array([layout.medoid])
        table = state.distance_table
        estimated = table[np.arange(len(table)), layout.codes[nodes]].sum(axis=1)
        order = np.argsort(estimated, kind="stable")
        state.candidate_node[: len(nodes)] = nodes[order]
        state.candidate_distance[: len(nodes)] = estimated[order]
        np.bitwise_or.at(state.seen_bits, nodes >> 3, (1 << (nodes & 7)).astype(np.uint8))
        state.counters[kernel.NUM_CANDIDATES] = state.counters[kernel.NUM_COMPARISONS] = len(nodes)

    def _error(self, code: int) -> RetrievalError:
        path = self._graph.file.path
        if code == self._kernel.NODE_DAMAGED:
            node = int(self._state.counters[self._kernel.DAMAGED_NODE])
            return IndexFormatError(
                f"{path}: node {node} names neighbours that do not exist; the file is damaged, build it again"
            )
        with self._graph.file.reading() as descriptor:
            size = os.fstat(descriptor).st_size
        if size < self._graph.file.size_bytes:
            return IndexFormatError(
                f"{path}: {size} bytes, was {self._graph.file.size_bytes} when opened; it was cut while open"
            )
        return RetrievalError(f"{path}: reading {GRAPH_FILE} failed; the disk reports an error")


def load_kernel() -> ModuleType:
    """The compiled search.

    Raises:
        MissingExtraError: numba is not installed.
    """
    try:
        from stream2llm_sdk.retrievers.diskann import kernel
    except ImportError as error:
        raise MissingExtraError("numba", "diskann") from error
    return kernel
