"""Asking a search service over HTTP: what every JSON service shares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.search.provider import SearchHit
from stream2llm_sdk.retrievers.web.option_checks import check_seconds
from stream2llm_sdk.retrievers.web.politeness import parse_retry_after

if TYPE_CHECKING:
    import httpx

__all__ = ["SearchService", "hits_of"]

_MAX_ANSWER_BYTES = 8_000_000
_BUSY = (429, 503)


class SearchService:
    """One service and how to ask it. A busy service (429 or 503) is asked once more if it says that it is ready again
    within `max_retry_after_s`.

    Args:
        base_url: where the service answers. It is the caller's own choice, so its address is not checked.
        path: what is asked below it.
        timeout_s: longest wait for one answer, in seconds.
        headers: sent with each request; secret, and never shown.
        hints: what to say behind an HTTP status, by status.
        secret: a key that must not appear in a message, even if the service repeats it.

    Raises:
        ConfigurationError: `base_url` is not an http(s) URL, or `timeout_s` is not positive.
    """

    def __init__(
        self,
        base_url: str,
        path: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        hints: Mapping[int, str] | None = None,
        secret: str = "",
        max_retry_after_s: float = 2.0,
    ) -> None:
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"base_url={base_url!r}: give an http(s) URL, such as http://127.0.0.1:8888")
        check_seconds("timeout_s", timeout_s)
        self.endpoint = base_url.rstrip("/") + path
        self._timeout_s = timeout_s
        self._headers = dict(headers or {})
        self._hints = dict(hints or {})
        self._secret = secret
        self._max_retry_after_s = max_retry_after_s

    async def ask(self, method: str, **request: Any) -> Any:
        """The answer's JSON.

        Raises:
            RetrievalError: the service cannot be reached, is too slow, refuses, or answers something else than JSON.
        """
        import httpx

        try:
            async with asyncio.timeout(self._timeout_s):  # httpx's own limit begins again with every byte
                return await self._ask(method, request)
        except TimeoutError:
            raise RetrievalError(f"{self.endpoint} did not answer within timeout_s={self._timeout_s:g}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Without the cause: it holds the request, and that the key.
            raise RetrievalError(
                self._clean(f"{self.endpoint} cannot be asked: {error or type(error).__name__}")
            ) from None

    async def _ask(self, method: str, request: dict[str, Any]) -> Any:
        import httpx

        async with httpx.AsyncClient(timeout=self._timeout_s, follow_redirects=True, headers=self._headers) as client:
            response, body = await self._send(client, method, request)
            wait_s = parse_retry_after(response.headers.get("retry-after"))
            if response.status_code in _BUSY and wait_s is not None and wait_s <= self._max_retry_after_s:
                await asyncio.sleep(wait_s)
                response, body = await self._send(client, method, request)
        if not response.is_success:
            raise RetrievalError(self._refusal(response, body))
        try:
            return json.loads(body)
        except ValueError:
            start = self._clean(body[:80].decode(errors="replace"))
            raise RetrievalError(f"{self.endpoint} answered something that is not JSON: {start!r}") from None

    async def _send(
        self, client: httpx.AsyncClient, method: str, request: dict[str, Any]
    ) -> tuple[httpx.Response, bytes]:
        async with client.stream(method, self.endpoint, **request) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise RetrievalError(f"{self.endpoint} answered more than {_MAX_ANSWER_BYTES} bytes")
            return response, bytes(body)

    def _refusal(self, response: httpx.Response, body: bytes) -> str:
        status = response.status_code
        parts = [f"{self.endpoint} answered HTTP {status}"]
        if reason := _reason(body):
            parts.append(f": {reason}")
        if hint := self._hints.get(status):
            parts.append(f"; {hint}")
        wait_s = parse_retry_after(response.headers.get("retry-after"))
        if status in _BUSY:
            parts.append(f"; try again in {wait_s:.0f} s" if wait_s is not None else "; it is busy, try again later")
        return self._clean("".join(parts))

    def _clean(self, text: str) -> str:
        return text.replace(self._secret, "[key]") if self._secret else text


def hits_of(results: Iterable[Any], snippet: str) -> list[SearchHit]:
    """Hits of JSON objects with `url`, `title` and a snippet, in order, one a URL; what has no URL is left out."""
    hits: dict[str, SearchHit] = {}
    for result in results:
        if isinstance(result, dict) and isinstance(url := result.get("url"), str) and url.strip():
            title, text = str(result.get("title") or ""), str(result.get(snippet) or "")
            hits.setdefault(url, SearchHit(url, title, text))
    return list(hits.values())


def _reason(body: bytes) -> str:
    """What a JSON error says, in the forms that services use: `detail`, `error` or `message`, nested or not."""
    try:
        value = json.loads(body)
    except ValueError:
        return ""
    for _ in range(3):
        if not isinstance(value, dict):
            break
        value = next((value[name] for name in ("detail", "error", "message") if name in value), "")
    return " ".join(value.split())[:200] if isinstance(value, str) else ""
