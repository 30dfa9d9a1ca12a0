"""Conversion in processes, as seen from the event loop: bounded, and stopped by cancelling.

`concurrent.futures.ProcessPoolExecutor` cannot stop a job that runs, and if one of its processes dies, the jobs of all
others are lost. Here every job is a process of its own, forked by a server that has crawl4ai imported already (see
`convert_process`). The server is a fresh interpreter that does not import `__main__`, so a script needs no
`if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import weakref
from types import TracebackType
from typing import Any

from stream2llm_sdk.errors import FetchError, RetrievalError
from stream2llm_sdk.retrievers.web.convert import ConvertedPage, prepare_crawl4ai
from stream2llm_sdk.retrievers.web.convert_process import FRAME_HEAD, pack_frame

__all__ = ["ConverterPool"]

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from stream2llm_sdk.retrievers.web.convert_process import serve
serve(int(sys.argv[2]))
"""
_ATTEMPTS = 2


class _HungUp(Exception):
    """The other end of a job's socket is closed."""


class _NotStarted(Exception):
    """The fork server did not start a job: it died, or the system has no process left."""


class _ForkServer:
    """The process that forks jobs. Nothing here waits."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is the application's
            )
        self._finalizer = weakref.finalize(self, _end, self.process, self._control)

    def start_job(self) -> socket.socket:
        """The application's end of a new job's socket. Closing it ends the job."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"J"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def end(self) -> None:
        self._finalizer()


class ConverterPool:
    """Converts pages, `num_workers` at the same time. Belongs to one event loop; close it with `aclose` or
    `async with`.

    The first job waits until crawl4ai is imported in the fork server, which starts with the pool and takes seconds.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, num_workers: int) -> None:
        prepare_crawl4ai()
        self._permits = asyncio.Semaphore(num_workers)
        self._server = _ForkServer()
        self._jobs: set[asyncio.StreamWriter] = set()
        self._is_closed = False

    @property
    def server_process_id(self) -> int:
        """The fork server, parent of the jobs."""
        return self._server.process.pid

    async def warm_up(self) -> None:
        """Waits until jobs start at once.

        Raises:
            RetrievalError: crawl4ai cannot be used.
        """
        await self.convert("", "", timeout_s=60.0)

    async def convert(self, html: str, url: str, *, timeout_s: float) -> ConvertedPage:
        """The page as Markdown. Cancelling it ends the job's process.

        Args:
            html: the page.
            url: where it comes from.
            timeout_s: longest time for the conversion itself in seconds; waiting for a turn, or for the import of
                crawl4ai, is not counted.

        Raises:
            TimeoutError: the conversion took longer.
            FetchError: the page cannot be converted, or its process died.
            RetrievalError: crawl4ai cannot be used, or the pool is closed.
        """
        async with self._permits:
            for _ in range(_ATTEMPTS):
                if self._is_closed:
                    raise RetrievalError("the converter processes were closed")
                server = self._server
                try:
                    return await self._run(server, html, url, timeout_s)
                except _NotStarted:
                    self._replace(server)
        raise RetrievalError("no converter process can be started")

    async def aclose(self) -> None:
        """Ends every process; jobs that run fail."""
        self._is_closed = True
        for job in self._jobs:
            job.transport.abort()
        await asyncio.to_thread(self._server.end)

    async def __aenter__(self) -> ConverterPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def kill(self) -> None:
        """Like `aclose`, for when the pool's event loop is gone."""
        self._is_closed = True
        self._server.end()

    def _replace(self, server: _ForkServer) -> None:
        if server is self._server and not self._is_closed:
            server.end()
            self._server = _ForkServer()

    async def _run(self, server: _ForkServer, html: str, url: str, timeout_s: float) -> ConvertedPage:
        try:
            reader, writer = await asyncio.open_connection(sock=server.start_job())
        except OSError as error:
            raise _NotStarted from error
        self._jobs.add(writer)
        try:
            await _wait_for_start(reader)
            async with asyncio.timeout(timeout_s):
                writer.write(pack_frame({"url": url}, html))
                await writer.drain()
                header, markdown = await _receive(reader)
        except (_HungUp, ConnectionError) as error:
            reason = "its converter process was closed" if self._is_closed else "its converter process died"
            raise FetchError(f"cannot be converted: {reason}") from error
        finally:
            self._jobs.discard(writer)
            writer.transport.abort()  # ends the job if it still runs
        if "error" in header:
            raise FetchError(f"cannot be converted: {header['error']:.200}")
        return ConvertedPage(header["title"], markdown)


async def _wait_for_start(reader: asyncio.StreamReader) -> None:
    try:
        header, _ = await _receive(reader)
    except (_HungUp, ConnectionError) as error:
        raise _NotStarted from error
    if "failed" in header:
        raise RetrievalError(f"crawl4ai cannot be used: {header['failed']}")


async def _receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], str]:
    try:
        header_size, body_size = FRAME_HEAD.unpack(await reader.readexactly(FRAME_HEAD.size))
        frame = await reader.readexactly(header_size + body_size)
    except asyncio.IncompleteReadError as error:
        raise _HungUp from error
    return json.loads(frame[:header_size]), frame[header_size:].decode()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
