"""Readers of corpus files: each yields a file's rows, and what of the file has been read."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError

__all__ = ["READERS", "Row", "reader_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file.

    Attributes:
        place: the file and the row, for errors and as a source of last resort.
        values: by column.
        fault: why the row cannot be read; None where it can.
    """

    place: str
    values: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None


# A row, and the bytes of the file that were read by then.
Rows = Iterator[tuple[Row, int]]


def reader_of(path: Path) -> Callable[[Path, str], Rows] | None:
    """The reader of a file by its name; None where there is none."""
    name = path.name.lower()
    return next((reader for ending, reader in READERS.items() if name.endswith(ending)), None)


def _read_parquet(path: Path, place: str) -> Rows:
    pa = _pyarrow(".parquet")
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            number, total = 0, max(file.metadata.num_rows, 1)
            size = path.stat().st_size
            for batch in file.iter_batches(batch_size=1024):
                for values in _batch_rows(batch):
                    at = f"{place}, row {number}"
                    number += 1
                    yield (
                        (Row(at, fault=values) if isinstance(values, str) else Row(at, values)),
                        size * number // total,
                    )
    except pa.ArrowException as error:
        raise ConfigurationError(f"{path}: not a Parquet file that can be read: {error}") from error


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The rows of a batch; where one is not UTF-8, what is wrong with it."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield f"not UTF-8: {error}"


def _read_json_lines(path: Path, place: str) -> Rows:
    with _opened(path) as (file, tell):
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _json_row(f"{place}, line {number}", line), tell()


def _json_row(place: str, line: bytes) -> Row:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Row(place, fault=f"not UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return Row(place, fault=f"not JSON: {error}")
    if not isinstance(values, dict):
        return Row(place, fault=f"a JSON {type(values).__name__}, expected an object")
    return Row(place, values)


def _read_csv(path: Path, place: str) -> Rows:
    csv.field_size_limit(1 << 30)
    with _opened(path) as (file, tell):
        # Bytes that are no UTF-8 become surrogates, so that they can be told in their own row.
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.DictReader(text, strict=True)
        while True:
            try:
                values = next(reader, None)
            except csv.Error as error:
                yield Row(f"{place}, line {reader.line_num}", fault=f"not CSV: {error}"), tell()
                continue
            if values is None:
                return
            yield _csv_row(f"{place}, line {reader.line_num}", values), tell()


def _csv_row(place: str, values: dict[str | Any, str | Any]) -> Row:
    if None in values:
        return Row(place, fault=f"{len(values[None])} fields more than the heading")
    given = {name: value for name, value in values.items() if value is not None}
    if any("\udc80" <= character <= "\udcff" for value in given.values() for character in value if not value.isascii()):
        return Row(place, fault="not UTF-8")
    return Row(place, given)


def _read_text(path: Path, place: str) -> Rows:
    raw = path.read_bytes()
    try:
        row = Row(place, {"text": raw.decode("utf-8-sig"), "source": place})
    except UnicodeDecodeError as error:
        row = Row(place, fault=f"not UTF-8: {error}")
    yield row, len(raw)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The file's contents, decompressed, and what says how much of the file has been read."""
    with open(path, "rb") as raw:
        if path.name.lower().endswith(".gz"):
            with gzip.open(raw) as file:
                yield file, raw.tell  # type: ignore[misc]
        elif path.name.lower().endswith(".zst"):
            pa = _pyarrow(".zst")
            with pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd") as stream:
                yield io.BufferedReader(stream), raw.tell
        else:
            yield raw, raw.tell


def _pyarrow(ending: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtraError(f"pyarrow, which reads {ending} files,", "corpus") from error
    return pyarrow


READERS: dict[str, Callable[[Path, str], Rows]] = {
    ".parquet": _read_parquet,
    **{f"{kind}{packed}": _read_json_lines for kind in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst")},
    **{f".csv{packed}": _read_csv for packed in ("", ".gz", ".zst")},
    ".txt": _read_text,
    ".md": _read_text,
}
"""The readers by the ending of a file's name."""
