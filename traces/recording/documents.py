"""The documents of a recording, each written once, however many traces hold it."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.recording.appending import append_whole, is_in_place

__all__ = ["DocumentFile"]

_FIELDS = ("text", "source", "title", "metadata")
_CHECKSUM_CHARACTERS = 8


class DocumentFile:
    """Keeps the chunks of traces by number, beside a journal that names them by it.

    A document is a chunk but for its score: text, source, title and metadata. One line is one document, with a checksum
    before it. The file has one writer at a time. What a crash left behind the last whole line is cut off.

    Args:
        file: made where it is not there.

    Raises:
        ConfigurationError: the file cannot be read or written, or a line that is not its last is damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._numbers: dict[bytes, int] = {}
        self._begins = array("q")
        self._end = 0
        try:
            self._stream = open(file, "a+b")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be written: {error.strerror}. Give another folder") from error
        try:
            self._read()
        except BaseException:
            self._stream.close()
            raise

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._begins)

    def refs(self, chunks: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
        """The number and the score of each chunk of a trace's row. Documents that are not there yet are appended, and
        are with the operating system when this returns.

        Raises:
            OSError: they cannot be written; none of them is there.
        """
        found = []
        new: dict[bytes, bytes] = {}
        numbers: dict[bytes, int] = {}
        for chunk in chunks:
            content = json.dumps([chunk[name] for name in _FIELDS]).encode()
            number = self._numbers.get(key := _key(content))
            if number is None:
                number = numbers.setdefault(key, len(self) + len(numbers))
                new.setdefault(key, b"%08x %b\n" % (zlib.crc32(content), content))
            found.append([number, chunk["score"]])
        append_whole(self._stream.fileno(), b"".join(new.values()), self._end)
        for key, line in new.items():
            self._add(key, len(line))
        return found

    def chunks(self, refs: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
        """The chunks of a row again, from what `refs` returned.

        Raises:
            ConfigurationError: there is no document of that number, or it is damaged.
        """
        return [{**self._document(number), "score": score} for number, score in refs]

    def sync(self) -> None:
        """Has everything reach the disk. To be called before what names the documents is synced."""
        os.fdatasync(self._stream.fileno())

    def is_in_place(self) -> bool:
        """Whether the file has its name still."""
        return is_in_place(self._stream.fileno(), self.file)

    def clear(self) -> None:
        """Forgets all documents.

        Raises:
            OSError: the file cannot be written.
        """
        os.ftruncate(self._stream.fileno(), 0)
        self._numbers, self._begins, self._end = {}, array("q"), 0

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._stream.close()

    def __enter__(self) -> DocumentFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, key: bytes, num_bytes: int) -> None:
        # The first of two equal ones counts, as it did when the second was written.
        self._numbers.setdefault(key, len(self._begins))
        self._begins.append(self._end)
        self._end += num_bytes

    def _read(self) -> None:
        self._stream.seek(0)
        for line in self._stream:
            content = _content(line)
            if content is None:
                if self._stream.read(1):
                    raise ConfigurationError(
                        f"{self.file}, line {len(self) + 1}: damaged, its checksum is another. Record into a new folder"
                    )
                self._stream.truncate(self._end)
                return
            self._add(_key(content), len(line))

    def _document(self, number: Any) -> dict[str, Any]:
        if not isinstance(number, int) or not 0 <= number < len(self):
            raise ConfigurationError(f"{self.file} has no document {number!r:.40}: it is not this journal's")
        end = self._begins[number + 1] if number + 1 < len(self) else self._end
        begin = self._begins[number]
        content = _content(os.pread(self._stream.fileno(), end - begin, begin))
        if content is None:
            raise ConfigurationError(f"{self.file}, line {number + 1}: damaged, its checksum is another")
        return dict(zip(_FIELDS, json.loads(content), strict=True))


def _key(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _content(line: bytes) -> bytes | None:
    """What a line holds; None if it is not whole."""
    content = line[_CHECKSUM_CHARACTERS + 1 : -1]
    whole = line.endswith(b"\n") and line[: _CHECKSUM_CHARACTERS + 1] == b"%08x " % zlib.crc32(content)
    return content if whole else None
