"""A DiskANN index over documents: build, open, search."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, RetrievalError
from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_files
from stream2llm_sdk.retrievers.diskann.document_store import DocumentStore
from stream2llm_sdk.retrievers.diskann.layout import GRAPH_FILE, METADATA_FILE, DiskLayout, read_layout
from stream2llm_sdk.retrievers.diskann.manifest import Manifest
from stream2llm_sdk.retrievers.diskann.search import BeamSearch, Graph, SearchOptions, SearchStatus
from stream2llm_sdk.retrievers.diskann.shared_file import SharedFile
from stream2llm_sdk.retrievers.embedding import Embedder, WordLlamaEmbedder, embed_unit_vectors

__all__ = ["DiskANNIndex", "build_index"]


class DiskANNIndex:
    """An open index. Any number of threads may search it at once.

    Get one from `build_index()` or `DiskANNIndex.open()`; close it with `close()` or use it in a `with` block.
    Its product quantiser's codes (a quarter of a byte a dimension and document) are in memory; vectors, graph
    and documents stay on disk.
    """

    def __init__(self, directory: Path, manifest: Manifest, layout: DiskLayout, embedder: Embedder) -> None:
        """Use `DiskANNIndex.open()`."""
        self.directory = directory
        self.embedder = embedder
        self._manifest = manifest
        self._documents = DocumentStore(directory, manifest.num_documents)
        try:
            self._graph = Graph(layout, SharedFile(directory / GRAPH_FILE))
        except IndexFormatError:
            self._documents.close()
            raise

    def __repr__(self) -> str:
        return f"DiskANNIndex({str(self.directory)!r}, {len(self)} documents, embedder={self._manifest.embedder!r})"

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, embedder: Embedder | None = None) -> DiskANNIndex:
        """Opens an index and checks its files; blocks while it reads the quantiser's codes.

        Args:
            embedder: the one that the index was built with. None means WordLlama.

        Raises:
            IndexFormatError: a file is missing, cut short, changed, or of another version.
            ConfigurationError: the index was built with another embedder.
        """
        path = Path(directory)
        manifest = Manifest.read(path)
        chosen = WordLlamaEmbedder() if embedder is None else embedder
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
        return cls(path, manifest, layout, chosen)

    def __len__(self) -> int:
        """Number of documents."""
        return self._manifest.num_documents

    def embed_query(self, query: str) -> npt.NDArray[np.float32]:
        """The query's unit vector, shape `(dim of the graph,)`.

        Raises:
            RetrievalError: the query is empty, or the embedder gives it no direction.
        """
        if not isinstance(query, str) or not query.strip():
            raise RetrievalError(f"the query is empty: {query!r:.80}")
        vector = embed_unit_vectors(self.embedder, [query], lambda _: "the query")[0]
        return np.pad(vector, (0, self._graph.layout.dim - len(vector)))

    def begin_search(self, query: str, options: SearchOptions | None = None) -> BeamSearch:
        """A search that can be stepped; blocks while it embeds the query. Raises as `search` does."""
        return BeamSearch(self._graph, self.embed_query(query), options or SearchOptions())

    def search(self, query: str, options: SearchOptions | None = None) -> list[Chunk]:
        """The `k` most similar documents, best first, in one call; `score` is the cosine similarity.

        Raises:
            RetrievalError: the query is empty or the index is closed.
            IndexFormatError: a file was cut short or is damaged.
        """
        search = self.begin_search(query, options)
        while search.run() is not SearchStatus.FINISHED:
            pass
        pool = search.pool
        return [self.chunk(*found) for found in zip(pool.nodes, pool.distances, strict=True)]

    def warm_up(self, options: SearchOptions | None = None) -> None:
        """Loads the embedder and the compiled search ahead of the first question; blocks for seconds."""
        self.embedder.embed(["warm up"])
        anywhere = np.zeros(self._graph.layout.dim, np.float32)
        BeamSearch(self._graph, anywhere, options or SearchOptions()).advance(1)

    def chunk(self, node: int, distance: float) -> Chunk:
        """The document of a node, with the cosine similarity for this squared L2 distance as its score."""
        return self._documents.read(node, 1 - distance / 2)

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


def build_index(
    documents: Iterable[Chunk | str | Mapping[str, Any]],
    directory: str | os.PathLike[str],
    *,
    embedder: Embedder | None = None,
    options: BuildOptions | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> DiskANNIndex:
    """Builds an index of `documents` in `directory` and opens it.

    All or nothing: the index is built in a hidden folder beside `directory` and renamed when it is complete. A
    build that is killed leaves at most that folder, `.<name>.building-…`, which is safe to delete. Blocks for
    the whole build, in a process of its own for DiskANN's part; from a coroutine use `asyncio.to_thread`.

    Args:
        documents: text, `Chunk`, or mappings with `text` and perhaps `url`, `source` or `id`, `title` and more.
            Read once, a batch at a time.
        embedder: None means WordLlama (256 dimensions, weights inside its package).
        overwrite: replaces an index that is already in `directory`, which is moved aside just before the new one
            gets its name.
        on_progress: called with the number of documents embedded so far.

    Raises:
        ConfigurationError: there are no documents, one has no text, `directory` is not empty, or the embedder has no
            usable dimensions.
        RetrievalError: a vector is zero or not finite, or DiskANN failed.
        MissingExtraError: diskannpy or wordllama is not installed.
    """
    chosen = WordLlamaEmbedder() if embedder is None else embedder
    if not isinstance(chosen, Embedder) or chosen.dim < 1:
        raise ConfigurationError(f"embedder={chosen!r:.80}: give an object with name, dim (1 or more) and embed()")
    path = Path(directory).resolve()
    build_files(
        documents,
        path,
        chosen,
        options or BuildOptions(),
        overwrite=overwrite,
        on_progress=on_progress,
    )
    return DiskANNIndex.open(path, embedder=chosen)
