"""crawl4ai's HTTP mode with a request that may be pointed at URLs from anywhere.

crawl4ai's own request connects to any address, reads a body of any size, and writes what is not HTML to disk. Here
the strategy's session and its `crawl` are replaced; it can be given to any `AsyncWebCrawler`.

Importing this module imports crawl4ai, which takes seconds: import it in a thread.
"""

from __future__ import annotations

import socket
from http import HTTPStatus
from typing import Any
from urllib.parse import urldefrag, urljoin

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from crawl4ai.async_configs import HTTPCrawlerConfig
from crawl4ai.async_crawler_strategy import AsyncHTTPCrawlerStrategy
from crawl4ai.models import AsyncCrawlResponse

from stream2llm_sdk.errors import FetchError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.page_body import decode_text, read_capped

__all__ = ["GuardedHTTPStrategy", "guarded_session"]

_MAX_REDIRECTS = 8
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_TEXT_TYPES = (*_HTML_TYPES, "text/plain")
_HEADERS = {"Accept": "text/html,application/xhtml+xml,text/plain;q=0.9", "Accept-Encoding": "gzip, deflate"}


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

    It keeps no cookies, uses no proxy, and hands bodies over as they were sent. It sets no timeouts: callers do.
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
    )


class GuardedHTTPStrategy(AsyncHTTPCrawlerStrategy):  # type: ignore[misc]
    """One page by HTTP: every hop checked, the body bounded, nothing written to disk.

    Args:
        guard: decides which URLs and addresses are fetched.
        max_page_bytes: bound on a body, both as sent and as decompressed.
        user_agent: the User-Agent header.
    """

    _session: aiohttp.ClientSession | None

    def __init__(self, guard: AddressGuard, *, max_page_bytes: int, user_agent: str) -> None:
        super().__init__(HTTPCrawlerConfig(headers={**_HEADERS, "User-Agent": user_agent}))
        self._guard = guard
        self._max_page_bytes = max_page_bytes

    async def start(self) -> None:
        if self._session is None:
            self._session = guarded_session(self._guard)

    async def crawl(self, url: str, config: object = None, **kwargs: object) -> AsyncCrawlResponse:
        """Fetches `url`, following redirects. `redirected_url` is the last hop's; header names are in lower case.

        Raises:
            AddressNotAllowedError: a hop leads where the guard forbids.
            FetchError: the page cannot be had, or is not text.
        """
        await self.start()
        assert self._session is not None
        headers = {**self._BASE_HEADERS, **self.browser_config.headers}
        url = urldefrag(url).url
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                self._guard.check_url(url)
                async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                    location = _redirect_location(response)
                    if location is None:
                        return await self._page(url, response)
                url = urldefrag(urljoin(url, location)).url
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise FetchError(_one_line(error)) from error
        raise FetchError(f"more than {_MAX_REDIRECTS} redirects")

    async def _page(self, url: str, response: aiohttp.ClientResponse) -> AsyncCrawlResponse:
        if not 200 <= response.status < 300:
            raise FetchError(f"HTTP {response.status} {_phrase(response.status)}".rstrip())
        headers = {name.lower(): value for name, value in response.headers.items()}
        if "content-type" in headers and response.content_type not in _TEXT_TYPES:
            raise FetchError(f"content type {response.content_type!r:.80} is not text")
        body = await read_capped(
            response.content.iter_any(),
            encoding=headers.get("content-encoding", ""),
            max_bytes=self._max_page_bytes,
        )
        return AsyncCrawlResponse(
            html=decode_text(body, response.charset),
            response_headers=headers,
            status_code=response.status,
            redirected_url=url,
        )


def _redirect_location(response: aiohttp.ClientResponse) -> str | None:
    if response.status not in (301, 302, 303, 307, 308):
        return None
    location = response.headers.get("Location")
    if not location:
        raise FetchError(f"HTTP {response.status} without a Location")
    return location


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _one_line(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection was lost in the middle of the body"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
