"""Builds a DiskANN index over documents, all or nothing."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.diskann.document_store import DocumentWriter, as_chunk
from stream2llm_sdk.retrievers.diskann.layout import INDEX_PREFIX, read_layout
from stream2llm_sdk.retrievers.diskann.manifest import INDEX_FILES, MANIFEST_FILE, FileRecord, Manifest
from stream2llm_sdk.retrievers.embedding import Embedder, embed_unit_vectors

__all__ = ["BuildOptions", "build_files"]

_VECTORS_FILE = f"{INDEX_PREFIX}_vectors.bin"
_ERROR_FILE = "build_error.txt"
_DIMENSIONS_A_PQ_CHUNK = 4
# DiskANN has code paths for fixed lengths that pad by themselves and then fail (100 becomes 104); zeros
# behind every vector change no distance.
_DIM_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How DiskANN builds its graph.

    Attributes:
        graph_degree: `R`, most neighbours of a node.
        complexity: size of the candidate list while building; larger builds a better graph and takes longer.
        num_threads: None uses every CPU that this process may use.
        max_memory_gb: above this the graph is built in parts and merged.
        batch_size: documents embedded at once.

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


def build_files(
    documents: Iterable[Chunk | str | Mapping[str, Any]],
    directory: Path,
    embedder: Embedder,
    options: BuildOptions,
    *,
    overwrite: bool,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Writes a complete index to `directory`; see `build_index`."""
    if isinstance(documents, (str, bytes, Mapping, Chunk)) or not isinstance(documents, Iterable):
        raise ConfigurationError(
            f"documents is one {type(documents).__name__}; give an iterable of documents, such as a list"
        )
    if find_spec("diskannpy") is None:
        raise MissingExtraError("diskannpy", "diskann")
    _check_target(directory, overwrite)
    with _building_beside(directory) as work:
        num_documents = _write_documents(documents, work, embedder, options.batch_size, on_progress)
        if num_documents == 0:
            raise ConfigurationError("documents is empty: give at least one document to build an index of")
        _build_graph(work, options, _padded(embedder.dim))
        read_layout(work)
        records = {name: FileRecord.of(work / name) for name in INDEX_FILES}
        Manifest(embedder.name, embedder.dim, num_documents, records).write(work)
        _write_through(work)
        _check_target(directory, overwrite)
        _put_in_place(work, directory)


def _check_target(directory: Path, overwrite: bool) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not overwrite:
        raise ConfigurationError(f"{directory} exists and is no empty folder: choose another, or give overwrite=True")
    if not (directory / MANIFEST_FILE).is_file():
        raise ConfigurationError(f"{directory} holds no index; overwrite=True only replaces an index")


@contextmanager
def _building_beside(directory: Path) -> Iterator[Path]:
    """A folder on the same file system, removed at the end unless it was moved away."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = directory.parent / f".{directory.name}.building-{secrets.token_hex(4)}"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_documents(
    documents: Iterable[Any],
    work: Path,
    embedder: Embedder,
    batch_size: int,
    on_progress: Callable[[int], None] | None,
) -> int:
    """Writes the documents and their vectors batch by batch, so that memory does not grow with their number."""
    dim = _padded(embedder.dim)
    remaining = iter(documents)
    row = 0
    with DocumentWriter(work) as writer, open(work / _VECTORS_FILE, "wb") as vectors_file:
        vectors_file.write(bytes(8))
        while batch := list(islice(remaining, batch_size)):
            first = row
            chunks = [as_chunk(document, first + i) for i, document in enumerate(batch)]
            vectors = embed_unit_vectors(
                embedder,
                [chunk.text for chunk in chunks],
                lambda i, first=first: f"document {first + i}",  # type: ignore[misc]
            )
            padded = np.zeros((len(batch), dim), "<f4")
            padded[:, : embedder.dim] = vectors
            vectors_file.write(padded.tobytes())
            for chunk in chunks:
                writer.write(chunk)
            row += len(batch)
            if on_progress is not None:
                on_progress(row)
        vectors_file.seek(0)
        vectors_file.write(np.array([row, dim], "<i4").tobytes())
    return row


def _padded(dim: int) -> int:
    return -(-dim // _DIM_MULTIPLE) * _DIM_MULTIPLE


def _build_graph(work: Path, options: BuildOptions, dim: int) -> None:
    threads = options.num_threads or len(os.sched_getaffinity(0))
    request = {
        "sys_path": [str(entry) for entry in sys.path],
        "parent_pid": os.getpid(),
        "error_file": str(work / _ERROR_FILE),
        "arguments": {
            "data": str(work / _VECTORS_FILE),
            "distance_metric": "l2",
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
    (work / _VECTORS_FILE).unlink()


def _reason(result: subprocess.CompletedProcess[bytes], error_file: Path) -> str:
    if error_file.exists():
        return error_file.read_text("utf-8", "replace").strip()
    if result.returncode < 0:
        name = signal.Signals(-result.returncode).name
        return f"its process was ended by {name}, which is often a lack of memory"
    lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"its process ended with status {result.returncode}"


def _write_through(work: Path) -> None:
    """Everything reaches the disk before the directory gets its name."""
    for path in (*work.iterdir(), work):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(work: Path, directory: Path) -> None:
    """Renames; an index that was there is moved aside first and comes back if that fails."""
    if not (directory / MANIFEST_FILE).exists():
        os.rename(work, directory)
        return
    old = work.with_name(f"{work.name}.old")
    os.rename(directory, old)
    try:
        os.rename(work, directory)
    except BaseException:
        os.rename(old, directory)
        raise
    shutil.rmtree(old, ignore_errors=True)
