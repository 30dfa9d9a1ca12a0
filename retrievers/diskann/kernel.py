"""The compiled beam search over DiskANN's on-disk layout.

Import this module only where a search really starts: it needs numba, and compiles at the first call (a few
seconds, then cached beside the module or in the user's cache directory).

A search can be stopped and continued after every iteration, and runs without the interpreter lock. Nodes are
read with `pread` after a `posix_fadvise` for the whole beam: a file that was cut short is an error code here,
where a memory map would kill the process. All of a search's state lies in the arrays of a `SearchState`, owned
by one thread at a time; a `GraphArrays` is only read and shared by all searches.

All compiled functions stay in this one file: the cache notices a change only in the file of the function that
it loads, not in those that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit, types

__all__ = [
    "CLOSEST_UNEXPANDED",
    "DAMAGED_NODE",
    "FINISHED",
    "GATE_OPEN",
    "NODE_DAMAGED",
    "NUM_CANDIDATES",
    "NUM_COMPARISONS",
    "NUM_COUNTERS",
    "NUM_EMITTED",
    "NUM_EXPANSIONS",
    "NUM_ITERATIONS",
    "POOL_SIZE",
    "READ_FAILED",
    "RUNNING",
    "STABLE_EXPANSIONS",
    "GraphArrays",
    "SearchState",
    "advance",
    "fill_distance_table",
]

# What `advance` returns.
RUNNING, GATE_OPEN, FINISHED, READ_FAILED, NODE_DAMAGED = range(5)

# Places in `SearchState.counters`.
NUM_CANDIDATES = 0
CLOSEST_UNEXPANDED = 1  # rank of the best candidate that is not expanded yet
POOL_SIZE = 2
STABLE_EXPANSIONS = 3  # node expansions since the pool last changed
NUM_EMITTED = 4
NUM_ITERATIONS = 5
NUM_EXPANSIONS = 6
NUM_COMPARISONS = 7
DAMAGED_NODE = 8
NUM_COUNTERS = 9

_SECTOR_BYTES = 4096
_SECTOR_WORDS = 1024
_WILL_NEED = 3

# NaN and infinity keep their meaning: damaged vectors must be recognised.
_FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}

_memmove = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))
_pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
_fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))

Integer = int | np.int64
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def _compiled(function: FunctionT) -> FunctionT:
    options = {"nogil": True, "fastmath": _FAST_MATH}
    try:
        compiled: FunctionT = njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package nor a user cache directory is writable
        compiled = njit(**options)(function)
    return compiled


class GraphArrays(NamedTuple):
    """What every search on one index reads. `node_words` counts 32-bit words."""

    codes: npt.NDArray[np.uint8]
    node_words: int
    nodes_per_sector: int
    sectors_per_node: int
    dim: int


class SearchState(NamedTuple):
    """One search. L is the search list's size, W the beam width, k the pool's size.

    Candidates (rows of length L) are sorted by estimated distance, the pool (length k) by exact distance.
    `sectors` and `vectors` are two views of one buffer of W nodes; `beam_offset` is where a node starts in it.
    """

    counters: npt.NDArray[np.int64]
    query: npt.NDArray[np.float32]
    distance_table: npt.NDArray[np.float32]
    candidate_node: npt.NDArray[np.int64]
    candidate_distance: npt.NDArray[np.float32]
    candidate_expanded: npt.NDArray[np.uint8]
    seen_bits: npt.NDArray[np.uint8]
    pool_node: npt.NDArray[np.int64]
    pool_distance: npt.NDArray[np.float32]
    emitted_node: npt.NDArray[np.int64]
    sectors: npt.NDArray[np.uint32]
    vectors: npt.NDArray[np.float32]
    beam_node: npt.NDArray[np.int64]
    beam_offset: npt.NDArray[np.int64]
    neighbours: npt.NDArray[np.int64]


@_compiled
def fill_distance_table(
    query: npt.NDArray[np.float32],
    pivots: npt.NDArray[np.float32],
    centroid: npt.NDArray[np.float32],
    chunk_offsets: npt.NDArray[np.int64],
    table: npt.NDArray[np.float32],
) -> None:
    """Fills `table[chunk, pivot]` with the squared distance between the query's chunk and each pivot."""
    for chunk in range(table.shape[0]):
        row = table[chunk]
        for pivot in range(row.shape[0]):
            row[pivot] = np.float32(0)
        for d in range(chunk_offsets[chunk], chunk_offsets[chunk + 1]):
            values = pivots[d]
            x = query[d] - centroid[d]
            for pivot in range(values.shape[0]):
                difference = values[pivot] - x
                row[pivot] += difference * difference


@_compiled
def _estimated_distance(table: npt.NDArray[np.float32], code: npt.NDArray[np.uint8]) -> np.float32:
    a = b = c = d = np.float32(0)
    chunk = 0
    while chunk + 4 <= code.shape[0]:  # four sums, because one would wait for each addition
        a += table[chunk, code[chunk]]
        b += table[chunk + 1, code[chunk + 1]]
        c += table[chunk + 2, code[chunk + 2]]
        d += table[chunk + 3, code[chunk + 3]]
        chunk += 4
    while chunk < code.shape[0]:
        a += table[chunk, code[chunk]]
        chunk += 1
    return (a + b) + (c + d)


@_compiled
def _exact_distance(vectors: npt.NDArray[np.float32], offset: int, query: npt.NDArray[np.float32]) -> np.float32:
    total = np.float32(0)
    for d in range(query.shape[0]):
        difference = vectors[offset + d] - query[d]
        total += difference * difference
    return total


@_compiled
def _add_candidate(state: SearchState, node: Integer, distance: np.float32) -> None:
    counters, distances = state.counters, state.candidate_distance
    nodes, expanded = state.candidate_node, state.candidate_expanded
    count = counters[NUM_CANDIDATES]
    if count == distances.shape[0]:
        if distances[count - 1] < distance:
            return
        count -= 1
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if distances[middle] < distance:
            low = middle + 1
        else:
            high = middle
    if low < count:
        moved = np.uintp(count - low)
        four, eight = np.uintp(4), np.uintp(8)
        at = distances.ctypes.data + np.uintp(low) * four
        _memmove(at + four, at, moved * four)
        at = nodes.ctypes.data + np.uintp(low) * eight
        _memmove(at + eight, at, moved * eight)
        at = expanded.ctypes.data + np.uintp(low)
        _memmove(at + np.uintp(1), at, moved)
    distances[low] = distance
    nodes[low] = node
    expanded[low] = 0
    counters[NUM_CANDIDATES] = count + 1
    if low < counters[CLOSEST_UNEXPANDED]:
        counters[CLOSEST_UNEXPANDED] = low


@_compiled
def _first_sight(seen_bits: npt.NDArray[np.uint8], node: Integer) -> bool:
    bit = np.uint8(1 << (node & 7))
    if seen_bits[node >> 3] & bit:
        return False
    seen_bits[node >> 3] |= bit
    return True


@_compiled
def _choose_beam(graph: GraphArrays, state: SearchState) -> int:
    """Takes the best unexpanded candidates into the beam; `beam_offset` becomes their sector's byte offset."""
    counters, expanded = state.counters, state.candidate_expanded
    shared_sectors = graph.nodes_per_sector > 0
    width = 0
    rank = counters[CLOSEST_UNEXPANDED]
    while width < state.beam_node.shape[0] and rank < counters[NUM_CANDIDATES]:
        expanded[rank] = 1
        node = state.candidate_node[rank]
        sector = node // graph.nodes_per_sector if shared_sectors else node * graph.sectors_per_node
        state.beam_node[width] = node
        state.beam_offset[width] = (1 + sector) * _SECTOR_BYTES
        width += 1
        while rank < counters[NUM_CANDIDATES] and expanded[rank] == 1:
            rank += 1
    counters[CLOSEST_UNEXPANDED] = rank
    return width


@_compiled
def _read_beam(graph: GraphArrays, state: SearchState, width: int, descriptor: int) -> bool:
    """Reads the beam's sectors; `beam_offset` becomes the word where the node starts in the buffer."""
    file = np.int32(descriptor)
    size = np.int64(graph.sectors_per_node * _SECTOR_BYTES)
    for b in range(width):
        _fadvise(file, state.beam_offset[b], size, np.int32(_WILL_NEED))
    for b in range(width):
        done = np.int64(0)
        while done < size:
            target = state.sectors.ctypes.data + np.uintp(b * size + done)
            count = _pread(file, target, np.uintp(size - done), state.beam_offset[b] + done)
            if count <= 0:
                return False
            done += count
        start = b * graph.sectors_per_node * _SECTOR_WORDS
        if graph.nodes_per_sector > 0:
            start += (state.beam_node[b] % graph.nodes_per_sector) * graph.node_words
        state.beam_offset[b] = start
    return True


@_compiled
def _offer_to_pool(state: SearchState, node: Integer, distance: np.float32) -> bool:
    """Keeps the k best of *all* expanded nodes, also of those that have left the candidate list."""
    nodes, distances = state.pool_node, state.pool_distance
    size, k = state.counters[POOL_SIZE], nodes.shape[0]
    if not distance < np.inf or (size == k and distance >= distances[k - 1]):
        return False
    place = size if size < k else k - 1
    while place > 0 and distances[place - 1] > distance:
        distances[place] = distances[place - 1]
        nodes[place] = nodes[place - 1]
        place -= 1
    distances[place] = distance
    nodes[place] = node
    if size < k:
        state.counters[POOL_SIZE] = size + 1
    return True


@_compiled
def _collect_neighbours(graph: GraphArrays, state: SearchState, offset: int, found: Integer) -> Integer:
    """Appends a node's neighbours that were never seen; returns the new count, or -1 for a damaged node."""
    at = offset + graph.dim
    degree = np.int64(state.sectors[at])
    if degree > graph.node_words - graph.dim - 1:
        return -1
    for i in range(degree):
        node = np.int64(state.sectors[at + 1 + i])
        if node >= graph.codes.shape[0]:
            return -1
        if _first_sight(state.seen_bits, node):
            state.neighbours[found] = node
            found += 1
    return found


@_compiled
def _expand_beam(graph: GraphArrays, state: SearchState, width: int) -> bool:
    counters = state.counters
    changed = False
    found: Integer = np.int64(0)  # one compilation: a literal would be of another type
    for b in range(width):
        offset = state.beam_offset[b]
        distance = _exact_distance(state.vectors, offset, state.query)
        if _offer_to_pool(state, state.beam_node[b], distance):
            changed = True
        found = _collect_neighbours(graph, state, offset, found)
        if found < 0:
            counters[DAMAGED_NODE] = state.beam_node[b]
            return False
    for i in range(found):
        node = state.neighbours[i]
        _add_candidate(state, node, _estimated_distance(state.distance_table, graph.codes[node]))
    counters[NUM_COMPARISONS] += found
    counters[NUM_EXPANSIONS] += width
    counters[NUM_ITERATIONS] += 1
    counters[STABLE_EXPANSIONS] = 0 if changed else counters[STABLE_EXPANSIONS] + width
    return True


@_compiled
def _pool_is_new(state: SearchState) -> bool:
    if state.counters[NUM_EMITTED] == 0:
        return True
    for node in state.pool_node:
        known = False
        for emitted in state.emitted_node:
            if emitted == node:
                known = True
                break
        if not known:
            return True
    return False


@_compiled
def advance(
    graph: GraphArrays,
    state: SearchState,
    descriptor: int,
    max_iterations: int,
    min_stable_expansions: int,
    min_unexpanded_rank: int,
) -> int:
    """Runs up to `max_iterations` iterations, each expanding a beam of the best unexpanded candidates.

    Returns RUNNING after that many; GATE_OPEN as soon as the full pool has not changed for
    `min_stable_expansions` node expansions (negative: never), the first unexpanded candidate is at rank
    `min_unexpanded_rank` or behind it, and the pool holds a node that the last emitted one did not; FINISHED
    when no candidate is left; READ_FAILED or NODE_DAMAGED for a file that cannot be trusted.
    """
    counters = state.counters
    iterations = 0
    while counters[CLOSEST_UNEXPANDED] < counters[NUM_CANDIDATES]:
        if iterations >= max_iterations:
            return RUNNING
        iterations += 1
        width = _choose_beam(graph, state)
        if not _read_beam(graph, state, width, descriptor):
            return READ_FAILED
        if not _expand_beam(graph, state, width):
            return NODE_DAMAGED
        if (
            min_stable_expansions >= 0
            and counters[CLOSEST_UNEXPANDED] < counters[NUM_CANDIDATES]
            and counters[POOL_SIZE] == state.pool_node.shape[0]
            and counters[STABLE_EXPANSIONS] >= min_stable_expansions
            and counters[CLOSEST_UNEXPANDED] >= min_unexpanded_rank
            and _pool_is_new(state)
        ):
            for i in range(state.pool_node.shape[0]):
                state.emitted_node[i] = state.pool_node[i]
            counters[NUM_EMITTED] += 1
            return GATE_OPEN
    return FINISHED
