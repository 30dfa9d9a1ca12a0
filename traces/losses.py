"""What of a trace a format does not hold: found before it is written, by comparing it with what would be read back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.checked_files import MAX_TEXT_CHARACTERS, not_unicode
from stream2llm_sdk.traces.published_numbers import numbers_of
from stream2llm_sdk.traces.trace import NUM_TOKENS, Trace

__all__ = ["check_texts", "numbered"]


def numbered(
    traces: Sequence[Trace], form: str, as_read: Callable[[Trace, int], Trace], *, drop: bool
) -> tuple[list[tuple[int, Trace]], tuple[str, ...]]:
    """What is to be written in a published format: each trace's number and the trace as it would be read back; and what
    is left out of them.

    Raises:
        ConfigurationError: something would be lost and `drop` is not set.
    """
    for trace in traces:
        if any(chunk.metadata.get(NUM_TOKENS) and not chunk.text for chunk in _chunks(trace)):
            raise ConfigurationError(
                f"trace {trace.trace_id!r:.80} keeps lengths and no texts, and the {form} format holds texts only: all "
                "of its context would be lost. Write a .parquet file, or make traces with texts (trace synth --texts)"
            )
    numbers = numbers_of(traces, form)
    read = [as_read(trace, number) for trace, number in zip(traces, numbers, strict=True)]
    found = losses(zip(traces, read, strict=True))
    refuse_losses(found, form, drop=drop)
    return list(zip(numbers, read, strict=True)), found


def losses(pairs: Iterable[tuple[Trace, Trace]]) -> tuple[str, ...]:
    """Names what differs between traces and what would be read back, with the number of traces it differs in."""
    counts = Counter(loss for trace, read in pairs for loss in _differences(trace, read))
    by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(f"{loss} (of {count:,})" for loss, count in by_count)


def refuse_losses(found: tuple[str, ...], form: str, *, drop: bool) -> None:
    """Raises ConfigurationError where something would be lost without having been asked for."""
    if found and not drop:
        raise ConfigurationError(
            f"the {form} format does not hold {', '.join(found)}. Give drop=True to leave that out, "
            "or write a .parquet file, which holds everything"
        )


def _differences(trace: Trace, read: Trace) -> set[str]:
    different = {
        field.name
        for field in fields(Trace)
        if field.name != "updates" and getattr(trace, field.name) != getattr(read, field.name)
    }
    if [(timed.offset_s, len(timed.update.chunks)) for timed in trace.updates] != [
        (timed.offset_s, len(timed.update.chunks)) for timed in read.updates
    ]:
        different.add("grouping of chunks into updates")
    different |= {name for name in ("begin_s", "iterations") if _is_lost(name, trace, read)}
    ours, theirs = _chunks(trace), _chunks(read)
    for field in fields(Chunk):
        if any(getattr(a, field.name) != getattr(b, field.name) for a, b in zip(ours, theirs, strict=True)):
            different.add(f"chunk {field.name}")
    return different


def _is_lost(name: str, trace: Trace, read: Trace) -> bool:
    """Whether something that was recorded of an update is read back otherwise. What was not recorded cannot be lost: a
    format may fill it in."""
    ours, theirs = (
        [getattr(timed, name) for timed in found.updates for _ in range(max(1, len(timed.update.chunks)))]
        for found in (trace, read)
    )
    if len(ours) < len(theirs):  # an opening of nothing was put before the first chunk
        theirs = theirs[len(theirs) - len(ours) :]
    return any(value is not None and value != back for value, back in zip(ours, theirs, strict=True))


def _chunks(trace: Trace) -> list[Chunk]:
    return [chunk for timed in trace.updates for chunk in timed.update.chunks]


def check_texts(trace: Trace, *, nul: bool = True) -> None:
    """Raises ConfigurationError where a text is too long, is no Unicode text, or has a NUL byte and must have none."""
    texts = [(name, getattr(trace, name)) for name in ("trace_id", "query", "tenant", "tag")]
    chunks = {id(chunk): chunk for chunk in _chunks(trace)}  # one that stands in many updates is looked at once
    texts += [
        (f"chunk {name}", getattr(chunk, name)) for chunk in chunks.values() for name in ("text", "source", "title")
    ]
    texts += [
        (f"failure's {name}", getattr(failure, name)) for failure in trace.failures for name in ("source", "reason")
    ]
    for name, text in texts:
        if len(text) > MAX_TEXT_CHARACTERS:
            reason = f"has {len(text):,} characters, where at most {MAX_TEXT_CHARACTERS:,} can be written"
        elif not nul and "\0" in text:
            reason = f"has a NUL byte at character {text.index(chr(0)):,}, which this format cannot hold"
        elif (found := not_unicode(text)) is not None:
            reason = found
        else:
            continue
        raise ConfigurationError(f"trace {trace.trace_id!r:.80}: its {name} {reason}")
