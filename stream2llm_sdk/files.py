"""Files that are to be written, checked before the work; and files that hold a JSON object."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["read_json_object", "require_writable"]


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
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{name}: {what} cannot be read from it: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{name}: {what} is a JSON object, got a {type(found).__name__}")
    return found
