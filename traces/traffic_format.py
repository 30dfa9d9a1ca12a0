"""Recorded traffic: a folder of segments, JSON lines that are written while an application runs.

Every process that records writes a segment of its own, `traffic-<begin>-<token>.jsonl`. Its first line is
`{"stream2llm_traffic": 1, "begun_unix_s": …, "texts": …}`, and every further line a trace: the row that `parquet_rows`
makes of it, with `arrival_s` counted from the segment's begin. A folder is read at any time, also while it is written
or after a crash: what is behind the last whole line of a segment is not there yet. Questions of all segments come on
one clock, which begins with the first segment.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import TraceError
from stream2llm_sdk.traces.parquet_rows import row_of, trace_of
from stream2llm_sdk.traces.trace import Trace

__all__ = ["TRAFFIC", "TrafficSegment", "read_traffic", "traffic_files"]

TRAFFIC = "traffic"

_VERSION_KEY, _VERSION = "stream2llm_traffic", 1
_NAME = re.compile(r"traffic-\d{8}T\d{6}Z-[0-9a-f]{16}\.jsonl")
_MAX_LINE_BYTES = 1 << 30
_SOME_ROW = dict.fromkeys(("trace_id", "query", "tenant", "tag", "mode", "offsets_s", "update_chunks", "chunks"))
_SOME_ROW |= dict.fromkeys(("num_query_tokens", "max_tokens", "arrival_s", "begins_s", "iterations", "failures"))


def traffic_files(folder: Path) -> list[Path]:
    """The segments in a folder, by the times of their begin."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


# ---- writing ---------------------------------------------------------------------------------------------------------


class TrafficSegment:
    """A segment that one thread writes. Its file is made with the first trace, and anew when it is not in its place any
    more, as where the folder was moved away to be looked at.

    Args:
        folder: where; it must be there when a trace is written.
        begun_unix_s: what `arrival_s` counts from.
        texts: what is kept of texts, for people.

    Attributes:
        num_bytes: written so far.
    """

    def __init__(self, folder: Path, begun_unix_s: float, texts: str) -> None:
        self.num_bytes = 0
        self._folder = folder
        self._begun_unix_s = begun_unix_s
        self._header = {_VERSION_KEY: _VERSION, "begun_unix_s": begun_unix_s, "texts": texts}
        self._file: Path | None = None
        self._descriptor = -1
        self._end = 0  # what is behind it is no whole line

    def write(self, trace: Trace) -> None:
        """Appends a trace, and leaves it to the operating system: it survives the process, though not the machine.

        Raises:
            OSError: it cannot be written. What is in the file stays whole.
            ConfigurationError: the trace holds what cannot be written (see `write_parquet`).
        """
        line = _line(row_of(trace))
        if not self._is_in_place():
            self.close()
            self._open()
        self._append(line)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _is_in_place(self) -> bool:
        if self._descriptor < 0 or self._file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._file))
        except OSError:
            return False

    def _open(self) -> None:
        begun = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._begun_unix_s))
        self._file = self._folder / f"traffic-{begun}-{secrets.token_hex(8)}.jsonl"
        # What people ask is for the eyes of whoever records it.
        self._descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._end = 0
        try:
            self._append(_line(self._header))
        except OSError:
            self.close()
            self._file.unlink(missing_ok=True)
            raise

    def _append(self, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            self._cut()
            raise
        self._end += len(line)
        self.num_bytes += len(line)

    def _cut(self) -> None:
        """Takes away a line that was written in part. Where that fails nothing more is written behind it."""
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError:
            self.close()


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_traffic(folder: Path) -> Iterator[Trace | TraceError]:
    """The traces of a folder in the order in which their questions came, behind errors for what cannot be read."""
    seen: dict[str, str] = {}
    found: list[Trace] = []
    begins_s = {file: begun for file in traffic_files(folder) if (begun := _begin_s(file)) is not None}
    for file, begun_s in begins_s.items():
        if isinstance(begun_s, TraceError):
            yield begun_s
            continue
        first_s = min(begin for begin in begins_s.values() if not isinstance(begin, TraceError))
        for item in _segment(file, begun_s - first_s):
            if isinstance(item, TraceError):
                yield item
            elif item.trace_id in seen:
                yield TraceError(f"trace {item.trace_id!r:.80} is in {seen[item.trace_id]} already", file=file)
            else:
                seen[item.trace_id] = file.name
                found.append(item)
    yield from sorted(found, key=lambda trace: trace.arrival_s or 0.0)


def _begin_s(file: Path) -> float | TraceError | None:
    """When a segment began; None for one whose first line is not written yet."""
    with file.open("rb") as stream:
        line = stream.readline(1 << 16)
    if not line.endswith(b"\n") and len(line) < 1 << 16:
        return None
    try:
        header = json.loads(line)
        version, begun_s = header[_VERSION_KEY], float(header["begun_unix_s"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return TraceError(f"no segment of recorded traffic: its first line does not say so ({error!r:.200})", file=file)
    if version != _VERSION:
        return TraceError(
            f"version {version!r:.40} of recorded traffic, where this release reads {_VERSION}: use the release that "
            "wrote it",
            file=file,
        )
    return begun_s


def _segment(file: Path, shift_s: float) -> Iterator[Trace | TraceError]:
    with file.open("rb") as stream:
        stream.readline()
        for number, line in enumerate(iter(lambda: stream.readline(_MAX_LINE_BYTES), b""), 1):
            if line.endswith(b"\n"):
                yield _trace(line, file, number, shift_s)
            elif len(line) == _MAX_LINE_BYTES:
                yield TraceError(f"a line of more than {_MAX_LINE_BYTES:,} bytes: damaged", file=file, row=number)
                return


def _trace(line: bytes, file: Path, number: int, shift_s: float) -> Trace | TraceError:
    try:
        trace = trace_of({**_SOME_ROW, **json.loads(line)}, file, number)
        return replace(trace, arrival_s=(trace.arrival_s or 0.0) + shift_s)
    except TraceError as error:
        return error
    # No type of a value is checked before: what is no row of ours fails somewhere in the making.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return TraceError(f"no trace, or damaged: {error!r:.200}", file=file, row=number)
