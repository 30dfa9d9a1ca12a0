"""Reading files that others wrote: what is not as it must be is found at once, and named by file, row and column."""

from __future__ import annotations

import csv
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from io import StringIO
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import TraceError

__all__ = [
    "MAX_TEXT_CHARACTERS",
    "Row",
    "csv_rows",
    "exact_number",
    "file_in",
    "json_object",
    "not_unicode",
    "read_text",
]

MAX_TEXT_CHARACTERS = 1 << 24
"""The longest text that a trace's file may hold in one field, far beyond any page's."""

_MAX_CSV_BYTES = 1 << 28
_MAX_JSON_BYTES = 1 << 32
_MAX_NUMBER_CHARACTERS = 2_048  # a float written out has up to 309 digits before its point and 1,074 behind it
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a CSV file; the first below the heading has number 1."""

    file: Path
    number: int
    values: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.values[column]

    def error(self, column: str, reason: str) -> TraceError:
        """What is wrong with the row's value of a column."""
        return TraceError(reason, file=self.file, row=self.number, column=column)

    def time(self, column: str) -> Fraction:
        """The column's time, exactly as it is written.

        Raises:
            TraceError: it is blank, negative, not finite, or no number.
        """
        try:
            return exact_number(self.values[column])
        except ValueError as error:
            raise self.error(column, str(error)) from None


def exact_number(text: str) -> Fraction:
    """The number that `text` spells in decimal, 0 or more, without rounding.

    Raises:
        ValueError: it is blank, negative, not finite, beyond a float's range, or no number.
    """
    digits = text.strip()
    if not digits:
        raise ValueError("blank: a time is missing")
    if _NOT_FINITE.fullmatch(digits):
        raise ValueError(f"{digits!r} is not a finite time")
    if len(digits) > _MAX_NUMBER_CHARACTERS or not _NUMBER.fullmatch(digits):
        raise ValueError(f"{digits!r:.80} is not a number")
    number = Fraction(digits)
    if number < 0:
        raise ValueError(f"{digits!r:.80} is negative: times count from the question")
    try:
        float(number)
    except OverflowError:
        raise ValueError(f"{digits!r:.80} is not a finite time: it is beyond what a float can hold") from None
    return number


def not_unicode(text: str) -> str | None:
    """Why a text cannot be encoded, or None: half of a surrogate pair, as cut JSON escapes leave it."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is no Unicode text: half of a surrogate pair at character {error.start:,}"
    return None


def file_in(folder: Path, name: str) -> Path:
    """The file `name` of a folder, with links followed.

    Raises:
        TraceError: it lies outside the folder (an absolute path, '..', a link), does not exist, or is no plain file.
    """
    try:
        file = (folder / name).resolve()
        inside = file.is_relative_to(folder.resolve())
        exists = inside and file.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{name!r:.200} is no usable path: {reason!s:.200}", file=folder) from error
    if not inside:
        raise TraceError(
            f"{name!r:.200} leaves this folder. If the set is yours, copy it with its links followed (cp -rL)",
            file=folder,
        )
    if not exists:
        raise TraceError("there is no such file", file=folder / name)
    if not file.is_file():
        raise TraceError("this is no plain file", file=folder / name)
    return file


def read_text(file: Path, max_bytes: int) -> str:
    """A file's text, which is UTF-8, line ends as they are.

    Raises:
        TraceError: it cannot be read, is larger than `max_bytes`, begins with a page of NUL bytes, or is not UTF-8.
    """
    try:
        if (size := file.stat().st_size) > max_bytes:
            raise TraceError(f"{size:,} bytes, where at most {max_bytes:,} are read", file=file)
        with file.open("rb") as stream:
            if (head := stream.read(4_096)) and not head.strip(b"\0"):
                raise TraceError("it begins with NUL bytes alone: this is no text", file=file)
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"not UTF-8: byte {error.start:,} is {error.object[error.start]:#04x}", file=file) from error
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror or error}", file=file) from error
    return text


def csv_rows(file: Path, columns: Sequence[str]) -> list[Row]:
    """All rows of a CSV file that has at least these columns.

    Raises:
        TraceError: the file cannot be read, a column is missing or there twice, a row has too few or too many fields,
            a field is too long or holds a NUL byte, a quote is not closed, or there are no rows.
    """
    lines = StringIO(read_text(file, _MAX_CSV_BYTES), newline="")
    rows: list[Row] = []
    heading: list[str] = []
    with _long_fields():
        try:
            for fields in csv.reader(lines, strict=True):
                if not heading:
                    heading = _checked_heading(file, fields, columns)
                elif fields:
                    rows.append(_checked_row(file, len(rows) + 1, heading, fields))
        except csv.Error as error:
            raise TraceError(f"not CSV, or cut short: {error}", file=file, row=len(rows) + 1) from error
    if not rows:
        raise TraceError("there are no rows below the heading" if heading else "the file is empty", file=file)
    return rows


def json_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        TraceError: it cannot be read, is no JSON (cut short, nested without end) or no object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise TraceError("this key is there twice", file=file, row=twice)
        return found

    try:
        value = json.loads(read_text(file, _MAX_JSON_BYTES), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON, or cut short: {error}", file=file) from error
    if not isinstance(value, dict):
        raise TraceError(f"a JSON object is expected, not {type(value).__name__}", file=file)
    return value


def _checked_heading(file: Path, heading: list[str], columns: Sequence[str]) -> list[str]:
    missing = [column for column in columns if column not in heading]
    if missing:
        raise TraceError(
            f"the column is missing; there are {', '.join(map(repr, heading[:20]))}", file=file, column=missing[0]
        )
    for column in columns:
        if heading.count(column) > 1:
            raise TraceError("the column is there twice", file=file, column=column)
    return heading


def _checked_row(file: Path, number: int, heading: list[str], fields: list[str]) -> Row:
    if len(fields) != len(heading):
        raise TraceError(
            f"{len(fields)} fields, where the heading has {len(heading)}: cut short?",
            file=file,
            row=number,
            column=heading[min(len(fields), len(heading) - 1)],
        )
    row = Row(file, number, dict(zip(heading, fields, strict=True)))
    for column, value in row.values.items():
        if len(value) > MAX_TEXT_CHARACTERS:
            raise row.error(column, f"{len(value):,} characters, where at most {MAX_TEXT_CHARACTERS:,} are read")
        if "\0" in value:
            raise row.error(column, f"a NUL byte at character {value.index(chr(0)):,}")
    return row


_limit_lock = threading.Lock()
_limit_users = 0
_limit_before = 0


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lets csv read fields as long as a file. Its limit is the whole process's: the last to leave sets it back."""
    global _limit_users, _limit_before
    with _limit_lock:
        if _limit_users == 0:
            _limit_before = csv.field_size_limit(_MAX_CSV_BYTES)
        _limit_users += 1
    try:
        yield
    finally:
        with _limit_lock:
            _limit_users -= 1
            if _limit_users == 0:
                csv.field_size_limit(_limit_before)
