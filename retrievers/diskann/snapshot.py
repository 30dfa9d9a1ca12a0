"""A dynamic index on disk: whole sets of files, and one small file that names the set that counts.

`CURRENT` holds the name of a folder beside it and is replaced in one step (`rename`) when a new folder is complete
and has reached the disk, as LevelDB does. Folders that it does not name are left-overs, removed by the next save.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, RetrievalError
from stream2llm_sdk.files import FolderLock
from stream2llm_sdk.retrievers.diskann.document_store import (
    DOCUMENTS_FILE,
    OFFSETS_FILE,
    DocumentStore,
    complete_store,
    document_line,
)
from stream2llm_sdk.retrievers.diskann.manifest import FileRecord, Metric, check_metric

__all__ = ["Snapshot", "read_snapshot", "write_snapshot"]

_CURRENT = "CURRENT"
_PREFIX = "snapshot-"
_HEAD = "snapshot.json"
_FORMAT = "stream2llm-dynamic-diskann"
_VERSION = 1
_ARRAYS = ("vectors", "neighbours", "degrees", "free", "slots")
_FILES = (*(f"{name}.npy" for name in _ARRAYS), DOCUMENTS_FILE, OFFSETS_FILE, "ids.json")


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a dynamic index holds. The arrays are by slot; their last row is the graph's start node.

    Attributes:
        num_slots: slots that were ever used, from 0.
        free: slots among them that are empty.
        documents: id and document by slot; a slot that is neither free nor here is deleted and still in the graph.
    """

    embedder: str
    metric: Metric
    graph_degree: int
    complexity: int
    vectors: npt.NDArray[np.float32]
    neighbours: npt.NDArray[np.uint32]
    degrees: npt.NDArray[np.int32]
    num_slots: int
    free: tuple[int, ...]
    documents: dict[int, tuple[str, Chunk]]


def write_snapshot(directory: Path, snapshot: Snapshot) -> None:
    """Writes a new set to `directory`, names it in `CURRENT`, and removes the others.

    Raises:
        ConfigurationError: `directory` holds something else, cannot be made, or another set is being written there.
        RetrievalError: it cannot be written; the set before is still there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(directory)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be a folder: {error.strerror}; name another folder") from error
    with lock:
        try:
            _replace_set(directory, snapshot)
        except OSError as error:
            raise RetrievalError(f"{error.filename or directory}: cannot be written: {error.strerror}") from error


def _replace_set(directory: Path, snapshot: Snapshot) -> None:
    old = list(directory.iterdir())
    if not all(path.name == _CURRENT or path.name.startswith((_PREFIX, f".{_CURRENT}")) for path in old):
        raise ConfigurationError(f"{directory} holds something else than a dynamic index: choose another folder")
    folder = directory / f"{_PREFIX}{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        _write_files(folder, snapshot)
        _sync(folder)
        pointer = directory / f".{_CURRENT}-{folder.name}"
        pointer.write_text(folder.name, encoding="utf-8")
        _sync_one(pointer)
        os.replace(pointer, directory / _CURRENT)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _sync_one(directory)
    for path in old:
        if path.name.startswith(_PREFIX):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _CURRENT:
            path.unlink(missing_ok=True)


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    slots = sorted(snapshot.documents)
    arrays: dict[str, npt.NDArray[Any]] = {
        "vectors": snapshot.vectors,
        "neighbours": snapshot.neighbours,
        "degrees": snapshot.degrees,
        "free": np.array(snapshot.free, np.int64),
        "slots": np.array(slots, np.int64),
    }
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    with open(folder / DOCUMENTS_FILE, "wb") as file:
        for row, slot in enumerate(slots):
            file.write(document_line(snapshot.documents[slot][1], row))
    complete_store(folder, ())
    ids = [snapshot.documents[slot][0] for slot in slots]
    (folder / "ids.json").write_text(json.dumps(ids), encoding="utf-8")
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "embedder": snapshot.embedder,
        "metric": snapshot.metric,
        "graph_degree": snapshot.graph_degree,
        "complexity": snapshot.complexity,
        "num_slots": snapshot.num_slots,
        "num_documents": len(slots),
        "files": {
            name: {"bytes": record.size_bytes, "crc32": record.crc32}
            for name in _FILES
            for record in (FileRecord.of(folder / name),)
        },
    }
    (folder / _HEAD).write_text(json.dumps(head, indent=2) + "\n", encoding="utf-8")


def read_snapshot(directory: Path) -> Snapshot:
    """The set that `CURRENT` names, checked.

    Raises:
        IndexFormatError: there is none, or a file is missing, cut short, changed or of another version.
    """
    try:
        folder = directory / (directory / _CURRENT).read_text(encoding="utf-8")
        head = json.loads((folder / _HEAD).read_bytes())
        if (head["format"], head["version"]) != (_FORMAT, _VERSION):
            raise IndexFormatError(
                f"{folder / _HEAD}: format {head['format']!r} version {head['version']!r}, expected {_FORMAT!r} "
                f"version {_VERSION}"
            )
        for name in _FILES:
            _check_file(folder / name, head["files"][name])
        return _read_files(folder, head)
    except OSError as error:
        raise IndexFormatError(f"{error.filename or directory}: cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise IndexFormatError(f"{directory}: damaged ({type(error).__name__}: {error})") from error


def _read_files(folder: Path, head: dict[str, Any]) -> Snapshot:
    arrays = {name: np.load(folder / f"{name}.npy", allow_pickle=False) for name in _ARRAYS}
    ids = json.loads((folder / "ids.json").read_bytes())
    store = DocumentStore(folder, head["num_documents"]) if head["num_documents"] else None
    documents: dict[int, tuple[str, Chunk]] = {}
    if store is not None:
        try:
            for row, (slot, document_id) in enumerate(zip(arrays["slots"].tolist(), ids, strict=True)):
                documents[slot] = (document_id, store.read(row))
        finally:
            store.close()
    return Snapshot(
        embedder=head["embedder"],
        metric=check_metric(head["metric"]),
        graph_degree=head["graph_degree"],
        complexity=head["complexity"],
        vectors=arrays["vectors"],
        neighbours=arrays["neighbours"],
        degrees=arrays["degrees"],
        num_slots=head["num_slots"],
        free=tuple(arrays["free"].tolist()),
        documents=documents,
    )


def _check_file(path: Path, expected: dict[str, int]) -> None:
    record = FileRecord.of(path)
    if (record.size_bytes, record.crc32) != (expected["bytes"], expected["crc32"]):
        raise IndexFormatError(
            f"{path}: {record.size_bytes} bytes with CRC-32 {record.crc32:#010x}, expected {expected['bytes']} with "
            f"{expected['crc32']:#010x}: cut short or changed"
        )


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
