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
from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool

SPIN_HTML = "<p>spin</p>"
QUICK_HTML = "<p>quick</p>"


def spinning(stub: Path) -> list[int]:
    """The jobs that have come to spin."""
    return [int(file.name) for file in stub.glob("[0-9]*")]


async def convert(pool: ConverterPool, html: str, timeout_s: float = 60.0) -> str:
    return (await pool.convert(html, "http://example.com/", timeout_s=timeout_s)).markdown


async def test_slow_job_is_ended(stub: Path) -> None:
    async with ConverterPool(1) as pool:
        await pool.warm_up()
        with pytest.raises(TimeoutError):
            await convert(pool, SPIN_HTML, timeout_s=0.5)
        await until(lambda: not children(pool.server_process_id))
        assert spinning(stub)
        assert await convert(pool, QUICK_HTML) == "quick"


async def test_cancelled_jobs_are_ended_and_at_most_num_workers_run(stub: Path) -> None:
    async with ConverterPool(2) as pool:
        jobs = [asyncio.create_task(convert(pool, SPIN_HTML)) for _ in range(6)]
        await until(lambda: len(spinning(stub)) == 2)
        assert len(pool._jobs) == 2
        for job in jobs:
            job.cancel()
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        await until(lambda: not children(pool.server_process_id))
        assert await convert(pool, QUICK_HTML) == "quick"


async def test_job_that_dies_fails_alone(stub: Path) -> None:
    async with ConverterPool(2) as pool:
        doomed = asyncio.create_task(convert(pool, SPIN_HTML))
        await until(lambda: len(spinning(stub)) == 1)
        (victim,) = spinning(stub)
        other = asyncio.create_task(convert(pool, SPIN_HTML))
        await until(lambda: len(spinning(stub)) == 2)
        os.kill(victim, signal.SIGSEGV)
        with pytest.raises(FetchError, match="process died"):
            await doomed
        await until(lambda: victim not in children(pool.server_process_id))
        assert len(children(pool.server_process_id)) == 1
        assert not other.done()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


async def test_large_text_survives_the_pipe(converters: ConverterPool) -> None:
    text = "größe" * 100_000  # several times the sockets' buffers
    assert await convert(converters, f"<p>{text}</p>") == text


async def test_closing_ends_jobs_and_fork_server(stub: Path) -> None:
    async with ConverterPool(1) as pool:
        running, waiting = (asyncio.create_task(convert(pool, SPIN_HTML)) for _ in range(2))
        await until(lambda: len(spinning(stub)) == 1)
        processes = [pool.server_process_id, *spinning(stub)]
    for job in (running, waiting):
        with pytest.raises(RetrievalError, match="closed"):
            await job
    await until(lambda: not any(is_running(process) for process in processes))


async def test_dead_fork_server_is_replaced(stub: Path) -> None:
    async with ConverterPool(1) as pool:
        await pool.warm_up()
        first = pool.server_process_id
        os.kill(first, signal.SIGKILL)
        await until(lambda: not is_running(first))
        assert await convert(pool, QUICK_HTML) == "quick"
        assert pool.server_process_id != first


async def test_broken_installation_is_reported(stub: Path) -> None:
    (stub / "__init__.py").write_text("raise ImportError('broken on purpose')")
    async with ConverterPool(1) as pool:
        with pytest.raises(RetrievalError, match="pages cannot be converted: ImportError: broken on purpose"):
            await pool.warm_up()


async def test_jobs_end_with_the_application(stub: Path, tmp_path: Path) -> None:
    """Also where it has no chance to clean up. The script has no `__main__` guard and needs none."""
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, os, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool\n"
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
    await until(lambda: len(spinning(stub)) == 1)
    (job,) = spinning(stub)
    application.kill()
    assert await application.stdout.read() == b""
    await until(lambda: not is_running(server) and not is_running(job))
    await application.wait()


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of trafilatura in new processes, for what is not about conversion: it starts at once, and spins for ever
    on a page with the word "spin"."""
    package = tmp_path / "trafilatura"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os\n"
        "def extract(root, **options):\n"
        "    if 'spin' in root.text_content():\n"
        "        open(os.path.dirname(__file__) + f'/{os.getpid()}', 'w').close()\n"
        "        while True: pass\n"
        "    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return package
