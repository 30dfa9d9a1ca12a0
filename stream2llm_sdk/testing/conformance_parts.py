"""What the checks of the conformance kit have in common: one retriever under test, and the ways to read it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from stream2llm_sdk.context import ContextMode, Retriever
from stream2llm_sdk.testing.leftovers import Holdings, grown
from stream2llm_sdk.testing.stream_run import Broken, StreamRun, closed, described, read, within

__all__ = ["ConformanceOptions", "ConformanceParts", "Factory", "NotRun", "OverTexts", "close_retriever"]

Factory = Callable[[], Retriever | Awaitable[Retriever]]
OverTexts = Callable[[Sequence[str]], Retriever | Awaitable[Retriever]]

_GROWTH_ROUNDS = 3  # what grows in each of so many rounds is a leak; what fills up does so once or twice


class NotRun(Exception):
    """The check needs something that was not given."""


@dataclass(frozen=True, slots=True)
class ConformanceOptions:
    """As `check_retriever` takes them."""

    query: str
    failing_first: Factory | None
    failing_later: Factory | None
    over: OverTexts | None
    produced: Callable[[], int] | None
    repeatable: bool
    same_order: bool
    max_cancellations: int
    num_concurrent: int
    max_read_ahead: int
    max_stall_s: float
    timeout_s: float
    settle_s: float


class ConformanceParts:
    """One retriever under test, and the ways to read it."""

    def __init__(self, factory: Factory, options: ConformanceOptions) -> None:
        self._factory = factory
        self._options = options
        self.retriever: Retriever = None  # type: ignore[assignment]
        self.expected = StreamRun()

    @asynccontextmanager
    async def opened(self, factory: Callable[[], Any]) -> AsyncIterator[Retriever]:
        """A retriever of the factory's, warmed up; closed in the end."""
        made = factory()
        retriever = await made if inspect.isawaitable(made) else made
        try:
            for name in ("__aenter__", "warm_up"):
                if (method := getattr(retriever, name, None)) is not None:
                    await self._within(method(), f"{name}()")
            yield retriever
        finally:
            await self._within(close_retriever(retriever), "closing the retriever")

    async def begin(self) -> str:
        """Streams once, and keeps that as what every other stream must give."""
        retriever = self.retriever
        if not isinstance(retriever, Retriever):
            raise Broken(
                "it is no retriever: that is an object with a `mode` and a method `stream(query)`; `as_retriever` "
                "makes one of a generator function"
            )
        if retriever.mode not in list(ContextMode):
            raise Broken(f"its mode is {retriever.mode!r}: it must be 'append' or 'update'")
        items: Any = retriever.stream(self._options.query)
        if not hasattr(items, "__anext__") or not hasattr(items, "aclose"):
            if inspect.iscoroutine(items):
                items.close()
            raise Broken(
                f"stream() returned {type(items).__name__}: it must be an async generator, as `async def` with `yield` "
                "makes it, so that closing it can end what it has begun"
            )
        await self._within(closed(items), "closing a stream that was not begun")
        self.expected = await self._read()
        self.expected.check(retriever.mode)
        if not self.expected.context:
            raise Broken(
                f"it gives no context for query={self._options.query!r:.80}: pass a query that it finds something for"
            )
        return (
            f"{len(self.expected.items)} items, {len(self.expected.context)} chunks in the end, mode {retriever.mode!s}"
        )

    # ---- parts --------------------------------------------------------------------------------------------------

    async def _read(self, query: str | None = None, **options: Any) -> StreamRun:
        query = self._options.query if query is None else query
        return await within(self._options.timeout_s, read(self.retriever, query, **options), "a stream")

    async def _within(self, work: Any, what: str) -> Any:
        return await within(self._options.timeout_s, _awaited(work), what)

    async def _no_growth(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        for _ in range(_GROWTH_ROUNDS):
            before = Holdings()
            await work()
            if not (more := await grown(before, self._options.settle_s)):
                return
        raise Broken(f"{what} left behind: {', '.join(more)}")

    async def _same_again(self, when: str) -> None:
        run = await self._read()
        if run.error is not None:
            raise Broken(f"{when}, it raised {described(run.error)}") from run.error
        self._check_same(run, when)

    def _check_same(self, run: StreamRun, when: str, expected: StreamRun | None = None) -> None:
        if self._options.repeatable:
            run.check_same(self.expected if expected is None else expected, when, same_order=self._options.same_order)
        elif not run.context:
            raise Broken(f"{when}, it gave no context")

    def _needs_repeatable(self) -> None:
        if not self._options.repeatable:
            raise NotRun("repeatable=False")


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


async def close_retriever(retriever: Any) -> None:
    """Ends what it holds."""
    if (close := getattr(retriever, "aclose", None)) is not None:
        await close()
    elif (leave := getattr(retriever, "__aexit__", None)) is not None:
        await leave(None, None, None)
