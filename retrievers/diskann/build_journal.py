"""What an unfinished build has done so far: its documents and vectors, and a journal that says how much of them holds.

The journal, `journal.jsonl`, has one record a line, each with its own checksum. The first holds the settings that
decide what the vectors are. Then one follows each batch, written only when the batch itself has reached the disk: how
far the documents are consumed, how long the files are, and the checksums of the batch. What lies behind the last record
that holds belongs to nobody and is cut off when a build goes on. So a process may be killed, or the machine lose its
power, at any moment: no batch is lost that was recorded, and none is there twice.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.diskann.document_store import DOCUMENTS_FILE
from stream2llm_sdk.retrievers.diskann.layout import INDEX_PREFIX

__all__ = ["JOURNAL_FILE", "VECTORS_FILE", "BatchRecord", "BuildJournal"]

JOURNAL_FILE = "journal.jsonl"
VECTORS_FILE = f"{INDEX_PREFIX}_vectors.bin"

_VERSION = 1
_VECTORS_HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The state after a batch.

    Attributes:
        num_sources: documents consumed so far, with those left out.
        num_passages: passages written so far.
        num_skipped: documents and passages left out so far.
        documents_bytes: length of the documents file.
        documents_crc32: of this batch's part of it.
        vectors_crc32: of this batch's vectors.
        sources_digest: of this batch's documents as they came.
    """

    num_sources: int = 0
    num_passages: int = 0
    num_skipped: int = 0
    documents_bytes: int = 0
    documents_crc32: int = 0
    vectors_crc32: int = 0
    sources_digest: str = ""


class BuildJournal:
    """The files of a build in `work`, opened to go on behind what is recorded. Close it, or use it in a `with` block.

    Args:
        work: the build's folder.
        settings: what must be the same when a build goes on; JSON.
        dim: of the vectors as they are stored.

    Attributes:
        batches: the records so far, oldest first.
        num_consumed: all documents that there are, once they have all been read; None before.
        graph: the options of a graph that is complete; None before.

    Raises:
        ConfigurationError: the build was begun with other settings.
    """

    def __init__(self, work: Path, settings: Mapping[str, Any], dim: int) -> None:
        self._work = work
        self._row_bytes = 4 * dim
        self.batches: list[BatchRecord] = []
        self.num_consumed: int | None = None
        self.num_skipped_before = 0
        self.graph: dict[str, Any] | None = None
        self._files: list[FileIO] = []
        self._read(json.loads(json.dumps(settings)))
        try:
            self._documents = self._open(DOCUMENTS_FILE)
            self._vectors: FileIO | None = None if self.graph is not None else self._open(VECTORS_FILE)
            self._drop_what_does_not_hold()
            self._journal = self._open(JOURNAL_FILE)
            self._rewrite(settings)
        except BaseException:
            self.close()
            raise

    @property
    def last(self) -> BatchRecord:
        return self.batches[-1] if self.batches else BatchRecord()

    def append(
        self, lines: Sequence[bytes], vectors: npt.NDArray[np.float32], *, sources: int, skipped: int, digest: str
    ) -> None:
        """Writes a batch through to the disk, and then its record.

        Args:
            lines: the passages, as the documents file holds them.
            vectors: float32, shape `(len(lines), dim)`.
            sources: documents that the batch consumed.
            skipped: documents and passages of them that were left out.
            digest: of those documents.

        Raises:
            OSError: the disk is full, or broken. Nothing was recorded then.
        """
        assert self._vectors is not None, "a complete graph takes no more batches"
        text, numbers = b"".join(lines), vectors.astype("<f4", copy=False).tobytes()
        for file, content in ((self._documents, text), (self._vectors, numbers)):
            _write_through(file, content)
        record = BatchRecord(
            self.last.num_sources + sources,
            self.last.num_passages + len(lines),
            self.last.num_skipped + skipped,
            self.last.documents_bytes + len(text),
            zlib.crc32(text),
            zlib.crc32(numbers),
            digest,
        )
        self._write("batch", asdict(record))
        self.batches.append(record)

    def complete_documents(self, num_sources: int, num_skipped_before: int) -> None:
        """Records that there are no more documents, and finishes the vectors' file for DiskANN.

        Args:
            num_sources: documents that were read.
            num_skipped_before: of what was read, rows that never became documents.
        """
        assert self._vectors is not None, "a complete graph has its documents"
        dim = self._row_bytes // 4
        os.pwrite(self._vectors.fileno(), np.array([self.last.num_passages, dim], "<i4").tobytes(), 0)
        os.fdatasync(self._vectors.fileno())
        self._write("documents", {"num_sources": num_sources, "num_skipped_before": num_skipped_before})
        self.num_consumed, self.num_skipped_before = num_sources, num_skipped_before

    def complete_graph(self, options: Mapping[str, Any]) -> None:
        """Records that the graph is complete and on the disk; the vectors, which it holds too, are deleted."""
        self._write("graph", dict(options))
        self.graph = dict(options)
        (self._work / VECTORS_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files; what was recorded stays."""
        for file in self._files:
            file.close()

    def __enter__(self) -> BuildJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, name: str) -> FileIO:
        path = self._work / name
        path.touch()
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 - closed by close()
        self._files.append(file)
        return file

    def _read(self, settings: dict[str, Any]) -> None:
        """Takes in the records up to the first that does not hold."""
        for kind, content in _records(self._work / JOURNAL_FILE):
            if kind == "settings":
                _require_same(self._work, content, {"version": _VERSION, **settings})
            elif kind == "batch":
                self.batches.append(BatchRecord(**content))
            elif kind == "documents":
                self.num_consumed = content["num_sources"]
                self.num_skipped_before = content["num_skipped_before"]
            elif kind == "graph":
                self.graph = content

    def _drop_what_does_not_hold(self) -> None:
        """Cuts the files behind the last batch whose checksums hold; batches behind a damaged one are done again."""
        held = 0
        before = BatchRecord()
        for record in self.batches:
            if not self._holds(before, record):
                break
            held += 1
            before = record
        if held < len(self.batches):
            del self.batches[held:]
            self.num_consumed = self.graph = None
            if self._vectors is None:
                # The vectors went when the graph was complete: everything is done again.
                self.batches.clear()
                self._vectors = self._open(VECTORS_FILE)
        _cut(self._documents, self.last.documents_bytes)
        if self._vectors is not None:
            _cut(self._vectors, _VECTORS_HEADER_BYTES + self.last.num_passages * self._row_bytes)

    def _holds(self, before: BatchRecord, record: BatchRecord) -> bool:
        start, end = before.documents_bytes, record.documents_bytes
        if _crc32(self._documents, start, end) != record.documents_crc32:
            return False
        if self._vectors is None:
            return True
        start, end = (
            _VECTORS_HEADER_BYTES + rows * self._row_bytes for rows in (before.num_passages, record.num_passages)
        )
        return _crc32(self._vectors, start, end) == record.vectors_crc32

    def _rewrite(self, settings: Mapping[str, Any]) -> None:
        """The journal again with the records that hold, so that nothing broken lies between them and new ones."""
        path = self._work / JOURNAL_FILE
        lines = [_line("settings", {"version": _VERSION, **settings})]
        lines += [_line("batch", asdict(record)) for record in self.batches]
        if self.num_consumed is not None:
            done = {"num_sources": self.num_consumed, "num_skipped_before": self.num_skipped_before}
            lines.append(_line("documents", done))
        if self.graph is not None:
            lines.append(_line("graph", self.graph))
        new = path.with_suffix(".new")
        with open(new, "wb") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        self._journal.close()
        self._journal = self._open(JOURNAL_FILE)
        self._journal.seek(0, os.SEEK_END)

    def _write(self, kind: str, content: Mapping[str, Any]) -> None:
        _write_through(self._journal, _line(kind, content))


def _write_through(file: FileIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    os.fdatasync(file.fileno())


def _line(kind: str, content: Mapping[str, Any]) -> bytes:
    record = json.dumps([kind, content])
    return json.dumps({"crc32": zlib.crc32(record.encode()), "record": record}).encode() + b"\n"


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The records of a journal up to the first that is damaged or cut; none where there is no journal."""
    found: list[tuple[str, dict[str, Any]]] = []
    if not path.exists():
        return found
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            checked = json.loads(line)
            holds = line.endswith(b"\n") and zlib.crc32(checked["record"].encode()) == checked["crc32"]
        except (ValueError, KeyError, TypeError, AttributeError):
            holds = False
        if not holds:
            break
        kind, content = json.loads(checked["record"])
        found.append((kind, content))
    return found if found and found[0][0] == "settings" else []


def _require_same(work: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in sorted({*begun, *now}):
        if begun.get(name) != now.get(name):
            raise ConfigurationError(
                f"the build in {work} was begun with {name}={begun.get(name)!r} and cannot go on with "
                f"{now.get(name)!r}: give the same, or begin again by deleting that folder (--restart)"
            )


def _crc32(file: FileIO, start: int, end: int) -> int:
    checksum = 0
    while start < end and (piece := os.pread(file.fileno(), min(1 << 20, end - start), start)):
        checksum = zlib.crc32(piece, checksum)
        start += len(piece)
    return checksum if start == end else -1


def _cut(file: FileIO, num_bytes: int) -> None:
    """Makes a file so long and goes to its end; the vectors' header is zeros until it is known."""
    os.ftruncate(file.fileno(), num_bytes)
    file.seek(num_bytes)
