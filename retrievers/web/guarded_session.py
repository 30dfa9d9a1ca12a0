"""HTTP connections that lead nowhere but where an address guard allows."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from stream2llm_sdk.retrievers.web.address_guard import AddressGuard

__all__ = ["guarded_session"]

_MAX_HEADER_LINE_BYTES = 16_384
_MAX_HEADERS = 256


class _GuardedResolver(AbstractResolver):
    """Gives the connector checked addresses. It connects to these and never asks again, so that a name that
    changes its answer between check and connection gains nothing."""

    def __init__(self, guard: AddressGuard) -> None:
        self._guard = guard

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._guard.resolve(host, port)
        ]

    async def close(self) -> None:
        pass


def guarded_session(guard: AddressGuard) -> aiohttp.ClientSession:
    """A session that opens no socket to an address that `guard` refuses. Closing it is the caller's duty.

    It keeps no cookies, uses no proxy, bounds the size and number of response headers, and hands bodies over as they
    were sent. It sets no timeouts: callers do.
    """

    def checked_socket(address: Any) -> socket.socket:
        # Literal addresses in URLs do not pass the resolver; every connection passes here.
        family, kind, protocol, _, target = address
        guard.check_address(target[0])
        return socket.socket(family, kind, protocol)

    connector = aiohttp.TCPConnector(
        resolver=_GuardedResolver(guard), socket_factory=checked_socket, use_dns_cache=False, limit=0
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),
        max_line_size=_MAX_HEADER_LINE_BYTES,
        max_field_size=_MAX_HEADER_LINE_BYTES,
        max_headers=_MAX_HEADERS,
    )
