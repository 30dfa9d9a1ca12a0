"""Appending to a file whole or not at all, past whatever a full disk left of an earlier attempt."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["append_whole", "is_in_place"]


def append_whole(descriptor: int, content: bytes, end: int) -> None:
    """Appends to a file, which is with the operating system when this returns.

    Nothing is kept back in a buffer, so that nothing is left to be written when the file is closed.

    Args:
        descriptor: of the file, opened to append.
        content: what to append.
        end: where the file ends; what lies behind is cut off first.

    Raises:
        OSError: it cannot be written; none of it is there.
    """
    if os.fstat(descriptor).st_size != end:
        os.ftruncate(descriptor, end)
    left = memoryview(content)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with suppress(OSError):  # the next attempt cuts it off
            os.ftruncate(descriptor, end)
        raise


def is_in_place(descriptor: int, file: Path) -> bool:
    """Whether an open file has this name still: it may have been renamed or deleted since."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except OSError:
        return False
