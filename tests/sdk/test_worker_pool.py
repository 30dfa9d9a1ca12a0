"""Pools whose work ends when whoever waits for it is stopped."""

from __future__ import annotations

import multiprocessing
import signal
import time

import pytest

from stream2llm_sdk.worker_pool import worker_pool


def nothing() -> None:
    pass


def doubled(number: int) -> int:
    return 2 * number


def hears_interrupts(wait_s: float = 0.0) -> bool:
    time.sleep(wait_s)
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_work_is_done_and_workers_do_not_hear_an_interrupt_of_all() -> None:
    with worker_pool(2, nothing) as pool:
        assert list(pool.map(doubled, range(3))) == [0, 2, 4]
        assert not any(pool.map(hears_interrupts, [0.2] * 4))
    assert hears_interrupts()


def test_what_is_stopped_takes_its_workers_along() -> None:
    def stopped() -> None:
        with worker_pool(2, nothing) as pool:
            for _ in range(4):
                pool.submit(time.sleep, 3_600)
            raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert set(multiprocessing.active_children()) <= before
