"""How much an index finds, and how fast, against the size of its search list.

Recall@k is the part of a search's k results that are as near as the exact k-th nearest vector, averaged over queries:
of documents that are equally near, as copies are, one is as good as another. The exact distances come from comparing
the query with every vector in the index, so it is the graph and the quantiser that are judged here, not the embedder.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.layout import SECTOR_BYTES, DiskLayout, graph_path, read_layout
from stream2llm_sdk.retrievers.diskann.manifest import Metric
from stream2llm_sdk.retrievers.diskann.search import BeamSearch, SearchOptions, SearchStatus
from stream2llm_sdk.retrievers.embedding import Embedder, embed_vectors

__all__ = ["Evaluation", "OperatingPoint", "evaluate", "plot_evaluation", "read_queries", "sample_queries"]

DEFAULT_LIST_SIZES = (10, 20, 40, 80, 160, 320)

_BLOCK_BYTES = 32 << 20
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_MAX_QUERY_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """One size of the search list.

    Attributes:
        recall: of the k nearest, 0 to 1, the mean over the queries.
        p50_ms: median time of a search, without embedding the query or reading the documents.
        p99_ms: 99th percentile of it.
        expansions: nodes read from disk a search, the mean.
    """

    search_list_size: int
    recall: float
    p50_ms: float
    p99_ms: float
    expansions: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` measured."""

    k: int
    beam_width: int
    num_queries: int
    num_documents: int
    points: tuple[OperatingPoint, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def evaluate(
    directory: str | os.PathLike[str],
    queries: Sequence[str],
    *,
    k: int = 10,
    list_sizes: Sequence[int] = DEFAULT_LIST_SIZES,
    beam_width: int = 4,
    embedder: Embedder | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Searches an index for every query with every size of the search list, one search at a time.

    Reads all vectors once, in blocks. Sizes below `k` are left out.

    Args:
        directory: the folder of the index.
        queries: questions.
        k: how many documents are to be found.
        list_sizes: sizes `L` of the search list.
        beam_width: `W`, nodes read from disk at once.
        embedder: as for `DiskANNIndex.open`.
        on_progress: called with what begins.

    Raises:
        ConfigurationError: there are no queries, or a number is out of range.
        IndexFormatError: the index cannot be read.
    """
    sizes = sorted({size for size in list_sizes if size >= k})
    if not queries or not sizes:
        raise ConfigurationError(
            f"{len(queries)} queries and list sizes {list(list_sizes)}: give some of k={k} or more"
        )
    options = [SearchOptions(k, size, beam_width, gate=None) for size in sizes]
    tell = on_progress or (lambda _: None)
    path = Path(directory)
    with DiskANNIndex.open(path, embedder=embedder) as index:
        tell("embedding the queries")
        known = _KnownQueries(index.embedder, queries)
    with DiskANNIndex.open(path, embedder=known) as index:
        vectors = np.array([index.embed_query(query) for query in queries])
        tell(f"comparing with all {len(index)} vectors")
        _, distances = exact_nearest(path, vectors, min(k, len(index)), index.metric)
        # What single precision makes of equal distances.
        farthest = distances[:, -1] + 1e-5 * ((vectors**2).sum(1) + abs(distances[:, -1]))
        points = []
        for option in options:
            tell(f"searching with L = {option.search_list_size}")
            points.append(_measure(index, queries, farthest, option))
        return Evaluation(k, beam_width, len(queries), len(index), tuple(points))


class _KnownQueries:
    """The embedder of an index, for questions that it has embedded already: only searches are to be timed."""

    def __init__(self, embedder: Embedder, queries: Sequence[str]) -> None:
        self.name, self.dim = embedder.name, embedder.dim
        self._vectors = dict(zip(queries, embed_vectors(embedder, queries, queries=True), strict=True))

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.array([self._vectors[text] for text in texts], np.float32)


def _measure(
    index: DiskANNIndex, queries: Sequence[str], farthest: npt.NDArray[np.float32], options: SearchOptions
) -> OperatingPoint:
    times_ms, recalls, expansions = [], [], []
    for query in (queries[0], queries[0]):  # compiled, and in the processor's caches
        _run(index, query, options)
    for query, limit in zip(queries, farthest, strict=True):
        search, elapsed_s = _run(index, query, options)
        times_ms.append(1000 * elapsed_s)
        recalls.append(sum(distance <= limit for distance in search.pool.distances) / min(options.k, len(index)))
        expansions.append(search.num_expansions)
    return OperatingPoint(
        options.search_list_size,
        float(np.mean(recalls)),
        float(np.percentile(times_ms, 50)),
        float(np.percentile(times_ms, 99)),
        float(np.mean(expansions)),
    )


def _run(index: DiskANNIndex, query: str, options: SearchOptions) -> tuple[BeamSearch, float]:
    start = time.perf_counter()
    search = index.begin_search(query, options)
    while search.run() is not SearchStatus.FINISHED:
        pass
    return search, time.perf_counter() - start


def exact_nearest(
    directory: Path, queries: npt.NDArray[np.float32], k: int, metric: Metric
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The `k` best nodes of each query by comparison with every vector, best first, and their distances (squared L2, or
    minus the inner product), both of shape `(len(queries), k)`."""
    layout = read_layout(directory)
    best = np.full((len(queries), k), np.inf, np.float32)
    nodes = np.zeros((len(queries), k), np.int64)
    for first, vectors in _stored_vectors(graph_path(directory), layout):
        distances = -(queries @ vectors.T)
        if metric != "ip":
            distances = 2 * distances + (vectors**2).sum(1) + (queries**2).sum(1, keepdims=True)
        numbers = np.broadcast_to(np.arange(first, first + len(vectors)), distances.shape)
        both, all_nodes = np.hstack([best, distances]), np.hstack([nodes, numbers])
        chosen = np.argpartition(both, k - 1, axis=1)[:, :k]
        best, nodes = np.take_along_axis(both, chosen, 1), np.take_along_axis(all_nodes, chosen, 1)
    order = np.argsort(best, axis=1)
    return np.take_along_axis(nodes, order, 1), np.take_along_axis(best, order, 1)


def _stored_vectors(path: Path, layout: DiskLayout) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """The vectors of a graph file in blocks, each with its first node's number."""
    group = layout.nodes_per_sector or 1
    group_bytes = SECTOR_BYTES * layout.sectors_per_node
    step = max(1, _BLOCK_BYTES // group_bytes)
    num_groups = -(-layout.num_nodes // group)
    with open(path, "rb") as file:
        file.seek(SECTOR_BYTES)
        for start in range(0, num_groups, step):
            count = min(step, num_groups - start)
            raw = np.frombuffer(file.read(count * group_bytes), np.uint8).reshape(count, group_bytes)
            nodes = raw[:, : group * layout.node_bytes].reshape(count * group, layout.node_bytes)
            vectors = np.ascontiguousarray(nodes[:, : 4 * layout.dim]).view("<f4")
            yield start * group, vectors[: layout.num_nodes - start * group]


def read_queries(file: Path, limit: int | None = None) -> list[str]:
    """Questions from a file: one a line, or JSON Lines with `query` or `question`.

    Raises:
        ConfigurationError: it cannot be read, or holds none.
    """
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
        if file.suffix in (".jsonl", ".ndjson"):
            lines = [_question(json.loads(line)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{file}: questions cannot be read from it ({error}); give one a line, or JSON Lines with 'query'"
        ) from error
    if not lines:
        raise ConfigurationError(f"{file}: holds no questions")
    return lines[:limit]


def _question(row: dict[str, Any]) -> str:
    return str(row["query"] if "query" in row else row["question"])


def sample_queries(index: DiskANNIndex, count: int, seed: int = 0) -> list[str]:
    """The first sentences of documents drawn at random, in place of questions that nobody has written."""
    rows = np.random.default_rng(seed).permutation(len(index))[:count]
    texts = (index.chunk(int(row), 0.0).text.strip() for row in rows)
    return [_SENTENCE_END.split(text, 1)[0][:_MAX_QUERY_CHARACTERS] for text in texts]


def plot_evaluation(evaluation: Evaluation, file: str | os.PathLike[str]) -> None:
    """Draws recall against latency, a point for each size of the search list.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigurationError: the file's kind is not one that matplotlib writes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots") from error
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    recalls = [point.recall for point in evaluation.points]
    for name, style in (("p50_ms", "o-"), ("p99_ms", "s--")):
        axes.plot([getattr(point, name) for point in evaluation.points], recalls, style, label=name.split("_")[0])
    for point in evaluation.points:
        axes.annotate(
            f"L={point.search_list_size}", (point.p50_ms, point.recall), textcoords="offset points", xytext=(6, -10)
        )
    axes.set(
        xscale="log",
        xlabel="time of a search, ms",
        ylabel=f"recall@{evaluation.k}",
        title=f"{evaluation.num_documents} vectors, {evaluation.num_queries} queries, W = {evaluation.beam_width}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except ValueError as error:
        raise ConfigurationError(f"{os.fspath(file)}: {error}") from error
