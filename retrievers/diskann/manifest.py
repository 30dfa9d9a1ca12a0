"""The manifest of an index directory: written last, checked first."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import IndexFormatError
from stream2llm_sdk.retrievers.diskann.document_store import DOCUMENTS_FILE, OFFSETS_FILE
from stream2llm_sdk.retrievers.diskann.layout import GRAPH_FILE, METADATA_FILE, PQ_CODES_FILE, PQ_PIVOTS_FILE

__all__ = ["INDEX_FILES", "MANIFEST_FILE", "FileRecord", "Manifest"]

MANIFEST_FILE = "manifest.json"
INDEX_FILES = (METADATA_FILE, GRAPH_FILE, PQ_PIVOTS_FILE, PQ_CODES_FILE, DOCUMENTS_FILE, OFFSETS_FILE)

_FORMAT = "stream2llm-diskann"
_VERSION = 1
_BUILD_IT_AGAIN = "build the index again with build_index()"

# Opening an index reads the other files whole anyway; of these two, which may be huge, only the beginning.
_CHECKED_BY_BEGINNING = (GRAPH_FILE, DOCUMENTS_FILE)
_BEGINNING_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size, and the CRC-32 of its contents (for the graph and the documents: of their first 64 KiB)."""

    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Raises OSError when the file cannot be read."""
        left = _BEGINNING_BYTES if path.name in _CHECKED_BY_BEGINNING else -1
        checksum = 0
        with open(path, "rb") as file:
            while piece := file.read(1 << 20 if left < 0 else left):
                checksum = zlib.crc32(piece, checksum)
                if left >= 0:
                    break
        return cls(path.stat().st_size, checksum)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an index holds.

    Attributes:
        embedder: name of the embedder whose vectors the index holds, normalised to length 1.
        dim: the embedder's dimensions; the graph's are padded with zeros to a multiple of 8.
    """

    embedder: str
    dim: int
    num_documents: int
    files: dict[str, FileRecord]

    def write(self, directory: Path) -> None:
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "metric": "cosine",
            "embedder": self.embedder,
            "dim": self.dim,
            "num_documents": self.num_documents,
            "files": {name: {"bytes": r.size_bytes, "crc32": r.crc32} for name, r in self.files.items()},
        }
        (directory / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads the manifest and checks every file of the index against it.

        Raises:
            IndexFormatError: the directory or a file is missing, cut short, changed or of another version.
        """
        path = directory / MANIFEST_FILE
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise IndexFormatError(
                f"{path} does not exist: {directory} is no index, or its build did not finish; {_BUILD_IT_AGAIN}"
            ) from None
        except OSError as error:
            raise IndexFormatError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise IndexFormatError(f"{path}: not JSON ({error}); {_BUILD_IT_AGAIN}") from error
        manifest = cls._parse(path, content)
        for name in INDEX_FILES:
            _check_file(directory / name, manifest.files[name])
        return manifest

    @classmethod
    def _parse(cls, path: Path, content: Any) -> Manifest:
        try:
            if content["format"] != _FORMAT or content["version"] != _VERSION:
                raise IndexFormatError(
                    f"{path}: format {content['format']!r} version {content['version']!r}, "
                    f"expected {_FORMAT!r} version {_VERSION}; {_BUILD_IT_AGAIN}"
                )
            if content["metric"] != "cosine":
                raise IndexFormatError(f"{path}: metric {content['metric']!r}, expected 'cosine'")
            return cls(
                embedder=str(content["embedder"]),
                dim=_positive(content["dim"]),
                num_documents=_positive(content["num_documents"]),
                files={
                    name: FileRecord(int(content["files"][name]["bytes"]), int(content["files"][name]["crc32"]))
                    for name in INDEX_FILES
                },
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IndexFormatError(
                f"{path}: incomplete or damaged ({type(error).__name__}: {error}); {_BUILD_IT_AGAIN}"
            ) from error


def _positive(number: Any) -> int:
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"{number!r} is not a positive integer")
    return number


def _check_file(path: Path, expected: FileRecord) -> None:
    try:
        actual = FileRecord.of(path)
    except OSError as error:
        raise IndexFormatError(f"{path}: cannot be read: {error.strerror}; {_BUILD_IT_AGAIN}") from error
    if actual.size_bytes != expected.size_bytes:
        raise IndexFormatError(
            f"{path}: {actual.size_bytes} bytes, expected {expected.size_bytes}: cut short or replaced; "
            f"{_BUILD_IT_AGAIN}"
        )
    if actual.crc32 != expected.crc32:
        raise IndexFormatError(
            f"{path}: CRC-32 {actual.crc32:#010x}, expected {expected.crc32:#010x}: changed, or of another "
            f"index; {_BUILD_IT_AGAIN}"
        )
