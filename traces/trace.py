"""One recorded or drawn retrieval: which context came when."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from stream2llm_sdk.context import Append, Chunk, ContextMode, ContextUpdate, Replace
from stream2llm_sdk.errors import ConfigurationError

__all__ = ["NUM_TOKENS", "TimedFailure", "TimedUpdate", "Trace"]

NUM_TOKENS = "num_tokens"
"""The key of a chunk's metadata that holds its length in tokens. A trace that keeps no texts has it for every chunk;
there a chunk's `source` says which text it stands for, and chunks of the same source are the same text."""


@dataclass(frozen=True, slots=True)
class TimedUpdate:
    """A context update and when it came.

    Attributes:
        offset_s: seconds after the question.
        update: what came: `Append` (possibly of nothing: a search that ended opens the prompt) or `Replace`.
        begin_s: seconds after the question at which the work that gave this update began: the search, the fetch of a
            page, a window of a vector search. None where it was not recorded.
        iterations: the numbers of the first and the last iteration of a vector search's window; None elsewhere.

    Raises:
        ConfigurationError: the offset is negative or not finite, the update is none, it began after it came, or its
            iterations are no two whole numbers in order.
    """

    offset_s: float
    update: ContextUpdate
    begin_s: float | None = None
    iterations: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _check_seconds("offset_s", self.offset_s)
        if not isinstance(self.update, (Append, Replace)):
            raise ConfigurationError(f"an update is an Append or a Replace, not {type(self.update).__name__}")
        if self.begin_s is not None:
            _check_seconds("begin_s", self.begin_s)
            if self.begin_s > self.offset_s:
                raise ConfigurationError(f"begin_s={self.begin_s!r} is after offset_s={self.offset_s!r}")
        if self.iterations is not None and not _is_range(self.iterations):
            raise ConfigurationError(
                f"iterations={self.iterations!r}: give the numbers of the first and the last one, from 0, in a tuple"
            )


@dataclass(frozen=True, slots=True)
class TimedFailure:
    """Something that could not be retrieved, and when that was known.

    Attributes:
        offset_s: seconds after the question.
        source: the URL or document id.
        reason: one line for people.

    Raises:
        ConfigurationError: the offset is negative or not finite, or source or reason is no text.
    """

    offset_s: float
    source: str
    reason: str

    def __post_init__(self) -> None:
        _check_seconds("offset_s", self.offset_s)
        for name in ("source", "reason"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigurationError(f"a failure's {name} is a text, not {type(value).__name__}: {value!r:.80}")


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
        failures: what could not be retrieved, in the order in which that was known. No part of the context.

    Raises:
        ConfigurationError: there is no update, offsets decrease, modes are mixed, a number is not one, or a failure is
            none.
    """

    trace_id: str
    query: str
    updates: tuple[TimedUpdate, ...]
    arrival_s: float | None = None
    num_query_tokens: int | None = None
    max_tokens: int | None = None
    tenant: str = ""
    tag: str = ""
    failures: tuple[TimedFailure, ...] = ()

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
        for failure in self.failures:
            if not isinstance(failure, TimedFailure):
                raise ConfigurationError(f"trace {self.trace_id!r}: failures holds {failure!r:.80}, no TimedFailure")

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
        """The same with its waits multiplied by `delay_multiplier`; with `first=False` all but the one before the first
        update.

        Raises:
            ConfigurationError: the multiplier is negative or not finite.
        """
        if not 0 <= delay_multiplier < math.inf:
            raise ConfigurationError(f"delay_multiplier={delay_multiplier!r} must be finite, 0 or more")
        begin_s = 0.0 if first else self.updates[0].offset_s

        def moved(at_s: float) -> float:
            return begin_s + delay_multiplier * (at_s - begin_s) if at_s > begin_s else at_s

        updates = tuple(
            replace(
                timed,
                offset_s=moved(timed.offset_s),
                begin_s=None if timed.begin_s is None else moved(timed.begin_s),
            )
            for timed in self.updates
        )
        failures = tuple(replace(failure, offset_s=moved(failure.offset_s)) for failure in self.failures)
        return replace(self, updates=updates, failures=failures)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.trace_view import trace_html

        return trace_html(self)


def _check_seconds(name: str, value: object) -> None:
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise ConfigurationError(f"{name}={value!r}: give finite seconds after the question, 0 or more")


def _is_range(value: object) -> bool:
    """Whether it is a tuple of two whole numbers from 0, in order."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(number, int) for number in value)
        and 0 <= value[0] <= value[1]
    )


def check_unique(traces: Iterable[Trace]) -> None:
    """Raises ConfigurationError where two traces have the same name."""
    seen = set()
    for trace in traces:
        if trace.trace_id in seen:
            raise ConfigurationError(f"two traces are called {trace.trace_id!r}: names must be unique")
        seen.add(trace.trace_id)
