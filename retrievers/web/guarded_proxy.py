"""A forward proxy on this machine through which a browser reaches the web, so that the address guard sees it all.

A browser resolves names and opens connections by itself, for scripts, images, frames and redirects as for pages.
Here it is left with one way out: this proxy, which resolves and checks every host and connects to the very address
that it has checked. Each page gets credentials of its own. They keep other processes of the machine out, bound what
the page transfers, and end its connections with it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from stream2llm_sdk.errors import AddressNotAllowedError, FetchError, RetrievalError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard

__all__ = ["GuardedProxy", "ProxyLease"]

_MAX_HEAD_BYTES = 65_536
_HEAD_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
_PIECE_BYTES = 65_536
_HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "proxy-authorization", "te", "upgrade")
_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) (\S{1,16384}) HTTP/1\.[01]")


@dataclass(eq=False, slots=True)
class ProxyLease:
    """One page's way through the proxy.

    Attributes:
        username, password: what the browser gives as proxy credentials.
        max_bytes: most bytes that the page may receive, over all of its connections.
        num_bytes: received so far.
        refusals: why a host was not connected to, by host.
    """

    max_bytes: int
    username: str = field(default_factory=lambda: secrets.token_hex(8))
    password: str = field(default_factory=lambda: secrets.token_hex(16))
    num_bytes: int = 0
    refusals: dict[str, RetrievalError] = field(default_factory=dict)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def is_exceeded(self) -> bool:
        """Whether the page wanted more than `max_bytes`."""
        return self.num_bytes > self.max_bytes

    @property
    def credentials(self) -> str:
        """The value of the Proxy-Authorization header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


class GuardedProxy:
    """An HTTP/1.1 forward proxy (CONNECT and absolute-form requests) for pages with a lease.

    Args:
        guard: decides which hosts are connected to.
        host: the address of this machine to listen on.
    """

    def __init__(self, guard: AddressGuard, host: str = "127.0.0.1") -> None:
        self._guard = guard
        self._host = host
        self._server: asyncio.Server | None = None
        self._leases: dict[str, ProxyLease] = {}
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where the proxy listens, as a browser takes it."""
        assert self._server is not None, "start() comes first"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Begins to listen.

        Raises:
            OSError: `host` is not an address of this machine.
        """
        self._server = await asyncio.start_server(self._serve, self._host, 0, limit=_MAX_HEAD_BYTES)

    async def aclose(self) -> None:
        """Ends every connection and stops listening."""
        if self._server is not None:
            self._server.close()
        await _end(self._connections)

    @contextlib.asynccontextmanager
    async def lease(self, max_bytes: int) -> AsyncIterator[ProxyLease]:
        """Credentials that work, and connections that live, until the block is left."""
        lease = ProxyLease(max_bytes)
        self._leases[lease.credentials] = lease
        try:
            yield lease
        finally:
            del self._leases[lease.credentials]
            await _end(lease._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._exchange(task, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # either side went away or does not speak HTTP
        except asyncio.CancelledError:
            pass  # our own doing (see `_end`): a handler has no one to pass it on to
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _exchange(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            request_line, headers = await _read_head(reader)
        lease = self._leases.get(dict(_lower(headers)).get("proxy-authorization", ""))
        if lease is None:
            await _answer(writer, "407 Proxy Authentication Required", 'Proxy-Authenticate: Basic realm="crawler"\r\n')
            writer.close()
            await writer.wait_closed()
            return
        lease._connections.add(task)
        try:
            await self._forward(lease, request_line, headers, reader, writer)
            writer.close()  # sends what is left
            await writer.wait_closed()
        finally:
            lease._connections.discard(task)

    async def _forward(
        self,
        lease: ProxyLease,
        request_line: str,
        headers: list[tuple[str, str]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        match = _REQUEST_LINE.fullmatch(request_line)
        if match is None:
            await _answer(writer, "400 Bad Request")
            return
        method, target = match.groups()
        is_tunnel = method == "CONNECT"
        url = f"https://{target}/" if is_tunnel else target
        try:
            upstream_reader, upstream = await self._connect(lease, url)
        except AddressNotAllowedError:
            await _answer(writer, "403 Forbidden")
            return
        except (RetrievalError, OSError, TimeoutError):
            await _answer(writer, "502 Bad Gateway")
            return
        try:
            if is_tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await _splice(lease, reader, writer, upstream_reader, upstream)
            else:
                await _forward_plain(lease, method, url, headers, (reader, writer), (upstream_reader, upstream))
        finally:
            upstream.transport.abort()

    async def _connect(self, lease: ProxyLease, url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the host of `url`, at an address that the guard allows."""
        host = ""
        try:
            self._guard.check_url(url)
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
            addresses = await self._guard.resolve(host, port)
            for address in addresses:
                self._guard.check_address(address)
        except RetrievalError as error:
            lease.refusals[host or (urlsplit(url).hostname or "")] = error
            raise
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            for address in addresses[:-1]:
                with contextlib.suppress(OSError):
                    return await asyncio.open_connection(address, port)
            try:
                return await asyncio.open_connection(addresses[-1], port)
            except OSError as error:
                lease.refusals[host] = FetchError(f"cannot connect: {error.strerror or error}")
                raise


async def _forward_plain(
    lease: ProxyLease,
    method: str,
    url: str,
    headers: list[tuple[str, str]],
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """One exchange, after which both connections end: the browser may reuse none for another host."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    upstream[1].write(_head(f"{method} {path} HTTP/1.1", headers))
    request = asyncio.create_task(_copy(client[0], upstream[1]))
    try:
        status_line, response_headers = await _read_head(upstream[0])
        if not status_line.startswith("HTTP/1."):
            await _answer(client[1], "502 Bad Gateway")
            return
        client[1].write(_head(status_line, response_headers))
        await _copy(upstream[0], client[1], lease)
    finally:
        await _end({request})


async def _splice(
    lease: ProxyLease,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    upstream_reader: asyncio.StreamReader,
    upstream: asyncio.StreamWriter,
) -> None:
    """Copies both ways until either side is done."""
    ways = {
        asyncio.create_task(_copy(reader, upstream)),
        asyncio.create_task(_copy(upstream_reader, writer, lease)),
    }
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end(ways)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, lease: ProxyLease | None = None) -> None:
    while piece := await source.read(_PIECE_BYTES):
        if lease is not None:
            lease.num_bytes += len(piece)
            if lease.is_exceeded:
                return
        target.write(piece)
        await target.drain()


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, list[tuple[str, str]]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines[1:] if line)
    return lines[0], [(name.strip(), value.strip()) for name, _, value in fields]


def _head(first_line: str, headers: list[tuple[str, str]]) -> bytes:
    kept = [f"{name}: {value}" for name, value in headers if name.lower() not in _HOP_BY_HOP]
    return ("\r\n".join([first_line, *kept, "Connection: close"]) + "\r\n\r\n").encode("latin-1", "replace")


def _lower(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name.lower(), value) for name, value in headers]


async def _answer(writer: asyncio.StreamWriter, status: str, header: str = "") -> None:
    writer.write(f"HTTP/1.1 {status}\r\n{header}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
    await writer.drain()


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels tasks and waits until they are over; their errors are the peers'."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
