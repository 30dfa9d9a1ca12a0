"""Tavily's search API."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.search.provider import SearchHit
from stream2llm_sdk.retrievers.search.service import SearchService, hits_of

__all__ = ["TavilySearch"]

_MAX_RESULTS = 20
_MAX_QUERY_CHARS = 400
_DEPTHS = ("basic", "advanced")
_TOPICS = ("general", "news", "finance")
_HINTS = {
    401: "check api_key= or TAVILY_API_KEY",
    432: "the plan's limit is reached",
    433: "the limit of pay-as-you-go is reached",
}


class TavilySearch:
    """Tavily, which the paper's crawler used.

    Args:
        api_key: by default the environment variable TAVILY_API_KEY. It is never shown.
        depth: `basic` or `advanced`; the second costs two credits a search.
        topic: `general`, `news` or `finance`.
        include_domains, exclude_domains: only these, or none of these.
        base_url: where the API answers.
        timeout_s: longest wait for one answer, in seconds.

    Raises:
        ConfigurationError: there is no key, or an option has a value that cannot work.
    """

    def __init__(
        self,
        api_key: str | None = None,
        *,
        depth: str = "basic",
        topic: str = "general",
        include_domains: Iterable[str] = (),
        exclude_domains: Iterable[str] = (),
        base_url: str = "https://api.tavily.com",
        timeout_s: float = 10.0,
    ) -> None:
        if api_key is not None and not isinstance(api_key, str):
            raise ConfigurationError(f"api_key is a {type(api_key).__name__}: give the key as text")
        key = (api_key if api_key is not None else os.environ.get("TAVILY_API_KEY", "")).strip()
        if not key:
            raise ConfigurationError("Tavily needs a key: give api_key=, or set TAVILY_API_KEY in the environment")
        if not key.isascii() or not key.isprintable():
            raise ConfigurationError("api_key holds characters that no HTTP header can carry; copy it again")
        if depth not in _DEPTHS:
            raise ConfigurationError(f"depth={depth!r}: choose one of {', '.join(_DEPTHS)}")
        if topic not in _TOPICS:
            raise ConfigurationError(f"topic={topic!r}: choose one of {', '.join(_TOPICS)}")
        self._service = SearchService(
            base_url,
            "/search",
            timeout_s=timeout_s,
            headers={"Authorization": f"Bearer {key}"},
            hints=_HINTS,
            secret=key,
        )
        self._body: dict[str, Any] = {"search_depth": depth, "topic": topic}
        for name, domains in (("include_domains", include_domains), ("exclude_domains", exclude_domains)):
            if isinstance(domains, (str, bytes)) or not isinstance(domains, Iterable):
                raise ConfigurationError(f"{name}={domains!r}: give a list, such as ['docs.python.org']")
            if listed := list(domains):
                self._body[name] = listed

    def __repr__(self) -> str:
        return f"TavilySearch({self._service.endpoint!r})"

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """At most `k` hits for `query`, best first, one a URL; Tavily gives at most 20. Of a question longer than the
        400 characters that it takes, the beginning is asked.

        Raises:
            RetrievalError: the service cannot be reached, refuses, or answers something else than results.
        """
        body = {**self._body, "query": _shortened(query), "max_results": max(1, min(k, _MAX_RESULTS))}
        answer = await self._service.ask("POST", json=body)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise RetrievalError(f"{self._service.endpoint} answered without a list of results; is it Tavily?")
        return hits_of(results, "content")[:k]


def _shortened(query: str) -> str:
    if len(query) <= _MAX_QUERY_CHARS:
        return query
    return query[:_MAX_QUERY_CHARS].rpartition(" ")[0] or query[:_MAX_QUERY_CHARS]
