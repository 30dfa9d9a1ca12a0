"""A folder that holds one index: whole sets of files, and one small file that names the set that counts.

The small file is replaced in one step when a new set has reached the disk, so that a reader finds the old set or the
new one, and a process that dies leaves the old one. It also tells the folder from one that belongs to something else.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import FolderLock

__all__ = ["holds_index", "read_index", "write_index"]

Index = TypeVar("Index")

_POINTER = "local-index.json"
_FORMAT = "stream2llm-local-index"
_OWN_NAME = re.compile(r"\.?(index-[0-9a-f]{16})(\.pointer)?")
_READ_ATTEMPTS = 5


def write_index(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes what `write` puts into a new folder the index of `folder`, in place of one that is there.

    Raises:
        ConfigurationError: `folder` holds something else than an index, is a file, or somebody else is writing there.
        OSError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigurationError(f"{str(folder)!r} is a file, or lies below one: give a folder") from None
    with FolderLock(folder):
        if not _is_own(folder):
            raise ConfigurationError(f"{str(folder)!r} is there and holds no index of pages: give another folder")
        made = folder / f"index-{secrets.token_hex(8)}"
        pointer = folder / f".{made.name}.pointer"
        made.mkdir()
        try:
            write(made)
            for path in made.iterdir():
                _sync(path)
            _sync(made)
            pointer.write_text(json.dumps({"format": _FORMAT, "folder": made.name}), encoding="utf-8")
            _sync(pointer)
            os.replace(pointer, folder / _POINTER)
        except BaseException:
            pointer.unlink(missing_ok=True)
            shutil.rmtree(made, ignore_errors=True)
            raise
        _sync(folder)
        _remove_others(folder, made.name)


def holds_index(folder: Path) -> bool:
    """Whether a folder is one that `write_index` made; whether what it holds can be read is not looked at."""
    return (folder / _POINTER).is_file()


def read_index(folder: Path, read: Callable[[Path], Index]) -> Index:
    """What `read` makes of the set of files that counts. If a new one takes its place meanwhile, that is read.

    Raises:
        OSError, ValueError: there is no index. What `read` raises passes through.
    """
    for _ in range(_READ_ATTEMPTS):
        name = _named(folder)
        try:
            return read(folder / name)
        except Exception:
            if _named(folder) == name:
                raise
    raise OSError(f"{folder} is being written again and again")


def _named(folder: Path) -> str:
    content = json.loads((folder / _POINTER).read_text(encoding="utf-8"))
    name = content.get("folder") if isinstance(content, dict) and content.get("format") == _FORMAT else None
    if not isinstance(name, str) or not _OWN_NAME.fullmatch(name):
        raise ValueError(f"{_POINTER} names no index")
    return name


def _is_own(folder: Path) -> bool:
    """Whether it holds an index, or nothing but what a first save has left that did not come to its end."""
    if (folder / _POINTER).exists():
        try:
            return bool(_named(folder))
        except (OSError, ValueError):
            return False
    return all(_OWN_NAME.fullmatch(path.name) for path in folder.iterdir())


def _remove_others(folder: Path, kept: str) -> None:
    for path in folder.iterdir():
        if path.name == kept or not _OWN_NAME.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
