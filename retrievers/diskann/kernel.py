"""The compiled beam search over DiskANN's graphs: on disk in its layout, or in memory.

Import this module only where a search really starts: it needs numba, and compiles at the first call (a few
seconds, then cached beside the module or in the user's cache directory).

A search can be stopped and continued after every iteration, and runs without the interpreter lock. Nodes are
read with `pread`, without waiting where the page cache has them, and after a `posix_fadvise` for the whole beam
where it does not: a file that was cut short is an error code here, where a memory map would kill the process.
All of a search's state lies in the arrays of a `SearchState`, owned by one thread at a time; `GraphArrays` and
`MemoryArrays` are only read and shared by all searches.

A *distance* is the squared L2 distance, or minus the inner product: smaller is better in both.

All compiled functions stay in this one file: the cache notices a change only in the file of the function that
it loads, not in those that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = [
    "CLOSEST_UNEXPANDED",
    "DAMAGED_NODE",
    "ENOUGH",
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
    "MemoryArrays",
    "Rules",
    "SearchState",
    "advance",
    "advance_in_memory",
    "fill_distance_table",
]

# What `advance` returns.
RUNNING, GATE_OPEN, FINISHED, ENOUGH, READ_FAILED, NODE_DAMAGED = range(6)

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
COLD_ITERATIONS = 9  # iterations for which the file is taken to be cold
NUM_COUNTERS = 10

# Values of `SearchState.candidate_expanded`.
_UNTOUCHED, _EXPANDED, _ASKED_FOR = 0, 1, 2

_BEAMS_AHEAD = 3
_SECTOR_BYTES = 4096
_CACHE_LINE_BYTES = 64
_WILL_NEED = 3
_NO_WAIT = 8
_COLD_AFTER_A_MISS = 16

# NaN and infinity keep their meaning: damaged vectors must be recognised.
_FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}

_memmove = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))
_pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
_preadv2 = types.ExternalFunction(
    "preadv2", types.intp(types.int32, types.uintp, types.int32, types.int64, types.int32)
)
_fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))

Integer = int | np.int64
Float = float | np.float32
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def _compiled(function: FunctionT) -> FunctionT:
    options = {"nogil": True, "fastmath": _FAST_MATH}
    try:
        compiled: FunctionT = njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package nor a user cache directory is writable
        compiled = njit(**options)(function)
    return compiled


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Starts to bring the cache line at an address, which need not be a valid one, into the cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        )
        target = builder.inttoptr(arguments[0], pointer)
        # To read, to be kept in all levels, data.
        builder.call(function, [target, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


class GraphArrays(NamedTuple):
    """What every search on one index on disk reads. `node_words` counts 32-bit words."""

    codes: npt.NDArray[np.uint8]
    inner_product: bool
    node_words: int
    nodes_per_sector: int
    sectors_per_node: int
    dim: int


class MemoryArrays(NamedTuple):
    """What every search on one graph in memory reads. Row i is node i: its vector, and `degrees[i]` neighbours.

    Its owner may rewrite a row while searches read it: whatever they see there names rows that exist.
    """

    vectors: npt.NDArray[np.float32]
    neighbours: npt.NDArray[np.uint32]
    degrees: npt.NDArray[np.int32]
    inner_product: bool


class Rules(NamedTuple):
    """When `advance` returns before nothing is left to expand; a negative number of expansions means never.

    Both ask for a full pool that has not changed for so many node expansions.

    Attributes:
        gate_expansions, gate_rank: GATE_OPEN, when also the first unexpanded candidate is at this rank or behind
            it and the pool holds a node that the last emitted one did not.
        stop_expansions, stop_margin: ENOUGH, when also the first unexpanded candidate's distance is more than
            `d + stop_margin * |d|`, d being the exact distance of the pool's last node.
    """

    gate_expansions: int
    gate_rank: int
    stop_expansions: int
    stop_margin: float


class SearchState(NamedTuple):
    """One search. L is the search list's size, W the beam width, k the pool's size.

    Candidates (rows of length L) are sorted by estimated distance, the pool (length k) by exact distance.
    `records` and `vectors` are two views of one buffer of W nodes; `beam_offset` is where a node starts in it.
    `io_vector` is room for one `struct iovec`.
    `allowed_bits` has a bit for each node that may enter the pool; empty, all may.
    """

    counters: npt.NDArray[np.int64]
    query: npt.NDArray[np.float32]
    distance_table: npt.NDArray[np.float32]
    candidate_node: npt.NDArray[np.int64]
    candidate_distance: npt.NDArray[np.float32]
    candidate_expanded: npt.NDArray[np.uint8]
    seen_bits: npt.NDArray[np.uint8]
    allowed_bits: npt.NDArray[np.uint8]
    pool_node: npt.NDArray[np.int64]
    pool_distance: npt.NDArray[np.float32]
    emitted_node: npt.NDArray[np.int64]
    records: npt.NDArray[np.uint32]
    vectors: npt.NDArray[np.float32]
    beam_node: npt.NDArray[np.int64]
    beam_offset: npt.NDArray[np.int64]
    io_vector: npt.NDArray[np.uint64]
    neighbours: npt.NDArray[np.int64]
    neighbour_distance: npt.NDArray[np.float32]


@_compiled
def fill_distance_table(
    query: npt.NDArray[np.float32],
    pivots: npt.NDArray[np.float32],
    centroid: npt.NDArray[np.float32],
    chunk_offsets: npt.NDArray[np.int64],
    inner_product: bool,
    table: npt.NDArray[np.float32],
) -> None:
    """Fills `table[chunk, pivot]` with the distance between the query's chunk and each pivot."""
    for chunk in range(table.shape[0]):
        row = table[chunk]
        for pivot in range(row.shape[0]):
            row[pivot] = np.float32(0)
        for d in range(chunk_offsets[chunk], chunk_offsets[chunk + 1]):
            values = pivots[d]
            if inner_product:
                x = query[d]
                for pivot in range(values.shape[0]):
                    row[pivot] -= x * (values[pivot] + centroid[d])
            else:
                x = query[d] - centroid[d]
                for pivot in range(values.shape[0]):
                    difference = values[pivot] - x
                    row[pivot] += difference * difference


@_compiled
def _estimate_distances(
    table: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    nodes: npt.NDArray[np.int64],
    count: Integer,
    distances: npt.NDArray[np.float32],
) -> None:
    """Fills `distances` with the quantiser's estimates for the first `count` of `nodes`."""
    num_nodes, num_chunks = codes.shape
    flat_codes = codes.reshape(num_nodes * num_chunks)
    flat_table = table.reshape(num_chunks * table.shape[1])
    # Unsigned numbers, because a signed index is looked at for being negative each time.
    one, row = np.uintp(1), np.uintp(table.shape[1])
    for i in range(count):
        code = np.uintp(nodes[i] * num_chunks)
        end = code + np.uintp(num_chunks)
        fours = code + np.uintp(num_chunks // 4 * 4)
        at = np.uintp(0)
        a = b = c = d = np.float32(0)
        while code < fours:  # four sums, because one would wait for each addition
            a += flat_table[at + np.uintp(flat_codes[code])]
            b += flat_table[at + row + np.uintp(flat_codes[code + one])]
            c += flat_table[at + row + row + np.uintp(flat_codes[code + one + one])]
            d += flat_table[at + row + row + row + np.uintp(flat_codes[code + one + one + one])]
            at += row + row + row + row
            code += np.uintp(4)
        while code < end:
            a += flat_table[at + np.uintp(flat_codes[code])]
            at += row
            code += one
        distances[i] = (a + b) + (c + d)


@_compiled
def _exact_distance(
    vectors: npt.NDArray[np.float32], offset: Integer, query: npt.NDArray[np.float32], inner_product: bool
) -> np.float32:
    total = np.float32(0)
    if inner_product:
        for d in range(query.shape[0]):
            total -= vectors[offset + d] * query[d]
    else:
        for d in range(query.shape[0]):
            difference = vectors[offset + d] - query[d]
            total += difference * difference
    return total


@_compiled
def _add_candidates(
    counters: npt.NDArray[np.int64],
    distances: npt.NDArray[np.float32],
    nodes: npt.NDArray[np.int64],
    expanded: npt.NDArray[np.uint8],
    new_nodes: npt.NDArray[np.int64],
    new_distances: npt.NDArray[np.float32],
    num_new: Integer,
) -> None:
    """Puts the first `num_new` new nodes into the sorted candidate list; what does not fit falls off its end.

    Takes the arrays, not the state: passing that costs more than an insertion.
    """
    size = distances.shape[0]
    count = counters[NUM_CANDIDATES]
    closest = counters[CLOSEST_UNEXPANDED]
    four, eight = np.uintp(4), np.uintp(8)
    distances_at, nodes_at, expanded_at = distances.ctypes.data, nodes.ctypes.data, expanded.ctypes.data
    for i in range(num_new):
        distance = new_distances[i]
        if count == size:
            if distances[count - 1] < distance:
                continue
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
            at = distances_at + np.uintp(low) * four
            _memmove(at + four, at, moved * four)
            at = nodes_at + np.uintp(low) * eight
            _memmove(at + eight, at, moved * eight)
            at = expanded_at + np.uintp(low)
            _memmove(at + np.uintp(1), at, moved)
        distances[low] = distance
        nodes[low] = new_nodes[i]
        expanded[low] = _UNTOUCHED
        count += 1
        closest = min(closest, low)
    counters[NUM_CANDIDATES] = count
    counters[CLOSEST_UNEXPANDED] = closest


@_compiled
def _add_found(state: SearchState, num_new: Integer) -> None:
    _add_candidates(
        state.counters,
        state.candidate_distance,
        state.candidate_node,
        state.candidate_expanded,
        state.neighbours,
        state.neighbour_distance,
        num_new,
    )


@_compiled
def _first_sight(seen_bits: npt.NDArray[np.uint8], node: Integer) -> bool:
    bit = np.uint8(1 << (node & 7))
    if seen_bits[node >> 3] & bit:
        return False
    seen_bits[node >> 3] |= bit
    return True


@_compiled
def _node_offset(graph: GraphArrays, node: Integer) -> Integer:
    """Where a node begins in the file. What else lies in its sectors is not read: that is most of a warm read."""
    if graph.nodes_per_sector > 0:
        sector, place = node // graph.nodes_per_sector, node % graph.nodes_per_sector
        return (1 + sector) * _SECTOR_BYTES + place * graph.node_words * 4
    return (1 + node * graph.sectors_per_node) * _SECTOR_BYTES


@_compiled
def _ask_for_nodes(graph: GraphArrays, state: SearchState, descriptor: int) -> None:
    """Has the kernel begin to read the beam that is next, and some candidates behind it.

    On a cold file a search mostly waits, once a beam. While the pool changes, so does the order of the candidates;
    once it stays, the list is worked off in order, and what lies behind the beam can be asked for ahead: as many
    nodes as the pool has been stable for, up to three beams. This changes no result.
    """
    counters, expanded = state.counters, state.candidate_expanded
    width = state.beam_node.shape[0]
    left = width + min(counters[STABLE_EXPANSIONS], _BEAMS_AHEAD * width)
    file = np.int32(descriptor)
    size = np.int64(graph.node_words * 4)
    rank = counters[CLOSEST_UNEXPANDED]
    while left > 0 and rank < counters[NUM_CANDIDATES]:
        if expanded[rank] == _UNTOUCHED:
            _fadvise(file, _node_offset(graph, state.candidate_node[rank]), size, np.int32(_WILL_NEED))
            expanded[rank] = _ASKED_FOR
        if expanded[rank] == _ASKED_FOR:
            left -= 1
        rank += 1


@_compiled
def _choose_beam(state: SearchState) -> int:
    """Takes the best unexpanded candidates into the beam."""
    counters, expanded = state.counters, state.candidate_expanded
    width = 0
    rank = counters[CLOSEST_UNEXPANDED]
    while width < state.beam_node.shape[0] and rank < counters[NUM_CANDIDATES]:
        expanded[rank] = _EXPANDED
        state.beam_node[width] = state.candidate_node[rank]
        width += 1
        while rank < counters[NUM_CANDIDATES] and expanded[rank] == _EXPANDED:
            rank += 1
    counters[CLOSEST_UNEXPANDED] = rank
    return width


@_compiled
def _read_at_once(
    descriptor: int, target: np.uintp, size: np.int64, offset: Integer, io_vector: npt.NDArray[np.uint64]
) -> bool:
    """Reads what is in the page cache, without waiting; False if it is not, or not all of it."""
    io_vector[0] = target
    io_vector[1] = size
    count = _preadv2(
        np.int32(descriptor), np.uintp(io_vector.ctypes.data), np.int32(1), np.int64(offset), np.int32(_NO_WAIT)
    )
    whole: bool = np.int64(count) == size
    return whole


@_compiled
def _read_whole(descriptor: int, target: np.uintp, size: np.int64, offset: Integer) -> bool:
    done = np.int64(0)
    while done < size:
        count = _pread(np.int32(descriptor), target + np.uintp(done), np.uintp(size - done), offset + done)
        if count <= 0:
            return False
        done += count
    return True


@_compiled
def _read_beam(graph: GraphArrays, state: SearchState, width: int, descriptor: int) -> bool:
    """Reads the beam's nodes; `beam_offset` becomes the word where the node starts in the buffer.

    A file that is in the page cache is read without asking for it first: that would be as many system calls again.
    """
    counters = state.counters
    size = np.int64(graph.node_words * 4)
    for b in range(width):
        node = state.beam_node[b]
        target = np.uintp(state.records.ctypes.data + np.uintp(b * size))
        offset = _node_offset(graph, node)
        was_cached = counters[COLD_ITERATIONS] == 0 and _read_at_once(descriptor, target, size, offset, state.io_vector)
        if not was_cached:
            if counters[COLD_ITERATIONS] == 0:
                counters[COLD_ITERATIONS] = _COLD_AFTER_A_MISS
                for other in range(b, width):
                    at = _node_offset(graph, state.beam_node[other])
                    _fadvise(np.int32(descriptor), at, size, np.int32(_WILL_NEED))
            if not _read_whole(descriptor, target, size, offset):
                return False
        state.beam_offset[b] = b * graph.node_words
    return True


@_compiled
def _offer_to_pool(state: SearchState, node: Integer, distance: np.float32) -> bool:
    """Keeps the k best of *all* nodes offered that are allowed, also of those that have left the candidate list."""
    nodes, distances = state.pool_node, state.pool_distance
    size, k = state.counters[POOL_SIZE], nodes.shape[0]
    if not distance < np.inf or k == 0 or (size == k and distance >= distances[k - 1]):
        return False
    if state.allowed_bits.shape[0] > 0 and not (state.allowed_bits[node >> 3] >> (node & 7)) & 1:
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
def _collect_neighbours(
    words: npt.NDArray[np.uint32],
    degree: Integer,
    codes: npt.NDArray[np.uint8],
    seen_bits: npt.NDArray[np.uint8],
    neighbours: npt.NDArray[np.int64],
    found: Integer,
) -> Integer:
    """Appends those of a node's neighbours that were never seen, and asks for their codes ahead of their use.

    Returns the new count, or -1 for a damaged node.
    """
    num_nodes, code_bytes = codes.shape
    codes_at = codes.ctypes.data
    for i in range(degree):
        node = np.int64(words[i])
        if node >= num_nodes:
            return -1
        if _first_sight(seen_bits, node):
            neighbours[found] = node
            found += 1
            at = codes_at + np.uintp(node * code_bytes)
            for line in range(0, code_bytes, _CACHE_LINE_BYTES):
                _prefetch(at + np.uintp(line))
    return found


@_compiled
def _expand_beam(graph: GraphArrays, state: SearchState, width: int) -> bool:
    changed = False
    found: Integer = np.int64(0)  # one compilation: a literal would be of another type
    for b in range(width):
        at = state.beam_offset[b] + graph.dim
        degree = np.int64(state.records[at])
        if degree <= graph.node_words - graph.dim - 1:
            words = state.records[at + 1 : at + 1 + degree]
            found = _collect_neighbours(words, degree, graph.codes, state.seen_bits, state.neighbours, found)
        else:
            found = np.int64(-1)
        if found < 0:
            state.counters[DAMAGED_NODE] = state.beam_node[b]
            return False
    for b in range(width):
        distance = _exact_distance(state.vectors, state.beam_offset[b], state.query, graph.inner_product)
        if _offer_to_pool(state, state.beam_node[b], distance):
            changed = True
    _estimate_distances(state.distance_table, graph.codes, state.neighbours, found, state.neighbour_distance)
    _add_found(state, found)
    _count_iteration(state, width, found, changed)
    return True


@_compiled
def _expand_in_memory(memory: MemoryArrays, state: SearchState, width: int) -> None:
    changed = False
    num_rows, dim = memory.vectors.shape
    flat = memory.vectors.reshape(num_rows * dim)
    rows_at, row_bytes = memory.vectors.ctypes.data, dim * 4
    found: Integer = np.int64(0)
    for b in range(width):
        expanded = state.beam_node[b]
        for i in range(memory.degrees[expanded]):
            node = np.int64(memory.neighbours[expanded, i])
            if node < num_rows and _first_sight(state.seen_bits, node):
                state.neighbours[found] = node
                found += 1
                at = rows_at + np.uintp(node * row_bytes)
                for line in range(0, row_bytes, _CACHE_LINE_BYTES):
                    _prefetch(at + np.uintp(line))
    k = state.pool_node.shape[0]
    for i in range(found):
        node = state.neighbours[i]
        distance = _exact_distance(flat, node * dim, state.query, memory.inner_product)
        state.neighbour_distance[i] = distance
        # Asked here too, because most nodes are no better, and passing the state costs more than the question.
        may_enter = k > 0 and (state.counters[POOL_SIZE] < k or distance < state.pool_distance[k - 1])
        if may_enter and _offer_to_pool(state, node, distance):
            changed = True
    _add_found(state, found)
    _count_iteration(state, width, found, changed)


@_compiled
def _count_iteration(state: SearchState, width: int, found: Integer, changed: bool) -> None:
    counters = state.counters
    counters[NUM_COMPARISONS] += found
    counters[NUM_EXPANSIONS] += width
    counters[NUM_ITERATIONS] += 1
    counters[STABLE_EXPANSIONS] = 0 if changed else counters[STABLE_EXPANSIONS] + width


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
def _verdict(state: SearchState, rules: Rules) -> int:
    """What the rules say after an iteration."""
    counters = state.counters
    rank = counters[CLOSEST_UNEXPANDED]
    if rank >= counters[NUM_CANDIDATES]:
        return FINISHED
    if counters[POOL_SIZE] < state.pool_node.shape[0]:
        return RUNNING
    stable = counters[STABLE_EXPANSIONS]
    last = state.pool_distance[counters[POOL_SIZE] - 1]
    if 0 <= rules.stop_expansions <= stable and state.candidate_distance[rank] > last + rules.stop_margin * abs(last):
        return ENOUGH
    if 0 <= rules.gate_expansions <= stable and rank >= rules.gate_rank and _pool_is_new(state):
        for i in range(state.pool_node.shape[0]):
            state.emitted_node[i] = state.pool_node[i]
        counters[NUM_EMITTED] += 1
        return GATE_OPEN
    return RUNNING


@_compiled
def advance(graph: GraphArrays, state: SearchState, descriptor: int, max_iterations: int, rules: Rules) -> int:
    """Runs up to `max_iterations` iterations, each expanding a beam of the best unexpanded candidates.

    Returns RUNNING after that many; GATE_OPEN or ENOUGH by the rules; FINISHED when no candidate is left;
    READ_FAILED or NODE_DAMAGED for a file that cannot be trusted.
    """
    if state.counters[CLOSEST_UNEXPANDED] >= state.counters[NUM_CANDIDATES]:
        return FINISHED
    for _ in range(max_iterations):
        if state.counters[COLD_ITERATIONS] > 0:
            state.counters[COLD_ITERATIONS] -= 1
            _ask_for_nodes(graph, state, descriptor)
        width = _choose_beam(state)
        if not _read_beam(graph, state, width, descriptor):
            return READ_FAILED
        if not _expand_beam(graph, state, width):
            return NODE_DAMAGED
        verdict = _verdict(state, rules)
        if verdict != RUNNING:
            return verdict
    return RUNNING


@_compiled
def advance_in_memory(memory: MemoryArrays, state: SearchState, max_iterations: int, rules: Rules) -> int:
    """The same over a graph in memory, where every distance is exact and the pool is of all nodes seen."""
    if state.counters[CLOSEST_UNEXPANDED] >= state.counters[NUM_CANDIDATES]:
        return FINISHED
    for _ in range(max_iterations):
        _expand_in_memory(memory, state, _choose_beam(state))
        verdict = _verdict(state, rules)
        if verdict != RUNNING:
            return verdict
    return RUNNING
