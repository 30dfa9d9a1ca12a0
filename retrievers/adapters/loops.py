"""Asynchronous work for callers that are not: on the event loop that it belongs to, or on one in a thread."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["LoopOfOthers"]

ResultT = TypeVar("ResultT")

_CLEANUP_S = 10.0  # whoever is interrupted waits so long for what it had begun to end


class LoopOfOthers:
    """Runs coroutines for callers without an event loop.

    What the coroutines use may belong to an event loop already: the one that was running when this was made or when
    `note` was called last. As long as that runs they run there; otherwise on one in a thread of this object's,
    which lasts until `close`, so that what they use stays open between calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self.note()

    def note(self) -> None:
        """Remembers the running event loop, if there is one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        with self._lock:
            if loop is not self._loop and self._end is None:
                self._loop = loop

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of `work`. If the caller is interrupted, `work` is cancelled.

        Raises:
            ConfigurationError: called on the event loop that `work` has to run on, which it would block for ever.
        """
        try:
            loop = self._usable_loop()
        except BaseException:
            work.close()
            raise
        over = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_noted(work, over), loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                over.wait(_CLEANUP_S)
            raise

    def iterate(self, items: AsyncGenerator[ResultT, None]) -> Iterator[ResultT]:
        """The items of an asynchronous generator, which is closed when the iteration ends."""

        async def next_item() -> tuple[ResultT, ...]:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return ()

        try:
            while item := self.run(next_item()):
                yield item[0]
        finally:
            self.run(items.aclose())

    def close(self) -> None:
        """Ends the thread, if there is one."""
        with self._lock:
            end, self._end = self._end, None
            self._loop = None
        if end is not None:
            end()

    def _usable_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or not self._loop.is_running():
                self._loop, thread = _loop_in_thread()
                self._end = weakref.finalize(self, _end_loop, self._loop, thread)
            loop = self._loop
        try:
            if asyncio.get_running_loop() is loop:
                raise ConfigurationError(
                    "a synchronous method was called on the event loop that does the work: use the asynchronous one, "
                    "such as ainvoke, astream or aretrieve"
                )
        except RuntimeError:
            pass
        return loop


async def _noted(work: Coroutine[Any, Any, ResultT], over: threading.Event) -> ResultT:
    try:
        return await work
    finally:
        over.set()


def _loop_in_thread() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    running = threading.Event()
    loop.call_soon(running.set)
    thread = threading.Thread(target=_run, args=(loop,), name="stream2llm-loop", daemon=True)
    thread.start()
    running.wait()
    return loop, thread


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join()
