"""The numbers under which the published formats keep traces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stream2llm_sdk.traces.trace import Trace

__all__ = ["numbers_of"]


def numbers_of(traces: Sequence[Trace], prefix: str) -> list[int]:
    """The n of each '<prefix>-<n>' where all traces are named so, otherwise 0, 1, 2, …."""
    name = re.compile(re.escape(prefix) + r"-(0|[1-9]\d{0,17})", re.ASCII)
    matches = [name.fullmatch(trace.trace_id) for trace in traces]
    if all(matches) and len({trace.trace_id for trace in traces}) == len(traces):
        return [int(match[1]) for match in matches if match]
    return list(range(len(traces)))
