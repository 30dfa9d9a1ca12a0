"""A DiskANN index over documents: open, search."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, RetrievalError
from stream2llm_sdk.retrievers.diskann.columns import CodedColumn, MetadataColumns
from stream2llm_sdk.retrievers.diskann.document_store import DocumentStore, as_chunk
from stream2llm_sdk.retrievers.diskann.filters import AllowedNodes, MetadataFilter
from stream2llm_sdk.retrievers.diskann.layout import INDEX_PREFIX, METADATA_FILE, DiskLayout, graph_path, read_layout
from stream2llm_sdk.retrievers.diskann.manifest import Manifest, Metric
from stream2llm_sdk.retrievers.diskann.scores import score_of
from stream2llm_sdk.retrievers.diskann.search import BeamSearch, Graph, SearchOptions, SearchStatus
from stream2llm_sdk.retrievers.diskann.shared_file import SharedFile
from stream2llm_sdk.retrievers.embedding import Embedder, WordLlamaEmbedder, embed_unit_vectors, embedder_of

__all__ = ["DiskANNIndex"]

_MAX_KEPT_FILTERS = 64

FilterLike = Mapping[str, Any] | MetadataFilter | None


class _Documents(Protocol):
    def read(self, row: int, score: float | None = None) -> Chunk: ...

    def close(self) -> None: ...


class DiskANNIndex:
    """An open index. Any number of threads may search it at once.

    It is made by `build_index()`, `DiskANNIndex.open()` or `DiskANNIndex.open_native()`; close it with `close()` or use
    it in a `with` block. Its product quantiser's codes (a quarter of a byte a dimension and document) are in memory;
    vectors, graph and documents stay on disk.

    Attributes:
        metric: what `score` is: the cosine similarity, minus the L2 distance ("l2"), or the inner product ("ip").
    """

    def __init__(
        self,
        directory: Path,
        layout: DiskLayout,
        file: SharedFile,
        documents: _Documents,
        columns: MetadataColumns,
        embedder: Embedder,
        metric: Metric,
    ) -> None:
        """Use `DiskANNIndex.open()`."""
        self.directory = directory
        self.embedder = embedder
        self.metric: Metric = metric
        self._documents = documents
        self._columns = columns
        self._graph = Graph(layout, file)
        self._allowed: OrderedDict[str, AllowedNodes] = OrderedDict()
        self._allowed_lock = threading.Lock()

    def __repr__(self) -> str:
        return (
            f"DiskANNIndex({str(self.directory)!r}, {len(self)} documents, embedder={self.embedder.name!r}, "
            f"metric={self.metric!r})"
        )

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, embedder: Embedder | None = None) -> DiskANNIndex:
        """Opens an index and checks its files; blocks while it reads the quantiser's codes.

        Args:
            directory: the folder of the index.
            embedder: the one that the index was built with. None makes the one that the manifest names, or
                WordLlama.

        Raises:
            IndexFormatError: a file is missing, cut short, changed, or of another version.
            ConfigurationError: the index was built with another embedder.
        """
        path = Path(directory)
        manifest = Manifest.read(path)
        chosen = _default_embedder(path, manifest) if embedder is None else embedder
        if (chosen.name, chosen.dim) != (manifest.embedder, manifest.dim):
            raise ConfigurationError(
                f"{path} was built with embedder {manifest.embedder!r} ({manifest.dim} dimensions); "
                f"give embedder= the same, not {chosen.name!r} ({chosen.dim})"
            )
        layout = read_layout(path)
        if layout.num_nodes != manifest.num_documents or layout.dim < manifest.dim:
            raise IndexFormatError(
                f"{path / METADATA_FILE}: {layout.num_nodes} vectors of {layout.dim} dimensions, expected "
                f"{manifest.num_documents} of at least {manifest.dim}"
            )
        if layout.inner_product != (manifest.metric == "ip"):
            raise IndexFormatError(f"{path / METADATA_FILE}: its metric is not the manifest's, {manifest.metric!r}")
        columns = MetadataColumns.open(path)
        for name, column in columns.items():
            length = len(column.codes if isinstance(column, CodedColumn) else column.numbers)
            if length != manifest.num_documents:
                raise IndexFormatError(
                    f"{path}: column {name!r} has {length} values for {manifest.num_documents} documents"
                )
        documents = DocumentStore(path, manifest.num_documents)
        try:
            file = SharedFile(graph_path(path))
        except IndexFormatError:
            documents.close()
            raise
        return cls(path, layout, file, documents, columns, chosen, manifest.metric)

    @classmethod
    def open_native(
        cls,
        directory: str | os.PathLike[str],
        documents: Sequence[Chunk | str | Mapping[str, Any]],
        *,
        embedder: Embedder,
        prefix: str = INDEX_PREFIX,
        vectors_are_unit: bool = True,
    ) -> DiskANNIndex:
        """Opens an index that diskannpy's own `build_disk_index` made, with the documents that its rows stand for.

        Args:
            directory: the folder of the index.
            documents: one for each row, in the order of the vectors; read when they are found. Filters are not
                available.
            embedder: makes vectors of the same space as those in the index.
            prefix: the index's `index_prefix`.
            vectors_are_unit: for an index with metric `l2`, whether its vectors have length 1, so that the score is
                their cosine similarity; otherwise it is minus the L2 distance.

        Raises:
            IndexFormatError: a file is missing, cut short, or of a metric, type or version that cannot be searched.
            ConfigurationError: the documents or the embedder's dimensions do not fit the index.
        """
        path = Path(directory)
        layout = read_layout(path, prefix)
        if len(documents) != layout.num_nodes:
            raise ConfigurationError(
                f"{path} holds {layout.num_nodes} vectors; give as many documents, not {len(documents)}"
            )
        if embedder.dim > layout.dim:
            raise ConfigurationError(
                f"{path} holds vectors of {layout.dim} dimensions; embedder {embedder.name!r} makes {embedder.dim}"
            )
        metric: Metric = "ip" if layout.inner_product else "cosine" if vectors_are_unit else "l2"
        file = SharedFile(graph_path(path, prefix))
        return cls(path, layout, file, _GivenDocuments(documents), MetadataColumns(()), embedder, metric)

    def __len__(self) -> int:
        """Number of documents."""
        return self._graph.layout.num_nodes

    def embed_query(self, query: str) -> npt.NDArray[np.float32]:
        """The query's vector (of length 1 for the cosine metric), shape `(dim of the graph,)`.

        Raises:
            RetrievalError: the query is empty, or the embedder gives it no direction.
        """
        if not isinstance(query, str) or not query.strip():
            raise RetrievalError(f"the query is empty: {query!r:.80}")
        unit = self.metric == "cosine"
        vector = embed_unit_vectors(self.embedder, [query], lambda _: "the query", unit=unit, queries=True)[0]
        return np.pad(vector, (0, self._graph.layout.dim - len(vector)))

    def allowed(self, filter: FilterLike) -> AllowedNodes | None:
        """The nodes that a filter allows, kept for the next search with the same filter; None for no filter.

        Raises:
            ConfigurationError: the filter is not written right, or the index has no such column.
        """
        checked = MetadataFilter.of(filter)
        if checked is None:
            return None
        with self._allowed_lock:
            known = self._allowed.get(checked.key)
            if known is not None:
                self._allowed.move_to_end(checked.key)
                return known
        allowed = AllowedNodes(checked.mask(self._columns))
        with self._allowed_lock:
            self._allowed[checked.key] = allowed
            if len(self._allowed) > _MAX_KEPT_FILTERS:
                self._allowed.popitem(last=False)
        return allowed

    def begin_search(self, query: str, options: SearchOptions | None = None, filter: FilterLike = None) -> BeamSearch:
        """A search that can be stepped; blocks while it embeds the query. Raises as `search` does; see `search` for
        the arguments."""
        allowed = self.allowed(filter)
        return BeamSearch(self._graph, self.embed_query(query), options or SearchOptions(), allowed)

    def search(self, query: str, options: SearchOptions | None = None, filter: FilterLike = None) -> list[Chunk]:
        """The `k` best documents that pass the filter, best first, in one call.

        Args:
            query: the question.
            options: `k` and the search's size; None means `SearchOptions()`.
            filter: as `MetadataFilter` says, over the columns that the index was built with.

        Raises:
            RetrievalError: the query is empty or the index is closed.
            ConfigurationError: the filter is not written right, or the index has no such column.
            IndexFormatError: a file was cut short or is damaged.
        """
        search = self.begin_search(query, options, filter)
        while search.run() is not SearchStatus.FINISHED:
            pass
        return self.chunks(search)

    def chunks(self, search: BeamSearch, known: dict[int, Chunk] | None = None) -> list[Chunk]:
        """The documents in the pool of `search`, best first; those in `known` are not read again, the others added to
        it."""
        known = {} if known is None else known
        pool = search.pool
        for node, distance in zip(pool.nodes, pool.distances, strict=True):
            if node not in known:
                known[node] = self.chunk(node, distance)
        return [known[node] for node in pool.nodes]

    def warm_up(self, options: SearchOptions | None = None) -> None:
        """Loads the embedder and the compiled search ahead of the first question; blocks for seconds."""
        self.embedder.embed(["warm up"])
        anywhere = np.zeros(self._graph.layout.dim, np.float32)
        BeamSearch(self._graph, anywhere, options or SearchOptions()).advance(1)

    def chunk(self, node: int, distance: float) -> Chunk:
        """The document of a `node`, with the score for this `distance` in the graph."""
        return self._documents.read(node, score_of(distance, self.metric))

    def close(self) -> None:
        """Closes the files. A search still running ends with a RetrievalError at its next step."""
        self._graph.file.close()
        self._documents.close()

    def __enter__(self) -> DiskANNIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _default_embedder(directory: Path, manifest: Manifest) -> Embedder:
    spec = manifest.embedder_spec
    if spec is not None and spec.startswith("endpoint:"):
        # A folder from elsewhere must not choose where questions, and a key, are sent.
        raise ConfigurationError(
            f"{directory} was built with an endpoint's embedder, {spec!r:.200}; give it as embedder="
        )
    return WordLlamaEmbedder() if spec is None else embedder_of(spec, directory)


class _GivenDocuments:
    """Documents that the caller holds."""

    def __init__(self, documents: Sequence[Chunk | str | Mapping[str, Any]]) -> None:
        self._documents = documents

    def read(self, row: int, score: float | None = None) -> Chunk:
        return replace(as_chunk(self._documents[row], row), score=score)

    def close(self) -> None:
        pass
