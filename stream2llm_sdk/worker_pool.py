"""A pool of processes for work that a Ctrl-C can end at once."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

__all__ = ["worker_pool"]


@contextmanager
def worker_pool(num_workers: int, initializer: Callable[[], None]) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes. What ends the block early also ends what they are at, and what is queued.

    Args:
        num_workers: processes.
        initializer: called in each of them first.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), initializer=initializer)
    try:
        # Workers inherit the mask. A terminal sends Ctrl-C to all processes, and this one tells the others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(num_workers):  # each starts one, for none is idle yet
                pool.submit(_nothing)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield pool
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()  # the pool notices, and gives up what is queued
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _nothing() -> None:
    return None
