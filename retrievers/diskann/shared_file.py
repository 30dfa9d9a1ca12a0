"""One open file, read by several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stream2llm_sdk.errors import IndexFormatError, RetrievalError

__all__ = ["SharedFile"]


class SharedFile:
    """A file read by several threads with `pread`; closing waits until nobody is reading.

    Without that wait a thread inside a native read could find its descriptor reused for another file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
            self.size_bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise IndexFormatError(f"{path}: cannot be read: {error.strerror}") from error
        self._free = threading.Condition()
        self._readers = 0
        self._closed = False

    @contextmanager
    def reading(self) -> Iterator[int]:
        """The descriptor, valid inside the block.

        Raises:
            RetrievalError: the file was closed.
        """
        with self._free:
            if self._closed:
                raise RetrievalError(f"{self.path}: the index is closed")
            self._readers += 1
        try:
            yield self._file.fileno()
        finally:
            with self._free:
                self._readers -= 1
                self._free.notify_all()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Exactly `num_bytes` from `offset`.

        Raises:
            IndexFormatError: the file ends before that.
            RetrievalError: the file was closed, or the read failed.
        """
        pieces: list[bytes] = []
        with self.reading() as descriptor:
            while num_bytes > 0:
                try:
                    piece = os.pread(descriptor, num_bytes, offset)
                except OSError as error:
                    raise RetrievalError(f"{self.path}: reading failed: {error.strerror}") from error
                if not piece:
                    raise IndexFormatError(
                        f"{self.path}: ends at byte {offset}, {num_bytes} bytes short; it was cut while open"
                    )
                pieces.append(piece)
                offset += len(piece)
                num_bytes -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Waits for the reads in progress, then closes. May be called more than once."""
        with self._free:
            self._closed = True
            self._free.wait_for(lambda: self._readers == 0)
            self._file.close()
