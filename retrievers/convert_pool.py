"""A pool of converter processes whose jobs can be stopped.

`concurrent.futures.ProcessPoolExecutor` cannot stop a job that runs, and killing one of its processes loses the jobs
of all others. Here each process has its own socket: a job that is cancelled or too slow is interrupted alone, and its
process is killed only if it does not react. The processes are fresh interpreters that do not import `__main__`, so
a script needs no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import weakref
from types import TracebackType
from typing import Any

from stream2llm_sdk.errors import FetchError, RetrievalError
from stream2llm_sdk.retrievers.convert import FRAME_HEAD, ConvertedPage, pack_frame, prepare_crawl4ai

__all__ = ["ConverterPool"]

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from stream2llm_sdk.retrievers.convert import serve
serve(int(sys.argv[2]))
"""
_STOP_GRACE_S = 0.5
_ATTEMPTS = 2


class _ProcessDied(Exception):
    """The converter process ended, or left its protocol."""


class _ConverterProcess:
    """One converter process, used by one caller at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())]
            try:
                self.process = subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C in a terminal is the application's, not the converter's
                )
            except BaseException:
                self._socket.close()
                raise
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._frame_head: bytes | None = None
        self._is_ready = False
        self._is_killed = False

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and self.process.poll() is None

    async def ready(self) -> None:
        """Waits until the process takes jobs. May be cancelled and called again."""
        if self._is_ready:
            return
        if self._streams is None:
            self._streams = await self._connect()
        header, _ = await self._receive()
        if "failed" in header:
            self.kill()
            raise RetrievalError(f"crawl4ai cannot be used: {header['failed']}")
        self._is_ready = True

    async def convert(self, html: str, url: str, timeout_s: float) -> ConvertedPage:
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(pack_frame({"url": url}, html))
                header, markdown = await self._receive()
        except (asyncio.CancelledError, TimeoutError):
            await self._stop_job()
            raise
        if "error" in header:
            raise FetchError(f"cannot be converted: {header['error']:.200}")
        return ConvertedPage(header["title"], markdown)

    def kill(self) -> None:
        """Ends the process at once; it holds nothing that needs saving."""
        self._is_killed = True
        self.process.kill()
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._socket.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_connection(sock=self._socket)
        except BaseException:  # asyncio has closed the socket
            self.kill()
            raise

    async def _stop_job(self) -> None:
        """Afterwards the process is idle, or dead."""
        try:
            self.process.send_signal(signal.SIGUSR1)
            async with asyncio.timeout(_STOP_GRACE_S):
                await self._receive()
        except (TimeoutError, _ProcessDied):
            self.kill()
        except BaseException:
            self.kill()
            raise

    async def _send(self, frame: bytes) -> None:
        assert self._streams is not None
        try:
            self._streams[1].write(frame)
            await self._streams[1].drain()
        except OSError as error:
            raise _ProcessDied from error

    async def _receive(self) -> tuple[dict[str, Any], str]:
        """The next frame. A cancelled call loses nothing: the next one goes on where it was."""
        assert self._streams is not None
        reader = self._streams[0]
        try:
            if self._frame_head is None:
                self._frame_head = await reader.readexactly(FRAME_HEAD.size)
            header_size, body_size = FRAME_HEAD.unpack(self._frame_head)
            frame = await reader.readexactly(header_size + body_size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise _ProcessDied from error
        self._frame_head = None
        return json.loads(frame[:header_size]), frame[header_size:].decode()


class ConverterPool:
    """Converts pages in `num_workers` processes. Belongs to one event loop; close it with `aclose` or `async with`.

    The processes start with the pool and take seconds until their first job; jobs wait for that.

    Raises:
        OSError: a process cannot be started.
    """

    def __init__(self, num_workers: int) -> None:
        prepare_crawl4ai()
        self._idle: asyncio.Queue[_ConverterProcess | None] = asyncio.Queue()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._converters: set[_ConverterProcess] = set()
        self._finalizer = weakref.finalize(self, _kill_all, self._processes)
        self._num_workers = num_workers
        self._is_closed = False
        for _ in range(num_workers):
            self._idle.put_nowait(self._start())

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that are alive."""
        return [process.pid for process in self._processes if process.poll() is None]

    async def warm_up(self) -> None:
        """Waits until every process takes jobs.

        Raises:
            RetrievalError: crawl4ai cannot be used in them.
        """
        held = [await self._idle.get() for _ in range(self._num_workers)]
        try:
            await asyncio.gather(*(converter.ready() for converter in held if converter is not None))
        except _ProcessDied:
            raise RetrievalError("a converter process ended while it started") from None
        finally:
            for converter in held:
                self._give_back(converter)

    async def convert(self, html: str, url: str, *, timeout_s: float) -> ConvertedPage:
        """The page as Markdown. Cancelling it stops the work.

        Args:
            html: the page.
            url: where it comes from.
            timeout_s: longest time for the conversion itself in seconds; waiting for a free process is not counted.

        Raises:
            TimeoutError: the conversion took longer.
            FetchError: the page cannot be converted, or the process died of it twice.
            RetrievalError: no converter process can be started, or the pool is closed.
        """
        for _ in range(_ATTEMPTS):
            converter = await self._idle.get()
            try:
                converter = self._usable(converter)
                await converter.ready()
                return await converter.convert(html, url, timeout_s)
            except _ProcessDied:
                continue
            finally:
                self._give_back(converter)
        raise FetchError("the converter process died of this page")

    async def aclose(self) -> None:
        """Ends every process; jobs that run fail. Returns when the processes are gone."""
        self._is_closed = True
        for converter in self._converters:
            converter.kill()
        processes = tuple(self._processes)
        await asyncio.to_thread(_wait_all, processes)
        self._forget_dead()
        self._finalizer.detach()

    async def __aenter__(self) -> ConverterPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def kill(self) -> None:
        """Like `aclose`, for when its event loop is gone."""
        self._is_closed = True
        self._finalizer()

    def _start(self) -> _ConverterProcess:
        converter = _ConverterProcess()
        self._processes.add(converter.process)
        self._converters.add(converter)
        return converter

    def _usable(self, converter: _ConverterProcess | None) -> _ConverterProcess:
        if self._is_closed:
            raise RetrievalError("the converter processes were closed")
        if converter is not None and converter.is_alive:
            return converter
        if converter is not None:
            converter.kill()
        self._forget_dead()
        try:
            return self._start()
        except OSError as error:
            raise RetrievalError(f"no converter process can be started: {error}") from error

    def _give_back(self, converter: _ConverterProcess | None) -> None:
        """Returns the place to the pool. A dead converter's successor starts now, to be ready for the next job."""
        if self._is_closed:
            if converter is not None:
                converter.kill()
        elif converter is not None and not converter.is_alive:
            with contextlib.suppress(RetrievalError):  # the next job tries again, and reports it
                converter = self._usable(converter)
        self._idle.put_nowait(converter)

    def _forget_dead(self) -> None:
        self._converters = {converter for converter in self._converters if converter.is_alive}
        self._processes -= {process for process in self._processes if process.poll() is not None}


def _wait_all(processes: tuple[subprocess.Popen[bytes], ...]) -> None:
    for process in processes:
        process.wait()


def _kill_all(processes: set[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
