"""DiskANN's own part of a build: the graph and the quantiser of vectors that lie on the disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.diskann.build_journal import VECTORS_FILE
from stream2llm_sdk.retrievers.diskann.layout import INDEX_PREFIX, SECTOR_BYTES
from stream2llm_sdk.retrievers.diskann.manifest import Metric

__all__ = ["BuildOptions", "build_graph"]

_ERROR_FILE = "build_error.txt"
_DIMENSIONS_A_PQ_CHUNK = 4
# Cosine is the distance of vectors of length 1: DiskANN's own cosine finds wrong neighbours.
_NATIVE_METRICS: dict[Metric, str] = {"cosine": "l2", "l2": "l2", "ip": "innerproduct"}


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How DiskANN builds its graph.

    Attributes:
        graph_degree: `R`, most neighbours of a node.
        complexity: size of the candidate list while building; larger builds a better graph and takes longer.
        num_threads: None uses every CPU that this process may use.
        max_memory_gb: what DiskANN takes the graph's vectors and neighbours to need at most. Above it, it cuts the
            vectors into overlapping shards by k-means, builds a graph of each, and merges them, which takes about
            half as long again. Training the quantiser comes on top, some 0.1 GB.
        batch_size: documents, or passages, embedded at once and written as one.

    Raises:
        ConfigurationError: a value is out of range.
    """

    graph_degree: int = 48
    complexity: int = 100
    num_threads: int | None = None
    max_memory_gb: float = 4.0
    batch_size: int = 1024

    def __post_init__(self) -> None:
        for name, most in (("graph_degree", 512), ("complexity", 10_000), ("batch_size", 1_000_000)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigurationError(f"BuildOptions.{name}={value!r}: give an integer from 1 to {most}")
        if self.num_threads is not None and not 1 <= self.num_threads <= 1024:
            raise ConfigurationError(f"BuildOptions.num_threads={self.num_threads!r}: give 1 to 1024, or None")
        if not 0 < self.max_memory_gb < 1e6:
            raise ConfigurationError(f"BuildOptions.max_memory_gb={self.max_memory_gb!r}: give more than 0")

    @property
    def graph(self) -> dict[str, int]:
        """What decides the graph."""
        return {"graph_degree": self.graph_degree, "complexity": self.complexity}


def build_graph(work: Path, options: BuildOptions, metric: Metric, dim: int, num_vectors: int) -> None:
    """Builds the graph of the vectors in `work`, in a process of its own; what an earlier try left is deleted.

    Raises:
        RetrievalError: DiskANN failed, or there is too little space on the disk.
    """
    for path in work.glob(f"{INDEX_PREFIX}_*"):
        if path.name != VECTORS_FILE:
            path.unlink()
    _require_space(work, options, dim, num_vectors)
    threads = options.num_threads or len(os.sched_getaffinity(0))
    request = {
        "sys_path": [str(entry) for entry in sys.path],
        "parent_pid": os.getpid(),
        "error_file": str(work / _ERROR_FILE),
        "arguments": {
            "data": str(work / VECTORS_FILE),
            "distance_metric": _NATIVE_METRICS[metric],
            "index_directory": str(work),
            "index_prefix": INDEX_PREFIX,
            "complexity": options.complexity,
            "graph_degree": options.graph_degree,
            "build_memory_maximum": options.max_memory_gb,
            "num_threads": threads,
            "num_of_pq_chunks": dim // _DIMENSIONS_A_PQ_CHUNK,
        },
    }
    script = Path(__file__).with_name("native_build.py")
    result = subprocess.run(
        [sys.executable, "-P", str(script)],
        input=json.dumps(request).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if result.returncode != 0:
        raise RetrievalError(f"DiskANN could not build the index: {_reason(result, work / _ERROR_FILE)}")


def _require_space(work: Path, options: BuildOptions, dim: int, num_vectors: int) -> None:
    """Says before the minutes of a build that its files will not fit: the graph on the disk, the one in memory, and the
    codes."""
    node_bytes = 4 * (dim + 1 + options.graph_degree)
    per_sector = SECTOR_BYTES // node_bytes
    sectors = -(-num_vectors // per_sector) if per_sector else num_vectors * -(-node_bytes // SECTOR_BYTES)
    needed = SECTOR_BYTES * sectors + num_vectors * (4 * options.graph_degree + dim // _DIMENSIONS_A_PQ_CHUNK)
    free = shutil.disk_usage(work).free
    if free < needed:
        raise RetrievalError(
            f"{work}: the graph needs {needed / 1e9:.1f} GB on the disk, and {free / 1e9:.1f} GB are free: make space, "
            "or build the index on another disk"
        )


def _reason(result: subprocess.CompletedProcess[bytes], error_file: Path) -> str:
    if error_file.exists():
        return error_file.read_text("utf-8", "replace").strip()
    if result.returncode < 0:
        name = signal.Signals(-result.returncode).name
        return f"its process was ended by {name}, which is often a lack of memory"
    lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"its process ended with status {result.returncode}"
