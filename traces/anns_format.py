"""The published vector-search traces: a folder with a map of queries, a CSV file for each, and the documents' texts.

`query_trace_map_*.json` is `{"0": {"query": …, "trace_file": …}, …}`, the file being in `res/` or beside the map. Each
row of a trace file is a top-k in the order of the prompt: `StartTime_us`, `EndTime_us` (microseconds) and
`PipelinePool`, such as `"(62952551,79119332)"`. `StartIteration` and `EndIteration` are the window of the search that
gave it; where they are no two whole numbers in order they are not kept, since no replay depends on them.
`retrieved_corpus_content*.json`, one file or several, is `{"62952551": "text", …}`.

What a row means is what the published replay driver makes of it: it waits for `(EndTime_us - StartTime_us) / 1e6`
seconds after the row before, and then sends that pool, a `Replace`. So an update begins with the one before. A chunk's
text is the document's and its source the document's id; template, separators and question are the driver's, and no part
of the trace.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from stream2llm_sdk.context import Chunk, ContextMode, Replace
from stream2llm_sdk.errors import ConfigurationError, TraceError
from stream2llm_sdk.traces.checked_files import Row, csv_rows, file_in, json_object, not_unicode
from stream2llm_sdk.traces.losses import check_texts, numbered
from stream2llm_sdk.traces.trace import TimedUpdate, Trace

__all__ = ["ANNS", "anns_maps", "read_anns", "write_anns"]

ANNS = "anns"

_COLUMNS = ("StartTime_us", "EndTime_us", "PipelinePool")
_ITERATIONS = ("StartIteration", "EndIteration")
_MAP_NAMES, _CORPUS_NAMES = "query_trace_map_*.json", "retrieved_corpus_content*.json"
_DOCUMENT_ID = re.compile(r"[^\s,()'\"\0]{1,256}")
_COUNT = re.compile(r"\d{1,18}", re.ASCII)
_US_PER_S = 1_000_000


def anns_maps(folder: Path) -> list[Path]:
    """The maps of queries in a folder."""
    return sorted(folder.glob(_MAP_NAMES))


def read_anns(path: Path) -> Iterator[Trace | TraceError]:
    """The traces of a folder, or of one of its maps, each named 'anns-<key of the map>'; an error in place of what
    cannot be read.

    Raises:
        TraceError: the folder has several maps, or the map cannot be read or is empty.
    """
    folder, map_file = _map_of(path)
    queries = json_object(map_file)
    if not queries:
        raise TraceError("the map has no queries", file=map_file)
    corpus: dict[str, str] = {}
    for name in sorted(part.name for part in folder.glob(_CORPUS_NAMES)):
        try:
            _add_documents(corpus, file_in(folder, name))
        except TraceError as error:
            yield error
    for key, entry in queries.items():
        try:
            yield _trace(folder, map_file, key, entry, corpus)
        except TraceError as error:
            yield error


def _map_of(path: Path) -> tuple[Path, Path]:
    if not path.is_dir():
        return path.parent, path
    maps = anns_maps(path)
    if len(maps) != 1:
        raise TraceError(f"{len(maps)} maps named {_MAP_NAMES}: name the one to read", file=path)
    return path, file_in(path, maps[0].name)


def _add_documents(corpus: dict[str, str], file: Path) -> None:
    for document_id, text in json_object(file).items():
        if not isinstance(text, str):
            raise TraceError(f"a document is a text, not {type(text).__name__}", file=file, row=document_id)
        if (reason := not_unicode(text)) is not None:
            raise TraceError(f"the text {reason}", file=file, row=document_id)
        if corpus.setdefault(document_id, text) != text:
            raise TraceError(
                "another part of the corpus has another text for this document", file=file, row=document_id
            )


def _trace(folder: Path, map_file: Path, key: str, entry: Any, corpus: Mapping[str, str]) -> Trace:
    for column in ("query", "trace_file"):
        if not isinstance(entry, dict) or not isinstance(entry.get(column), str):
            raise TraceError("a text is expected here", file=map_file, row=key, column=column)
        if (reason := not_unicode(entry[column])) is not None:
            raise TraceError(f"the text {reason}", file=map_file, row=key, column=column)
    try:
        file = _trace_file(folder, entry["trace_file"])
    except TraceError as error:
        raise TraceError(f"{error.file}: {error.reason}", file=map_file, row=key, column="trace_file") from error
    total_us, before = Fraction(0), None
    updates = []
    for row in csv_rows(file, _COLUMNS):
        begin_us = total_us
        total_us += _wait_us(row, before)
        begin_s, end_s = float(begin_us / _US_PER_S), float(total_us / _US_PER_S)
        updates.append(TimedUpdate(end_s, _pool(row, corpus), begin_s, _iterations(row)))
        before = row
    return Trace(f"{ANNS}-{key}", entry["query"], tuple(updates), tag=ANNS)


def _trace_file(folder: Path, name: str) -> Path:
    if not name.strip():
        raise TraceError("blank: a file is missing", file=folder)
    is_beside_map = Path(name).is_absolute() or os.path.lexists(folder / name)
    return file_in(folder, name if is_beside_map else f"res/{name}")


def _wait_us(row: Row, before: Row | None) -> Fraction:
    start_us, end_us = row.time("StartTime_us"), row.time("EndTime_us")
    if end_us < start_us:
        raise row.error("EndTime_us", f"{row['EndTime_us']!r} is before StartTime_us, which is {row['StartTime_us']!r}")
    for column, time_us in (("StartTime_us", start_us), ("EndTime_us", end_us)):
        if before is not None and time_us < before.time(column):
            raise row.error(column, f"{row[column]!r} is before that of the row above, {before[column]!r}")
    return end_us - start_us


def _iterations(row: Row) -> tuple[int, int] | None:
    first, last = (row.values.get(column, "").strip() for column in _ITERATIONS)
    if not (_COUNT.fullmatch(first) and _COUNT.fullmatch(last)) or int(first) > int(last):
        return None
    return int(first), int(last)


def _pool(row: Row, corpus: Mapping[str, str]) -> Replace:
    text = row["PipelinePool"].strip()
    if not (text.startswith("(") and text.endswith(")")):
        raise row.error("PipelinePool", f"{text!r:.80} is no list of documents like '(62952551,79119332)'")
    document_ids = [part.strip() for part in text[1:-1].split(",")]
    if not document_ids[-1]:
        document_ids.pop()
    seen: set[str] = set()
    for document_id in document_ids:
        if not _DOCUMENT_ID.fullmatch(document_id):
            raise row.error("PipelinePool", f"{document_id!r:.80} is no document's id, in {text!r:.80}")
        if document_id not in corpus:
            raise row.error("PipelinePool", f"document {document_id!r:.80} is not in the corpus ({_CORPUS_NAMES})")
        if document_id in seen:
            raise row.error("PipelinePool", f"document {document_id!r:.80} is there twice")
        seen.add(document_id)
    return Replace(Chunk(corpus[document_id], source=document_id) for document_id in document_ids)


def write_anns(traces: Sequence[Trace], folder: Path, *, drop: bool = False) -> tuple[str, ...]:
    """Writes the map, a trace file for each trace, and the corpus, and returns what was left out.

    Traces keep their number where all are named 'anns-<number>', and are numbered from 0 otherwise. A chunk's source is
    its document's id. A row begins where the one before ended, as the driver has it. Where a trace holds no iterations,
    they count the rows.

    Raises:
        ConfigurationError: a trace appends to its context, the format would lose something and `drop` is not set, a
            source cannot be a document's id or stands for two texts, or a text is no Unicode text.
    """
    for trace in traces:
        if trace.mode is not ContextMode.UPDATE:
            raise ConfigurationError(f"trace {trace.trace_id!r} appends to its context: the anns format only replaces")
    to_write, dropped = numbered(traces, ANNS, _as_read, drop=drop)
    for _, trace in to_write:
        check_texts(trace)
    corpus = _corpus_of(trace for _, trace in to_write)
    (folder / "res").mkdir(parents=True, exist_ok=True)
    queries = {}
    for number, trace in to_write:
        queries[str(number)] = {"query": trace.query, "trace_file": (name := f"query{number}_pipeline_trace.csv")}
        _write(trace, folder / "res" / name)
    for file_name, content in (("query_trace_map_all.json", queries), ("retrieved_corpus_content.part.0.json", corpus)):
        with (folder / file_name).open("w", encoding="utf-8") as stream:
            json.dump(content, stream)
    return dropped


def _as_read(trace: Trace, number: int) -> Trace:
    """The trace that is read back."""
    updates: list[TimedUpdate] = []
    begin_s = 0.0
    for index, timed in enumerate(trace.updates):
        pool = Replace(Chunk(chunk.text, source=chunk.source) for chunk in timed.update.chunks)
        updates.append(TimedUpdate(timed.offset_s, pool, begin_s, timed.iterations or (index, index + 1)))
        begin_s = float(timed.offset_s)
    return Trace(f"{ANNS}-{number}", trace.query, tuple(updates), tag=ANNS)


def _corpus_of(traces: Iterable[Trace]) -> dict[str, str]:
    corpus: dict[str, str] = {}
    for trace in traces:
        for timed in trace.updates:
            seen: set[str] = set()
            for chunk in timed.update.chunks:
                if not _DOCUMENT_ID.fullmatch(chunk.source) or chunk.source in seen:
                    raise ConfigurationError(
                        f"trace {trace.trace_id!r}: source {chunk.source!r:.80} cannot be a document's id in the anns "
                        "format: an id has no blanks, commas, quotes or brackets, and is in a pool once"
                    )
                if corpus.setdefault(chunk.source, chunk.text) != chunk.text:
                    raise ConfigurationError(
                        f"trace {trace.trace_id!r}: source {chunk.source!r} has another text than elsewhere, and the "
                        "anns format keeps one text for an id"
                    )
                seen.add(chunk.source)
    return corpus


def _write(trace: Trace, file: Path) -> None:
    start_us = "0"
    with file.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow((*_COLUMNS[:2], *_ITERATIONS, _COLUMNS[2]))
        for timed in trace.updates:
            # The decimal digits of the seconds, moved: reading gives exactly the same float.
            end_us = format(Decimal(repr(float(timed.offset_s))).scaleb(6), "f")
            pool = ",".join(chunk.source for chunk in timed.update.chunks)
            rows.writerow((start_us, end_us, *(timed.iterations or ("", "")), f"({pool})"))
            start_us = end_us
