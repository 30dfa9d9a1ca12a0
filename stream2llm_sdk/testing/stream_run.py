"""One stream of a retriever, read to its end in one of several ways, and what came of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stream2llm_sdk.context import Append, Chunk, ContextMode, Replace, Retriever, SourceFailure

__all__ = ["Broken", "StreamRun", "closed", "read", "within"]

ResultT = TypeVar("ResultT")

# A task that does not heed its cancellation is left behind after this time.
_LAST_WORD_S = 1.0


class Broken(Exception):
    """A rule that a retriever breaks, in words."""


@dataclass(slots=True)
class StreamRun:
    """What came out of one stream: `items`, and the `error` that ended it, if one did."""

    items: list[Any] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def context(self) -> list[Chunk]:
        """The context in the end."""
        context: list[Chunk] = []
        for item in self.items:
            if isinstance(item, Replace):
                context = list(item.chunks)
            elif isinstance(item, Append):
                context += item.chunks
        return context

    @property
    def documents(self) -> list[tuple[str, str, str]]:
        """What is in the context in the end, and in which order, without scores."""
        return [(chunk.source, chunk.title, chunk.text) for chunk in self.context]

    @property
    def num_failures(self) -> int:
        return sum(isinstance(item, SourceFailure) for item in self.items)

    @property
    def gave_up_silently(self) -> bool:
        return self.error is None and not self.num_failures

    def check(self, mode: ContextMode) -> None:
        """Raises:
        Broken: it failed, or yielded what its mode does not allow.
        """
        if self.error is not None:
            raise Broken(f"the stream raised {described(self.error)}") from self.error
        allowed = (Append, SourceFailure) if mode == ContextMode.APPEND else (Append, Replace, SourceFailure)
        for item in self.items:
            if not isinstance(item, allowed):
                names = ", ".join(kind.__name__ for kind in allowed)
                raise Broken(f"its mode is {str(mode)!r} and it yielded {type(item).__name__}; allowed are {names}")

    def check_same(self, expected: StreamRun, when: str, *, same_order: bool) -> None:
        """Raises:
        Broken: the context in the end is another one than `expected`.
        """
        ours, theirs = Counter(self.documents), Counter(expected.documents)
        if ours != theirs:
            raise Broken(
                f"{when}: {_difference(theirs - ours, 'missing')}{_difference(ours - theirs, 'not there before')}"
            )
        if same_order and self.documents != expected.documents:
            raise Broken(f"{when}: the same chunks came in another order")


async def read(
    retriever: Retriever,
    query: str,
    *,
    run: StreamRun | None = None,
    most: int | None = None,
    pause: Callable[[], Awaitable[None]] | None = None,
) -> StreamRun:
    """Reads a stream to its end, or `most` items of it, and closes it. `pause` is awaited after each item.

    An error of the stream is kept in the run; a cancellation of the reader is raised.
    """
    run = StreamRun() if run is None else run
    items = retriever.stream(query)
    try:
        try:
            while most is None or len(run.items) < most:
                run.items.append(await anext(items))
                if pause is not None:
                    await pause()
        except StopAsyncIteration:
            pass
        finally:
            await closed(items)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of native libraries among them
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        run.error = error
    return run


async def closed(items: Any) -> None:
    """Closes an iterator that can be closed."""
    if (close := getattr(items, "aclose", None)) is not None:
        await close()


async def within(seconds: float, work: Coroutine[Any, Any, ResultT], what: str) -> ResultT:
    """The result of `work`, also if it does not let itself be cancelled.

    Raises:
        Broken: it took longer.
    """
    task = asyncio.create_task(work, name="conformance")
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise Broken(f"{what} did not end within {seconds:g} s")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_LAST_WORD_S)
    return task.result()


def described(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__


def _difference(documents: Counter[tuple[str, str, str]], what: str) -> str:
    if not documents:
        return ""
    source, title, text = next(iter(documents))
    return f"{documents.total()} chunks {what}, such as {title or source or text:.60}; "
