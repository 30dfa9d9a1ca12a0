"""SearXNG, over its JSON API."""

from __future__ import annotations

from stream2llm_sdk.errors import RetrievalError
from stream2llm_sdk.retrievers.search.provider import SearchHit
from stream2llm_sdk.retrievers.search.service import SearchService, hits_of

__all__ = ["SearxNGSearch"]


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
        hints = {403: "enable the json format in its settings"}
        self._service = SearchService(base_url, "/search", timeout_s=timeout_s, hints=hints)
        self._parameters = {"format": "json", "categories": categories}
        if language is not None:
            self._parameters["language"] = language

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """At most `k` hits of the first result page for `query`, best first, one a URL.

        Raises:
            RetrievalError: the instance cannot be reached, refuses, or answers something else than results.
        """
        answer = await self._service.ask("GET", params={**self._parameters, "q": query})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise RetrievalError(f"{self._service.endpoint} answered without a list of results; is it SearXNG?")
        return hits_of(results, "content")[:k]
