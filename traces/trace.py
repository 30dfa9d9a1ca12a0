"""One recorded or drawn retrieval: which context came when."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from stream2llm_sdk.context import Append, Chunk, ContextMode, ContextUpdate, Replace
from stream2llm_sdk.errors import ConfigurationError

__all__ = ["NUM_TOKENS", "TimedUpdate", "Trace"]

NUM_TOKENS = "num_tokens"
"""The key of a chunk's metadata that holds its length in tokens. A trace that keeps no texts has it for every chunk;
there a chunk's `source` says which text it stands for, and chunks of the same source are the same text."""


@dataclass(frozen=True, slots=True)
class TimedUpdate:
    """A context update and when it came.

    Attributes:
        offset_s: seconds after the question.
        update: what came: `Append` (possibly of nothing: a search that ended opens the prompt) or `Replace`.

    Raises:
        ConfigurationError: the offset is negative or not finite, or the update is none.
    """

    offset_s: float
    update: ContextUpdate

    def __post_init__(self) -> None:
        if not (isinstance(self.offset_s, (int, float)) and 0 <= self.offset_s < math.inf):
            raise ConfigurationError(f"offset_s={self.offset_s!r}: give finite seconds after the question, 0 or more")
        if not isinstance(self.update, (Append, Replace)):
            raise ConfigurationError(f"an update is an Append or a Replace, not {type(self.update).__name__}")


@dataclass(frozen=True, slots=True)
class Trace:
    """The retrieval for one question. The last update completes the context.

    Attributes:
        trace_id: a name, unique among traces that are used together.
        query: the question.
        updates: at least one, in the order of their offsets; all `Append`, or all `Replace`.
        arrival_s: seconds after the start of a recording at which the question came; None where arrivals are drawn.
        num_query_tokens: the question's length, for traces that keep no texts.
        max_tokens: output tokens; None for whoever replays it to say.
        tenant: whose question it is.
        tag: what kind of retrieval, such as 'crawler' or 'anns'.

    Raises:
        ConfigurationError: there is no update, offsets decrease, modes are mixed, or a number is not one.
    """

    trace_id: str
    query: str
    updates: tuple[TimedUpdate, ...]
    arrival_s: float | None = None
    num_query_tokens: int | None = None
    max_tokens: int | None = None
    tenant: str = ""
    tag: str = ""

    def __post_init__(self) -> None:
        if not self.updates:
            raise ConfigurationError(f"trace {self.trace_id!r} has no updates: nothing completes its context")
        for before, after in zip(self.updates, self.updates[1:], strict=False):
            if after.offset_s < before.offset_s:
                raise ConfigurationError(
                    f"trace {self.trace_id!r}: offsets decrease from {before.offset_s} s to {after.offset_s} s"
                )
            if type(after.update) is not type(before.update):
                raise ConfigurationError(f"trace {self.trace_id!r} mixes Append and Replace: use one of them")
        if self.arrival_s is not None and not 0 <= self.arrival_s < math.inf:
            raise ConfigurationError(f"trace {self.trace_id!r}: arrival_s={self.arrival_s!r} must be finite, 0 or more")
        for name, least in (("num_query_tokens", 0), ("max_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"trace {self.trace_id!r}: {name}={value!r} must be at least {least}")

    @property
    def mode(self) -> ContextMode:
        """Whether the context appends or updates."""
        return ContextMode.APPEND if isinstance(self.updates[0].update, Append) else ContextMode.UPDATE

    @property
    def duration_s(self) -> float:
        """From the question to the last update."""
        return self.updates[-1].offset_s

    @property
    def final_chunks(self) -> tuple[Chunk, ...]:
        """The whole context after the last update."""
        if self.mode is ContextMode.UPDATE:
            return self.updates[-1].update.chunks
        return tuple(chunk for timed in self.updates for chunk in timed.update.chunks)

    def stretched(self, delay_multiplier: float, *, first: bool = True) -> Trace:
        """The same with its waits multiplied; with `first=False` all but the one before the first update.

        Raises:
            ConfigurationError: the multiplier is negative or not finite.
        """
        if not 0 <= delay_multiplier < math.inf:
            raise ConfigurationError(f"delay_multiplier={delay_multiplier!r} must be finite, 0 or more")
        begin_s = 0.0 if first else self.updates[0].offset_s
        updates = tuple(
            TimedUpdate(begin_s + delay_multiplier * (timed.offset_s - begin_s), timed.update) for timed in self.updates
        )
        return replace(self, updates=updates)


def check_unique(traces: Iterable[Trace]) -> None:
    """Raises ConfigurationError where two traces have the same name."""
    seen = set()
    for trace in traces:
        if trace.trace_id in seen:
            raise ConfigurationError(f"two traces are called {trace.trace_id!r}: names must be unique")
        seen.add(trace.trace_id)
