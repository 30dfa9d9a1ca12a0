"""Builds a DiskANN index over documents, all or nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.diskann.build_folder import (
    building_beside,
    check_target,
    put_in_place,
    unfinished_build,
    write_through,
)
from stream2llm_sdk.retrievers.diskann.build_journal import BuildJournal
from stream2llm_sdk.retrievers.diskann.columns import check_filterable
from stream2llm_sdk.retrievers.diskann.document_store import as_chunk, complete_store, document_line
from stream2llm_sdk.retrievers.diskann.graph_build import BuildOptions, build_graph
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.layout import read_layout
from stream2llm_sdk.retrievers.diskann.manifest import (
    INDEX_FILES,
    FileRecord,
    Manifest,
    Metric,
    check_metric,
    library_versions,
)
from stream2llm_sdk.retrievers.diskann.splitter import PassageSplitter
from stream2llm_sdk.retrievers.embedding import Embedder, WordLlamaEmbedder, embed_vectors
from stream2llm_sdk.retrievers.embedding.protocol import scaled_to_unit, unusable_rows, unusable_vector

__all__ = ["BuildOptions", "BuildStage", "build_index", "unfinished_build"]

# DiskANN has code paths for fixed lengths that pad by themselves and then fail (100 becomes 104); zeros
# behind every vector change no distance.
_DIM_MULTIPLE = 8
# Text of a batch that is cut into passages: about so many characters a token.
_CHARACTERS_A_TOKEN = 4


class BuildStage(StrEnum):
    """What a build does next."""

    EMBED = "embed"
    GRAPH = "graph"
    FINISH = "finish"


def build_index(
    documents: Iterable[Chunk | str | Mapping[str, Any]],
    directory: str | os.PathLike[str],
    *,
    embedder: Embedder | None = None,
    metric: Metric = "cosine",
    splitter: PassageSplitter | None = None,
    filterable: Sequence[str] = (),
    options: BuildOptions | None = None,
    overwrite: bool = False,
    resume: bool = False,
    skip_bad: bool = False,
    on_progress: Callable[[int], None] | None = None,
    on_stage: Callable[[BuildStage, int], None] | None = None,
) -> DiskANNIndex:
    """Builds an index of `documents` in `directory` and opens it.

    All or nothing: the index is built in a hidden folder beside `directory` and renamed when it is complete. A
    build that is killed leaves at most that folder, `.<name>.building…`, which is safe to delete. Blocks for
    the whole build, in a process of its own for DiskANN's part; from a coroutine use `asyncio.to_thread`.

    Memory does not grow with the number of documents, except for DiskANN's own part, which `options.max_memory_gb`
    bounds: above it DiskANN cuts the vectors into overlapping shards, builds a graph of each and merges them.

    Args:
        documents: text, `Chunk`, or mappings with `text` and perhaps `url`, `source` or `id`, `title` and more.
            Read once, a batch at a time. `open_corpus` reads them from files.
        embedder: None means WordLlama (256 dimensions, weights inside its package).
        metric: `cosine` normalises the vectors; `l2` (distance) and `ip` (inner product) take them as they are.
        splitter: cuts documents into passages, which are then what a search finds. None indexes them whole.
        filterable: metadata that searches may filter by: names of fields, or `source` and `title`. 4 or 8 bytes a
            document of memory each.
        overwrite: replaces an index that is already in `directory`, which is moved aside just before the new one
            gets its name.
        resume: keeps what is done when the build ends early, by an error or `kill -9`, and goes on from there the next
            time. The documents must come in the same order again: those that are done are read and compared, and
            neither cut nor embedded again. The result is the same as without the interruption. Further documents behind
            them are taken in until the graph is complete.
        skip_bad: leaves out documents that have no text, and passages whose vector cannot be ranked, and counts them in
            the manifest, instead of ending with an error.
        on_progress: called with the number of documents, or passages, embedded so far.
        on_stage: called with what begins and with how many are embedded by then.

    Raises:
        ConfigurationError: there are no documents, one has no text, `directory` is not empty, the embedder has no
            usable dimensions, what is resumed was begun with other options or other documents, or another process is
            building it.
        RetrievalError: a vector is zero or not finite, DiskANN failed, or the disk is full.
        MissingExtraError: diskannpy, wordllama or the splitter's library is not installed.
    """
    chosen = WordLlamaEmbedder() if embedder is None else embedder
    if not isinstance(chosen, Embedder) or chosen.dim < 1:
        raise ConfigurationError(f"embedder={chosen!r:.80}: give an object with name, dim (1 or more) and embed()")
    if isinstance(documents, (str, bytes, Mapping, Chunk)) or not isinstance(documents, Iterable):
        raise ConfigurationError(
            f"documents is one {type(documents).__name__}; give an iterable of documents, such as a list"
        )
    if find_spec("diskannpy") is None:
        raise MissingExtraError("diskannpy", "diskann")
    path = Path(directory).resolve()
    build = _Build(
        path,
        chosen,
        check_metric(metric),
        splitter,
        check_filterable(filterable),
        options or BuildOptions(),
        skip_bad,
        on_progress or (lambda _: None),
        on_stage or (lambda *_: None),
    )
    check_target(path, overwrite)
    with building_beside(path, keep=resume) as work:
        try:
            build.run(documents, work)
            check_target(path, overwrite)
            put_in_place(work, path)
        except OSError as error:
            kept = "; what is done is kept, and the same call goes on from there" if resume else ""
            raise RetrievalError(f"{error.filename or work}: {error.strerror or error}{kept}") from error
    return DiskANNIndex.open(path, embedder=chosen)


@dataclass(frozen=True, slots=True)
class _Build:
    """One build, with what was asked for."""

    directory: Path
    embedder: Embedder
    metric: Metric
    splitter: PassageSplitter | None
    filterable: tuple[str, ...]
    options: BuildOptions
    skip_bad: bool
    on_progress: Callable[[int], None]
    on_stage: Callable[[BuildStage, int], None]

    def run(self, documents: Iterable[Any], work: Path) -> None:
        """Writes a complete index to `work`."""
        with BuildJournal(work, self._settings(), self._padded_dim) as journal:
            extra = [save(work)] if (save := getattr(self.embedder, "save", None)) is not None else []
            self.on_stage(BuildStage.EMBED, journal.last.num_passages)
            self._embed(documents, journal)
            if journal.last.num_passages == 0:
                raise ConfigurationError("documents is empty: give at least one document to build an index of")
            extra += complete_store(work, self.filterable)
            self.on_stage(BuildStage.GRAPH, journal.last.num_passages)
            graph = self.options.graph
            if journal.graph != graph:
                if journal.graph is not None:
                    raise ConfigurationError(
                        f"the graph in {work} was built with {journal.graph}; give the same options, or delete that "
                        "folder (--restart)"
                    )
                build_graph(work, self.options, self.metric, self._padded_dim, journal.last.num_passages)
                read_layout(work)
                write_through(work)
                journal.complete_graph(graph)
            self.on_stage(BuildStage.FINISH, journal.last.num_passages)
            self._manifest(work, journal, extra).write(work)
            write_through(work)

    @property
    def _padded_dim(self) -> int:
        return -(-self.embedder.dim // _DIM_MULTIPLE) * _DIM_MULTIPLE

    def _settings(self) -> dict[str, Any]:
        return {
            "embedder": self.embedder.name,
            "dim": self.embedder.dim,
            "metric": self.metric,
            "splitter": None if self.splitter is None else self.splitter.settings,
            "filterable": list(self.filterable),
            "skip_bad": self.skip_bad,
            "libraries": library_versions(),
        }

    def _manifest(self, work: Path, journal: BuildJournal, extra: Iterable[Path]) -> Manifest:
        names = [*INDEX_FILES, *(str(path.relative_to(work)) for path in extra)]
        return Manifest(
            embedder=self.embedder.name,
            dim=self.embedder.dim,
            num_documents=journal.last.num_passages,
            files={name: FileRecord.of(work / name) for name in names},
            metric=self.metric,
            embedder_spec=getattr(self.embedder, "spec", None),
            filterable=self.filterable,
            num_sources=journal.num_consumed,
            num_skipped=journal.last.num_skipped + journal.num_skipped_before,
            splitter=None if self.splitter is None else self.splitter.settings,
            graph=self.options.graph,
            libraries=library_versions(),
        )

    def _embed(self, documents: Iterable[Any], journal: BuildJournal) -> None:
        """Passages and their vectors batch by batch, so that memory does not grow with their number."""
        rows = enumerate(documents)
        done = 0
        for record in journal.batches:
            batch = self._take(rows, record.num_sources - done)
            if batch.num_sources != record.num_sources - done or batch.digest != record.sources_digest:
                raise ConfigurationError(
                    f"documents {done} to {record.num_sources - 1} are not those that the build was begun with: give "
                    f"them again in the same order, or begin anew by deleting {unfinished_build(self.directory)} "
                    "(--restart)"
                )
            done = record.num_sources
        while (batch := self._take(rows)).num_sources:
            if journal.graph is not None:
                raise ConfigurationError(
                    f"there are more documents than the {done} of the graph that is built already: give those, or "
                    f"begin anew by deleting {unfinished_build(self.directory)} (--restart)"
                )
            found = self._passages(batch)
            passages, vectors = self._vectors(found)
            journal.append(
                [document_line(chunk, row) for row, chunk in passages],
                vectors,
                sources=batch.num_sources,
                skipped=batch.num_sources - len(batch.chunks) + len(found) - len(passages),
                digest=batch.digest,
            )
            self.on_progress(journal.last.num_passages)
        if journal.num_consumed != journal.last.num_sources:
            journal.complete_documents(journal.last.num_sources, int(getattr(documents, "num_skipped", 0)))

    def _take(self, rows: Iterator[tuple[int, Any]], count: int | None = None) -> _Batch:
        """The next `count` documents, or a batch of them: as many as fill it by their length, if they are to be cut."""
        chunks: list[tuple[int, Chunk]] = []
        num_sources = num_characters = 0
        most = self.options.batch_size if count is None else count
        enough = float("inf")
        if count is None and self.splitter is not None:
            enough = most * self.splitter.max_tokens * _CHARACTERS_A_TOKEN
        while num_sources < most and num_characters < enough and (found := next(rows, None)) is not None:
            num_sources += 1
            row, document = found
            try:
                chunk = as_chunk(document, row)
            except ConfigurationError:
                if not self.skip_bad:
                    raise
                continue
            chunks.append((row, chunk))
            num_characters += len(chunk.text)
        return _Batch(num_sources, chunks)

    def _passages(self, batch: _Batch) -> list[tuple[int, Chunk]]:
        """The passages with the rows of their documents."""
        if self.splitter is None:
            return batch.chunks
        passages = self.splitter.split([chunk for _, chunk in batch.chunks])
        return [(row, passage) for (row, _), found in zip(batch.chunks, passages, strict=True) for passage in found]

    def _vectors(self, passages: list[tuple[int, Chunk]]) -> tuple[list[tuple[int, Chunk]], npt.NDArray[np.float32]]:
        """The passages that have a vector, and the vectors as they are stored."""
        texts = [chunk.text for _, chunk in passages]
        dim = self.embedder.dim
        unit = self.metric == "cosine"
        vectors = embed_vectors(self.embedder, texts) if texts else np.zeros((0, dim), np.float32)
        bad = unusable_rows(vectors, unit=unit)
        if bad and not self.skip_bad:
            place = next(iter(bad))
            raise unusable_vector(self.embedder, f"document {passages[place][0]}", bad[place], texts[place])
        kept = [place for place in range(len(passages)) if place not in bad]
        vectors = vectors[kept]
        stored = np.zeros((len(kept), self._padded_dim), np.float32)
        stored[:, :dim] = scaled_to_unit(vectors) if unit else vectors
        return [passages[place] for place in kept], stored


@dataclass(frozen=True, slots=True)
class _Batch:
    """Documents with their rows in what was given, without those left out; and how many came."""

    num_sources: int
    chunks: list[tuple[int, Chunk]]

    @property
    def digest(self) -> str:
        """Tells whether the documents are the same as those of another time."""
        digest = hashlib.blake2b(digest_size=16)
        for row, chunk in self.chunks:
            digest.update(document_line(chunk, row))
        return digest.hexdigest()
