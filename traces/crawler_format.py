"""The published crawler traces: a folder with one `query_<number>.csv` for each question.

Columns: `type` (`tavily_search` or `page_scrape`), `startTime` and `endTime` (seconds after the question), `query` (in
the search's row), `content` (in a page's row, may be blank), and `url`, which may be missing; others are ignored.

What a row means is what the published replay driver makes of it. Rows count in the order of `endTime`. The search's row
opens the prompt, so it is an `Append` of nothing; a page's row is an `Append` of one chunk, whose text is `content` and
whose source is `url`. The driver sends `template + '\\n'` when the search has ended, `content + '\\n'` for each page,
and `end_template + ' ' + query` with the last; none of that is part of the trace. `startTime` is when the update began.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from stream2llm_sdk.context import Append, Chunk, ContextMode
from stream2llm_sdk.errors import ConfigurationError, TraceError
from stream2llm_sdk.traces.checked_files import Row, csv_rows, file_in
from stream2llm_sdk.traces.losses import check_texts, numbered
from stream2llm_sdk.traces.trace import TimedUpdate, Trace

__all__ = ["CRAWLER", "crawler_files", "read_crawler", "write_crawler"]

CRAWLER = "crawler"

_SEARCH, _PAGE = "tavily_search", "page_scrape"
_COLUMNS = ("type", "startTime", "endTime", "query", "content")
_FILE_NAME = re.compile(r"query_(\d{1,18})\.csv", re.ASCII)


def crawler_files(folder: Path) -> list[str]:
    """The names of a folder's trace files, by their numbers."""
    numbered = [(int(match[1]), path.name) for path in folder.iterdir() if (match := _FILE_NAME.fullmatch(path.name))]
    return [name for _, name in sorted(numbered)]


def read_crawler(folder: Path) -> Iterator[Trace | TraceError]:
    """The traces of a folder in the order of their numbers, each named 'crawler-<number>'; an error in place of one
    that cannot be read."""
    before = -1
    for name in crawler_files(folder):
        number = int(name[len("query_") : -len(".csv")])
        try:
            if number == before:
                raise TraceError(f"another file has the number {number} too", file=folder / name)
            yield _trace(file_in(folder, name), before := number)
        except TraceError as error:
            yield error


def _trace(file: Path, number: int) -> Trace:
    timed = sorted(
        ((_end_time(row), row["type"] != _SEARCH, row) for row in csv_rows(file, _COLUMNS)), key=lambda item: item[:2]
    )
    end_s, is_page, first = timed[0]
    if is_page:
        reason = f"a page that ended at {end_s} s, before any search did: a {_SEARCH!r} row must come first"
        raise first.error("endTime", reason)
    updates = tuple(TimedUpdate(end_s, _update(row), float(row.time("startTime"))) for end_s, _, row in timed)
    return Trace(f"{CRAWLER}-{number}", first["query"], updates, tag=CRAWLER)


def _end_time(row: Row) -> float:
    if row["type"] not in (_SEARCH, _PAGE):
        raise row.error("type", f"{row['type']!r:.80} is neither {_SEARCH!r} nor {_PAGE!r}")
    start_s, end_s = row.time("startTime"), row.time("endTime")
    if end_s < start_s:
        raise row.error("endTime", f"{row['endTime']!r} is before startTime, which is {row['startTime']!r}")
    return float(end_s)


def _update(row: Row) -> Append:
    if row["type"] == _SEARCH:
        return Append(())
    return Append(Chunk(row["content"], source=row.values.get("url", "")))


def write_crawler(traces: Sequence[Trace], folder: Path, *, drop: bool = False) -> tuple[str, ...]:
    """Writes a `query_<number>.csv` for each trace and returns what was left out.

    Traces keep their number where all are named 'crawler-<number>', and are numbered from 0 otherwise. Where a
    trace does not say when an update began, a search begins with the question and a page with the first update.

    Raises:
        ConfigurationError: a trace replaces its context, the format would lose something and `drop` is not set, a text
            cannot stand in a CSV file, or the folder holds files.
    """
    for trace in traces:
        if trace.mode is not ContextMode.APPEND:
            raise ConfigurationError(f"trace {trace.trace_id!r} replaces its context: the crawler format only appends")
    to_write, dropped = numbered(traces, CRAWLER, _as_read, drop=drop)
    for _, trace in to_write:
        check_texts(trace, nul=False)
    folder.mkdir(parents=True, exist_ok=True)
    for number, trace in to_write:
        _write(trace, folder / f"query_{number}.csv")
    return dropped


def _as_read(trace: Trace, number: int) -> Trace:
    """The trace that is read back: one chunk an update, after an update of nothing."""
    updates: list[TimedUpdate] = []
    opened_s = float(trace.updates[0].offset_s)
    for timed in trace.updates:
        search_s, page_s = (default if timed.begin_s is None else float(timed.begin_s) for default in (0.0, opened_s))
        pages = [Append(Chunk(chunk.text, source=chunk.source)) for chunk in timed.update.chunks]
        if not pages or not updates:
            updates.append(TimedUpdate(timed.offset_s, Append(()), 0.0 if pages else search_s))
        updates += [TimedUpdate(timed.offset_s, page, page_s) for page in pages]
    # Rows of the same time are read with the searches first.
    updates.sort(key=lambda timed: (timed.offset_s, len(timed.update.chunks)))
    return Trace(f"{CRAWLER}-{number}", trace.query, tuple(updates), tag=CRAWLER)


def _write(trace: Trace, file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow((*_COLUMNS, "url"))
        for timed in trace.updates:
            times = (timed.begin_s, float(timed.offset_s))
            if not timed.update.chunks:
                rows.writerow((_SEARCH, *times, trace.query, "", ""))
            for chunk in timed.update.chunks:
                rows.writerow((_PAGE, *times, "", chunk.text, chunk.source))
