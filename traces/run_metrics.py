"""`run_metrics.csv`: a run in the form that the published experiments wrote, column for column.

A row is an event of a request, written when the request ended, or one of the run itself. Driver events keep their
names: replay_start, query_delay (the wait for the arrival), query_start, query_sleep (a wait for a chunk),
pipeline_pool_update (update mode), query_ttft (from complete context), query_e2e_latency, replay_end, error. A row of
the engine is an interval: `event_type` is `EngineCoreEventType.` with the state that was left, `duration_secs` how long
it had lasted and `event_timestamp` when it was left; the end has no row of its own, and marks have none.

`event_timestamp` is in seconds since the epoch (virtual time in a simulation). As published, `request_size` (tokens of
the final prompt) and `concurrent_requests` (requests under way, itself included) are those at the request's end, not at
the event's time. `prev_event_type` is that of the request's row before of the same source. `details` is a JSON object.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stream2llm_sdk.traces.run_journal import Entry
from stream2llm_sdk.traces.run_tables import latest_requests
from stream2llm_sdk.trail import EventType

__all__ = ["ANNS_COLUMNS", "COLUMNS", "write_run_metrics"]

COLUMNS = (
    "event_timestamp",
    "event_type",
    "query_id",
    "request_id",
    "stream",
    "concurrency",
    "duration_secs",
    "details",
    "request_size",
    "concurrent_requests",
    "replay_rate",
    "prev_event_type",
)
ANNS_COLUMNS = ("num_documents", "pipeline_pool_change")
"""Two more, where a request is in update mode: documents in the pool, and those of them that are new in it."""

_ENGINE_PREFIX = "EngineCoreEventType."


def write_run_metrics(file: Path, entries: Sequence[Entry], options: Mapping[str, Any]) -> None:
    """Writes the file, whole or not at all.

    Args:
        file: where.
        entries: a journal's.
        options: the run's options, as `ReplayOptions.to_dict` gives them.
    """
    latest = latest_requests(entries)
    has_pools = any(entry["row"]["mode"] == "update" for entry in latest.values())
    columns = (*COLUMNS, *(ANNS_COLUMNS if has_pools else ()))
    unfinished = file.with_name(f".{file.name}.tmp")
    with open(unfinished, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(_rows(entries, latest, options))
    os.replace(unfinished, file)


def _rows(
    entries: Sequence[Entry], latest: Mapping[str, Entry], options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    common = {
        "stream": options.get("streaming"),
        "concurrency": options.get("concurrency") or "",
        "replay_rate": (options.get("arrivals") or {}).get("rate_per_s") or "",
    }
    under_way = _under_way(latest)
    for entry in entries:
        if entry["kind"] == "event":
            yield from ({**common, **row} for row in _driver_rows(entry["events"]))
        elif entry["kind"] == "request" and latest[entry["row"]["request_id"]] is entry:
            row = entry["row"]
            own = {
                "query_id": row["query_id"],
                "request_id": row["request_id"],
                "request_size": row["num_prompt_tokens"],
                "concurrent_requests": under_way[row["request_id"]],
            }
            for found in (*_driver_rows(entry["events"]), *_engine_rows(entry["events"])):
                yield {**common, **own, **found}


def _driver_rows(events: Iterable[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    before = ""
    for source, event, _, _, wall_s, duration_s, data in events:
        if source == "driver":
            yield {
                "event_timestamp": wall_s,
                "event_type": event,
                "duration_secs": "" if duration_s is None else duration_s,
                "details": json.dumps(data),
                "prev_event_type": before,
                **{name: data[name] for name in ANNS_COLUMNS if name in data},
            }
            before = event


def _engine_rows(events: Iterable[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    before = ""
    for source, event, _, _, wall_s, duration_s, data in events:
        if source == "engine" and duration_s is not None and EventType(event).is_state:
            yield {
                "event_timestamp": wall_s + duration_s,
                "event_type": _ENGINE_PREFIX + event,
                "duration_secs": duration_s,
                "details": json.dumps(data),
                "prev_event_type": before,
            }
            before = _ENGINE_PREFIX + event


def _under_way(latest: Mapping[str, Entry]) -> dict[str, int]:
    """How many requests were under way when each of them ended."""
    rows = [entry["row"] for entry in latest.values()]
    ends = {row["request_id"]: row["arrival_s"] if row["finished_s"] is None else row["finished_s"] for row in rows}
    starts_s, ends_s = np.sort([row["arrival_s"] for row in rows]), np.sort(list(ends.values()))
    return {
        name: int(np.searchsorted(starts_s, end_s, "right") - np.searchsorted(ends_s, end_s, "left"))
        for name, end_s in ends.items()
    }
