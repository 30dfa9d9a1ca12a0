"""Ending tasks for good, also while whoever waits for that is being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["cancel_and_wait", "ended", "uncancelled"]

ResultT = TypeVar("ResultT")


async def ended(*tasks: asyncio.Task[Any], cancel_every_s: float | None = None) -> None:
    """Returns once all tasks have ended, whatever their results. If the caller is cancelled meanwhile, that is raised
    then and not before.

    Args:
        cancel_every_s: seconds after which those that still run are cancelled, again and again; None waits.
    """
    interruption: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            _, late = await asyncio.wait(pending, timeout=cancel_every_s)
        except asyncio.CancelledError as error:
            interruption = error
            continue
        for task in late:
            task.cancel()
    for task in tasks:
        if not task.cancelled():
            task.exception()  # fetched, so that asyncio does not report it as lost
    if interruption is not None:
        raise interruption


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and returns once they have ended, as `ended` does."""
    for task in tasks:
        task.cancel()
    await ended(*tasks)


async def uncancelled(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs `work` to its end. If the caller is cancelled meanwhile, that is raised then and not before."""
    task = asyncio.create_task(work)
    await ended(task)
    return task.result()
