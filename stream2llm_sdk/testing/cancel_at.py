"""Cancelling a task at one exact suspension, of its own or of a task that was begun for it."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

__all__ = ["CancelAt"]

ResultT = TypeVar("ResultT")

_RUN: contextvars.ContextVar[CancelAt[Any] | None] = contextvars.ContextVar("stream2llm_cancel_at", default=None)


class CancelAt(Generic[ResultT]):
    """Runs a coroutine in a task, counts the suspensions of this task and of all tasks that are begun from it on the
    same event loop, and cancels this task at the `at`-th.

    The cancellation comes as any other does: through what the task is waiting for. One run at a time.

    Args:
        coroutine: what to run.
        at: the suspension, from 1; None cancels nothing and counts.

    Attributes:
        num_suspensions: how many there were.
        was_cancelled: whether the task was still running at that suspension, and so was cancelled.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, ResultT], at: int | None = None) -> None:
        self.num_suspensions = 0
        self.was_cancelled = False
        self._coroutine = coroutine
        self._at = at
        self._task: asyncio.Task[ResultT] | None = None

    def start(self) -> asyncio.Task[ResultT]:
        """Begins, and returns the task."""
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        context = contextvars.copy_context()
        context.run(_RUN.set, self)
        loop.set_task_factory(_counting(factory))
        self._task = asyncio.Task(_Counted(self._coroutine, self), loop=loop, name="conformance", context=context)
        self._task.add_done_callback(lambda _: loop.set_task_factory(factory))
        return self._task

    def suspended(self) -> None:
        """One of the tasks is about to wait."""
        self.num_suspensions += 1
        if self.num_suspensions == self._at:
            # Once this step has ended: only then is it known what the task waits for.
            asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        assert self._task is not None
        self.was_cancelled = self._task.cancel()


class _Counted(Coroutine[Any, Any, ResultT]):
    """A coroutine that says each time that it suspends."""

    def __init__(self, coroutine: Coroutine[Any, Any, ResultT], run: CancelAt[Any]) -> None:
        self._coroutine = coroutine
        self._run = run
        self.__name__ = getattr(coroutine, "__name__", type(coroutine).__name__)
        self.__qualname__ = getattr(coroutine, "__qualname__", self.__name__)

    def send(self, value: Any) -> Any:
        waited_for = self._coroutine.send(value)
        self._run.suspended()
        return waited_for

    def throw(self, *error: Any) -> Any:
        waited_for = self._coroutine.throw(*error)
        self._run.suspended()
        return waited_for

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, ResultT]:
        return self._coroutine.__await__()


def _counting(factory: Any) -> Any:
    """A task factory that counts the suspensions of tasks that are begun from the one that is running."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        context = options.get("context")
        run = context.get(_RUN) if context is not None else _RUN.get()
        if run is not None and inspect.iscoroutine(coroutine):
            coroutine = _Counted(coroutine, run)
        if factory is not None:
            return factory(loop, coroutine, **options)
        return asyncio.Task(coroutine, loop=loop, **options)

    return make
