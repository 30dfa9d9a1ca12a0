"""Retrieval into a prompt: several retrievers at once, until they end or somebody says that it is enough."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stream2llm_sdk.answer import ContextEnd
from stream2llm_sdk.context import Append, ContextMode, ContextUpdate, Replace, Retriever, SourceFailure
from stream2llm_sdk.errors import RetrievalError, Stream2LLMError
from stream2llm_sdk.growing_prompt import Prompt, Section

__all__ = ["ContextEvent", "Gathering"]


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
    """Runs retrievers into one prompt. `changed` is set whenever the prompt's tokens changed."""

    def __init__(
        self,
        prompt: Prompt,
        retrievers: Mapping[str, Retriever],
        started_s: float,
        observe: Callable[[ContextEvent], None] | None = None,
    ) -> None:
        self.prompt = prompt
        self.changed = asyncio.Event()
        self.failures: list[SourceFailure] = []
        self.first_context_s: float | None = None
        self._retrievers = retrievers
        self._sections = {name: prompt.section(name, retriever.mode) for name, retriever in retrievers.items()}
        self._started_s = started_s
        self._observe = observe
        self._enough = asyncio.Event()
        self._errors: list[Exception] = []
        self._end = ContextEnd.RETRIEVED

    @property
    def mode(self) -> ContextMode:
        """UPDATE as soon as one retriever replaces its context, since that may change what others put behind it."""
        modes = {retriever.mode for retriever in self._retrievers.values()}
        return ContextMode.UPDATE if ContextMode.UPDATE in modes else ContextMode.APPEND

    def stop(self, reason: ContextEnd = ContextEnd.ASKED) -> None:
        """Ends the retrieval with what is there."""
        if not self._enough.is_set():
            self._end = reason
            self._enough.set()

    async def run(self, deadline_s: float | None) -> ContextEnd:
        """Retrieves until every retriever has ended, `deadline_s` seconds have passed since the question, the prompt
        is full, or `stop` was called. Whatever still runs then is cancelled before this returns.

        Raises:
            RetrievalError: every retriever that ended failed, and there is no context at all.
        """
        remaining_s = None if deadline_s is None else max(0.0, self._started_s + deadline_s - time.monotonic())
        pulls = [
            asyncio.create_task(self._pull(name, retriever), name=f"stream2llm-retrieve-{name}")
            for name, retriever in self._retrievers.items()
        ]
        all_pulled = asyncio.gather(*pulls)
        enough = asyncio.create_task(self._enough.wait(), name="stream2llm-enough")
        try:
            done, _ = await asyncio.wait({all_pulled, enough}, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.stop(ContextEnd.DEADLINE)
            if all_pulled in done:
                all_pulled.result()
        finally:
            for task in (*pulls, enough):
                task.cancel()
            await asyncio.shield(asyncio.gather(*pulls, enough, all_pulled, return_exceptions=True))
        if self._errors and not self.prompt.num_context_tokens and self._end is ContextEnd.RETRIEVED:
            raise self._failure()
        return self._end

    async def _pull(self, name: str, retriever: Retriever) -> None:
        items = retriever.stream(self.prompt.question)
        try:
            async for item in items:
                self._take(name, retriever, item)
        except Exception as error:
            # One retriever's failure must not end the others; without any context it becomes the caller's error.
            self._errors.append(error)
            self._report(name, SourceFailure(name, f"{type(error).__name__}: {error}"))
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    def _take(self, name: str, retriever: Retriever, item: object) -> None:
        if isinstance(item, SourceFailure):
            self._report(name, item)
            return
        expected = Append if retriever.mode is ContextMode.APPEND else (Append, Replace)
        if not isinstance(item, expected):
            raise RetrievalError(
                f"retriever {name!r} has mode {retriever.mode.value!r} and yielded {type(item).__name__}: "
                "append mode yields Append, update mode Replace (or Append); SourceFailure goes in both"
            )
        section: Section = self._sections[name]
        if item.chunks and self.first_context_s is None:
            self.first_context_s = time.monotonic() - self._started_s
        if section.apply(item):
            self.changed.set()
        self._tell(name, item)
        if self.mode is ContextMode.APPEND and self.prompt.is_full:
            self.stop(ContextEnd.FULL)

    def _report(self, name: str, failure: SourceFailure) -> None:
        self.failures.append(failure)
        self._tell(name, failure)

    def _tell(self, name: str, item: ContextUpdate | SourceFailure) -> None:
        if self._observe is not None:
            at_s = time.monotonic() - self._started_s
            self._observe(ContextEvent(name, item, at_s, self.prompt.num_context_tokens))

    def _failure(self) -> Exception:
        if len(self._errors) == 1 and isinstance(self._errors[0], Stream2LLMError):
            return self._errors[0]
        reasons = "; ".join(f"{type(error).__name__}: {error}" for error in self._errors)
        failure = RetrievalError(f"no retriever gave any context: {reasons}")
        failure.__cause__ = self._errors[0]
        return failure
