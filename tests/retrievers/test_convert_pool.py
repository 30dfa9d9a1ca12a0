"""Conversion in processes: a job can be stopped at any point, and one that dies takes nothing with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from processes import children, is_running, until

from stream2llm_sdk.errors import FetchError, RetrievalError
from stream2llm_sdk.retrievers.convert_pool import ConverterPool

SLOW_HTML = "<p>a &amp b</p>" * 200_000  # many seconds
QUICK_HTML = "<p>quick</p>"


def job_processes(pool: ConverterPool) -> list[int]:
    return children(pool.server_process_id)


async def convert(pool: ConverterPool, html: str, timeout_s: float = 60.0) -> str:
    return (await pool.convert(html, "http://example.com/", timeout_s=timeout_s)).markdown


async def test_slow_job_is_ended(converters: ConverterPool) -> None:
    with pytest.raises(TimeoutError):
        await convert(converters, SLOW_HTML, timeout_s=0.3)
    await until(lambda: not job_processes(converters))
    assert await convert(converters, QUICK_HTML) == "quick"


async def test_cancelled_jobs_are_ended_and_at_most_num_workers_run(converters: ConverterPool) -> None:
    await until(lambda: not job_processes(converters))
    jobs = [asyncio.create_task(convert(converters, SLOW_HTML)) for _ in range(6)]
    await until(lambda: len(job_processes(converters)) == 2)
    for job in jobs:
        job.cancel()
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    await until(lambda: not job_processes(converters))
    assert await convert(converters, QUICK_HTML) == "quick"


async def test_job_that_dies_fails_alone(converters: ConverterPool) -> None:
    await until(lambda: not job_processes(converters))
    doomed = asyncio.create_task(convert(converters, SLOW_HTML))
    await until(lambda: len(job_processes(converters)) == 1)
    (victim,) = job_processes(converters)
    other = asyncio.create_task(convert(converters, "<p>other</p>" * 20_000))
    await until(lambda: len(job_processes(converters)) == 2)
    os.kill(victim, signal.SIGSEGV)
    with pytest.raises(FetchError, match="process died"):
        await doomed
    assert (await other).startswith("other")


async def test_large_text_survives_the_pipe(converters: ConverterPool) -> None:
    text = "größe" * 100_000  # several times the sockets' buffers
    assert await convert(converters, f"<p>{text}</p>") == text


async def test_closing_ends_jobs_and_fork_server(stub_crawl4ai: Path) -> None:
    async with ConverterPool(1) as pool:
        await pool.warm_up()
        running, waiting = (asyncio.create_task(convert(pool, "<p>spin</p>")) for _ in range(2))
        await until(lambda: len(job_processes(pool)) == 1)
        processes = [pool.server_process_id, *job_processes(pool)]
    for job in (running, waiting):
        with pytest.raises(RetrievalError, match="closed"):
            await job
    await until(lambda: not any(is_running(process) for process in processes))


async def test_dead_fork_server_is_replaced(stub_crawl4ai: Path) -> None:
    async with ConverterPool(1) as pool:
        await pool.warm_up()
        first = pool.server_process_id
        os.kill(first, signal.SIGKILL)
        assert await convert(pool, QUICK_HTML) == "stub"
        assert pool.server_process_id != first


async def test_broken_installation_is_reported(stub_crawl4ai: Path) -> None:
    (stub_crawl4ai / "__init__.py").write_text("raise ImportError('broken on purpose')")
    async with ConverterPool(1) as pool:
        with pytest.raises(RetrievalError, match="crawl4ai cannot be used: ImportError: broken on purpose"):
            await pool.warm_up()


async def test_jobs_end_with_the_application(stub_crawl4ai: Path, tmp_path: Path) -> None:
    """Also where it has no chance to clean up. The script has no `__main__` guard and needs none."""
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, os, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from stream2llm_sdk.retrievers.convert_pool import ConverterPool\n"
        "print('started', flush=True)\n"
        "async def main():\n"
        "    pool = ConverterPool(1)\n"
        "    await pool.warm_up()\n"
        "    print(pool.server_process_id, flush=True)\n"
        "    await pool.convert('<p>spin</p>', '', timeout_s=600)\n"
        "asyncio.run(main())\n"
    )
    application = await asyncio.create_subprocess_exec(sys.executable, script, stdout=asyncio.subprocess.PIPE)
    assert application.stdout is not None
    assert await application.stdout.readline() == b"started\n"
    server = int(await application.stdout.readline())
    await until(lambda: len(children(server)) == 1)
    (job,) = children(server)
    application.kill()
    assert await application.stdout.read() == b""
    await until(lambda: not is_running(server) and not is_running(job))
    await application.wait()


@pytest.fixture
def stub_crawl4ai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of crawl4ai in new processes, for what is not about conversion: it starts at once, and spins for ever
    on a page with the word "spin"."""
    package = tmp_path / "crawl4ai"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "content_scraping_strategy.py").write_text(
        "from types import SimpleNamespace\n"
        "class LXMLWebScrapingStrategy:\n"
        "    def scrap(self, url, html):\n"
        "        while 'spin' in html: pass\n"
        "        return SimpleNamespace(success=True, cleaned_html=html, metadata={})\n"
    )
    (package / "markdown_generation_strategy.py").write_text(
        "from types import SimpleNamespace\n"
        "class DefaultMarkdownGenerator:\n"
        "    def __init__(self, options): pass\n"
        "    def generate_markdown(self, *args, **kwargs): return SimpleNamespace(raw_markdown='stub')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return package
