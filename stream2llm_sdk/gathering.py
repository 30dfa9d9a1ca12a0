"""Retrieval into a prompt: several retrievers at once, until they end or somebody says that it is enough."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stream2llm_sdk.answer import ContextEnd, Source
from stream2llm_sdk.context import Append, ContextMode, ContextUpdate, Replace, Retriever, SourceFailure
from stream2llm_sdk.context_log import ContextLog
from stream2llm_sdk.errors import RetrievalError, Stream2LLMError
from stream2llm_sdk.growing_prompt import Prompt, Section
from stream2llm_sdk.placement import DroppedChunk
from stream2llm_sdk.tasks import ended

__all__ = ["ContextEvent", "Gathering"]

# A retriever that is told to end may take this long to release what it holds; then its cleanup is cancelled too.
_CLEANUP_S = 10.0


@dataclass(frozen=True, slots=True)
class ContextEvent:
    """Something came out of a retriever.

    Attributes:
        retriever: its name.
        item: the update or the failure.
        at_s: seconds since the question was asked.
        num_context_tokens: tokens of context in the prompt now.
    """

    retriever: str
    item: ContextUpdate | SourceFailure
    at_s: float
    num_context_tokens: int


class Gathering:
    """Runs retrievers into one prompt. `run` retrieves; `aclose` must follow, and may take as long as the retrievers
    need to end.

    Attributes:
        mode: UPDATE as soon as one retriever replaces its context, since that may change what others put behind it.
        changed: set whenever the prompt's tokens changed.
        failures: what could not be used so far.
        first_context_s, ended_s: seconds from the question to the first chunk and to the end of the retrieval.
    """

    def __init__(
        self,
        prompt: Prompt,
        retrievers: Mapping[str, Retriever],
        started_s: float,
        observe: Callable[[ContextEvent], None] | None = None,
        *,
        query: str | None = None,
        log: ContextLog | None = None,
    ) -> None:
        self.prompt = prompt
        self._log = log
        self._query = prompt.question if query is None else query
        self.changed = asyncio.Event()
        self.failures: list[SourceFailure] = []
        self.first_context_s: float | None = None
        self.ended_s = 0.0
        self._retrievers = retrievers
        self._sections = _sections(prompt, retrievers)
        modes = {section.mode for section in self._sections.values()}
        self.mode = ContextMode.UPDATE if ContextMode.UPDATE in modes else ContextMode.APPEND
        self._origins: dict[int, str] = {}  # retriever names by id of a chunk; the prompt keeps the chunks alive
        self._started_s = started_s
        self._observe = observe
        self._observer_error: Exception | None = None
        self._pulls: list[asyncio.Task[None]] = []
        self._errors: dict[str, BaseException] = {}
        self._over = asyncio.Event()
        self._end = ContextEnd.RETRIEVED

    @property
    def end(self) -> ContextEnd:
        """Why the retrieval ended; RETRIEVED while it goes on."""
        return self._end

    @property
    def sources(self) -> tuple[Source, ...]:
        """What is in the prompt, in the prompt's order."""
        return tuple(
            Source(place.chunk, self._origins[id(place.chunk)], place.start, place.end, place.was_cut)
            for place in self.prompt.placements
        )

    @property
    def dropped(self) -> tuple[DroppedChunk, ...]:
        """What was cut or left out of the prompt, by retriever."""
        return tuple(replace(drop, section=self._origins[id(drop.chunk)]) for drop in self.prompt.dropped)

    def stop(self, reason: ContextEnd = ContextEnd.ASKED) -> None:
        """Ends the retrieval with what is there. From here on the prompt does not change any more."""
        if not self._over.is_set():
            self._end = reason
            self._over.set()

    async def run(self, deadline_s: float | None) -> ContextEnd:
        """Retrieves until every retriever has ended, `deadline_s` seconds have passed since the question, the prompt
        is full, or `stop` was called. Whatever still runs then is cancelled; `aclose` waits for it.

        Raises:
            RetrievalError: retrievers failed, and there is no context at all.
            Exception: what `observe` raised.
        """
        remaining_s = None if deadline_s is None else max(0.0, self._started_s + deadline_s - time.monotonic())
        self._pulls = [
            asyncio.create_task(self._pull(name, retriever), name=f"stream2llm-retrieve-{name}")
            for name, retriever in self._retrievers.items()
        ]
        for pull in self._pulls:
            pull.add_done_callback(self._pull_ended)
        try:
            async with asyncio.timeout(remaining_s):
                await self._over.wait()
        except TimeoutError:
            self.stop(ContextEnd.DEADLINE)
        finally:
            self._over.set()
            self.ended_s = self._now_s()
            for pull in self._pulls:
                pull.cancel()
        if self._observer_error is not None:
            raise self._observer_error
        if self._errors and not self.prompt.num_context_tokens and self._end is ContextEnd.RETRIEVED:
            raise self._failure()
        return self._end

    async def aclose(self) -> None:
        """Returns when every retriever has released what it held for this question."""
        await ended(*self._pulls, cancel_every_s=_CLEANUP_S)

    def _pull_ended(self, _pull: asyncio.Task[None]) -> None:
        if all(pull.done() for pull in self._pulls):
            self._over.set()

    async def _pull(self, name: str, retriever: Retriever) -> None:
        # One retriever's failure must not end the others; without any context it becomes the caller's error.
        try:
            items = retriever.stream(self._query)
            try:
                async for item in items:
                    if self._over.is_set():
                        break
                    self._take(name, item)
                    await asyncio.sleep(0)  # a source that never waits must not keep the deadline from being seen
            finally:
                close = getattr(items, "aclose", None)
                if close is not None:
                    await close()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._fail(name, error)  # not ours: something that the retriever waited for was cancelled
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of native libraries among them
            self._fail(name, error)

    def _take(self, name: str, item: object) -> None:
        if isinstance(item, SourceFailure):
            self._report(name, item)
            return
        section: Section = self._sections[name]
        expected = Append if section.mode is ContextMode.APPEND else (Append, Replace)
        if not isinstance(item, expected):
            raise RetrievalError(
                f"retriever {name!r} has mode {section.mode.value!r} and yielded {type(item).__name__}: "
                "append mode yields Append, update mode Replace (or Append); SourceFailure goes in both"
            )
        if item.chunks and self.first_context_s is None:
            self.first_context_s = self._now_s()
        self._origins.update((id(chunk), name) for chunk in item.chunks)
        if section.apply(item):
            self.changed.set()
            if self._log is not None:
                self._log.changed(self._now_s(), self.prompt.contents, self.mode)
        self._tell(name, item)
        if self.mode is ContextMode.APPEND and self.prompt.is_full:
            self.stop(ContextEnd.FULL)

    def _fail(self, name: str, error: BaseException) -> None:
        self._errors[name] = error
        self._report(name, SourceFailure(name, _reason(error)))

    def _report(self, name: str, failure: SourceFailure) -> None:
        self.failures.append(failure)
        if self._log is not None:
            self._log.failures.append((self._now_s(), failure))
        self._tell(name, failure)

    def _tell(self, name: str, item: ContextUpdate | SourceFailure) -> None:
        if self._observe is None or self._observer_error is not None:
            return
        try:
            self._observe(ContextEvent(name, item, self._now_s(), self.prompt.num_context_tokens))
        except Exception as error:
            # The observer's mistake is its owner's to hear of, not a failure of the retriever.
            self._observer_error = error
            self.stop()

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    def _failure(self) -> BaseException:
        only = next(iter(self._errors.values()))
        if len(self._errors) == 1 and isinstance(only, Stream2LLMError):
            return only
        reasons = "; ".join(f"{name}: {_reason(error)}" for name, error in self._errors.items())
        failure = RetrievalError(f"no retriever gave any context: {reasons}")
        failure.__cause__ = only
        return failure


def _sections(prompt: Prompt, retrievers: Mapping[str, Retriever]) -> dict[str, Section]:
    """One section for all that append, since their chunks stay in the order in which they come; one for each other."""
    appending = ", ".join(name for name, retriever in retrievers.items() if retriever.mode == ContextMode.APPEND)
    return {
        name: prompt.section(
            appending if retriever.mode == ContextMode.APPEND else name,
            retriever.mode,
            order=getattr(retriever, "chunk_order", None),
        )
        for name, retriever in retrievers.items()
    }


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
