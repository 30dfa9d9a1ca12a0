"""The journal of a recording: a line for each question that has been asked, with its own checksum.

A line is the JSON list `[checksum, entry]`. It is with the operating system when `append` returns, so that the process
may be killed at any moment and nothing that was recorded is lost; `sync` has it reach the disk, so that a loss of power
costs at most what came since. A line that does not hold is left out, and its question asked again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.recording.appending import append_whole, is_in_place

__all__ = ["Entry", "RecordingJournal", "num_without_trace"]

Entry = dict[str, Any]
"""One line: `question` (its id), `number` (its place among the questions), `text`, `at` (when it was done), `trace`, a
row as `parquet_rows` makes it with its chunks by number, or else `reason` and `failures`; and, where the pages that the
question names are asked, `urls`, a digest of them."""

_OPENING, _CLOSING = b'["%08x",', b"]\n"
_OPENING_BYTES = len(_OPENING % 0)


@dataclass(frozen=True, slots=True)
class _Place:
    begin: int
    num_bytes: int
    number: int
    is_trace: bool
    text: str
    urls: str | None


class RecordingJournal:
    """The entries of a recording, the latest of each question. One writer at a time.

    Args:
        file: made where it is not there.
        holds: whether an entry can be read with what is beside the journal; one that cannot is left out.

    Attributes:
        num_damaged: entries that were left out when it was opened.

    Raises:
        ConfigurationError: the file cannot be read or written.
    """

    def __init__(self, file: Path, *, holds: Callable[[Entry], bool]) -> None:
        self.file = file
        self.num_damaged = 0
        self._places: dict[str, _Place] = {}
        self._end = 0
        try:
            self._stream = open(file, "a+b")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be written: {error.strerror}. Give another folder") from error
        try:
            self._read(holds)
        except BaseException:
            self._stream.close()
            raise

    def __len__(self) -> int:
        """Number of questions with an entry."""
        return len(self._places)

    def __contains__(self, question_id: object) -> bool:
        return question_id in self._places

    def texts(self) -> Iterator[tuple[str, int, str, str | None]]:
        """Of each question with an entry its id, number and text, and the digest of its pages, where that was kept."""
        for question_id, place in self._places.items():
            yield question_id, place.number, place.text, place.urls

    @property
    def num_traces(self) -> int:
        """Number of questions for which something could be recorded."""
        return sum(place.is_trace for place in self._places.values())

    def has_trace(self, question_id: str) -> bool:
        """Whether something could be recorded for a question."""
        place = self._places.get(question_id)
        return place is not None and place.is_trace

    def __getitem__(self, question_id: str) -> Entry:
        place = self._places[question_id]
        entry = _entry(os.pread(self._stream.fileno(), place.num_bytes, place.begin))
        if entry is None:
            raise ConfigurationError(f"{self.file}: the entry of question {question_id!r:.80} has been damaged")
        return entry

    def __iter__(self) -> Iterator[Entry]:
        """The entries in the order of their questions."""
        for question_id, _ in sorted(self._places.items(), key=lambda item: item[1].number):
            yield self[question_id]

    def append(self, entry: Entry) -> None:
        """Adds the entry of a question, in place of an earlier one.

        Raises:
            OSError: it cannot be written.
        """
        line = _line(entry)
        append_whole(self._stream.fileno(), line, self._end)
        self._add(entry, len(line))

    def is_in_place(self) -> bool:
        """Whether the file has its name still."""
        return is_in_place(self._stream.fileno(), self.file)

    def clear(self) -> None:
        """Forgets all entries.

        Raises:
            OSError: the file cannot be written.
        """
        os.ftruncate(self._stream.fileno(), 0)
        self._places, self._end = {}, 0

    def sync(self) -> None:
        """Has everything reach the disk."""
        os.fdatasync(self._stream.fileno())

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._stream.close()

    def _add(self, entry: Entry, num_bytes: int) -> None:
        is_trace = entry.get("trace") is not None
        place = _Place(self._end, num_bytes, entry["number"], is_trace, entry["text"], entry.get("urls"))
        self._places[entry["question"]] = place
        self._end += num_bytes

    def _read(self, holds: Callable[[Entry], bool]) -> None:
        self._stream.seek(0)
        for line in self._stream:
            entry = _entry(line)
            if entry is None or not holds(entry):
                self.num_damaged += 1
                self._end += len(line)
            else:
                self._add(entry, len(line))
        if self.num_damaged:
            # What was left out would seem to hold later, once what it names has been written anew for another one.
            self._rewrite()

    def _rewrite(self) -> None:
        new = self.file.with_name(f".{self.file.name}.new")
        kept = sorted(self._places.values(), key=lambda place: place.begin)
        with open(new, "wb") as stream:
            stream.writelines(self._lines(kept))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, self.file)
        self._stream.close()
        self._stream = open(self.file, "a+b")  # noqa: SIM115 - closed by close()
        self._places, self._end = {}, 0
        self._stream.seek(0)
        for line in self._stream:
            entry = _entry(line)
            assert entry is not None, "it was written whole"
            self._add(entry, len(line))

    def _lines(self, places: Iterable[_Place]) -> Iterator[bytes]:
        for place in places:
            yield os.pread(self._stream.fileno(), place.num_bytes, place.begin)


def num_without_trace(file: Path) -> int | None:
    """Number of the questions in a journal where none of them gave a trace; None where one did. Others may write it."""
    if not file.is_file():
        return 0
    asked = set()
    with open(file, "rb") as stream:
        for entry in filter(None, map(_entry, stream)):
            if entry.get("trace") is not None:
                return None
            asked.add(entry["question"])
    return len(asked)


def _line(entry: Entry) -> bytes:
    content = json.dumps(entry, allow_nan=False).encode()
    return _OPENING % zlib.crc32(content) + content + _CLOSING


def _entry(line: bytes) -> Entry | None:
    """The entry of a line; None if it does not hold."""
    content = line[_OPENING_BYTES : -len(_CLOSING)]
    if line != _OPENING % zlib.crc32(content) + content + _CLOSING:
        return None
    entry: Entry = json.loads(content)
    return entry
