"""A run's tables, made of its journal."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.traces.extras import require_pyarrow
from stream2llm_sdk.traces.run_folder import (
    EVENT_COLUMNS,
    REQUEST_COLUMNS,
    SAMPLE_COLUMNS,
    to_table,
)
from stream2llm_sdk.traces.run_journal import Entry
from stream2llm_sdk.trail import EventType

if TYPE_CHECKING:
    import pyarrow

__all__ = ["latest_requests", "tables_of", "write_tables"]

_ROWS_AT_ONCE = 50_000
_COUNTED = {
    EventType.QUEUED: "num_queued",
    EventType.SCHEDULED: "num_scheduled",
    EventType.KV_ON_GPU: "num_kv_on_gpu",
    EventType.PREEMPTED_RECOMPUTE: "num_preempted_recompute",
    EventType.PREEMPTED_SWAP: "num_preempted_swap",
}


def latest_requests(entries: Iterable[Entry]) -> dict[str, Entry]:
    """The last entry of each request by its name, in the order of these entries: one that was aborted when the run was
    stopped, and replayed when it was continued, counts once."""
    latest: dict[str, Entry] = {}
    for entry in entries:
        if entry["kind"] == "request":
            latest.pop(entry["row"]["request_id"], None)
            latest[entry["row"]["request_id"]] = entry
    return latest


def tables_of(entries: Sequence[Entry], config: Mapping[str, Any]) -> dict[str, pyarrow.Table]:
    """The tables 'requests', 'events' and 'samples'.

    Args:
        entries: a journal's.
        config: the run's; it says how many KV blocks the engine has.
    """
    pa = require_pyarrow()
    latest = latest_requests(entries)
    num_blocks = (config.get("engine") or {}).get("limits", {}).get("num_blocks")
    empty = to_table([], EVENT_COLUMNS)
    return {
        "requests": to_table((entry["row"] for entry in latest.values()), REQUEST_COLUMNS),
        "events": pa.concat_tables([empty, *_event_tables(entries, latest)]),
        "samples": to_table(_samples(entries, latest, num_blocks), SAMPLE_COLUMNS),
    }


def write_tables(tables: Mapping[str, pyarrow.Table], folder: Path) -> None:
    """Writes each table to its Parquet file; a file is there whole, or not."""
    pa = require_pyarrow()
    for name, table in tables.items():
        unfinished = folder / f".{name}.parquet.tmp"
        pa.parquet.write_table(table, unfinished, compression="zstd")
        os.replace(unfinished, folder / f"{name}.parquet")


# ---- events ---------------------------------------------------------------------------------------------------------


def _event_tables(entries: Sequence[Entry], latest: Mapping[str, Entry]) -> Iterator[pyarrow.Table]:
    rows = _event_rows(entries, latest)
    while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        yield to_table(batch, EVENT_COLUMNS)


def _event_rows(entries: Sequence[Entry], latest: Mapping[str, Entry]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        row = entry.get("row", {"segment": entry.get("segment", 0)})
        if entry["kind"] == "request" and latest[row["request_id"]] is not entry:
            continue
        for source, event, run_s, monotonic_s, wall_s, duration_s, data in entry.get("events", ()):
            yield {
                "request_id": row.get("request_id", ""),
                "query_id": row.get("query_id", ""),
                "source": source,
                "event": event,
                "run_s": run_s,
                "monotonic_s": monotonic_s,
                "wall_s": wall_s,
                "duration_s": duration_s,
                "segment": row["segment"],
                "data": json.dumps(data),
            }


# ---- samples --------------------------------------------------------------------------------------------------------


class _Spans:
    """Spans of time of one kind; how many of them there are at a time."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def add(self, start_s: float, end_s: float) -> None:
        self._starts.append(start_s)
        self._ends.append(end_s)

    def count_at(self, times_s: npt.NDArray[np.float64]) -> list[int]:
        started, ended = (np.searchsorted(np.sort(times), times_s, "right") for times in (self._starts, self._ends))
        return [int(number) for number in started - ended]


def _samples(entries: Sequence[Entry], latest: Mapping[str, Entry], num_blocks: int | None) -> list[dict[str, Any]]:
    """The samples taken, with the numbers of requests in each state, which the trails tell."""
    samples = [entry for entry in entries if entry["kind"] == "sample"]
    times_s = np.array([sample["run_s"] for sample in samples], dtype=np.float64)
    spans = {name: _Spans() for name in ("num_requests", "num_open_streams", *_COUNTED.values())}
    for entry in latest.values():
        _add_spans(spans, entry)
    counts = {name: kind.count_at(times_s) for name, kind in spans.items()}
    rows = []
    for index, sample in enumerate(samples):
        free = sample.get("num_free_blocks")
        usage = None if free is None or not num_blocks else 1 - free / num_blocks
        rows.append({"kv_usage": usage, **sample, **{name: numbers[index] for name, numbers in counts.items()}})
    return [{name: row.get(name) for name in SAMPLE_COLUMNS} for row in rows]


def _add_spans(spans: Mapping[str, _Spans], entry: Entry) -> None:
    row = entry["row"]
    trail = [(EventType(event), run_s) for source, event, run_s, *_ in entry["events"] if source == "engine"]
    ends = [time_s for time_s in (row["finished_s"], trail[-1][1] if trail else None) if time_s is not None]
    end_s = max(ends, default=row["arrival_s"])
    spans["num_requests"].add(row["arrival_s"], end_s)
    if row["send_s"]:
        complete_s = row["context_complete_s"]
        spans["num_open_streams"].add(row["send_s"][0], end_s if complete_s is None else complete_s)
    states = [(event, run_s) for event, run_s in trail if event.is_state]
    for (event, start_s), (_, stop_s) in itertools.pairwise(states):
        spans[_COUNTED[event]].add(start_s, stop_s)
