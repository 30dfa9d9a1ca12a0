"""A run as a trace for ui.perfetto.dev and chrome://tracing.

The format is the JSON object form of the Chrome trace event format: complete events ('X') for what a request was doing,
a thread a request; instant events ('i') for the marks of its trail; counters ('C') for memory and queues; metadata
('M') for names. Times are microseconds of the run.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import IO, Any

from stream2llm_sdk.traces.report.phases import Mark, RequestTrail, Span
from stream2llm_sdk.traces.report.reported_run import ReportedRun

__all__ = ["trace_events", "write_trace"]

_ENGINE, _REQUESTS = 1, 2
# A thread with its process's number would be shown as that process's main thread.
_FIRST_THREAD = 10
_COUNTERS = {
    "KV blocks in use (%)": {"in use": "kv_usage"},
    "blocks in host memory": {"used": "num_host_blocks_used"},
    "requests by state": {
        "queued": "num_queued",
        "scheduled": "num_scheduled",
        "KV on the GPU": "num_kv_on_gpu",
        "KV dropped": "num_preempted_recompute",
        "KV in host memory": "num_preempted_swap",
    },
    "open streams": {"open": "num_open_streams", "nothing to compute": "num_parked"},
}


def write_trace(run: ReportedRun, file: IO[str]) -> None:
    """Writes a run's trace, an event a line."""
    about = {"run": run.label, "state": run.state, "warnings": list(run.warnings)}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    separator = ""
    for event in trace_events(run):
        file.write(separator + json.dumps(event, allow_nan=False, separators=(",", ":")))
        separator = ",\n"
    file.write("\n]}\n")


def trace_events(run: ReportedRun) -> Iterator[dict[str, Any]]:
    """All events of a run's trace."""
    for order, (process, name) in enumerate(((_ENGINE, "engine"), (_REQUESTS, "requests, by arrival"))):
        yield _metadata("process_name", process, name=f"{name}: {run.label}")
        yield _metadata("process_sort_index", process, sort_index=order)
    yield from _counters(run)
    for thread, trail in enumerate(run.trails, _FIRST_THREAD):
        yield from _request(thread, trail)


def _metadata(kind: str, process: int, thread: int = 0, **values: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": values}


def _microseconds(run_s: float) -> float:
    return round(run_s * 1e6, 3)


def _counters(run: ReportedRun) -> Iterator[dict[str, Any]]:
    for index, run_s in enumerate(run.samples["run_s"]):
        for name, columns in _COUNTERS.items():
            factor = 100 if "kv_usage" in columns.values() else 1
            values = {title: float(run.samples[column][index]) * factor for title, column in columns.items()}
            known = {title: _short(value) for title, value in values.items() if math.isfinite(value)}
            if known:
                yield {
                    "name": name, "ph": "C", "pid": _ENGINE, "tid": 0, "ts": _microseconds(run_s), "args": known
                }  # fmt: skip


def _short(value: float) -> float:
    return int(value) if value.is_integer() else round(value, 3)


def _request(thread: int, trail: RequestTrail) -> Iterator[dict[str, Any]]:
    request = trail.request
    name = request.query_id if request.query_id == request.request_id else f"{request.query_id} ({request.request_id})"
    yield _metadata("thread_name", _REQUESTS, thread, name=name)
    yield _metadata("thread_sort_index", _REQUESTS, thread, sort_index=thread)
    for span in trail.spans:
        yield _slice(thread, span)
    for mark in itertools.filterfalse(lambda mark: mark.type.is_state and not mark.type.is_terminal, trail.marks):
        yield _instant(thread, mark)


def _slice(thread: int, span: Span) -> dict[str, Any]:
    start_us, end_us = _microseconds(span.start_s), _microseconds(span.end_s)
    return {
        "name": span.phase.value,
        "cat": "state",
        "ph": "X",
        "pid": _REQUESTS,
        "tid": thread,
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": dict(span.data),
    }


def _instant(thread: int, mark: Mark) -> dict[str, Any]:
    return {
        "name": mark.type.value,
        "cat": "mark",
        "ph": "i",
        "s": "t",
        "pid": _REQUESTS,
        "tid": thread,
        "ts": _microseconds(mark.run_s),
        "args": dict(mark.data),
    }
