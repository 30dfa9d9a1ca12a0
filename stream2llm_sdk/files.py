"""Files that are to be written, checked before the work."""

from __future__ import annotations

import os
from pathlib import Path

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["require_writable"]


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
