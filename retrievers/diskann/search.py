"""Beam searches over a DiskANN graph that can be stopped, looked at and continued.

`SteppedSearch` is what all of them have in common; `BeamSearch` is the one over an index on disk.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import IndexFormatError, MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.diskann.filters import AllowedNodes
from stream2llm_sdk.retrievers.diskann.layout import GRAPH_FILE, DiskLayout
from stream2llm_sdk.retrievers.diskann.search_options import EarlyStop, EmissionGate, SearchOptions
from stream2llm_sdk.retrievers.diskann.shared_file import SharedFile

__all__ = [
    "BeamSearch",
    "EarlyStop",
    "EmissionGate",
    "Graph",
    "Pool",
    "SearchOptions",
    "SearchStatus",
    "SteppedSearch",
    "load_kernel",
]

# Cancelling waits for one slice: about a millisecond on a warm file.
_SLICE_ITERATIONS = 16
_EXHAUSTIVE_UP_TO_NODES = 4096
_WIDENING = 4


class SearchStatus(Enum):
    """Where a search stands. GATE_OPEN: its pool is worth emitting now. STOPPED: it was told to stop."""

    RUNNING = auto()
    GATE_OPEN = auto()
    FINISHED = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True)
class Pool:
    """The best nodes found so far, best first, with their exact distances: squared L2, or minus the inner product."""

    nodes: tuple[int, ...]
    distances: tuple[float, ...]


class SteppedSearch(ABC):
    """One search. Used by one thread at a time.

    With a filter, all nodes are traversed but only those allowed enter the pool. The candidate list grows in
    proportion to how selective the filter is, and again when it turns out that too few allowed nodes lie near the
    query; once it would have to be longer than the allowed nodes are many, these are all looked at instead, which is
    exact.

    Attributes:
        stopped_early: whether `EarlyStop` ended it.
    """

    def __init__(self, options: SearchOptions, allowed: AllowedNodes | None) -> None:
        gate, stop = options.gate, options.early_stop
        self._kernel = load_kernel()
        self._rules = self._kernel.Rules(
            gate_expansions=-1 if gate is None else gate.min_stable_expansions,
            gate_rank=0 if gate is None else round(gate.min_rank_factor * options.k),
            stop_expansions=-1 if stop is None else stop.min_stable_expansions,
            stop_margin=0.0 if stop is None else float(stop.margin),
        )
        self._options = options
        self._allowed = allowed
        self._is_exact = False
        self._state: Any = None
        self.stopped_early = False

    @abstractmethod
    def _begin(self, list_size: int) -> None:
        """Makes a fresh `_state` with a list of that size. Sets `_is_exact` when it looks at all allowed nodes."""

    @abstractmethod
    def _advance(self, max_iterations: int) -> int:
        """Calls the kernel; returns its code."""

    def _error(self, code: int) -> RetrievalError:
        """What a code that stands for a failure means."""
        raise AssertionError(f"the search returned code {code}")

    def advance(self, max_iterations: int) -> SearchStatus:
        """Runs up to `max_iterations` iterations, or until the gate opens or the search is finished.

        Raises:
            IndexFormatError: the graph file was cut short or is damaged.
            RetrievalError: the index was closed, or the read failed.
        """
        kernel = self._kernel
        code = self._advance(max_iterations)
        if code == kernel.FINISHED and self._found_too_few():
            self._widen()
            return SearchStatus.RUNNING
        if code == kernel.RUNNING:
            return SearchStatus.RUNNING
        if code == kernel.GATE_OPEN:
            return SearchStatus.GATE_OPEN
        if code in (kernel.FINISHED, kernel.ENOUGH):
            self.stopped_early = code == kernel.ENOUGH
            return SearchStatus.FINISHED
        raise self._error(code)

    def run(self, stop: threading.Event | None = None) -> SearchStatus:
        """Runs until the gate opens, the search is finished, or `stop` is set from another thread."""
        while stop is None or not stop.is_set():
            status = self.advance(_SLICE_ITERATIONS)
            if status is not SearchStatus.RUNNING:
                return status
        return SearchStatus.STOPPED

    def _first_list_size(self) -> int:
        options = self._options
        return options.search_list_size if self._allowed is None else self._allowed.list_size(options)

    def _found_too_few(self) -> bool:
        found = int(self._state.counters[self._kernel.POOL_SIZE])
        return self._allowed is not None and not self._is_exact and found < len(self._state.pool_node)

    def _widen(self) -> None:
        so_far = self._state.counters
        self._begin(_WIDENING * self.search_list_size)
        for place in (self._kernel.NUM_ITERATIONS, self._kernel.NUM_EXPANSIONS, self._kernel.NUM_COMPARISONS):
            self._state.counters[place] += so_far[place]

    @property
    def search_list_size(self) -> int:
        """`L` as it is now: a filter makes it longer than was asked for."""
        return len(self._state.candidate_node)

    @property
    def pool(self) -> Pool:
        size = int(self._state.counters[self._kernel.POOL_SIZE])
        return Pool(tuple(self._state.pool_node[:size].tolist()), tuple(self._state.pool_distance[:size].tolist()))

    @property
    def num_iterations(self) -> int:
        return int(self._state.counters[self._kernel.NUM_ITERATIONS])

    @property
    def num_expansions(self) -> int:
        """Nodes whose neighbours were looked at; on disk, nodes read."""
        return int(self._state.counters[self._kernel.NUM_EXPANSIONS])

    @property
    def num_comparisons(self) -> int:
        """Distances computed to order the candidates; on disk, estimates from the product quantiser's codes."""
        return int(self._state.counters[self._kernel.NUM_COMPARISONS])


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
            inner_product=layout.inner_product,
            node_words=layout.node_bytes // 4,
            nodes_per_sector=layout.nodes_per_sector,
            sectors_per_node=layout.sectors_per_node,
            dim=layout.dim,
        )


class BeamSearch(SteppedSearch):
    """A search over an index on disk. Any number of searches may share a `Graph`.

    Args:
        query: float32, shape `(dim,)`, finite.
        allowed: the nodes that may enter the pool; None allows all.

    Raises:
        MissingExtraError: numba is not installed.
        RetrievalError: the query has another shape or is not finite.
    """

    def __init__(
        self,
        graph: Graph,
        query: npt.NDArray[np.float32],
        options: SearchOptions,
        allowed: AllowedNodes | None = None,
    ) -> None:
        layout = graph.layout
        vector = np.array(query, np.float32)
        if vector.shape != (layout.dim,) or not np.isfinite(vector).all():
            raise RetrievalError(
                f"the query vector has shape {vector.shape}; give {layout.dim} finite numbers for this index"
            )
        super().__init__(options, allowed)
        self._graph = graph
        self._query = vector
        self._begin(self._first_list_size())

    def _advance(self, max_iterations: int) -> int:
        with self._graph.file.reading() as descriptor:
            return int(self._kernel.advance(self._graph.compiled, self._state, descriptor, max_iterations, self._rules))

    def _begin(self, list_size: int) -> None:
        """A fresh state whose candidates are the medoid, or all nodes that could be in the result if those are few.

        A graph smaller than the candidate list is expanded whole anyway: to begin with all of its nodes costs
        nothing more, and finds those that no edge leads to.
        """
        layout, kernel, allowed = self._graph.layout, self._kernel, self._allowed
        self._is_exact = allowed is not None and len(allowed) <= list_size
        if allowed is not None and self._is_exact:
            nodes = allowed.nodes
        elif layout.num_nodes <= min(list_size, _EXHAUSTIVE_UP_TO_NODES):
            nodes = np.arange(layout.num_nodes)
        else:
            nodes = np.array([layout.medoid])
        self._state = state = self._new_state(max(list_size, len(nodes)))
        kernel.fill_distance_table(
            self._query,
            layout.pivots,
            layout.centroid,
            layout.chunk_offsets,
            layout.inner_product,
            state.distance_table,
        )
        estimated = state.distance_table[np.arange(len(state.distance_table)), layout.codes[nodes]].sum(axis=1)
        order = np.argsort(estimated, kind="stable")
        state.candidate_node[: len(nodes)] = nodes[order]
        state.candidate_distance[: len(nodes)] = estimated[order]
        state.counters[kernel.NUM_CANDIDATES] = state.counters[kernel.NUM_COMPARISONS] = len(nodes)
        if self._is_exact:
            state.seen_bits[:] = 255
        else:
            np.bitwise_or.at(state.seen_bits, nodes >> 3, (1 << (nodes & 7)).astype(np.uint8))

    def _new_state(self, list_size: int) -> Any:
        layout, allowed = self._graph.layout, self._allowed
        width = min(self._options.beam_width, layout.num_nodes)
        records = np.empty(width * layout.node_bytes // 4, np.uint32)
        return self._kernel.SearchState(
            distance_table=np.empty((len(layout.chunk_offsets) - 1, layout.pivots.shape[1]), np.float32),
            records=records,
            vectors=records.view(np.float32),
            beam_offset=np.empty(width, np.int64),
            io_vector=np.empty(2, np.uint64),
            **new_arrays(
                self._kernel,
                self._query,
                num_nodes=layout.num_nodes,
                k=min(self._options.k, layout.num_nodes if allowed is None else len(allowed)),
                list_size=min(list_size, layout.num_nodes),
                beam_width=width,
                max_degree=layout.max_degree,
                allowed_bits=None if allowed is None else allowed.bits,
            ),
        )

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


def new_arrays(
    kernel: ModuleType,
    query: npt.NDArray[np.float32],
    *,
    num_nodes: int,
    k: int,
    list_size: int,
    beam_width: int,
    max_degree: int,
    allowed_bits: npt.NDArray[np.uint8] | None,
) -> dict[str, Any]:
    """The arrays of a `SearchState` that every search has."""
    return {
        "counters": np.zeros(kernel.NUM_COUNTERS, np.int64),
        "query": query,
        "candidate_node": np.empty(list_size, np.int64),
        "candidate_distance": np.empty(list_size, np.float32),
        "candidate_expanded": np.zeros(list_size, np.uint8),
        "seen_bits": np.zeros(num_nodes // 8 + 1, np.uint8),
        "allowed_bits": np.empty(0, np.uint8) if allowed_bits is None else allowed_bits,
        "pool_node": np.empty(k, np.int64),
        "pool_distance": np.empty(k, np.float32),
        "emitted_node": np.full(k, -1, np.int64),
        "beam_node": np.empty(beam_width, np.int64),
        "neighbours": np.empty(beam_width * max_degree, np.int64),
        "neighbour_distance": np.empty(beam_width * max_degree, np.float32),
    }


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
