"""The search protocol, and fixed seed URLs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["FixedSeeds", "SearchHit", "SearchProvider", "StreamingSearchProvider"]


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One search result.

    Attributes:
        url: not trusted: whoever fetches it checks it.
        title: of the page.
        snippet: what the search shows of its text.
    """

    url: str
    title: str = ""
    snippet: str = ""


@runtime_checkable
class SearchProvider(Protocol):
    """Anything that turns a query into pages to read."""

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """At most `k` hits for `query`, best first."""
        ...


@runtime_checkable
class StreamingSearchProvider(SearchProvider, Protocol):
    """A search whose hits come one by one, so that the first page can be read before the last hit is known."""

    def stream(self, query: str, k: int) -> AsyncIterator[SearchHit]:
        """At most `k` hits for `query` as they come. Closing the iterator (`aclose`) ends the search."""
        ...


class FixedSeeds:
    """The same URLs for every query, in the given order, without repetitions.

    Args:
        urls: at least one.

    Raises:
        ConfigurationError: `urls` is empty or holds something that is not a URL in text form.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        if isinstance(urls, str):
            raise ConfigurationError(f"urls={urls!r}: give a list of URLs, such as [{urls!r}]")
        given: object = urls
        if isinstance(given, bytes) or not isinstance(given, Iterable):
            raise ConfigurationError(f"urls={given!r:.80}: give a list of URLs")
        urls = list(urls)
        for url in urls:
            if not isinstance(url, str) or not url.strip():
                raise ConfigurationError(f"urls holds {url!r:.80}, which is not a URL")
        self.urls = tuple(dict.fromkeys(urls))
        if not self.urls:
            raise ConfigurationError("urls is empty: give at least one URL")

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """The first `k` of them, whatever the `query`."""
        return [SearchHit(url) for url in self.urls[:k]]
