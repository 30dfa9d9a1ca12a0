"""A process that searches for the questions it is sent, one at a time: what it does, and how one speaks with it.

It has a CPU for itself and one thread that works. Everything that a search does not need (reading the documents,
packing the answer) is done after the search has ended.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, RecordingError, RetrievalError, Stream2LLMError
from stream2llm_sdk.retrievers.diskann.filters import MetadataFilter
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.layout import graph_path
from stream2llm_sdk.retrievers.diskann.search_options import SearchOptions
from stream2llm_sdk.retrievers.embedding import Embedder, embedder_of
from stream2llm_sdk.traces.recording.child_process import framed, frames
from stream2llm_sdk.traces.recording.cpu_claims import claim_cpu
from stream2llm_sdk.traces.recording.published_searches import NODE
from stream2llm_sdk.traces.recording.search_windows import search_in_windows, trace_of_windows
from stream2llm_sdk.traces.trace import Trace

__all__ = [
    "ONE_THREAD",
    "Asked",
    "Ready",
    "SearchJob",
    "open_index",
    "serve",
]

ONE_THREAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
    ),
    "TOKENIZERS_PARALLELISM": "false",
    "RUST_LOG": "error",
}
"""The environment in which the libraries that embed and search start no threads."""


@dataclass(frozen=True, slots=True)
class SearchJob:
    """What a search process is for.

    Attributes:
        index: the folder of the index.
        options: how each search runs. Without a gate, every change of the pool is recorded.
        filter: which documents may be found.
        embedder: what makes it: a name as `embedder_of` takes it, or a function that pickles, such as a class; None for
            the one that the index's manifest names.
        cold: whether the graph file is dropped from the page cache before each search.
        cpus: those that it may choose one of, in this order.
    """

    index: Path
    options: SearchOptions
    filter: Mapping[str, Any] | None = None
    embedder: str | Callable[[], Embedder] | None = None
    cold: bool = False
    cpus: tuple[int, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Ready:
    """The process's first answer: it searches from now on, on this CPU."""

    cpu: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the name of its trace. The answer is the trace, or a RecordingError where there is none; any
    other error ends the process, which sends it."""

    trace_id: str
    query: str


def open_index(job: SearchJob) -> DiskANNIndex:
    """The index, with its filter checked. Raises as `DiskANNIndex.open`, `DiskANNIndex.allowed` and
    `embedder_of` do."""
    made = job.embedder() if callable(job.embedder) else job.embedder
    index = DiskANNIndex.open(job.index, embedder=embedder_of(made, job.index) if isinstance(made, str) else made)
    try:
        index.allowed(job.filter)
    except BaseException:
        index.close()
        raise
    return index


def serve(descriptor: int) -> None:
    """The process's main function: a `SearchJob` comes first, then questions, until the other end is closed."""
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        messages = frames(stream)
        job = next(messages, None)
        if not isinstance(job, SearchJob):
            return
        try:
            for answer in _answers(job, messages):
                stream.write(framed(answer))
                stream.flush()
        except BrokenPipeError:
            return
        except Stream2LLMError as error:
            stream.write(framed(error))


def _answers(job: SearchJob, questions: Iterable[Asked]) -> Iterator[Ready | Trace | RecordingError]:
    claim = claim_cpu(job.cpus)
    if claim is None:
        raise ConfigurationError(
            f"none of the {len(job.cpus)} CPUs is left for a search: other recordings on this machine have them all. "
            "Wait for their end, or record fewer searches at once"
        )
    os.sched_setaffinity(0, {claim.cpu})
    with closing(open_index(job)) as index:
        index.search("warm up", job.options, job.filter)
        yield Ready(claim.cpu)
        for asked in questions:
            if job.cold:
                _drop_from_page_cache(graph_path(job.index))
            yield _answer(index, job, asked)


def _answer(index: DiskANNIndex, job: SearchJob, asked: Asked) -> Trace | RecordingError:
    begin = partial(index.begin_search, asked.query, job.options, MetadataFilter.of(job.filter))
    try:
        windows = search_in_windows(begin, every_pool=job.options.gate is None)
    except IndexFormatError:
        raise
    except RetrievalError as error:
        return RecordingError(str(error))
    if not windows[-1].pool.nodes:
        return RecordingError("the filter lets no document through")
    return trace_of_windows(asked.trace_id, asked.query, windows, partial(_numbered_chunk, index))


def _numbered_chunk(index: DiskANNIndex, node: int, distance: float) -> Chunk:
    chunk = index.chunk(node, distance)
    return replace(chunk, metadata={**chunk.metadata, NODE: node})


def _drop_from_page_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
