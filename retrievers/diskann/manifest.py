"""The manifest of an index directory: written last, checked first."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from stream2llm_sdk.errors import ConfigurationError, IndexFormatError
from stream2llm_sdk.retrievers.diskann.document_store import DOCUMENTS_FILE, OFFSETS_FILE
from stream2llm_sdk.retrievers.diskann.layout import GRAPH_FILE, METADATA_FILE, PQ_CODES_FILE, PQ_PIVOTS_FILE

__all__ = [
    "INDEX_FILES",
    "MANIFEST_FILE",
    "METRICS",
    "FileRecord",
    "Manifest",
    "Metric",
    "check_metric",
    "library_versions",
]

Metric = Literal["cosine", "l2", "ip"]
"""How vectors are compared: by their angle (they are stored with length 1), by their distance, or by their inner
product."""

METRICS: tuple[Metric, ...] = get_args(Metric)

MANIFEST_FILE = "manifest.json"
INDEX_FILES = (METADATA_FILE, GRAPH_FILE, PQ_PIVOTS_FILE, PQ_CODES_FILE, DOCUMENTS_FILE, OFFSETS_FILE)

_FORMAT = "stream2llm-diskann"
_VERSION = 2
# Version 1 knew cosine only, and nothing of how the index was built.
_READABLE_VERSIONS = (1, 2)
_BUILD_IT_AGAIN = "build the index again: build_index(), or `stream2llm index build`"

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
        embedder: name of the embedder whose vectors the index holds; normalised to length 1 where the metric is cosine.
        dim: the embedder's dimensions; the graph's are padded with zeros to a multiple of 8.
        num_documents: what a search finds: documents, or the passages that they were cut into.
        files: every file of the index by its path in the directory.
        metric: see `Metric`.
        embedder_spec: what `embedder_of` makes the embedder of; None for one that it does not know.
        filterable: columns that filters may use.
        num_sources: documents that were read.
        num_skipped: documents or passages that were left out because they could not be used.
        splitter: the splitter's settings; None where documents were not cut.
        graph: the options that DiskANN built its graph with.
        libraries: versions of what built the index.
    """

    embedder: str
    dim: int
    num_documents: int
    files: dict[str, FileRecord]
    metric: Metric = "cosine"
    embedder_spec: str | None = None
    filterable: tuple[str, ...] = ()
    num_sources: int | None = None
    num_skipped: int = 0
    splitter: Mapping[str, Any] | None = None
    graph: Mapping[str, Any] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Of all files on disk, without the manifest."""
        return sum(record.size_bytes for record in self.files.values())

    def write(self, directory: Path) -> None:
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "metric": self.metric,
            "embedder": self.embedder,
            "embedder_spec": self.embedder_spec,
            "dim": self.dim,
            "num_documents": self.num_documents,
            "num_sources": self.num_sources,
            "num_skipped": self.num_skipped,
            "splitter": None if self.splitter is None else dict(self.splitter),
            "filterable": list(self.filterable),
            "graph": dict(self.graph),
            "libraries": dict(self.libraries),
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
        except (ValueError, RecursionError) as error:
            raise IndexFormatError(f"{path}: not JSON ({error}); {_BUILD_IT_AGAIN}") from error
        manifest = cls._parse(path, content)
        for name, record in manifest.files.items():
            _check_file(directory / name, record)
        return manifest

    @classmethod
    def _parse(cls, path: Path, content: Any) -> Manifest:
        try:
            if content["format"] != _FORMAT or content["version"] not in _READABLE_VERSIONS:
                raise IndexFormatError(
                    f"{path}: format {content['format']!r} version {content['version']!r}, "
                    f"expected {_FORMAT!r} version {_VERSION}; {_BUILD_IT_AGAIN}"
                )
            if content["metric"] not in METRICS:
                raise IndexFormatError(f"{path}: metric {content['metric']!r}, expected one of {', '.join(METRICS)}")
            files = content["files"]
            return cls(
                embedder=str(content["embedder"]),
                dim=_positive(content["dim"]),
                num_documents=_positive(content["num_documents"]),
                files={
                    _own_file(name): FileRecord(int(files[name]["bytes"]), int(files[name]["crc32"]))
                    for name in dict.fromkeys((*INDEX_FILES, *files))
                },
                metric=content["metric"],
                embedder_spec=_optional(content, "embedder_spec", str),
                filterable=tuple(map(str, content.get("filterable", ()))),
                num_sources=_optional(content, "num_sources", int),
                num_skipped=int(content.get("num_skipped", 0)),
                splitter=_optional(content, "splitter", dict),
                graph=dict(content.get("graph", {})),
                libraries=dict(content.get("libraries", {})),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise IndexFormatError(
                f"{path}: incomplete or damaged ({type(error).__name__}: {error}); {_BUILD_IT_AGAIN}"
            ) from error


def check_metric(metric: str) -> Metric:
    """Raises ConfigurationError when there is no such metric."""
    for known in METRICS:
        if metric == known:
            return known
    raise ConfigurationError(f"metric={metric!r}: give one of {', '.join(METRICS)}")


def library_versions() -> dict[str, str]:
    """The versions of the libraries that decide what an index holds, those that are installed."""
    versions = {}
    for name in ("stream2llm-sdk", "diskannpy-rust", "wordllama", "sentence-transformers", "semantic-text-splitter"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _own_file(name: str) -> str:
    if name.startswith("/") or ".." in Path(name).parts:
        raise ValueError(f"file {name!r} is outside the index")
    return name


def _optional(content: Mapping[str, Any], name: str, kind: type) -> Any:
    value = content.get(name)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name!r} is {value!r:.80}, not {kind.__name__}")
    return value


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
