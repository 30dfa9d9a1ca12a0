"""The checks of the conformance kit on a retriever's own streams, and the list of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from stream2llm_sdk.errors import Stream2LLMError
from stream2llm_sdk.testing.cancel_at import CancelAt
from stream2llm_sdk.testing.conformance_parts import NotRun, close_retriever
from stream2llm_sdk.testing.conformance_variants import VariantChecks
from stream2llm_sdk.testing.leftovers import Holdings, grown
from stream2llm_sdk.testing.stream_run import Broken, closed, described, read

__all__ = ["CHECKS", "Conformance"]

CHECKS = (
    "repeat",
    "early_close",
    "cancellation",
    "slow_reader",
    "read_ahead",
    "concurrency",
    "odd_queries",
    "stall",
    "leftovers",
    "failing_first",
    "failing_later",
    "empty",
    "odd_texts",
    "huge_text",
    "close",
)
_BEAT_S = 0.005
_STALL_ROUNDS = 3  # others on the machine hold the loop up now and then
_ODD_QUERIES = {
    "an empty query": "",
    "blanks": " \n\t ",
    "a lone surrogate": "what is \udce9?",
    "control characters": "nul \x00 and escape \x1b[2J",
    "other scripts": "مرحبا 你好 👩‍👩‍👧 e\u0301",
    "1 MB": "streamed " * 116_000,
}


class Conformance(VariantChecks):
    """One retriever under test. `begin` comes first; the checks may then run in any order. Each says what it did, or
    raises `Broken` with what is wrong."""

    # ---- its own streams ----------------------------------------------------------------------------------------

    async def repeat(self) -> str:
        """The same question gives the same context again."""
        self._needs_repeatable()
        await self._same_again("asked again")
        return "the same context when asked again"

    async def early_close(self) -> str:
        """A stream can be closed at any time, more than once, and is over then."""
        for num_items in range(len(self.expected.items) + 1):
            await self._within(self._close_after(num_items), f"closing after {num_items} items")
        await self._same_again("after streams that were closed early")
        return f"closed twice after 0 to {len(self.expected.items)} items"

    async def _close_after(self, num_items: int) -> None:
        items: Any = self.retriever.stream(self._options.query)
        try:
            for _ in range(num_items):
                await anext(items)
        except StopAsyncIteration:
            pass  # fewer this time
        for _ in range(2):
            await items.aclose()
        try:
            item = await anext(items)
        except StopAsyncIteration:
            return
        raise Broken(f"after aclose() it still yielded {type(item).__name__}")

    async def cancellation(self) -> str:
        """Its reader can be cancelled whenever it, or a task that it began, waits."""
        whole = CancelAt(read(self.retriever, self._options.query))
        await self._within(asyncio.wait({whole.start()}), "a stream")
        points = _spread(whole.num_suspensions, self._options.max_cancellations)
        for at in points:
            await self._cancel_at(at)
        await self._same_again("after cancelled streams")
        return f"cancelled at {len(points)} of {whole.num_suspensions} suspensions"

    async def _cancel_at(self, at: int) -> None:
        before = Holdings()
        run = CancelAt(read(self.retriever, self._options.query), at)
        task = run.start()
        where = f"cancelled at suspension {at}"
        await asyncio.wait({task}, timeout=self._options.timeout_s)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
            raise Broken(f"{where}, it did not end within {self._options.timeout_s:g} s")
        if not task.cancelled():
            if (error := task.exception()) is not None:
                raise Broken(f"{where}, it raised {described(error)} instead of CancelledError") from error
            if run.was_cancelled:
                error = task.result().error
                instead = f"raised {described(error)}" if error is not None else "went on to its end"
                raise Broken(f"{where}, it swallowed the cancellation and {instead}")
        if left := [what for what in await grown(before, self._options.settle_s) if " x task " in what]:
            raise Broken(f"{where}, it left {', '.join(left)} behind")

    async def slow_reader(self) -> str:
        """A reader that takes its time gets everything."""

        pause_s = min(0.01, 1.0 / len(self.expected.items))

        async def pause() -> None:
            await asyncio.sleep(pause_s)

        run = await self._read(pause=pause)
        run.check(self.retriever.mode)
        self._check_same(run, "read slowly")
        return f"{len(run.items)} items with pauses, nothing lost"

    async def read_ahead(self) -> str:
        """What is produced ahead of a reader that stops is bounded."""
        produced = self._options.produced
        if produced is None:
            raise NotRun("give produced=, a function that says how much the retriever has read from its source so far")
        before = produced()
        items: Any = self.retriever.stream(self._options.query)
        try:
            await self._within(anext(items), "the first item")
            num = await self._within(
                _at_rest(lambda: produced() - before, self._options.max_read_ahead), "reading ahead"
            )
        finally:
            await self._within(closed(items), "closing")
        if num > self._options.max_read_ahead:
            raise Broken(
                f"with one item read it had produced {num}, more than max_read_ahead={self._options.max_read_ahead}"
            )
        return f"{num} produced with one item read"

    async def concurrency(self) -> str:
        """Streams at the same time do not disturb each other."""
        num = self._options.num_concurrent
        other = f"{self._options.query} again"
        alone = await self._read(other)
        runs = await asyncio.gather(*(self._read(other if i % 2 else None) for i in range(num)))
        for i, run in enumerate(runs):
            if run.error is not None and (alone.error is None or i % 2 == 0):
                raise Broken(f"one of {num} streams at once raised {described(run.error)}") from run.error
            self._check_same(run, f"{num} streams at once", alone if i % 2 else None)
        return f"{num} streams at once give what each gives alone"

    async def odd_queries(self) -> str:
        """Any text can be a query: it is answered, or refused with an error of the SDK's, and does no harm."""
        refused = []
        for name, query in _ODD_QUERIES.items():
            run = await self._read(query)
            if isinstance(run.error, Stream2LLMError):
                refused.append(name)
            elif run.error is not None:
                raise Broken(
                    f"{name} as query raised {described(run.error)}: refuse it with a RetrievalError, or answer it"
                )
        await self._same_again("after odd queries")
        return f"{len(_ODD_QUERIES)} odd queries" + (f"; refused: {', '.join(refused)}" if refused else "")

    async def stall(self) -> str:
        """It does not keep the event loop from others."""
        stalls = []
        for _ in range(_STALL_ROUNDS):
            async with _heartbeat() as gaps:
                await self._read()
            stalls.append(max(gaps, default=0.0))
            if stalls[-1] <= self._options.max_stall_s:
                return f"the loop was held for {1e3 * stalls[-1]:.0f} ms at most"
        raise Broken(
            f"it held the event loop for {1e3 * min(stalls):.0f} ms, more than "
            f"max_stall_s={self._options.max_stall_s:g}: move blocking work into a thread or a process"
        )

    # ---- what it leaves behind ----------------------------------------------------------------------------------

    async def leftovers(self) -> str:
        """Streams that have ended, in whichever way, hold nothing any more."""
        await self._one_of_each_end()
        await self._no_growth(self._one_of_each_end, "streams that have ended")
        return "no task, thread, process, socket or file more after streams that ended, were closed or cancelled"

    async def close(self) -> str:
        """A retriever that is closed, which may be done twice, holds nothing any more."""

        async def one_life() -> None:
            async with self.opened(self._factory) as retriever:
                await self._within(read(retriever, self._options.query, most=1), "a stream")
                await self._within(read(retriever, self._options.query), "a stream")
                await self._within(close_retriever(retriever), "closing the retriever")

        await one_life()
        await self._no_growth(one_life, "a retriever that was closed")
        return "no task, thread, process, socket or file more after it was closed, twice"

    async def _one_of_each_end(self) -> None:
        await asyncio.gather(*(self._read() for _ in range(self._options.num_concurrent)))
        await asyncio.gather(*(self._read(most=1) for _ in range(self._options.num_concurrent)))
        for at in (1, 3, 9):
            task = CancelAt(read(self.retriever, self._options.query), at).start()
            await asyncio.wait({task}, timeout=self._options.timeout_s)


async def _at_rest(count: Callable[[], int], most: int) -> int:
    """The count when it has not grown for a while, or is more than `most`."""
    quiet, before = 0, count()
    while quiet < 10 and before <= most:
        await asyncio.sleep(0.02)
        quiet = 0 if count() != before else quiet + 1
        before = count()
    return before


@asynccontextmanager
async def _heartbeat() -> AsyncIterator[list[float]]:
    """How late each beat of the loop was, in seconds."""
    loop = asyncio.get_running_loop()
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            started_s = loop.time()
            await asyncio.sleep(_BEAT_S)
            gaps.append(loop.time() - started_s - _BEAT_S)

    task = asyncio.create_task(beat(), name="heartbeat")
    await asyncio.sleep(0)
    try:
        yield gaps
        await asyncio.sleep(2 * _BEAT_S)
    finally:
        task.cancel()
        await asyncio.wait({task})


def _spread(num: int, most: int) -> list[int]:
    """The suspensions to cancel at: all, or the first half of `most` and the others at equal distances."""
    if num <= most:
        return list(range(1, num + 1))
    first = most // 2
    step = (num - first) / (most - first)
    return [*range(1, first + 1), *(first + round(step * (i + 1)) for i in range(most - first))]
