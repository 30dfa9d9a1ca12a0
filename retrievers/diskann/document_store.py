"""Documents beside an index: one JSON object a line, found by row number with one `pread`."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, IndexFormatError
from stream2llm_sdk.retrievers.diskann.columns import ColumnsWriter
from stream2llm_sdk.retrievers.diskann.shared_file import SharedFile

__all__ = [
    "DOCUMENTS_FILE",
    "OFFSETS_FILE",
    "SOURCE_FIELDS",
    "DocumentStore",
    "as_chunk",
    "complete_store",
    "document_line",
]

DOCUMENTS_FILE = "documents.jsonl"
OFFSETS_FILE = "documents.offsets"

SOURCE_FIELDS = ("url", "source", "id")
"""The fields of a document that say where it comes from; the first that is there counts."""

_OWN_FIELDS = frozenset({"text", "title", "metadata", *SOURCE_FIELDS})


def as_chunk(document: Any, row: int) -> Chunk:
    """A document as a chunk: a `Chunk`, text, or a mapping with `text` and perhaps `url`, `source`, `id`, `title`.

    The chunk's source is the first of `url`, `source` and `id` that is there; other fields become metadata.

    Raises:
        ConfigurationError: the document is none of these, or its text is not text or is blank.
    """
    if isinstance(document, str):
        chunk = Chunk(document, source=f"document-{row}")
    elif isinstance(document, Mapping):
        chunk = _mapping_as_chunk(document, row)
    elif isinstance(document, Chunk):
        chunk = document
    else:
        raise ConfigurationError(
            f"document {row} is a {type(document).__name__}; give text, a Chunk, or a mapping with 'text'"
        )
    if not chunk.text.strip():
        raise ConfigurationError(f"document {row} (source {chunk.source!r}) has no text; leave it out")
    return chunk


def _mapping_as_chunk(document: Mapping[str, Any], row: int) -> Chunk:
    if "text" not in document:
        fields = ", ".join(map(repr, document)) or "none"
        raise ConfigurationError(f"document {row} lacks 'text'; its fields are: {fields:.200}")
    text = document["text"]
    if not isinstance(text, str):
        raise ConfigurationError(f"document {row}: 'text' is {type(text).__name__}, not str: {document!r:.120}")
    source = next((document[name] for name in SOURCE_FIELDS if document.get(name)), f"document-{row}")
    metadata = document.get("metadata")
    extra = {name: value for name, value in document.items() if name not in _OWN_FIELDS}
    # What did not become the source is kept: an id beside a URL.
    extra.update({n: document[n] for n in SOURCE_FIELDS if document.get(n) and str(document[n]) != str(source)})
    extra.update(metadata if isinstance(metadata, Mapping) else {})
    return Chunk(text, source=str(source), title=str(document.get("title") or ""), metadata=extra)


def document_line(chunk: Chunk, row: int) -> bytes:
    """The line of one document. Metadata values that JSON cannot hold are stored as their text.

    Raises:
        ConfigurationError: its metadata cannot be stored; `row` names it in the error.
    """
    record = {"text": chunk.text, "source": chunk.source, "title": chunk.title, "metadata": dict(chunk.metadata)}
    try:
        # ASCII escapes carry NULs and lone surrogates, which UTF-8 could not.
        return json.dumps(record, ensure_ascii=True, default=str).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"document {row}: its metadata cannot be stored as JSON: {error}") from error


def complete_store(directory: Path, filterable: Sequence[str]) -> list[Path]:
    """Reads the documents file once, and writes its offsets and the columns that filters may use.

    Returns:
        The paths of the columns' files.

    Raises:
        ConfigurationError: a value cannot be a filter's, or no document has a column.
    """
    offsets = array("q", [0])
    columns = ColumnsWriter(filterable)
    absent = set(filterable)
    with open(directory / DOCUMENTS_FILE, "rb") as file:
        for line in file:
            offsets.append(offsets[-1] + len(line))
            if filterable:
                record = json.loads(line)
                values = {**record["metadata"], "source": record["source"], "title": record["title"]}
                columns.append(values)
                absent -= values.keys()
    if absent:
        raise ConfigurationError(f"filterable: no document has {min(absent)!r} in its metadata; leave it out")
    np.array(offsets, "<i8").tofile(directory / OFFSETS_FILE)
    return columns.write(directory)


class DocumentStore:
    """Reads documents by row number.

    Raises:
        IndexFormatError: a file is missing, or the two do not fit each other or `num_documents`.
    """

    def __init__(self, directory: Path, num_documents: int) -> None:
        path = directory / OFFSETS_FILE
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise IndexFormatError(f"{path}: cannot be read: {error.strerror}") from error
        if len(raw) != 8 * (num_documents + 1):
            raise IndexFormatError(
                f"{path}: {len(raw)} bytes; {num_documents} documents need {8 * (num_documents + 1)}"
            )
        self._offsets = np.frombuffer(raw, "<i8")
        self._file = SharedFile(directory / DOCUMENTS_FILE)
        ends_right = self._offsets[0] == 0 and self._offsets[-1] == self._file.size_bytes
        if not ends_right or (np.diff(self._offsets) <= 0).any():
            self._file.close()
            raise IndexFormatError(f"{path}: its offsets do not fit {DOCUMENTS_FILE}")

    def read(self, row: int, score: float | None = None) -> Chunk:
        """The document of one row as a chunk.

        Raises:
            IndexFormatError: the line is damaged.
        """
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        try:
            record = json.loads(self._file.read(start, end - start))
            return Chunk(record["text"], record["source"], record["title"], score, record["metadata"])
        except (ValueError, KeyError, TypeError) as error:
            raise IndexFormatError(
                f"{self._file.path}: the line of document {row} (byte {start}) is damaged: {error}"
            ) from error

    def close(self) -> None:
        self._file.close()
