"""Conversion in processes, as seen from the event loop: bounded, and stopped by cancelling.

`concurrent.futures.ProcessPoolExecutor` cannot stop a job that runs, and if one of its processes dies, the jobs of all
others are lost. Here every page that is being converted has a process for itself, forked by a server that has imported
everything already (see `convert_process`), and a process that is free converts the next page. The server is a fresh
interpreter that does not import `__main__`, so a script needs no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from stream2llm_sdk.errors import ConfigurationError, FetchError, RetrievalError
from stream2llm_sdk.retrievers.web.convert_process import FRAME_HEAD, JOB, JOB_WITH_LANGUAGES, pack_frame
from stream2llm_sdk.retrievers.web.page import ConvertedPage, ExtractionOptions

__all__ = ["ConverterPool"]

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from stream2llm_sdk.retrievers.web.convert_process import serve
serve(int(sys.argv[2]))
"""
_ATTEMPTS = 2
_WHOLE_PAGE = ExtractionOptions(max_page_tokens=None)


class _HungUp(Exception):
    """The other end of a job's socket is closed."""


class _JobDied(FetchError):
    """A job's process ended under its page."""


class _NotStarted(Exception):
    """The fork server did not start a job: it died, or the system has no process left."""


class _ForkServer:
    """The process that forks jobs. Nothing here waits."""

    def __init__(self, hash_seed: int) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is the application's
            )
        self._finalizer = weakref.finalize(self, _end, self.process, self._control)

    def start_job(self, kind: bytes) -> socket.socket:
        """The application's end of a new job's socket. Closing it ends the job."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._control, [kind], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def end(self) -> None:
        self._finalizer()


@dataclass(eq=False, slots=True)
class _Job:
    """One end of a job process: `is_fresh` until it has converted a page."""

    server: _ForkServer
    connection: socket.socket  # a plain one, that needs no event loop to be closed
    is_fresh: bool = True

    @property
    def can_go_on(self) -> bool:
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self.server.process.poll() is None
        except OSError:
            pass
        return False

    def hang_up(self) -> None:
        """Ends the process, and with it what waits for its answer."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Ends the process, whatever it does. Nobody may be waiting for its answer."""
        self.connection.close()


class ConverterPool:
    """Converts pages, `num_workers` at the same time. Belongs to one event loop; close it with `aclose` or
    `async with`.

    The first job waits until the fork server, which starts with the pool, has imported what conversion needs. That
    takes about a second.

    Raises:
        ConfigurationError: `num_workers` is not a positive number.
        OSError: the process cannot be started.
    """

    def __init__(self, num_workers: int) -> None:
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ConfigurationError(f"num_workers={num_workers!r:.80}: give a whole number of at least 1")
        self._permits = asyncio.Semaphore(num_workers)
        self._hash_seed = secrets.randbelow(2**32)  # hashes of texts are compared, whichever server's job made them
        self._server = _ForkServer(self._hash_seed)
        self._jobs: set[_Job] = set()  # at work
        self._free: list[_Job] = []  # the one that worked last at the end; they end by themselves after a while
        self._is_closed = False

    @property
    def server_process_id(self) -> int:
        """The fork server, parent of the jobs."""
        return self._server.process.pid

    async def warm_up(self) -> None:
        """Waits until jobs start at once.

        Raises:
            RetrievalError: a library that conversion needs cannot be used.
        """
        await self.convert("", "", timeout_s=60.0)

    async def convert(
        self,
        page: str | bytes,
        url: str,
        *,
        timeout_s: float,
        options: ExtractionOptions | None = None,
        content_type: str = "text/html",
    ) -> ConvertedPage:
        """The page as Markdown. Cancelling it ends the job's process.

        Args:
            page: its text, or its bytes: of a PDF, or of a page whose charset nobody has found yet.
            url: where it comes from; links are resolved against it.
            options: what to take from the page; if left out, all of its main text and its links.
            content_type: `text/html`, `text/plain` or `application/pdf`, parameters aside. Bytes that begin as a PDF
                does are read as one whatever it says.
            timeout_s: longest time for the conversion itself in seconds; waiting for a turn, or for the fork
                server, is not counted.

        Raises:
            TimeoutError: the conversion took longer.
            FetchError: the page cannot be converted, or its process died.
            RetrievalError: a library that conversion needs cannot be used, or the pool is closed.
        """
        options = _WHOLE_PAGE if options is None else options
        request = {"url": url, "content_type": content_type, "is_text": isinstance(page, str)}
        frame = pack_frame({**request, "options": options.to_json()}, page)
        kind = JOB_WITH_LANGUAGES if options.languages else JOB
        async with self._permits:
            job = self._free_job()
            if job is not None:
                try:
                    return await self._run(job, frame, timeout_s)
                except _JobDied:
                    pass  # it may have ended before it saw the page
            for _ in range(_ATTEMPTS):
                if self._is_closed:
                    raise RetrievalError("the converter processes were closed")
                server = self._server
                try:
                    return await self._run(self._job(server, kind), frame, timeout_s)
                except _NotStarted:
                    self._replace(server)
        raise RetrievalError("no converter process can be started")

    def prepare(self) -> None:
        """Has a job started for a page that is expected soon, if none is free. Does not wait for it."""
        if not (self._free or self._jobs or self._is_closed):
            with contextlib.suppress(_NotStarted):  # then the page's own attempt sees to it
                self._free.append(self._job(self._server, JOB))

    async def aclose(self) -> None:
        """Ends every process; jobs that run fail."""
        self._is_closed = True
        for job in self._jobs:
            job.hang_up()
        self._end_free_jobs()
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
        for job in self._jobs:
            job.hang_up()
        self._end_free_jobs()
        self._server.end()

    def _end_free_jobs(self) -> None:
        while self._free:
            self._free.pop().end()

    def _replace(self, server: _ForkServer) -> None:
        if server is self._server and not self._is_closed:
            server.end()
            self._server = _ForkServer(self._hash_seed)

    def _free_job(self) -> _Job | None:
        while self._free:
            job = self._free.pop()
            if job.can_go_on and job.server is self._server:
                return job
            job.end()
        return None

    def _job(self, server: _ForkServer, kind: bytes) -> _Job:
        try:
            return _Job(server, server.start_job(kind))
        except OSError as error:
            raise _NotStarted from error

    async def _run(self, job: _Job, frame: bytes, timeout_s: float) -> ConvertedPage:
        self._jobs.add(job)
        is_whole = False
        try:
            if job.is_fresh:
                await _wait_for_start(job.connection)
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_sendall(job.connection, frame)
                header, markdown = await _receive(job.connection)
            is_whole = True
        except (_HungUp, ConnectionError) as error:
            reason = "its converter process was closed" if self._is_closed else "its converter process died"
            raise _JobDied(f"cannot be converted: {reason}") from error
        finally:
            self._jobs.discard(job)
            if is_whole and not self._is_closed:
                job.is_fresh = False
                self._free.append(job)
            else:
                job.end()
        if "error" in header:
            raise FetchError(f"cannot be converted: {header['error']:.200}")
        return ConvertedPage.from_json(header["page"], markdown)


async def _wait_for_start(connection: socket.socket) -> None:
    try:
        header, _ = await _receive(connection)
    except (_HungUp, ConnectionError) as error:
        raise _NotStarted from error
    if "failed" in header:
        raise RetrievalError(f"pages cannot be converted: {header['failed']}")


async def _receive(connection: socket.socket) -> tuple[dict[str, Any], str]:
    header_size, body_size = FRAME_HEAD.unpack(await _read(connection, FRAME_HEAD.size))
    frame = await _read(connection, header_size + body_size)
    return json.loads(frame[:header_size]), frame[header_size:].decode()


async def _read(connection: socket.socket, size: int) -> bytearray:
    loop, data, num_read = asyncio.get_running_loop(), bytearray(size), 0
    while num_read < size:
        num_now = await loop.sock_recv_into(connection, memoryview(data)[num_read:])
        if not num_now:
            raise _HungUp
        num_read += num_now
    return data


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
