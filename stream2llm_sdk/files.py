"""Files that are to be written, checked before the work; and files that hold a JSON object."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError

__all__ = [
    "FolderLock",
    "read_json_object",
    "require_makeable",
    "require_own_folder",
    "require_writable",
    "write_json",
    "write_whole",
]


def require_writable(file: Path, name: str) -> None:
    """Says before minutes of work that their result could not be written.

    Args:
        file: the file to write.
        name: the option that named it.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    folder = file.absolute().parent
    if file.is_dir():
        reason = "it is a folder: name a file in it"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}: make it, or name a file elsewhere"
    elif not os.access(file if file.exists() else folder, os.W_OK):
        reason = "it may not be written: name a file elsewhere, or change the permissions"
    else:
        return
    raise ConfigurationError(f"{name} {file}: {reason}")


def read_json_object(file: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        file: the file.
        what: what it should be, for the error: "a cost model".

    Raises:
        ConfigurationError: the file cannot be read, or holds something else.
    """
    name = os.fspath(file)
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name}: {what} cannot be read from it: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{name}: {what} is a JSON object, got a {type(found).__name__}")
    return found


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file, whole or not at all."""
    write_whole(file, json.dumps(content, indent=2) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Writes a file, whole or not at all: what was there before stays until then."""
    unfinished = file.with_name(f".{file.name}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


class FolderLock:
    """Keeps other processes from writing into a folder until `release`, or as a context. A process that ends gives it
    up.

    Raises:
        ConfigurationError: another one is writing there.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigurationError(
                f"{folder} is in use: another run writes into it. Wait for its end, or name another folder"
            ) from error

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def is_of(self, folder: Path) -> bool:
        """Whether the folder that is locked has this name still: it may have been renamed or deleted since."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(folder))
        except OSError:
            return False

    def release(self) -> None:
        """Lets others write there. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def require_makeable(folder: Path, name: str) -> None:
    """Says before the work that a folder could not be made, or not written.

    Args:
        folder: the folder, which need not be there.
        name: what named it, for the error.

    Raises:
        ConfigurationError: what there is of its path is no folder, or may not be written.
    """
    try:
        above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise ConfigurationError(f"{name} {folder}: {error.strerror}: name another folder") from error
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigurationError(f"{name}: nothing may be written in {above}: name a folder elsewhere")


def require_own_folder(folder: Path, own_files: Iterable[str], what: str) -> None:
    """Says before the work that a folder belongs to something else.

    Args:
        folder: where files are to be written; it need not exist.
        own_files: the names of files of which one is there where the folder holds an earlier one.
        what: what is to be written, for the error: "report".

    Raises:
        ConfigurationError: it is a file, or holds files but none of `own_files`.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file: name a folder")
    if not folder.exists() or any((folder / name).exists() for name in own_files):
        return
    strangers = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if strangers:
        raise ConfigurationError(f"{folder} holds {strangers[0]!r} and no {what}: give an empty or new folder")
