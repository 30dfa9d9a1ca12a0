"""A real HTTP server on the loopback whose pages misbehave on request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

Handler = Callable[[asyncio.StreamWriter], Awaitable[None]]
Result = TypeVar("Result")


def page(text: str, title: str = "") -> str:
    return f"<html><head><title>{title}</title></head><body><p>{text}</p></body></html>"


class WebServer:
    """Serves `routes`; records what was asked and how many requests and connections are open.

    One request a connection. `base` is `http://127.0.0.1:<port>`. It runs on an event loop and a thread of its own,
    so that the test's event loop holds nothing but the tasks under test.
    """

    def __init__(self) -> None:
        self.routes: dict[str, Handler] = {}
        self.requests: list[str] = []
        self.hosts: list[str] = []
        self.headers: list[dict[str, str]] = []  # of each request, names in lower case
        self.num_active = 0
        self.max_active = 0
        self.num_connections = 0
        self.max_connections = 0
        self._changed = asyncio.Condition()
        self._handlers: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    async def __aenter__(self) -> WebServer:
        self._thread.start()
        self._server = await self._there(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._there(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    def add(
        self,
        path: str,
        body: str | bytes,
        *,
        status: int = 200,
        content_type: str | None = "text/html; charset=utf-8",
        headers: dict[str, str] | None = None,
        gate: asyncio.Event | None = None,
    ) -> str:
        """A page that is answered when `gate` opens. Returns its URL."""
        payload = body.encode() if isinstance(body, str) else body
        lines = {"Content-Length": str(len(payload)), **(headers or {})}
        lines["Content-Type"] = content_type or ""

        async def answer(writer: asyncio.StreamWriter) -> None:
            if gate is not None:
                await gate.wait()
            writer.write(head(status, lines) + payload)

        return self.add_handler(path, answer)

    def add_redirect(self, path: str, location: str) -> str:
        return self.add(path, "", status=302, headers={"Location": location})

    def add_handler(self, path: str, handler: Handler) -> str:
        """A page answered by `handler`, which writes the whole response."""
        self.routes[path] = handler
        return self.base + path

    def open(self, gate: asyncio.Event) -> None:
        self._loop.call_soon_threadsafe(gate.set)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until a request or a connection makes `condition` true."""

        async def wait() -> None:
            async with asyncio.timeout(30), self._changed:
                await self._changed.wait_for(condition)

        await self._there(wait())

    async def _there(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _close(self) -> None:
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        await self._count(connections=1)
        try:
            await self._exchange(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self._handlers.discard(task)
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            await self._count(connections=-1)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        path = request.split(" ", 2)[1]
        self.requests.append(path)
        self.hosts += [line[6:] for line in request.split("\r\n") if line.lower().startswith("host: ")]
        lines = (line.partition(":") for line in request.split("\r\n")[1:] if line)
        self.headers.append({name.lower(): value.strip() for name, _, value in lines})
        await self._count(active=1)
        answer = asyncio.ensure_future(self.routes.get(path.partition("?")[0], _not_found)(writer))
        hang_up = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait({answer, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
                await writer.drain()
        finally:
            answer.cancel()
            hang_up.cancel()
            await asyncio.gather(answer, hang_up, return_exceptions=True)
            await self._count(active=-1)

    async def _count(self, *, active: int = 0, connections: int = 0) -> None:
        async with self._changed:
            self.num_active += active
            self.max_active = max(self.max_active, self.num_active)
            self.num_connections += connections
            self.max_connections = max(self.max_connections, self.num_connections)
            self._changed.notify_all()


async def _not_found(writer: asyncio.StreamWriter) -> None:
    writer.write(head(404, {"Content-Length": "0"}))


def head(status: int = 200, headers: dict[str, str] | None = None) -> bytes:
    lines = {"Connection": "close", "Content-Type": "text/html", **(headers or {})}
    return (f"HTTP/1.1 {status} -\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items() if v) + "\r\n").encode()
