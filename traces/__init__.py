"""Traces of retrieval: formats, replay and statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream2llm_sdk.lazy import lazy_names

if TYPE_CHECKING:
    from stream2llm_sdk.traces.arrivals_file import read_arrival_times, with_arrivals, write_arrival_times
    from stream2llm_sdk.traces.statistics import WorkloadStatistics, workload_statistics
    from stream2llm_sdk.traces.trace import NUM_TOKENS, TimedUpdate, Trace
    from stream2llm_sdk.traces.trace_set import TraceSet, read_traces, write_traces

__all__ = [
    "NUM_TOKENS",
    "TimedUpdate",
    "Trace",
    "TraceSet",
    "WorkloadStatistics",
    "read_arrival_times",
    "read_traces",
    "with_arrivals",
    "workload_statistics",
    "write_arrival_times",
    "write_traces",
]

_MODULES = {
    "NUM_TOKENS": "trace",
    "TimedUpdate": "trace",
    "Trace": "trace",
    "TraceSet": "trace_set",
    "WorkloadStatistics": "statistics",
    "read_arrival_times": "arrivals_file",
    "read_traces": "trace_set",
    "with_arrivals": "arrivals_file",
    "workload_statistics": "statistics",
    "write_arrival_times": "arrivals_file",
    "write_traces": "trace_set",
}

# numpy and whatever else a part needs is imported when that part is used.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
