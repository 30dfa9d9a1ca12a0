"""The search of a recorded crawl, as the command line names it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.search.index_folder import holds_index
from stream2llm_sdk.retrievers.search.provider import FixedSeeds, SearchHit, SearchProvider
from stream2llm_sdk.traces.recording.questions import Question

__all__ = ["SEARCHES", "asked_question", "check_questions", "check_search", "open_search"]

SEARCHES = "dataset, searxng:URL, tavily, duckduckgo, local:FOLDER@BASE_URL, local:INDEX or urls:URL,URL"
"""What a search can be called."""

asked_question: ContextVar[Question] = ContextVar("asked_question")
"""The question that is asked in this context: a data set may name other pages for the same words."""


class _NamedPages:
    """The pages that the data set names for the question."""

    async def search(self, query: str, k: int) -> list[SearchHit]:
        return [SearchHit(url) for url in asked_question.get().urls[:k]]


def check_search(name: str) -> None:
    """Raises ConfigurationError where a search is not one of `SEARCHES`; none is opened."""
    kind, _, rest = name.partition(":")
    takes_more = kind in ("searxng", "local", "urls")
    if kind not in ("dataset", "searxng", "tavily", "duckduckgo", "local", "urls") or takes_more != bool(rest):
        raise ConfigurationError(f"search={name!r:.200}: give one of {SEARCHES}")
    if kind == "urls" and not all(url.startswith(("http://", "https://")) for url in _listed(rest)):
        raise ConfigurationError(f"search={name!r:.200}: only http and https are read, write each as https://HOST/PATH")
    folder = Path(rest.rpartition("@")[0] or rest)
    if kind == "local" and not folder.is_dir():
        raise ConfigurationError(f"search={name!r:.200}: {str(folder)!r} is no folder. Give one of {SEARCHES}")
    if kind == "local" and "@" not in rest and not holds_index(folder):
        raise ConfigurationError(
            f"search={name!r:.200}: {str(folder)!r} holds no saved index of pages. For a folder of HTML say where it "
            f"is served: {name}@BASE_URL, such as {name}@http://localhost:8000"
        )


def _listed(urls: str) -> list[str]:
    return [url.strip() for url in urls.split(",") if url.strip()]


def check_questions(search: str, questions: Sequence[Question]) -> None:
    """Raises ConfigurationError where a search is to be the data set's, and the data set names no pages at all."""
    if search == "dataset" and not any(question.urls for question in questions):
        raise ConfigurationError(
            "search='dataset': the data set names no pages for its questions, in a column urls or, as SimpleQA does, "
            f"in metadata. Give another --search: {SEARCHES.partition(', ')[2]}"
        )


async def open_search(name: str) -> SearchProvider:
    """The search of a name.

    Raises:
        ConfigurationError: there is none of that name, or it cannot work: no key, no page.
        MissingExtraError: what it needs is not installed.
    """
    check_search(name)
    kind, _, rest = name.partition(":")
    if kind == "dataset":
        return _NamedPages()
    if kind == "urls":
        return FixedSeeds(_listed(rest))
    if kind == "local":
        from stream2llm_sdk.retrievers.search.local import LocalIndexSearch

        folder, _, base_url = rest.rpartition("@")
        return await LocalIndexSearch.from_folder(folder, base_url) if folder else LocalIndexSearch.load(rest)
    if kind == "searxng":
        from stream2llm_sdk.retrievers.search.searxng import SearxNGSearch

        return SearxNGSearch(rest)
    if kind == "tavily":
        from stream2llm_sdk.retrievers.search.tavily import TavilySearch

        return TavilySearch()
    from stream2llm_sdk.retrievers.search.duckduckgo import DuckDuckGoSearch

    return DuckDuckGoSearch()
