"""How recorded vector searches are written in the published format."""

from __future__ import annotations

from dataclasses import replace

from stream2llm_sdk.context import Replace
from stream2llm_sdk.traces.trace import TimedUpdate, Trace

__all__ = ["NODE", "as_published"]

NODE = "diskann_node"
"""The key of a recorded chunk's metadata that holds its row number in the index."""


def as_published(trace: Trace) -> Trace:
    """A recorded search's trace with each document called by its row number in the index, as the published traces do:
    passages of one page have one source, and that format keeps one text for each."""
    return replace(trace, updates=tuple(_numbered(timed) for timed in trace.updates))


def _numbered(timed: TimedUpdate) -> TimedUpdate:
    return replace(timed, update=Replace(replace(c, source=str(c.metadata[NODE])) for c in timed.update.chunks))
