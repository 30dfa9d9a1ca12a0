"""A DiskANN index that documents can be added to and deleted from while it is searched."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.diskann.document_store import SOURCE_FIELDS, as_chunk
from stream2llm_sdk.retrievers.diskann.filters import MetadataFilter
from stream2llm_sdk.retrievers.diskann.manifest import Metric, check_metric
from stream2llm_sdk.retrievers.diskann.memory_graph import MemoryGraph
from stream2llm_sdk.retrievers.diskann.memory_search import MemorySearch
from stream2llm_sdk.retrievers.diskann.search import SearchOptions, SearchStatus
from stream2llm_sdk.retrievers.diskann.slot_table import SlotTable
from stream2llm_sdk.retrievers.diskann.snapshot import Snapshot, read_snapshot, write_snapshot
from stream2llm_sdk.retrievers.embedding import Embedder, WordLlamaEmbedder, embed_unit_vectors

__all__ = ["DynamicDiskANN"]

_EMBEDDED_AT_ONCE = 256
_PAUSE_S = 1e-5

FilterLike = Mapping[str, Any] | MetadataFilter | None


class DynamicDiskANN:
    """An index in memory that grows and shrinks while any number of threads search it.

    Documents have ids: the `id` of a mapping, or a chunk's source. A search that runs while documents are added may
    or may not find them; a document that was deleted is in no context read after `delete()` returned. Everything here
    blocks: from a coroutine use `asyncio.to_thread`, or a `DiskANNRetriever` for searching.

    It holds everything in memory: about `8 * dim + 11 * graph_degree` bytes a document (diskannpy holds a copy of the
    vectors and the graph), and its text.
    What was changed since the last `save()` is lost with the process.

    Args:
        embedder: None means WordLlama.
        metric: "cosine", "l2" or "ip", as for an index on disk.
        graph_degree: `R`, edges of a node.
        complexity: size of the candidate list of an insert; larger makes a better graph, slower.

    Raises:
        ConfigurationError: an option is out of range.
    """

    def __init__(
        self,
        *,
        embedder: Embedder | None = None,
        metric: str = "cosine",
        graph_degree: int = 48,
        complexity: int = 100,
    ) -> None:
        for name, value, most in (("graph_degree", graph_degree, 512), ("complexity", complexity, 10_000)):
            if not isinstance(value, int) or not 4 <= value <= most:
                raise ConfigurationError(f"{name}={value!r}: give an integer from 4 to {most}")
        self.embedder = _checked_embedder(embedder)
        self.metric: Metric = check_metric(metric)
        self._graph = MemoryGraph(
            self.embedder.dim, inner_product=metric == "ip", graph_degree=graph_degree, complexity=complexity
        )
        # `_writing` is held by whoever changes the index, for as long as that takes; `_state` only for moments, by
        # all who read or write the table or the arrays.
        self._writing = threading.Lock()
        self._state = threading.Lock()
        self._is_closed = False
        self._num_texts = 0
        self._free: list[int] = []
        self._num_slots = 0
        self._arrays = self._graph.arrays()
        self._table = SlotTable(self._graph.capacity + 1)

    def __repr__(self) -> str:
        return f"DynamicDiskANN({len(self)} documents, embedder={self.embedder.name!r}, metric={self.metric!r})"

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._table)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._table

    @property
    def deleted_fraction(self) -> float:
        """Share of the graph's nodes that are deleted and not consolidated yet. They cost memory and search time:
        above 0.2 or so `consolidate()` pays."""
        return self._graph.num_deleted / max(self._num_slots - len(self._free), 1)

    def add(self, documents: Iterable[Chunk | str | Mapping[str, Any]], *, replace_existing: bool = False) -> list[str]:
        """Embeds and inserts documents; returns their ids. Each can be found as soon as it is inserted.

        Args:
            documents: mappings with `text` and `id` (or else `url` or `source`), or `Chunk` whose source is the id.
                Those without, and plain text, get an id of their own.
            replace_existing: a document whose id is known takes the old one's place; otherwise that is an error.

        Raises:
            ConfigurationError: a document has no text, or its id is known already. Those before it in `documents`
                may have been inserted.
            RetrievalError: the embedder's vector for one is not finite, or zero; or the index is closed.
        """
        if isinstance(documents, (str, bytes, Mapping, Chunk)) or not isinstance(documents, Iterable):
            raise ConfigurationError(
                f"documents is one {type(documents).__name__}; give an iterable of documents, such as a list"
            )
        ids: list[str] = []
        remaining = iter(documents)
        while batch := list(islice(remaining, _EMBEDDED_AT_ONCE)):
            chunks = [self._as_own_chunk(document, len(ids) + row) for row, document in enumerate(batch)]
            first = len(ids)
            vectors = embed_unit_vectors(
                self.embedder,
                [chunk.text for _, chunk in chunks],
                lambda row, first=first: f"document {first + row}",  # type: ignore[misc]
                unit=self.metric == "cosine",
            )
            for (document_id, chunk), vector in zip(chunks, vectors, strict=True):
                self._insert(document_id, chunk, vector, replace_existing)
                ids.append(document_id)
                # The native insert holds the interpreter lock; an event loop that waits for it has its turn here.
                time.sleep(_PAUSE_S)
        return ids

    def delete(self, document_ids: Iterable[str], *, missing_ok: bool = False) -> int:
        """Deletes documents by id, all or none; returns how many there were.

        Args:
            document_ids: which.
            missing_ok: an id that is not known is no error.

        Raises:
            ConfigurationError: an id is not known, and `missing_ok` is False.
            RetrievalError: the index is closed.
        """
        if isinstance(document_ids, (str, bytes)) or not isinstance(document_ids, Iterable):
            raise ConfigurationError(
                f"document_ids={document_ids!r:.80} is one {type(document_ids).__name__}; give a list of ids"
            )
        wanted = list(dict.fromkeys(document_ids))
        with self._writing:
            self._check_open()
            known = [document_id for document_id in wanted if document_id in self._table]
            unknown = [document_id for document_id in wanted if document_id not in self._table]
            if unknown and not missing_ok:
                raise ConfigurationError(
                    f"{len(unknown)} ids are not in the index, among them {unknown[0]!r:.80}; give missing_ok=True to "
                    "pass them over"
                )
            with self._state:
                slots = self._table.forget(known)
            self._graph.mark_deleted(slots)
            return len(slots)

    def consolidate(self) -> int:
        """Takes deleted documents out of the graph, so that their room is used again; returns how many.

        Runs in a process of its own, a few seconds for 100,000 documents; searches go on, changes wait.

        Raises:
            RetrievalError: that process failed, or the index is closed.
        """
        with self._writing:
            self._check_open()
            freed = self._graph.consolidate()
            with self._state:
                self._free += freed
                self._arrays = self._graph.arrays()
            return len(freed)

    def begin_search(self, query: str, options: SearchOptions | None = None, filter: FilterLike = None) -> MemorySearch:
        """A search that can be stepped; blocks while it embeds the query. Takes and raises what `search` does; see
        `search` for the arguments."""
        if not isinstance(query, str) or not query.strip():
            raise RetrievalError(f"the query is empty: {query!r:.80}")
        checked = MetadataFilter.of(filter)
        unit = self.metric == "cosine"
        vector = embed_unit_vectors(self.embedder, [query], lambda _: "the query", unit=unit, queries=True)[0]
        with self._state:
            self._check_open()
            allowed = self._table.allowed(checked)
            arrays, now = self._arrays, self._table.clock
        return MemorySearch(arrays, vector, options or SearchOptions(), allowed, now)

    def search(self, query: str, options: SearchOptions | None = None, filter: FilterLike = None) -> list[Chunk]:
        """The `k` best documents that pass the filter, best first.

        Args:
            query: the question.
            options: `k` and the search's size; None means `SearchOptions()`.
            filter: as `MetadataFilter` says, over the documents' metadata.

        Raises:
            RetrievalError: the query is empty or the index is closed.
            ConfigurationError: the filter is not written right.
        """
        search = self.begin_search(query, options, filter)
        while search.run() is not SearchStatus.FINISHED:
            pass
        return self.chunks(search)

    def chunks(self, search: MemorySearch, known: dict[int, Chunk] | None = None) -> list[Chunk]:
        """The documents in the pool of `search` that are still there, best first: fewer than `k` if some of them were
        deleted since the search began. `known` is not used."""
        with self._state:
            self._check_open()
            return list(self._table.chunks(search.pool, search.began_at, self.metric))

    def warm_up(self, options: SearchOptions | None = None) -> None:
        """Loads the embedder and the compiled search ahead of the first question; blocks for seconds."""
        self.search("warm up", options)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes everything to `directory`, in a new file set that takes the old one's place at once.

        A crash at any moment leaves the set saved before, or this one. Changes wait meanwhile; searches do not.

        Raises:
            ConfigurationError: `directory` holds something else, cannot be made, or another index is being saved there.
            RetrievalError: it cannot be written; the set saved before is still there.
        """
        with self._writing:
            self._check_open()
            write_snapshot(
                Path(directory),
                Snapshot(
                    embedder=self.embedder.name,
                    metric=self.metric,
                    graph_degree=self._graph.graph_degree,
                    complexity=self._graph.complexity,
                    vectors=self._graph.vectors,
                    neighbours=self._graph.neighbours,
                    degrees=self._graph.degrees,
                    num_slots=self._num_slots,
                    free=tuple(self._free),
                    documents=dict(self._table.documents),
                ),
            )

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, embedder: Embedder | None = None) -> DynamicDiskANN:
        """The index that was saved in `directory`.

        Raises:
            IndexFormatError: there is none, or a file is missing, cut short or changed.
            ConfigurationError: it was made with another embedder.
        """
        path = Path(directory)
        chosen = _checked_embedder(embedder)
        snapshot = read_snapshot(path)
        if (chosen.name, chosen.dim) != (snapshot.embedder, snapshot.vectors.shape[1]):
            raise ConfigurationError(
                f"{path} was made with embedder {snapshot.embedder!r} ({snapshot.vectors.shape[1]} dimensions); "
                f"give embedder= the same, not {chosen.name!r} ({chosen.dim})"
            )
        index = cls(
            embedder=chosen,
            metric=snapshot.metric,
            graph_degree=snapshot.graph_degree,
            complexity=snapshot.complexity,
        )
        index._restore(snapshot)
        return index

    def close(self) -> None:
        """Gives the memory back; every later call is a RetrievalError."""
        with self._writing, self._state:
            self._is_closed = True
            self._table.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RetrievalError("the index is closed")

    def _as_own_chunk(self, document: Any, row: int) -> tuple[str, Chunk]:
        """A document's id and itself as a chunk."""
        chunk = as_chunk(document, row)
        given: Any = None
        if isinstance(document, Mapping):
            given = document.get("id")
            names_itself = any(document.get(field) for field in SOURCE_FIELDS)
        else:
            names_itself = isinstance(document, Chunk) and bool(chunk.source)
        if given is None or given == "":
            given = chunk.source if names_itself else self._new_id()
        return str(given), chunk if names_itself else replace(chunk, source=str(given))

    def _new_id(self) -> str:
        with self._state:
            self._num_texts += 1
            return f"text-{secrets.token_hex(6)}-{self._num_texts}"

    def _insert(self, document_id: str, chunk: Chunk, vector: npt.NDArray[np.float32], replace_existing: bool) -> None:
        with self._writing:
            self._check_open()
            if document_id in self._table and not replace_existing:
                raise ConfigurationError(
                    f"document id {document_id!r:.80} is in the index already; give replace_existing=True to replace it"
                )
            slot = self._empty_slot()
            try:
                self._graph.insert(slot, vector)
            except BaseException:
                self._free.append(slot)
                raise
            with self._state:
                replaced = self._table.put(slot, document_id, chunk)
            self._graph.mark_deleted(replaced)

    def _empty_slot(self) -> int:
        if self._free:
            return self._free.pop()
        slot = self._num_slots
        if slot >= self._graph.capacity:
            self._graph.ensure_capacity(slot + 1)
            with self._state:
                self._adopt_arrays()
        self._num_slots += 1
        return slot

    def _adopt_arrays(self) -> None:
        """Searches go through the graph's present arrays from here on, and the tables are as long."""
        self._arrays = self._graph.arrays()
        self._table.resize(self._graph.capacity + 1)

    def _restore(self, snapshot: Snapshot) -> None:
        gone = set(range(snapshot.num_slots)) - set(snapshot.documents) - set(snapshot.free)
        if snapshot.num_slots:
            self._graph = MemoryGraph.restored(
                snapshot.vectors,
                snapshot.neighbours,
                snapshot.degrees,
                gone,
                inner_product=snapshot.metric == "ip",
                graph_degree=snapshot.graph_degree,
                complexity=snapshot.complexity,
            )
        self._adopt_arrays()
        self._num_slots = snapshot.num_slots
        self._free = list(snapshot.free)
        for slot, (document_id, chunk) in snapshot.documents.items():
            self._table.put(slot, document_id, chunk)


def _checked_embedder(embedder: Embedder | None) -> Embedder:
    if embedder is None:
        return WordLlamaEmbedder()
    if not isinstance(embedder, Embedder) or not isinstance(embedder.dim, int) or embedder.dim < 1:
        raise ConfigurationError(f"embedder={embedder!r:.80}: give an object with name, dim (1 or more) and embed()")
    return embedder
