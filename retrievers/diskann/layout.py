"""DiskANN's on-disk layout: reads and checks everything that a search needs before it starts.

The files (little-endian), as written by diskannpy for the prefix `ann`:

- `ann_metadata.bin`: four uint64: dtype, metric, number of vectors, dimensions.
- `ann_disk.index`: 4,096-byte sectors. Sector 0 holds two int32 and then the header as uint64 words; the nodes
  follow: `dim` float32, the degree as uint32, the neighbours as uint32. Short nodes share a sector; a node
  longer than a sector starts on a sector of its own.
- `ann_pq_pivots.bin`: the product quantiser's 256 pivots, its centroid and its chunks' offsets.
- `ann_pq_compressed.bin`: one byte a chunk for every vector.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import IndexFormatError

__all__ = [
    "GRAPH_FILE",
    "INDEX_PREFIX",
    "METADATA_FILE",
    "PQ_CODES_FILE",
    "PQ_PIVOTS_FILE",
    "SECTOR_BYTES",
    "DiskLayout",
    "graph_path",
    "read_layout",
]

INDEX_PREFIX = "ann"
GRAPH_FILE = f"{INDEX_PREFIX}_disk.index"
METADATA_FILE = f"{INDEX_PREFIX}_metadata.bin"
PQ_PIVOTS_FILE = f"{INDEX_PREFIX}_pq_pivots.bin"
PQ_CODES_FILE = f"{INDEX_PREFIX}_pq_compressed.bin"

SECTOR_BYTES = 4096
NUM_PIVOTS = 256

_DTYPES = ("float32", "int8", "uint8")
_METRICS = ("l2", "cosine", "cosinenormalized", "innerproduct")
_LAYOUT_VERSIONS = ((0, 0), (1, 0))
_HEADER_OFFSET = 8


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """The geometry of a graph file and its product quantiser.

    Attributes:
        inner_product: the metric: larger inner products are better, or smaller L2 distances.
        nodes_per_sector: 0 when a node is longer than a sector.
        sectors_per_node: sectors to read to have a whole node.
        pivots: float32, shape `(dim, 256)`: a dimension's 256 values lie side by side.
        centroid: float32, shape `(dim,)`; the pivots are relative to it.
        chunk_offsets: int64, shape `(num_chunks + 1,)`: chunk c covers dimensions `[offsets[c], offsets[c + 1])`.
        codes: uint8, shape `(num_nodes, num_chunks)`.
    """

    num_nodes: int
    dim: int
    inner_product: bool
    medoid: int
    node_bytes: int
    nodes_per_sector: int
    sectors_per_node: int
    pivots: npt.NDArray[np.float32]
    centroid: npt.NDArray[np.float32]
    chunk_offsets: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint8]

    @property
    def max_degree(self) -> int:
        return self.node_bytes // 4 - self.dim - 1


def graph_path(directory: Path, prefix: str = INDEX_PREFIX) -> Path:
    """The graph file of the index with this prefix."""
    return _named(directory, GRAPH_FILE, prefix)


def _named(directory: Path, file: str, prefix: str) -> Path:
    return directory / (prefix + file.removeprefix(INDEX_PREFIX))


def read_layout(directory: Path, prefix: str = INDEX_PREFIX) -> DiskLayout:
    """Reads and checks the four files in `directory`.

    Raises:
        IndexFormatError: a file is missing or cut short, does not fit the others, or holds another dtype, metric
            or layout version than float32, l2 or innerproduct, and 1.0. The message names the file and what was
            expected.
    """
    num_nodes, dim, inner_product = _read_metadata(_named(directory, METADATA_FILE, prefix))
    geometry = _read_header(_named(directory, GRAPH_FILE, prefix), num_nodes, dim)
    pivots, centroid, chunk_offsets = _read_pivots(_named(directory, PQ_PIVOTS_FILE, prefix), dim)
    codes = _read_codes(_named(directory, PQ_CODES_FILE, prefix), num_nodes, len(chunk_offsets) - 1)
    return DiskLayout(
        num_nodes=num_nodes,
        dim=dim,
        inner_product=inner_product,
        pivots=pivots,
        centroid=centroid,
        chunk_offsets=chunk_offsets,
        codes=codes,
        **geometry,
    )


def _read_metadata(path: Path) -> tuple[int, int, bool]:
    raw = _read(path)
    _expect(path, len(raw) == 32, f"{len(raw)} bytes, expected 32")
    dtype, metric, num_nodes, dim = (int(word) for word in np.frombuffer(raw, "<u8"))
    _expect(path, dtype == 0, f"vectors of dtype {_name(_DTYPES, dtype)}, expected float32")
    name = _name(_METRICS, metric)
    _expect(
        path,
        name in ("l2", "innerproduct"),
        f"metric {name}, expected l2 or innerproduct; for cosine, normalise the vectors and build it with l2, as "
        "build_index() does: DiskANN's own cosine metrics give wrong neighbours",
    )
    _expect(path, 0 < num_nodes < 2**32 and 0 < dim < 2**20, f"{num_nodes} vectors of {dim} dimensions")
    return num_nodes, dim, name == "innerproduct"


def _read_header(path: Path, num_nodes: int, dim: int) -> dict[str, int]:
    raw = _read(path, SECTOR_BYTES)
    _expect(path, len(raw) == SECTOR_BYTES, f"{len(raw)} bytes, too short for the header of {SECTOR_BYTES}")
    words = [int(word) for word in np.frombuffer(raw, "<u8", 12, _HEADER_OFFSET)]
    nodes, dimensions, medoid, node_bytes, per_sector, _, _, reorder, size, extra, block, version = words
    layout_version = (version & 0xFFFFFFFF, version >> 32)
    _expect(
        path,
        layout_version in _LAYOUT_VERSIONS and block in (0, SECTOR_BYTES),
        f"layout version {layout_version[0]}.{layout_version[1]} with blocks of {block} bytes, "
        f"expected version 1.0 with {SECTOR_BYTES}",
    )
    _expect(
        path,
        (nodes, dimensions) == (num_nodes, dim),
        f"{nodes} vectors of {dimensions} dimensions, but {METADATA_FILE} says {num_nodes} of {dim}",
    )
    _expect(path, medoid < num_nodes, f"medoid {medoid}, expected a number below {num_nodes}")
    _expect(path, reorder == 0 and extra == 0, "nodes carry reordering or associated data, expected none")
    _expect(
        path,
        node_bytes % 4 == 0 and dim * 4 + 4 <= node_bytes < 2**30,
        f"nodes of {node_bytes} bytes, expected a multiple of 4 of at least {dim * 4 + 4}",
    )
    expected = SECTOR_BYTES // node_bytes
    _expect(path, per_sector == expected, f"{per_sector} nodes a sector, expected {expected}")
    sectors_per_node = 1 if per_sector else -(-node_bytes // SECTOR_BYTES)
    num_sectors = 1 + (-(-num_nodes // per_sector) if per_sector else num_nodes * sectors_per_node)
    actual = path.stat().st_size
    _expect(
        path,
        actual == size == num_sectors * SECTOR_BYTES,
        f"{actual} bytes; the header says {size} and {num_nodes} nodes need {num_sectors * SECTOR_BYTES}",
    )
    return {
        "medoid": medoid,
        "node_bytes": node_bytes,
        "nodes_per_sector": per_sector,
        "sectors_per_node": sectors_per_node,
    }


def _read_pivots(
    path: Path, dim: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    raw = _read(path)
    starts = _matrix(path, raw, 0, "<u8", "section offsets").ravel()
    _expect(path, len(starts) == 4, f"{len(starts)} section offsets, expected 4")
    _expect(path, int(starts[3]) == len(raw), f"{len(raw)} bytes, expected {int(starts[3])}")
    pivots = _matrix(path, raw, int(starts[0]), "<f4", "pivots")
    centroid = _matrix(path, raw, int(starts[1]), "<f4", "centroid").ravel()
    offsets = _matrix(path, raw, int(starts[2]), "<u4", "chunk offsets").ravel().astype(np.int64)
    _expect(
        path,
        pivots.shape == (NUM_PIVOTS, dim) and centroid.shape == (dim,),
        f"pivots of shape {pivots.shape} and a centroid of {len(centroid)}, expected {(NUM_PIVOTS, dim)} and {dim}",
    )
    _expect(
        path,
        len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == dim and bool((np.diff(offsets) >= 0).all()),
        f"chunk offsets that do not cover the {dim} dimensions",
    )
    _expect(
        path,
        bool(np.isfinite(pivots).all() and np.isfinite(centroid).all()),
        "pivots or a centroid that are not finite",
    )
    return np.ascontiguousarray(pivots.T), centroid.copy(), offsets


def _read_codes(path: Path, num_nodes: int, num_chunks: int) -> npt.NDArray[np.uint8]:
    head = _read(path, 8)
    _expect(path, len(head) == 8, f"{len(head)} bytes, too short for the header of 8")
    rows, columns = (int(number) for number in np.frombuffer(head, "<i4"))
    _expect(
        path,
        (rows, columns) == (num_nodes, num_chunks),
        f"{rows} codes of {columns} bytes, expected {num_nodes} of {num_chunks}",
    )
    expected = 8 + num_nodes * num_chunks
    actual = path.stat().st_size
    _expect(path, actual == expected, f"{actual} bytes, expected {expected}")
    return np.fromfile(path, np.uint8, num_nodes * num_chunks, offset=8).reshape(num_nodes, num_chunks)


def _matrix(path: Path, raw: bytes, offset: int, dtype: str, what: str) -> npt.NDArray[Any]:
    """The matrix at `offset`: int32 rows, int32 columns, then the items."""
    _expect(path, offset + 8 <= len(raw), f"{len(raw)} bytes end before the {what} at {offset}")
    rows, columns = (int(number) for number in np.frombuffer(raw, "<i4", 2, offset))
    size = rows * columns * np.dtype(dtype).itemsize
    _expect(
        path,
        rows > 0 and columns > 0 and offset + 8 + size <= len(raw),
        f"{len(raw)} bytes end inside the {what} ({rows} by {columns} at {offset})",
    )
    return np.frombuffer(raw, dtype, rows * columns, offset + 8).reshape(rows, columns)


def _read(path: Path, num_bytes: int = -1) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(num_bytes)
    except OSError as error:
        raise IndexFormatError(f"{path}: cannot be read: {error.strerror or os.strerror(5)}") from error


def _expect(path: Path, holds: bool, found: str) -> None:
    if not holds:
        raise IndexFormatError(f"{path}: not a DiskANN index that can be searched: {found}")


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"number {number}"
