"""A trace as a row of the compact form, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stream2llm_sdk.context import Append, Chunk, ContextMode, Replace
from stream2llm_sdk.errors import ConfigurationError, TraceError
from stream2llm_sdk.traces.json_values import json_text
from stream2llm_sdk.traces.trace import TimedFailure, TimedUpdate, Trace

__all__ = ["row_of", "trace_of"]

_TEXTS = ("trace_id", "query", "tenant", "tag")
_INTEGERS = ("num_query_tokens", "max_tokens")
_UPDATES: dict[str, type[Append | Replace]] = {ContextMode.APPEND.value: Append, ContextMode.UPDATE.value: Replace}


def row_of(trace: Trace) -> dict[str, Any]:
    """The row of a trace.

    Raises:
        ConfigurationError: it holds what a row cannot: see `write_parquet`.
    """
    positions: dict[tuple[Any, ...], int] = {}
    # Most chunks of a search stand in several of its updates, as the same object: each is looked at once.
    chunks = {id(chunk): chunk for timed in trace.updates for chunk in timed.update.chunks}
    position_of = {key: positions.setdefault(_chunk_key(trace, chunk), len(positions)) for key, chunk in chunks.items()}
    update_chunks = [[position_of[id(chunk)] for chunk in timed.update.chunks] for timed in trace.updates]
    row: dict[str, Any] = {name: getattr(trace, name) for name in _TEXTS}
    row |= {name: _int64(trace, name) for name in _INTEGERS}
    row["arrival_s"] = _float64(trace, "arrival_s", trace.arrival_s)
    row["mode"] = trace.mode.value
    row["offsets_s"] = [_float64(trace, "offset_s", timed.offset_s) for timed in trace.updates]
    row["update_chunks"] = update_chunks
    row |= _begins_and_iterations(trace)
    row["failures"] = [
        {"offset_s": _float64(trace, "offset_s", failure.offset_s), "source": failure.source, "reason": failure.reason}
        for failure in trace.failures
    ] or None
    row["chunks"] = [
        {"text": text, "source": source, "title": title, "score": score, "metadata": metadata}
        for text, source, title, score, metadata in positions
    ]
    return row


def trace_of(row: Mapping[str, Any], file: Path, number: int) -> Trace:
    """The trace of row `number` of a file.

    Raises:
        TraceError: a value is missing or cannot be.
    """
    for column in (*_TEXTS, "mode", "offsets_s", "update_chunks", "chunks"):
        if row[column] is None:
            raise TraceError("the value is missing", file=file, row=number, column=column)
    kind = _UPDATES.get(row["mode"])
    if kind is None:
        reason = f"{row['mode']!r:.40} is neither {' nor '.join(map(repr, _UPDATES))}"
        raise TraceError(reason, file=file, row=number, column="mode")
    offsets_s, positions = row["offsets_s"], row["update_chunks"]
    if len(offsets_s) != len(positions):
        reason = f"{len(positions)} updates, where offsets_s has {len(offsets_s)}"
        raise TraceError(reason, file=file, row=number, column="update_chunks")
    chunks = [_chunk(chunk, file, number) for chunk in row["chunks"]]
    begins_s = _of_updates(row, "begins_s", len(offsets_s), file, number)
    windows = _of_updates(row, "iterations", len(offsets_s), file, number)
    try:
        updates = []
        for offset_s, update, begin_s, window in zip(offsets_s, positions, begins_s, windows, strict=True):
            iterations = None if window is None else (window["first"], window["last"])
            updates.append(TimedUpdate(offset_s, kind(_picked(chunks, update, file, number)), begin_s, iterations))
        fields = {name: row[name] for name in (*_TEXTS, *_INTEGERS, "arrival_s")}
        failures = _failures(row.get("failures"), file, number)
        return Trace(updates=tuple(updates), failures=failures, **fields)
    except ConfigurationError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(str(error), file=file, row=number, column=_column_of(error)) from error


def _column_of(error: ConfigurationError) -> str:
    message = str(error)
    if message.startswith("begin_s"):
        return "begins_s"
    return next((name for name in (*_INTEGERS, "arrival_s", "iterations") if name in message), "offsets_s")


def _of_updates(row: Mapping[str, Any], column: str, num_updates: int, file: Path, number: int) -> list[Any]:
    values = row.get(column)
    if values is None:
        return [None] * num_updates
    if len(values) != num_updates:
        reason = f"{len(values)} values, where offsets_s has {num_updates}"
        raise TraceError(reason, file=file, row=number, column=column)
    return list(values)


def _failures(rows: Any, file: Path, number: int) -> tuple[TimedFailure, ...]:
    try:
        return tuple(TimedFailure(row["offset_s"], row["source"], row["reason"]) for row in rows or ())
    except (ConfigurationError, TypeError) as error:
        reason = "a failure is missing" if isinstance(error, TypeError) else str(error)
        raise TraceError(reason, file=file, row=number, column="failures") from error


def _begins_and_iterations(trace: Trace) -> dict[str, Any]:
    """The columns in which an update may have no value; null where none has one."""
    begins_s = [_float64(trace, "begin_s", timed.begin_s) for timed in trace.updates]
    windows = [None if (pair := timed.iterations) is None else _window(trace, pair) for timed in trace.updates]
    return {
        "begins_s": begins_s if any(begin_s is not None for begin_s in begins_s) else None,
        "iterations": windows if any(windows) else None,
    }


def _window(trace: Trace, iterations: tuple[int, int]) -> dict[str, int]:
    if iterations[1] >= 1 << 63:
        raise _unfit(trace, "iterations", iterations, "are no 64-bit integers")
    return {"first": iterations[0], "last": iterations[1]}


def _picked(chunks: list[Chunk], positions: Any, file: Path, number: int) -> list[Chunk]:
    if positions is None or any(position is None or not 0 <= position < len(chunks) for position in positions):
        reason = f"{positions!r:.80} names chunks that are not among the {len(chunks)} of the row"
        raise TraceError(reason, file=file, row=number, column="update_chunks")
    return [chunks[position] for position in positions]


def _chunk(values: Mapping[str, Any] | None, file: Path, number: int) -> Chunk:
    if values is None or any(values[name] is None for name in ("text", "source", "title")):
        raise TraceError("a chunk, or a text of one, is missing", file=file, row=number, column="chunks")
    try:
        metadata = json.loads(values["metadata"]) if values["metadata"] is not None else {}
    except (ValueError, RecursionError) as error:
        reason = f"not JSON: {error!s:.200}"
        raise TraceError(reason, file=file, row=number, column="chunks.metadata") from error
    if not isinstance(metadata, dict):
        reason = f"a JSON object is expected, not {type(metadata).__name__}"
        raise TraceError(reason, file=file, row=number, column="chunks.metadata")
    return Chunk(values["text"], values["source"], values["title"], values["score"], metadata)


def _chunk_key(trace: Trace, chunk: Chunk) -> tuple[Any, ...]:
    return chunk.text, chunk.source, chunk.title, _float64(trace, "score", chunk.score), _metadata(trace, chunk)


def _metadata(trace: Trace, chunk: Chunk) -> str | None:
    """The metadata as JSON; None for none."""
    if not isinstance(chunk.metadata, Mapping):
        raise _unfit(trace, "metadata", chunk.metadata, "is no mapping")
    if not chunk.metadata:
        return None
    metadata = chunk.metadata if type(chunk.metadata) is dict else dict(chunk.metadata)
    text = json_text(metadata)
    if text is None:
        raise _unfit(trace, "metadata", metadata, "is not what JSON holds: texts, finite numbers, lists, dicts by text")
    return text


def _float64(trace: Trace, name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _unfit(trace, name, value, "is no 64-bit float") from None
    if number != value and number == number:
        raise _unfit(trace, name, value, "is no 64-bit float")
    return number


def _int64(trace: Trace, name: str) -> int | None:
    value = getattr(trace, name)
    if value is None:
        return None
    if value != int(value) or value >= 1 << 63:
        raise _unfit(trace, name, value, "is no 64-bit integer")
    return int(value)


def _unfit(trace: Trace, name: str, value: Any, why: str) -> ConfigurationError:
    try:
        shown = f"{value!r:.80}"
    except ValueError:  # an integer of thousands of digits
        shown = f"<{type(value).__name__}>"
    return ConfigurationError(f"trace {trace.trace_id!r:.80}: {name}={shown} {why}, and cannot be written")
