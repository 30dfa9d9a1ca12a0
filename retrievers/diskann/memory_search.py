"""A search over a graph in memory that can be stopped, looked at and continued."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import RetrievalError
from stream2llm_sdk.retrievers.diskann.filters import AllowedNodes
from stream2llm_sdk.retrievers.diskann.search import SteppedSearch, new_arrays
from stream2llm_sdk.retrievers.diskann.search_options import SearchOptions

__all__ = ["MemorySearch"]


class MemorySearch(SteppedSearch):
    """One search over arrays that may grow and change meanwhile; it sees what it finds, never half a vector's owner.

    Args:
        arrays: the kernel's `MemoryArrays`; the last row is the start node.
        query: float32, shape `(dim,)`, finite.
        allowed: the nodes that may enter the pool: those alive that pass the filter.
        began_at: the index's clock when the search began.

    Raises:
        RetrievalError: the query has another shape or is not finite.
    """

    def __init__(
        self,
        arrays: Any,
        query: npt.NDArray[np.float32],
        options: SearchOptions,
        allowed: AllowedNodes,
        began_at: int,
    ) -> None:
        vector = np.array(query, np.float32)
        if vector.shape != arrays.vectors.shape[1:] or not np.isfinite(vector).all():
            dim = arrays.vectors.shape[1]
            raise RetrievalError(f"the query vector has shape {vector.shape}; give {dim} finite numbers for this index")
        super().__init__(options, allowed)
        self.began_at = began_at
        self._arrays = arrays
        self._query = vector
        self._allowed_nodes = allowed
        self._begin(self._first_list_size())

    def _advance(self, max_iterations: int) -> int:
        return int(self._kernel.advance_in_memory(self._arrays, self._state, max_iterations, self._rules))

    def _begin(self, list_size: int) -> None:
        """The start node as the only candidate; or the result at once, if few nodes can be in it."""
        kernel, options, allowed = self._kernel, self._options, self._allowed_nodes
        num_rows = len(self._arrays.vectors)
        self._state = state = kernel.SearchState(
            distance_table=np.empty((0, 0), np.float32),
            records=np.empty(0, np.uint32),
            vectors=np.empty(0, np.float32),
            beam_offset=np.empty(0, np.int64),
            io_vector=np.empty(0, np.uint64),
            **new_arrays(
                kernel,
                self._query,
                num_nodes=num_rows,
                k=min(options.k, len(allowed)),
                list_size=min(list_size, num_rows),
                beam_width=options.beam_width,
                max_degree=self._arrays.neighbours.shape[1],
                allowed_bits=allowed.bits,
            ),
        )
        self._is_exact = len(allowed) <= list_size
        if self._is_exact:
            self._fill_pool(state, allowed.nodes)
            return
        start = num_rows - 1
        state.candidate_node[0] = start
        state.candidate_distance[0] = self._distances(np.array([start]))[0]
        state.seen_bits[start >> 3] |= np.uint8(1 << (start & 7))
        state.counters[kernel.NUM_CANDIDATES] = 1

    def _fill_pool(self, state: Any, nodes: npt.NDArray[np.int64]) -> None:
        distances = self._distances(nodes)
        best = np.argsort(distances, kind="stable")[: len(state.pool_node)]
        state.pool_node[: len(best)] = nodes[best]
        state.pool_distance[: len(best)] = distances[best]
        state.counters[self._kernel.POOL_SIZE] = len(best)
        state.counters[self._kernel.NUM_COMPARISONS] = len(nodes)

    def _distances(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        vectors = self._arrays.vectors[nodes]
        if self._arrays.inner_product:
            return np.asarray(-(vectors @ self._query), np.float32)
        return np.asarray(((vectors - self._query) ** 2).sum(axis=1), np.float32)
