"""Texts that every format of traces can hold: of pages and documents that come from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.traces.json_values import is_flat_json
from stream2llm_sdk.traces.trace import TimedFailure, Trace

__all__ = ["whole_failure", "whole_text", "with_whole_texts"]

_REPLACEMENT = "\ufffd"


def with_whole_texts(trace: Trace, trace_id: str, query: str) -> Trace:
    """The trace with this name and question, with whole texts in its chunks and failures, and with metadata that is
    JSON."""
    # A document of a search stands in most of its pools, as the same object.
    chunks = {id(chunk): chunk for timed in trace.updates for chunk in timed.update.chunks}
    whole = {key: _whole_chunk(chunk) for key, chunk in chunks.items()}
    updates = tuple(
        replace(timed, update=type(timed.update)(whole[id(chunk)] for chunk in timed.update.chunks))
        for timed in trace.updates
    )
    failures = tuple(map(whole_failure, trace.failures))
    return replace(trace, trace_id=trace_id, query=query, updates=updates, failures=failures)


def whole_failure(failure: TimedFailure) -> TimedFailure:
    """The failure with whole texts."""
    return replace(failure, source=whole_text(failure.source), reason=whole_text(failure.reason))


def whole_text(text: str) -> str:
    """The text with the replacement character in place of NUL bytes, which CSV cannot hold, and of halves of surrogate
    pairs, which are no Unicode."""
    if "\0" in text:
        text = text.replace("\0", _REPLACEMENT)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _whole_chunk(chunk: Chunk) -> Chunk:
    text, source, title = map(whole_text, (chunk.text, chunk.source, chunk.title))
    metadata = _as_json(chunk.metadata)
    if text is chunk.text and source is chunk.source and title is chunk.title and metadata is chunk.metadata:
        return chunk
    return replace(chunk, text=text, source=source, title=title, metadata=metadata)


def _as_json(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    if is_flat_json(metadata):
        return metadata
    if not metadata:
        return {}
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False, default=str))
    except (TypeError, ValueError, RecursionError):
        return {_as_text(key): _as_text(value) for key, value in metadata.items()}
    return found


def _as_text(value: Any) -> str:
    try:
        return whole_text(str(value))
    except Exception:  # an integer of thousands of digits, an object that cannot show itself
        return f"<{type(value).__name__}>"
