"""Checksums for a Parquet file, which has none for its footer: reading a damaged one could end the process.

The seal lies between the last column and the footer, where readers of Parquet do not look, so the file stays an
ordinary one: JSON with the place and CRC-32 of every row group and of the footer, then the JSON's own CRC-32 and
length, and the letters 'S2LT'.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stream2llm_sdk.errors import TraceError

__all__ = ["Seal", "read_seal", "seal"]

_TAIL = struct.Struct("<I4s")
_SEAL_TAIL = struct.Struct("<II4s")
_PARQUET_MAGIC, _SEAL_MAGIC = b"PAR1", b"S2LT"
_PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Seal:
    """The places and checksums of a file's row groups: (begin, end, CRC-32) each."""

    file: Path
    groups: Sequence[tuple[int, int, int]]

    def is_whole(self, group: int) -> bool:
        """Whether a row group is as it was written."""
        begin, end, checksum = self.groups[group] if group < len(self.groups) else (0, 0, -1)
        with self.file.open("rb") as stream:
            return _checksum(stream, begin, end) == checksum


def seal(file: Path, group_ranges: Sequence[tuple[int, int]]) -> None:
    """Adds the seal to a Parquet file whose row groups lie at these places."""
    with file.open("r+b") as stream:
        begin, footer = _footer(stream, file)
        groups = [(start, end, _checksum(stream, start, end)) for start, end in group_ranges]
        content = json.dumps({"groups": groups, "footer": zlib.crc32(footer)}).encode()
        stream.seek(begin)
        stream.write(content + _SEAL_TAIL.pack(zlib.crc32(content), len(content), _SEAL_MAGIC))
        stream.write(footer + _TAIL.pack(len(footer), _PARQUET_MAGIC))


def read_seal(file: Path) -> Seal:
    """The seal of a file, whose footer is as it was written.

    Raises:
        TraceError: the file has no seal, or its footer is damaged.
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        begin, footer = _footer(stream, file)
        content = _seal_content(stream, begin)
    if content is None:
        raise TraceError("this Parquet file was not written by write_traces, or its end is damaged", file=file)
    try:
        values = json.loads(content)
        is_whole = values["footer"] == zlib.crc32(footer)
        groups = [(int(begin), int(end), int(checksum)) for begin, end, checksum in values["groups"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError("this Parquet file was not written by write_traces: its seal is none", file=file) from error
    if not is_whole:
        raise TraceError("damaged: the footer is not what was written", file=file)
    return Seal(file, groups)


def _footer(stream: BinaryIO, file: Path) -> tuple[int, bytes]:
    """Where the footer begins, and the footer."""
    size = stream.seek(0, 2)
    if size >= _TAIL.size:
        stream.seek(size - _TAIL.size)
        length, magic = _TAIL.unpack(stream.read(_TAIL.size))
        if magic == _PARQUET_MAGIC and length + _TAIL.size <= size:
            stream.seek(size - _TAIL.size - length)
            return size - _TAIL.size - length, stream.read(length)
    raise TraceError(f"no Parquet file, or cut short: its {size:,} bytes do not end with a footer", file=file)


def _seal_content(stream: BinaryIO, end: int) -> bytes | None:
    """The seal's JSON, which ends with its tail at `end`; None if there is none that is whole."""
    if end < _SEAL_TAIL.size:
        return None
    stream.seek(end - _SEAL_TAIL.size)
    checksum, length, magic = _SEAL_TAIL.unpack(stream.read(_SEAL_TAIL.size))
    if magic != _SEAL_MAGIC or length + _SEAL_TAIL.size > end:
        return None
    stream.seek(end - _SEAL_TAIL.size - length)
    content = stream.read(length)
    return content if zlib.crc32(content) == checksum else None


def _checksum(stream: BinaryIO, begin: int, end: int) -> int:
    stream.seek(begin)
    checksum = 0
    while begin < end and (part := stream.read(min(_PART_BYTES, end - begin))):
        checksum = zlib.crc32(part, checksum)
        begin += len(part)
    return checksum
