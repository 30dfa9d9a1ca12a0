"""A DiskANN graph in memory that grows and shrinks: diskannpy's dynamic index, and a mirror of it to search.

diskannpy's `AsyncDiskIndex` inserts and deletes, but its searches cannot be stepped and hold the interpreter lock, and
it has neither a way to save what it holds nor room for more than it was opened with. So its graph is mirrored here in
arrays: searches step through the mirror with the compiled kernel, growing writes the mirror to files in DiskANN's
format and opens the index again with more room, and the mirror is what is saved.

An insert changes the lists of the new node and of the nodes it links to, no others, and consolidating those of nodes
that had a deleted neighbour: these rows are read back after each.

The files, little-endian: `ann` holds the length in bytes as uint64, the greatest degree and the start node as uint32,
the number of start nodes as uint64, then for each node its degree and its neighbours as uint32; `ann.data` holds the
number of vectors and their dimension as int32, then the vectors. The start node is the last one, a copy of the first
vector: it is never found and never deleted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.diskann.search import load_kernel

__all__ = ["MemoryGraph"]

_SLACK = 1.3
_SPARE_EDGES = 8
_METRIC_NUMBERS = {"l2": 0, "innerproduct": 3}
_CONSOLIDATE_SCRIPT = "native_consolidate.py"


class MemoryGraph:
    """The graph. One thread at a time may change it; searches may go on meanwhile over `arrays()` taken before.

    Args:
        inner_product: the metric; False is L2.
        graph_degree: `R`, edges that a node is cut to; up to 1.3 times as many between cuts.
        complexity: size of the candidate list of an insert.
        capacity: slots to begin with. It doubles when they are used up.

    Attributes:
        capacity: nodes that there is room for, slots 0 to `capacity - 1`; row `capacity` is the start node.
    """

    def __init__(
        self, dim: int, *, inner_product: bool, graph_degree: int, complexity: int, capacity: int = 1024
    ) -> None:
        self.dim = dim
        self.inner_product = inner_product
        self.graph_degree = graph_degree
        self.complexity = complexity
        self.capacity = capacity
        self._deleted: set[int] = set()
        self._has_start = False
        self._native: Any = None
        self.vectors = np.zeros((capacity + 1, dim), np.float32)
        self.neighbours = np.zeros((capacity + 1, self._width), np.uint32)
        self.degrees = np.zeros(capacity + 1, np.int32)

    @property
    def _width(self) -> int:
        return int(self.graph_degree * _SLACK) + _SPARE_EDGES

    @classmethod
    def restored(
        cls,
        vectors: npt.NDArray[np.float32],
        neighbours: npt.NDArray[np.uint32],
        degrees: npt.NDArray[np.int32],
        deleted: Iterable[int],
        *,
        inner_product: bool,
        graph_degree: int,
        complexity: int,
    ) -> MemoryGraph:
        """The graph whose arrays were saved; their last row is the start node."""
        graph = cls(
            vectors.shape[1],
            inner_product=inner_product,
            graph_degree=graph_degree,
            complexity=complexity,
            capacity=len(vectors) - 1,
        )
        graph.vectors, graph.degrees = vectors, degrees
        graph._deleted = set(deleted)
        graph.neighbours[:, : neighbours.shape[1]] = neighbours[:, : graph._width]
        graph._has_start = True
        graph._open_native()
        return graph

    def arrays(self) -> Any:
        """What a search reads, in the form that the kernel takes. Growing and consolidating replace the arrays."""
        return load_kernel().MemoryArrays(self.vectors, self.neighbours, self.degrees, self.inner_product)

    def ensure_capacity(self, num_slots: int) -> None:
        """Makes room for slots 0 to `num_slots - 1`."""
        if num_slots <= self.capacity:
            return
        old, new = self.capacity, max(num_slots, 2 * self.capacity)
        vectors = np.zeros((new + 1, self.dim), np.float32)
        neighbours = np.zeros((new + 1, self._width), np.uint32)
        degrees = np.zeros(new + 1, np.int32)
        for grown, was in ((vectors, self.vectors), (neighbours, self.neighbours), (degrees, self.degrees)):
            grown[:old] = was[:old]
            grown[new] = was[old]
        neighbours[neighbours == old] = new
        self.vectors, self.neighbours, self.degrees, self.capacity = vectors, neighbours, degrees, new
        if self._has_start:
            self._open_native()

    def insert(self, slot: int, vector: npt.NDArray[np.float32]) -> None:
        """Puts a vector into an empty slot; holds the interpreter lock for less than a millisecond."""
        if not self._has_start:
            self.vectors[self.capacity] = vector
            self._has_start = True
            self._open_native()
        self.vectors[slot] = vector
        self.degrees[slot] = 0
        self._native.insert(slot, vector, True)
        own = self._read_back(slot)
        for neighbour in own:
            self._read_back(neighbour)

    @property
    def num_deleted(self) -> int:
        """Nodes that are marked and not yet consolidated."""
        return len(self._deleted)

    def mark_deleted(self, slots: Iterable[int]) -> None:
        """The native index passes these nodes over from now on; their edges stay until `consolidate()`."""
        new = set(slots) - self._deleted
        self._deleted |= new
        if new:
            self._native.mark_deleted(np.fromiter(new, np.uint32))

    def native_search(self, query: npt.NDArray[np.float32], k: int, list_size: int) -> list[int]:
        """What diskannpy itself finds, to compare with; holds the interpreter lock."""
        if not self._has_start:
            return []
        return [int(node) for node in self._native.search(query, k, list_size).identifiers]

    def consolidate(self) -> list[int]:
        """Takes the deleted nodes out of the graph and joins their neighbours; returns their slots, empty now.

        In a process of its own: diskannpy would hold the interpreter lock for seconds.

        Raises:
            RetrievalError: that process failed.
        """
        freed = sorted(self._deleted)
        if not freed:
            return []
        with tempfile.TemporaryDirectory(prefix="stream2llm-consolidate-") as folder:
            directory = Path(folder)
            self._write(directory)
            np.save(directory / "deleted.npy", np.array(freed, np.uint32))
            _run_consolidation(directory, self._native_options())
            neighbours = np.load(directory / "neighbours.npy")
            degrees = np.load(directory / "degrees.npy")
        self.neighbours, self.degrees = neighbours, degrees
        self._deleted.clear()
        self._open_native()
        return freed

    def check_integrity(self) -> None:
        """Compares the mirror with the native graph; for tests.

        Raises:
            AssertionError: they differ.
        """
        for node in range(self.capacity + 1) if self._has_start else ():
            row = self.neighbours[node, : self.degrees[node]].tolist()
            assert row == list(self._native._index.get_neighbors(node)), f"node {node} differs"

    def _read_back(self, node: int) -> list[int]:
        # The wrapper's own get_neighbors makes an array of each list, which takes ten times as long.
        neighbours: list[int] = self._native._index.get_neighbors(node)
        self.neighbours[node, : len(neighbours)] = neighbours
        self.degrees[node] = len(neighbours)
        return neighbours

    def _native_options(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "metric": "innerproduct" if self.inner_product else "l2",
            "graph_degree": self.graph_degree,
            "complexity": self.complexity,
            "width": self._width,
        }

    def _open_native(self) -> None:
        os.environ.setdefault("RUST_LOG", "error")
        try:
            import diskannpy
        except ImportError as error:
            raise MissingExtraError("diskannpy", "diskann") from error
        options = self._native_options()
        with tempfile.TemporaryDirectory(prefix="stream2llm-graph-") as folder:
            self._write(Path(folder))
            self._native = diskannpy.AsyncDiskIndex(
                folder,
                distance_metric=options["metric"],
                vector_dtype=np.float32,
                dimensions=self.dim,
                r=self.graph_degree,
                l=self.complexity,
                graph_slack_factor=_SLACK,
            )
        if self._deleted:
            self._native.mark_deleted(np.fromiter(self._deleted, np.uint32))

    def _write(self, directory: Path) -> None:
        rows = self.capacity + 1
        with open(directory / "ann.data", "wb") as file:
            np.array([rows, self.dim], "<i4").tofile(file)
            self.vectors.tofile(file)
        # Each row as its degree and so many neighbours, one behind the other, and an empty list at the end.
        table = np.concatenate([self.degrees.astype("<u4")[:, None], self.neighbours], axis=1)
        used = np.arange(table.shape[1])[None, :] <= self.degrees[:, None]
        body = np.append(table[used], np.uint32(0)).astype("<u4")
        with open(directory / "ann", "wb") as file:
            np.array([24 + body.nbytes], "<u8").tofile(file)
            np.array([int(self.graph_degree * _SLACK), self.capacity], "<u4").tofile(file)
            np.array([1], "<u8").tofile(file)
            body.tofile(file)
        metric = _METRIC_NUMBERS["innerproduct" if self.inner_product else "l2"]
        np.array([0, metric, self.capacity, self.dim], "<u8").tofile(directory / "ann_metadata.bin")


def _run_consolidation(directory: Path, options: dict[str, Any]) -> None:
    request = {
        "sys_path": [str(entry) for entry in sys.path],
        "parent_pid": os.getpid(),
        "directory": str(directory),
        **options,
    }
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name(_CONSOLIDATE_SCRIPT))],
        input=json.dumps(request).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else f"its process ended with status {done.returncode}"
        raise RetrievalError(f"DiskANN could not consolidate the index: {reason}")
