"""A retriever that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from stream2llm_sdk.context import Append, Chunk, ContextMode, ContextUpdate, Replace, SourceFailure
from stream2llm_sdk.errors import ConfigurationError

__all__ = ["ScriptedRetriever", "Step"]

Step = ContextUpdate | SourceFailure | Chunk | str | BaseException | asyncio.Event | float
"""What a script consists of: see `ScriptedRetriever`."""


class ScriptedRetriever:
    """A retriever that does for every question what its script says, step by step.

    A step is an update or a `SourceFailure` (yielded); text or a `Chunk` (yielded as an update of this one chunk); an
    exception (raised); an `asyncio.Event` (waited for); or a number of seconds (slept).

    Args:
        steps: the script, or a function of the query that returns it.
        mode: 'append' or 'update'.
        closing: steps to take when an iterator ends or is closed; those that would yield are not allowed here.
        source: the source of chunks that are made of text.

    Attributes:
        queries: the questions so far.
        num_live: iterators that have begun and not ended.
        num_exhausted: iterators that came to the end of the script.
        num_closed: iterators that were closed, cancelled or failed before that.
        is_closed: whether the retriever itself was closed.

    Raises:
        ConfigurationError: a step is none of these, or the mode is unknown.
    """

    def __init__(
        self,
        steps: Iterable[Step] | Callable[[str], Iterable[Step]],
        mode: ContextMode | str = ContextMode.APPEND,
        *,
        closing: Iterable[Step] = (),
        source: str = "script",
    ) -> None:
        try:
            self.mode = ContextMode(mode)
        except ValueError:
            raise ConfigurationError(f"mode={mode!r}: choose 'append' or 'update'") from None
        self._source = source
        self._script = steps if callable(steps) else self._checked(steps)
        self._closing = self._checked(closing)
        if any(isinstance(step, (Append, Replace, SourceFailure)) for step in self._closing):
            raise ConfigurationError("closing: an iterator that is being closed cannot yield anything")
        self.queries: list[str] = []
        self.num_live = 0
        self.num_exhausted = 0
        self.num_closed = 0
        self.is_closed = False

    async def stream(self, query: str) -> AsyncIterator[ContextUpdate | SourceFailure]:
        """Follows the script."""
        self.queries.append(query)
        steps = self._checked(self._script(query)) if callable(self._script) else self._script
        self.num_live += 1
        is_exhausted = False
        try:
            for step in steps:
                if isinstance(step, (Append, Replace, SourceFailure)):
                    yield step
                else:
                    await _take(step)
            is_exhausted = True
        finally:
            try:
                for step in self._closing:
                    await _take(step)
            finally:
                self.num_live -= 1
                self.num_exhausted += is_exhausted
                self.num_closed += not is_exhausted

    async def aclose(self) -> None:
        """Notes that it was closed."""
        self.is_closed = True

    def _checked(self, steps: Iterable[Step]) -> list[Any]:
        checked: list[Any] = []
        for step in steps:
            item = Chunk(step, source=self._source) if isinstance(step, str) else step
            if isinstance(item, Chunk):
                item = Append(item) if self.mode is ContextMode.APPEND else Replace(item)
            allowed = (Append, Replace, SourceFailure, BaseException, asyncio.Event, float, int)
            if not isinstance(item, allowed) or isinstance(item, bool):
                raise ConfigurationError(
                    f"step {step!r:.80}: give an update, text, a Chunk, a SourceFailure, an exception, "
                    "an asyncio.Event or a number of seconds"
                )
            checked.append(item)
        return checked


async def _take(step: Any) -> None:
    if isinstance(step, BaseException):
        raise step
    if isinstance(step, asyncio.Event):
        await step.wait()
    else:
        await asyncio.sleep(step)
