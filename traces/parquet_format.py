"""Our own compact form: one Parquet file for thousands of traces, which holds all that a `Trace` does.

One row a trace, in the columns of `parquet_schema`. A trace's distinct chunks are in `chunks`, and its updates name
them by position (`update_chunks`), so that a document that stays in the top-k is stored once. `metadata` of a chunk is
JSON. `begins_s` and `iterations` have a value or null for each update, and are null where no update has one; `failures`
is null where there are none. The file's own metadata has the version of the schema under `stream2llm_traces_version`;
version 1 has not got these three columns.

Every row group and the footer have a checksum (`parquet_seal`), looked at before they are read. Texts are not
dictionary-encoded, so that what a file says of its size bounds what reading it can allocate; a file that says more than
`_MAX_GROUP_BYTES` for one row group is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError, Stream2LLMError, TraceError
from stream2llm_sdk.traces.extras import require_pyarrow
from stream2llm_sdk.traces.losses import check_texts
from stream2llm_sdk.traces.parquet_rows import row_of, trace_of
from stream2llm_sdk.traces.parquet_seal import read_seal, seal
from stream2llm_sdk.traces.trace import Trace

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import FileMetaData, ParquetFile

__all__ = ["PARQUET", "SCHEMA_VERSION", "group_ranges", "parquet_schema", "read_parquet", "write_parquet"]

PARQUET = "parquet"
SCHEMA_VERSION = 2

_VERSION_KEY = b"stream2llm_traces_version"
_READ_VERSIONS = frozenset(str(version).encode() for version in range(1, SCHEMA_VERSION + 1))
_SINCE_VERSION_2 = frozenset({"begins_s", "iterations", "failures"})
_GROUP_TRACES, _GROUP_BYTES, _BATCH_TRACES = 256, 1 << 25, 32
_MAX_GROUP_BYTES, _MAX_GROUP_VALUES, _MAX_TRACE_VALUES = 1 << 31, 1 << 23, 1 << 22


def parquet_schema() -> Schema:
    """The columns of version `SCHEMA_VERSION`."""
    pa = require_pyarrow()
    text, number = pa.string(), pa.float64()
    chunk = [("text", text), ("source", text), ("title", text), ("score", number), ("metadata", text)]
    failure = [("offset_s", number), ("source", text), ("reason", text)]
    columns = [
        ("trace_id", pa.string()),
        ("query", pa.string()),
        ("arrival_s", pa.float64()),
        ("num_query_tokens", pa.int64()),
        ("max_tokens", pa.int64()),
        ("tenant", pa.string()),
        ("tag", pa.string()),
        ("mode", pa.string()),
        ("offsets_s", pa.list_(pa.float64())),
        ("update_chunks", pa.list_(pa.list_(pa.int32()))),
        ("chunks", pa.list_(pa.struct(chunk))),
        ("begins_s", pa.list_(pa.float64())),
        ("iterations", pa.list_(pa.struct([("first", pa.int64()), ("last", pa.int64())]))),
        ("failures", pa.list_(pa.struct(failure))),
    ]
    return pa.schema(columns, metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()})


def write_parquet(traces: Iterable[Trace], file: Path) -> None:
    """Writes the file, in place of one that is there only when all is written.

    Raises:
        ConfigurationError: a trace holds what cannot be read back as it is (metadata that JSON does not hold, half a
            surrogate pair, a number beyond 64 bits), or the file cannot be written.
        MissingExtraError: pyarrow is not installed.
    """
    pa, schema = require_pyarrow(), parquet_schema()
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with pa.parquet.ParquetWriter(part, schema, compression="zstd", use_dictionary=False) as writer:
            for group in _groups(traces):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
        seal(part, group_ranges(pa.parquet.read_metadata(part)))
        part.replace(file)
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(f"traces cannot be written to {str(file)!r}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def group_ranges(metadata: FileMetaData) -> list[tuple[int, int]]:
    """Where each row group of a file begins and ends, in bytes."""
    ranges = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [group.column(index) for index in range(group.num_columns)]
        begins = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        ends = [begin + column.total_compressed_size for begin, column in zip(begins, columns, strict=True)]
        ranges.append((min(begins), max(ends)))
    return ranges


def _groups(traces: Iterable[Trace]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    num_bytes = 0
    for trace in traces:
        check_texts(trace)
        group.append(row_of(trace))
        num_values = sum(1 + len(update) for update in group[-1]["update_chunks"]) + len(trace.failures)
        if num_values > _MAX_TRACE_VALUES:
            raise ConfigurationError(
                f"trace {trace.trace_id!r:.80} has {num_values:,} updates, chunks in them and failures, where at most "
                f"{_MAX_TRACE_VALUES:,} can be written"
            )
        num_bytes += 8 * num_values
        num_bytes += sum(4 * len(chunk["text"]) + len(chunk["metadata"] or "") + 64 for chunk in group[-1]["chunks"])
        num_bytes += sum(4 * len(failure.source + failure.reason) + 16 for failure in trace.failures)
        if len(group) == _GROUP_TRACES or num_bytes > _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def read_parquet(file: Path) -> Iterator[Trace | TraceError]:
    """The traces of a file in its order; an error in place of what cannot be read: one row, or a damaged row group.

    Raises:
        TraceError: the file as a whole cannot be read: it is cut short, is not of this form, or of another version.
        MissingExtraError: pyarrow is not installed.
    """
    pa = require_pyarrow()
    try:
        checksums = read_seal(file)
        with pa.parquet.ParquetFile(file) as parquet:
            _check_columns(file, parquet)
            begin, seen = 0, dict[str, int]()
            for group in range(parquet.num_row_groups):
                num_rows = parquet.metadata.row_group(group).num_rows
                if checksums.is_whole(group):
                    yield from _group(file, parquet, group, begin, seen)
                else:
                    reason = f"rows {begin + 1:,} to {begin + num_rows:,} are damaged: not what was written"
                    yield TraceError(reason, file=file, row=begin + 1)
                begin += num_rows
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        if isinstance(error, Stream2LLMError):
            raise
        raise TraceError(f"no Parquet file, or damaged: {_one_line(error)}", file=file) from error


def _group(
    file: Path, parquet: ParquetFile, group: int, begin: int, seen: dict[str, int]
) -> Iterator[Trace | TraceError]:
    num_rows = parquet.metadata.row_group(group).num_rows
    pa, number = require_pyarrow(), begin
    try:
        _check_size(file, parquet.metadata, group, begin)
        for batch in parquet.iter_batches(_BATCH_TRACES, row_groups=[group], use_threads=False):
            batch.validate(full=True)
            for row in batch.to_pylist():
                number += 1
                try:
                    trace = trace_of(row, file, number)
                    _check_new(trace, file, number, seen)
                    yield trace
                except TraceError as error:
                    yield error
    except TraceError as error:
        yield error
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        reason = f"rows {number + 1:,} to {begin + num_rows:,} are damaged: {_one_line(error)}"
        yield TraceError(reason, file=file, row=number + 1)


def _check_new(trace: Trace, file: Path, number: int, seen: dict[str, int]) -> None:
    if (first := seen.setdefault(trace.trace_id, number)) != number:
        reason = f"{trace.trace_id!r:.80} is the name of row {first:,} already"
        raise TraceError(reason, file=file, row=number, column="trace_id")


def _check_columns(file: Path, parquet: ParquetFile) -> None:
    version = (parquet.metadata.metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise TraceError(f"no traces: the file's metadata has no {_VERSION_KEY.decode()!r}", file=file)
    if version not in _READ_VERSIONS:
        found = version.decode("utf-8", "replace")
        raise TraceError(
            f"version {found!r:.40} of the schema, where this release reads 1 to {SCHEMA_VERSION}: use the release "
            "that wrote it, or write the traces again",
            file=file,
        )
    found_schema = parquet.schema_arrow
    for field in parquet_schema():
        if version == b"1" and field.name in _SINCE_VERSION_2:
            continue
        if field.name not in found_schema.names:
            raise TraceError("the column is missing", file=file, column=field.name)
        if (found_type := found_schema.field(field.name).type) != field.type:
            raise TraceError(f"its type is {found_type}, where {field.type} is expected", file=file, column=field.name)


def _check_size(file: Path, metadata: FileMetaData, group: int, begin: int) -> None:
    row_group = metadata.row_group(group)
    columns = [row_group.column(index) for index in range(row_group.num_columns)]
    for column in columns:
        if not 0 <= column.num_values <= _MAX_GROUP_VALUES or not 0 <= row_group.num_rows <= _MAX_GROUP_VALUES:
            reason = f"{column.num_values:,} values in one row group, where at most {_MAX_GROUP_VALUES:,} are read"
        elif column.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in name for name in column.encodings):
            reason = "dictionary-encoded, which does not bound its size: write the file with write_traces"
        else:
            continue
        raise TraceError(reason, file=file, row=begin + 1, column=column.path_in_schema)
    if (num_bytes := sum(column.total_uncompressed_size for column in columns)) > _MAX_GROUP_BYTES:
        reason = f"{num_bytes:,} bytes in one row group, where at most {_MAX_GROUP_BYTES:,} are read"
        raise TraceError(reason, file=file, row=begin + 1)


def _one_line(error: BaseException) -> str:
    return f"{' '.join(str(error).split()):.200}"
