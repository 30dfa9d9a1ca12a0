"""The browser's way out lets through what the guard allows, for whoever has a lease, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest
from web_server import WebServer, head, page

from stream2llm_sdk.errors import AddressNotAllowedError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.guarded_proxy import GuardedProxy, ProxyLease

pytestmark = pytest.mark.slow

LOOPBACK = ["127.0.0.0/8"]


@pytest.fixture
async def proxy() -> AsyncIterator[GuardedProxy]:
    proxy = GuardedProxy(AddressGuard(LOOPBACK))
    await proxy.start()
    yield proxy
    await proxy.aclose()


async def get(proxy: GuardedProxy, lease: ProxyLease | None, url: str, body: bytes | None = None) -> tuple[int, bytes]:
    headers = {"Proxy-Authorization": lease.credentials} if lease is not None else {}
    method = "GET" if body is None else "POST"
    async with aiohttp.ClientSession() as session:
        async with session.request(method, url, proxy=proxy.url, headers=headers, data=body) as response:
            return response.status, await response.read()


async def tunnel(
    proxy: GuardedProxy, lease: ProxyLease | None, target: str
) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    credentials = f"Proxy-Authorization: {lease.credentials}\r\n" if lease is not None else ""
    writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{credentials}\r\n".encode())
    return (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0], reader, writer


async def test_plain_requests_and_tunnels_pass(web: WebServer, proxy: GuardedProxy) -> None:
    url = web.add("/a", page("text" * 50_000))
    async with proxy.lease(10_000_000) as lease:
        status, body = await get(proxy, lease, f"{url}?x=1")
        assert (status, len(body)) == (200, len(page("text" * 50_000)))
        first_line, reader, writer = await tunnel(proxy, lease, f"127.0.0.1:{web.port}")
        assert first_line.endswith(b"200 Connection established")
        writer.write(b"GET /a HTTP/1.1\r\nHost: e\r\n\r\n")
        assert (await reader.read()).endswith(body)
        writer.close()
        assert lease.num_bytes > 2 * len(body)
    assert web.requests == ["/a?x=1", "/a"]
    assert not {"proxy-authorization", "proxy-connection"} & set(web.headers[0])
    await web.wait_until(lambda: web.num_connections == 0)


async def test_body_of_a_request_is_passed_on(proxy: GuardedProxy) -> None:
    received = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(5) == b"posts"
        received.set()
        writer.write(head(200, {"Content-Length": "2", "Connection": "keep-alive"}) + b"ok")

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with proxy.lease(1_000) as lease:
            assert await get(proxy, lease, f"http://127.0.0.1:{port}/", b"posts") == (200, b"ok")
    assert received.is_set()


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]", "2130706433", "evil.example"]
)
async def test_forbidden_hosts_are_refused_either_way(proxy: GuardedProxy, host: str) -> None:
    async def lookup(name: str, port: int) -> Sequence[str]:
        return ["10.0.0.1"]

    proxy._guard = AddressGuard(LOOPBACK, lookup=lookup)
    async with proxy.lease(1_000) as lease:
        first_line, _, writer = await tunnel(proxy, lease, f"{host}:443")
        writer.close()
        assert first_line.endswith(b"403 Forbidden")
        assert (await get(proxy, lease, f"http://{host}/"))[0] == 403
        assert all(isinstance(error, AddressNotAllowedError) for error in lease.refusals.values())
        assert lease.refusals


async def test_name_is_resolved_once_and_its_answer_is_what_is_connected_to(
    web: WebServer, proxy: GuardedProxy
) -> None:
    answers = [["127.0.0.1"], ["10.0.0.1"]]

    async def lookup(name: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    web.add("/", page("pinned"))
    proxy._guard = AddressGuard(["127.0.0.1/32"], lookup=lookup)
    async with proxy.lease(10_000) as lease:
        url = f"http://rebinding.example:{web.port}/"
        assert (await get(proxy, lease, url))[0] == 200
        assert (await get(proxy, lease, url))[0] == 403
    assert web.hosts == [f"rebinding.example:{web.port}"]


async def test_nobody_else_gets_through(web: WebServer, proxy: GuardedProxy) -> None:
    url = web.add("/", page("secret"))
    async with proxy.lease(10_000) as ended:
        pass
    for lease in (None, ended, ProxyLease(10_000)):
        assert (await get(proxy, lease, url))[0] == 407
        assert b"407" in (await tunnel(proxy, lease, f"127.0.0.1:{web.port}"))[0]
    assert web.max_connections == 0


async def test_bytes_of_a_page_are_bounded_over_all_its_connections(web: WebServer, proxy: GuardedProxy) -> None:
    url = web.add("/", "x" * 40_000)
    async with proxy.lease(100_000) as lease:
        assert len((await get(proxy, lease, url))[1]) == 40_000
        assert len((await get(proxy, lease, url))[1]) == 40_000
        with pytest.raises(aiohttp.ClientError):
            await get(proxy, lease, url)
        assert lease.is_exceeded


async def test_end_of_a_lease_ends_its_connections(web: WebServer, proxy: GuardedProxy) -> None:
    async def hang(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    url = web.add_handler("/", hang)
    async with proxy.lease(10_000) as lease, proxy.lease(10_000) as other:
        kept = asyncio.create_task(get(proxy, other, url))
        async with proxy.lease(10_000) as short:
            ended = asyncio.create_task(get(proxy, short, url))
            await web.wait_until(lambda: web.num_active == 2)
        (outcome,) = await asyncio.gather(ended, return_exceptions=True)
        assert isinstance(outcome, aiohttp.ClientError) or outcome == (407, b"")  # aiohttp may have tried again
        await web.wait_until(lambda: web.num_active == 1)
        assert not kept.done()
        assert lease.num_bytes == 0
    await asyncio.gather(kept, return_exceptions=True)
    await web.wait_until(lambda: web.num_connections == 0)


@pytest.mark.parametrize(
    "request_",
    [b"\x16\x03\x01 not http\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET " + b"x" * 200_000 + b"\r\n\r\n", b"\r\n\r\n"],
)
async def test_rubbish_is_turned_away(proxy: GuardedProxy, request_: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    writer.write(request_)
    try:
        assert (await reader.read()).split(b"\r\n")[0].rpartition(b" ")[0] in (
            b"",
            b"HTTP/1.1 407 Proxy Authentication",
        )
    except ConnectionError:
        pass
    finally:
        writer.close()


async def test_server_that_speaks_no_http_is_a_bad_gateway(web: WebServer, proxy: GuardedProxy) -> None:
    async def rubbish(writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    async with proxy.lease(10_000) as lease:
        assert (await get(proxy, lease, web.add_handler("/", rubbish)))[0] == 502
        assert (await get(proxy, lease, f"http://127.0.0.1:{port}/"))[0] == 502
        assert "cannot connect" in str(lease.refusals["127.0.0.1"])
