"""Pages by HTTP from URLs that may come from anywhere.

Every hop is checked, asked for politely, bounded in time and size, and taken for what its bytes are.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from urllib.parse import urldefrag, urljoin

import aiohttp

from stream2llm_sdk.errors import AddressNotAllowedError, FetchError, RetrievalError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.content_type import PDF, SNIFFED_BYTES, check_declared_type, sniffed_type
from stream2llm_sdk.retrievers.web.fetched_page import FetchedPage
from stream2llm_sdk.retrievers.web.guarded_session import guarded_session
from stream2llm_sdk.retrievers.web.http_cache import HTTPAnswer, HTTPCache
from stream2llm_sdk.retrievers.web.http_failures import fetch_failure, status_line
from stream2llm_sdk.retrievers.web.page_body import accepted_encodings, decode_text_gently, read_capped
from stream2llm_sdk.retrievers.web.politeness import DEFAULT_USER_AGENT, Politeness, parse_retry_after
from stream2llm_sdk.retrievers.web.robots import MAX_ROBOTS_BYTES, RobotsAnswer

__all__ = ["PageFetcher"]

_MAX_REDIRECTS = 8
_MAX_ROBOTS_REDIRECTS = 5  # RFC 9309, section 2.3.1.2
_ROBOTS_TIMEOUT_S = 10.0
_MAX_RETRY_WAIT_S = 5.0
_BUSY_STATUSES = (429, 503)
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_ACCEPT = "text/html,application/xhtml+xml,application/pdf;q=0.9,text/plain;q=0.9,*/*;q=0.1"


class _TimeLimit:
    """How long one page may keep its servers busy. Waiting for a turn is not counted.

    Attributes:
        began: when they were first kept busy, in the event loop's time.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.began: float | None = None
        self._timeout_s = timeout_s
        self._left_s = math.inf if timeout_s is None else timeout_s

    @contextlib.asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.began = started if self.began is None else self.began
        timeout = asyncio.timeout(None if math.isinf(self._left_s) else self._left_s)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if timeout.expired():
                raise FetchError(f"not fetched within page_timeout_s={self._timeout_s:g}") from None
            raise
        finally:
            self._left_s = max(0.0, self._left_s - (loop.time() - started))


class PageFetcher:
    """Fetches single pages. Close it at the end, or use it as an async context manager.

    Args:
        guard: decides which URLs and addresses are fetched.
        max_page_bytes: bound on a body, both as sent and as decompressed.
        user_agent: the User-Agent header.
        politeness: gives turns at hosts; shared by all that fetch for one user agent. Without it, nobody is asked
            and robots.txt is not read.
        cache: pages kept from earlier. It stays its owner's to close.
    """

    def __init__(
        self,
        guard: AddressGuard,
        *,
        max_page_bytes: int,
        user_agent: str = DEFAULT_USER_AGENT,
        politeness: Politeness | None = None,
        cache: HTTPCache | None = None,
    ) -> None:
        self._guard = guard
        self._max_page_bytes = max_page_bytes
        self._headers = {"accept": _ACCEPT, "accept-encoding": accepted_encodings(), "user-agent": user_agent}
        self._politeness = politeness
        self._cache = cache
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str, *, timeout_s: float | None = None, deadline: float | None = None) -> FetchedPage:
        """The page at `url`, after up to 8 redirects.

        A server that answers 429 or 503 is asked once more if it wants a pause of at most 5 s.

        Args:
            timeout_s: longest time in seconds for all that goes over the network; waiting for a turn at a host is not
                counted.
            deadline: when the caller gives up, in the event loop's time. A turn that would come later is not waited
                for.

        Raises:
            AddressNotAllowedError: a hop leads where the guard forbids.
            RobotsDisallowedError: a hop's robots.txt forbids it.
            FetchError: the page cannot be had, or is neither text nor a PDF. The message is one line.
        """
        limit = _TimeLimit(timeout_s)
        url = _joined(url, "")
        seen = {url}
        for _ in range(_MAX_REDIRECTS + 1):
            self._guard.check_url(url)
            answer = await self._answer_or_retry(url, limit, deadline)
            location = _redirect_location(answer)
            if location is None:
                return await _page(url, answer, limit.began)
            url = _joined(url, location)
            if url in seen:
                raise FetchError(f"the redirects go round in a circle, back to {url:.200}")
            seen.add(url)
        raise FetchError(f"more than {_MAX_REDIRECTS} redirects")

    @contextlib.asynccontextmanager
    async def turn(self, url: str, *, deadline: float | None = None) -> AsyncIterator[None]:
        """Waits until `url` may be requested, also by other means than `fetch`; see `Politeness.turn` for
        the arguments."""
        if self._politeness is None:
            yield
            return
        async with self._politeness.turn(url, self._fetch_robots, deadline=deadline):
            yield

    async def close(self) -> None:
        """Closes all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> PageFetcher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _answer_or_retry(self, url: str, limit: _TimeLimit, deadline: float | None) -> HTTPAnswer:
        answer = await self._answer(url, limit, deadline)
        if answer.status not in _BUSY_STATUSES:
            return answer
        wait_s = self._noted_wait(url, answer)
        if wait_s <= _MAX_RETRY_WAIT_S:
            if self._politeness is None:
                await asyncio.sleep(wait_s)
            answer = await self._answer(url, limit, deadline)
            if answer.status not in _BUSY_STATUSES:
                return answer
            wait_s = self._noted_wait(url, answer)
        raise FetchError(f"{status_line(answer.status)}: try again in {math.ceil(wait_s)} s")

    def _noted_wait(self, url: str, answer: HTTPAnswer) -> float:
        retry_after = answer.headers.get("retry-after")
        if self._politeness is not None:
            return self._politeness.note_response(url, answer.status, retry_after)
        asked_s = parse_retry_after(retry_after)
        return 1.0 if asked_s is None else asked_s

    async def _answer(self, url: str, limit: _TimeLimit, deadline: float | None) -> HTTPAnswer:
        async def send(headers: Mapping[str, str]) -> HTTPAnswer:
            async with self.turn(url, deadline=deadline):
                async with limit.counted():
                    answer = await self._send(url, headers, self._max_page_bytes)
                if self._politeness is not None and answer.status not in _BUSY_STATUSES:
                    self._politeness.note_response(url, answer.status)
                return answer

        if self._cache is None:
            return await send(self._headers)
        # Pages of a private network are for those alone who may read that network: a kept page asks no name server.
        partition = " ".join(self._guard.allowed_networks)
        answer = await self._cache.answer(url, self._headers, send, partition=partition)
        if len(answer.body) > self._max_page_bytes:  # kept by someone with a larger bound
            raise FetchError(f"larger than max_page_bytes={self._max_page_bytes}")
        return answer

    async def _send(self, url: str, headers: Mapping[str, str], max_bytes: int) -> HTTPAnswer:
        """One request. The body is read only if it can become a page."""
        if self._session is None:
            self._session = guarded_session(self._guard)
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                body = await _body(response, max_bytes, is_page=True)
                return HTTPAnswer(response.status, _header_mapping(response), body)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise fetch_failure(error) from error

    async def _fetch_robots(self, url: str) -> RobotsAnswer:
        try:
            async with asyncio.timeout(_ROBOTS_TIMEOUT_S):
                return await self._robots(url)
        except TimeoutError:
            return RobotsAnswer(None, reason=f"no answer within {_ROBOTS_TIMEOUT_S:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return RobotsAnswer(None, reason=str(fetch_failure(error)))
        except RetrievalError as error:
            return RobotsAnswer(None, reason=str(error))

    async def _robots(self, url: str) -> RobotsAnswer:
        if self._session is None:
            self._session = guarded_session(self._guard)
        headers = {**self._headers, "accept": "text/plain,*/*;q=0.5"}
        for _ in range(_MAX_ROBOTS_REDIRECTS + 1):
            self._guard.check_url(url)
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                answer = HTTPAnswer(response.status, _header_mapping(response))
                location = _redirect_location(answer)
                if location is None:
                    body = await _body(response, MAX_ROBOTS_BYTES, is_page=False)
                    pause_s = parse_retry_after(answer.headers.get("retry-after"))
                    return RobotsAnswer(answer.status, body, retry_after_s=pause_s)
            url = _joined(url, location)
        return RobotsAnswer(404)  # as RFC 9309 has it: a crawler may take this for a file that is not there


async def _body(response: aiohttp.ClientResponse, max_bytes: int, *, is_page: bool) -> bytes:
    """A 2xx answer's body, decompressed. A robots.txt is cut at `max_bytes`; a page that is larger is refused, as is
    one that cannot be read as text."""
    if not 200 <= response.status < 300:
        return b""
    encoding = response.headers.get("Content-Encoding", "")
    pieces = response.content.iter_any()
    if not is_page:
        return await read_capped(pieces, encoding=encoding, max_bytes=max_bytes, is_cut=True)
    content_type = response.headers.get("Content-Type", "")
    declared, charset = _declared_type(content_type), _charset(content_type)
    check_declared_type(declared)
    if response.content_length is not None and response.content_length > max_bytes:
        raise FetchError(f"larger than max_page_bytes={max_bytes}")
    return await read_capped(
        pieces,
        encoding=encoding,
        max_bytes=max_bytes,
        check_start=lambda start: sniffed_type(start, declared, charset),
        start_bytes=SNIFFED_BYTES,
    )


async def _page(url: str, answer: HTTPAnswer, began: float | None) -> FetchedPage:
    if not 200 <= answer.status < 300:
        raise FetchError(status_line(answer.status))
    content_type = answer.headers.get("content-type", "")
    charset = _charset(content_type)
    kind = sniffed_type(answer.body[:SNIFFED_BYTES], _declared_type(content_type), charset)
    is_pdf = kind == PDF
    return FetchedPage(
        url,
        answer.status,
        answer.headers,
        kind,
        text=None if is_pdf else await decode_text_gently(answer.body, charset),
        body=answer.body if is_pdf else None,
        from_cache=answer.from_cache,
        began=began,
    )


def _header_mapping(response: aiohttp.ClientResponse) -> dict[str, str]:
    """Repeated headers are joined, as RFC 9110 allows; of Content-Type and Location the last one counts."""
    headers: dict[str, str] = {}
    for name, value in response.headers.items():
        key = name.lower()
        is_single = key not in headers or key in ("content-type", "location", "retry-after")
        headers[key] = value if is_single else f"{headers[key]}, {value}"
    return headers


def _declared_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _charset(content_type: str) -> str | None:
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("'\"") or None
    return None


def _redirect_location(answer: HTTPAnswer) -> str | None:
    if answer.status not in _REDIRECT_STATUSES:
        return None
    location = answer.headers.get("location")
    if not location:
        raise FetchError(f"HTTP {answer.status} without a Location")
    return location


def _joined(url: str, location: str) -> str:
    """Where `location` leads from `url`, without a fragment."""
    try:
        return urldefrag(urljoin(url, location)).url
    except ValueError as error:
        raise AddressNotAllowedError(f"the URL is malformed: {error}") from None
