"""From a query to URLs: the protocol, fixed seed URLs, and SearXNG."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from stream2llm_sdk.errors import ConfigurationError, RetrievalError

__all__ = ["FixedSeeds", "SearchHit", "SearchProvider", "SearxNGSearch"]


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One search result. Its `url` is not trusted: whoever fetches it checks it."""

    url: str
    title: str = ""
    snippet: str = ""


@runtime_checkable
class SearchProvider(Protocol):
    """Anything that turns a query into pages to read."""

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """At most `k` hits, best first."""
        ...


class FixedSeeds:
    """The same URLs for every query, in the given order, without repetitions.

    Raises:
        ConfigurationError: `urls` is empty or holds something that is not a URL in text form.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        if isinstance(urls, str):
            raise ConfigurationError(f"urls={urls!r}: give a list of URLs, such as [{urls!r}]")
        self.urls = tuple(dict.fromkeys(urls))
        if not self.urls:
            raise ConfigurationError("urls is empty: give at least one URL")
        for url in self.urls:
            if not isinstance(url, str) or not url.strip():
                raise ConfigurationError(f"urls holds {url!r:.80}, which is not a URL")

    async def search(self, query: str, k: int) -> list[SearchHit]:
        return [SearchHit(url) for url in self.urls[:k]]


class SearxNGSearch:
    """A SearXNG instance, over its JSON API (`search.formats` in its settings must contain `json`).

    The instance is the caller's own choice, so its address is not checked; the URLs that it returns are.

    Args:
        base_url: where the instance answers, such as `http://127.0.0.1:8888`.
        categories: SearXNG's categories, comma-separated.
        language: a language code such as `en`, or None for the instance's default.
        timeout_s: longest wait for one answer of the instance, in seconds.

    Raises:
        ConfigurationError: `base_url` is not an http(s) URL, or `timeout_s` is not positive.
    """

    def __init__(
        self,
        base_url: str,
        *,
        categories: str = "general",
        language: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"base_url={base_url!r}: give an http(s) URL, such as http://127.0.0.1:8888")
        if not timeout_s > 0:
            raise ConfigurationError(f"timeout_s={timeout_s!r}: give a positive number of seconds")
        self._endpoint = base_url.rstrip("/") + "/search"
        self._parameters = {"format": "json", "categories": categories}
        if language is not None:
            self._parameters["language"] = language
        self._timeout_s = timeout_s

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """At most `k` hits of the first result page, best first, one a URL.

        Raises:
            RetrievalError: the instance cannot be reached, refuses, or answers something else than results.
        """
        answer = await self._ask(query)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise RetrievalError(f"{self._endpoint} answered without a list of results; is it SearXNG?")
        hits: dict[str, SearchHit] = {}
        for result in results:
            if isinstance(result, dict) and isinstance(url := result.get("url"), str):
                title, snippet = str(result.get("title") or ""), str(result.get("content") or "")
                hits.setdefault(url, SearchHit(url, title, snippet))
        return list(hits.values())[:k]

    async def _ask(self, query: str) -> Any:
        import httpx

        try:
            async with httpx.AsyncClient(timeout=self._timeout_s, follow_redirects=True) as client:
                response = await client.get(self._endpoint, params={**self._parameters, "q": query})
                response.raise_for_status()
                return response.json()
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            hint = "; enable the json format in its settings" if status == 403 else ""
            raise RetrievalError(f"{self._endpoint} answered HTTP {status}{hint}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RetrievalError(f"{self._endpoint} cannot be asked: {error or type(error).__name__}") from error
        except ValueError as error:
            raise RetrievalError(f"{self._endpoint} answered something that is not JSON") from error
