"""Traces of retrieval: recording, formats, replay and statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream2llm_sdk.lazy import lazy_names

if TYPE_CHECKING:
    from stream2llm_sdk.traces.arrivals import Arrivals
    from stream2llm_sdk.traces.arrivals_file import read_arrival_times, with_arrivals, write_arrival_times
    from stream2llm_sdk.traces.recording.anns import SearchSpec
    from stream2llm_sdk.traces.recording.crawl import CrawlSpec, record_crawls
    from stream2llm_sdk.traces.recording.questions import Question, read_questions
    from stream2llm_sdk.traces.recording.record_searches import record_searches
    from stream2llm_sdk.traces.recording.recording import RecordingFolder
    from stream2llm_sdk.traces.recording.run import RecordingProgress, run_recording
    from stream2llm_sdk.traces.recording.summary import RecordingSummary
    from stream2llm_sdk.traces.statistics import WorkloadStatistics, workload_statistics
    from stream2llm_sdk.traces.synthesis import OutputLength, SynthesisOptions, synthesize
    from stream2llm_sdk.traces.trace import NUM_TOKENS, TimedFailure, TimedUpdate, Trace
    from stream2llm_sdk.traces.trace_set import TraceSet, read_traces, write_traces

__all__ = [
    "NUM_TOKENS",
    "Arrivals",
    "CrawlSpec",
    "OutputLength",
    "Question",
    "RecordingFolder",
    "RecordingProgress",
    "RecordingSummary",
    "SearchSpec",
    "SynthesisOptions",
    "TimedFailure",
    "TimedUpdate",
    "Trace",
    "TraceSet",
    "WorkloadStatistics",
    "read_arrival_times",
    "read_questions",
    "read_traces",
    "record_crawls",
    "record_searches",
    "run_recording",
    "synthesize",
    "with_arrivals",
    "workload_statistics",
    "write_arrival_times",
    "write_traces",
]

_MODULES = {
    "NUM_TOKENS": "trace",
    "Arrivals": "arrivals",
    "CrawlSpec": "recording.crawl",
    "OutputLength": "synthesis",
    "Question": "recording.questions",
    "RecordingFolder": "recording.recording",
    "RecordingProgress": "recording.run",
    "RecordingSummary": "recording.summary",
    "SearchSpec": "recording.anns",
    "SynthesisOptions": "synthesis",
    "TimedFailure": "trace",
    "TimedUpdate": "trace",
    "Trace": "trace",
    "TraceSet": "trace_set",
    "WorkloadStatistics": "statistics",
    "read_arrival_times": "arrivals_file",
    "read_questions": "recording.questions",
    "read_traces": "trace_set",
    "record_crawls": "recording.crawl",
    "record_searches": "recording.record_searches",
    "run_recording": "recording.run",
    "synthesize": "synthesis",
    "with_arrivals": "arrivals_file",
    "workload_statistics": "statistics",
    "write_arrival_times": "arrivals_file",
    "write_traces": "trace_set",
}

# numpy and whatever else a part needs is imported when that part is used.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
