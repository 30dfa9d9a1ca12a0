"""Converter processes: a job can be stopped, and a process that dies takes nothing with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from stream2llm_sdk.errors import FetchError, RetrievalError
from stream2llm_sdk.retrievers.convert_pool import ConverterPool

SLOW_HTML = "<p>a &amp b</p>" * 200_000  # many seconds
QUICK_HTML = "<p>quick</p>"


async def convert(pool: ConverterPool, html: str, timeout_s: float = 60.0) -> str:
    return (await pool.convert(html, "http://example.com/", timeout_s=timeout_s)).markdown


async def test_slow_job_is_stopped_and_its_process_goes_on(converters: ConverterPool) -> None:
    processes = set(converters.process_ids)
    with pytest.raises(TimeoutError):
        await convert(converters, SLOW_HTML, timeout_s=0.3)
    assert [await convert(converters, QUICK_HTML) for _ in processes] == ["quick"] * len(processes)
    assert set(converters.process_ids) == processes


async def test_cancelled_jobs_leave_their_processes_idle(converters: ConverterPool) -> None:
    processes = set(converters.process_ids)
    jobs = [asyncio.create_task(convert(converters, SLOW_HTML)) for _ in range(6)]
    await asyncio.sleep(0.2)
    for job in jobs:
        job.cancel()
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert [await convert(converters, QUICK_HTML) for _ in processes] == ["quick"] * len(processes)
    assert set(converters.process_ids) == processes


async def test_process_that_hangs_dies_or_is_closed() -> None:
    """One pool of one process goes through all of it, because a start takes seconds."""
    async with ConverterPool(1) as pool:
        await pool.warm_up()

        (hung,) = pool.process_ids
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await convert(pool, QUICK_HTML, timeout_s=0.2)
        assert hung not in pool.process_ids

        # The successor is killed while a job waits for it; the job goes to the next one.
        (second,) = pool.process_ids
        job = asyncio.create_task(convert(pool, QUICK_HTML))
        await asyncio.sleep(0)
        os.kill(second, signal.SIGKILL)
        assert await job == "quick"

        # A page whose processes die twice fails, and only that page.
        (third,) = pool.process_ids
        os.kill(third, signal.SIGSTOP)
        job = asyncio.create_task(convert(pool, QUICK_HTML))
        await asyncio.sleep(0)
        os.kill(third, signal.SIGKILL)
        while third in pool.process_ids or not pool.process_ids:
            await asyncio.sleep(0.01)
        os.kill(pool.process_ids[0], signal.SIGKILL)
        with pytest.raises(FetchError, match="died of this page"):
            await job

        running, waiting = (asyncio.create_task(convert(pool, QUICK_HTML)) for _ in range(2))
        await asyncio.sleep(0)
    assert pool.process_ids == []
    for job in (running, waiting):
        with pytest.raises(RetrievalError, match="closed"):
            await job
    with pytest.raises(RetrievalError, match="closed"):
        await convert(pool, QUICK_HTML)


def test_script_without_main_guard_works(tmp_path: object) -> None:
    script = (
        "import asyncio\n"
        "from stream2llm_sdk.retrievers.convert_pool import ConverterPool\n"
        "print('started')\n"
        "async def main():\n"
        "    async with ConverterPool(1) as pool:\n"
        "        print((await pool.convert('<p>text</p>', 'http://x/', timeout_s=60)).markdown)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["started", "text"], done.stderr
