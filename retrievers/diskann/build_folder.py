"""The hidden folder that an index is built in, and its way to the index's own name."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import FolderLock
from stream2llm_sdk.retrievers.diskann.build_journal import JOURNAL_FILE
from stream2llm_sdk.retrievers.diskann.document_store import DOCUMENTS_FILE
from stream2llm_sdk.retrievers.diskann.manifest import MANIFEST_FILE

__all__ = [
    "building_beside",
    "check_target",
    "discard_unfinished_build",
    "put_in_place",
    "unfinished_build",
    "write_through",
]


def unfinished_build(directory: str | os.PathLike[str]) -> Path:
    """The folder in which `build_index(…, directory, resume=True)` keeps what is done; it need not exist."""
    path = Path(directory).resolve()
    return path.parent / f".{path.name}.building"


def discard_unfinished_build(directory: str | os.PathLike[str]) -> None:
    """Deletes what an unfinished build has done, if there is one.

    Raises:
        ConfigurationError: that build is running.
    """
    work = unfinished_build(directory)
    if work.is_dir():
        with _locked(work) as lock:
            _remove(work, lock)


def check_target(directory: Path, overwrite: bool) -> None:
    """Raises ConfigurationError when an index may not be written to `directory`."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not overwrite:
        raise ConfigurationError(f"{directory} exists and is no empty folder: choose another, or give overwrite=True")
    if not (directory / MANIFEST_FILE).is_file():
        raise ConfigurationError(f"{directory} holds no index; overwrite=True only replaces an index")


@contextmanager
def building_beside(directory: Path, *, keep: bool) -> Iterator[Path]:
    """A folder on the same file system, of which nobody else is the owner, removed at the end unless it was moved away.

    Args:
        keep: it has the name that `unfinished_build` gives, may be there already, and stays once it holds documents.

    Raises:
        ConfigurationError: another build owns it, or it cannot be made.
    """
    work = unfinished_build(directory)
    if not keep:
        work = work.with_name(f"{work.name}-{secrets.token_hex(4)}")
    with _locked(work) as lock:
        try:
            yield work
        finally:
            documents = work / DOCUMENTS_FILE
            if not (keep and documents.is_file() and documents.stat().st_size):
                _remove(work, lock)


def _locked(work: Path) -> FolderLock:
    """The lock of a folder, which is made where it is not there."""
    while True:
        try:
            work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"{work} cannot be made: {error.strerror}; name another folder") from error
        try:
            lock = FolderLock(work)
        except FileNotFoundError:
            continue
        # Its owner may have finished, and renamed or deleted it, between the two.
        if lock.is_of(work):
            return lock
        lock.release()


def _remove(work: Path, lock: FolderLock) -> None:
    """Deletes the folder, unless it has another name by now and this one is somebody else's."""
    if lock.is_of(work):
        shutil.rmtree(work, ignore_errors=True)


def write_through(work: Path) -> None:
    """Everything reaches the disk before the directory gets its name."""
    for path in (*work.rglob("*"), work):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def put_in_place(work: Path, directory: Path) -> None:
    """Renames; an index that was there is moved aside first and comes back if that fails."""
    if not (directory / MANIFEST_FILE).exists():
        os.rename(work, directory)
    else:
        old = work.with_name(f".{directory.name}.old-{secrets.token_hex(4)}")
        os.rename(directory, old)
        try:
            os.rename(work, directory)
        except BaseException:
            os.rename(old, directory)
            raise
        shutil.rmtree(old, ignore_errors=True)
    # Only now: until it has its name, the build can go on from its journal.
    (directory / JOURNAL_FILE).unlink(missing_ok=True)
