"""A search over known pages: no service, no network."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, MissingExtraError
from stream2llm_sdk.retrievers.lexical import terms
from stream2llm_sdk.retrievers.search.index_folder import read_index, write_index
from stream2llm_sdk.retrievers.search.known_pages import KnownPage, pages_in_folder
from stream2llm_sdk.retrievers.search.provider import SearchHit

__all__ = ["LocalIndexSearch"]

_FORMAT = 1
_PAGES_FILE = "pages.json"
_SNIPPET_CHARS = 200
_WINDOW_TERMS = 200
_WINDOW_STEP = 150
_WINDOWS_PER_HIT = 20
_MAX_TEXT_CHARS = 1_000_000
_URL_PART = re.compile(r"[^\W_]+")


class LocalIndexSearch:
    """BM25 over known pages: their text, title and the words of their URL's path. A page is as good as its best
    window of 200 words, each with the title and the path, so a long page that answers many questions is found by each.

    By bm25s, with Lucene's variant and stemmed words. 3,000 documentation pages take half a minute to read and index;
    build ahead, `save`, and `load`, or build with `from_folder`, which does it in a thread.

    Args:
        pages: `KnownPage` objects, or `(url, title, text)`.

    Raises:
        ConfigurationError: there are no pages, or one is no page.
        MissingExtraError: bm25s is not installed.
    """

    def __init__(self, pages: Iterable[KnownPage | tuple[str, str, str]]) -> None:
        given: object = pages
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise ConfigurationError(f"pages={given!r:.80}: give a list of (url, title, text)")
        bm25s = _import_bm25s()
        hits: dict[str, SearchHit] = {}
        texts: list[list[str]] = []
        owners: list[int] = []
        for page in map(_as_page, pages):
            if page.url not in hits:
                hits[page.url] = SearchHit(page.url, page.title, page.text[:_SNIPPET_CHARS])
                for window in _windows(page):
                    texts.append(window)
                    owners.append(len(hits) - 1)
        if not hits:
            raise ConfigurationError("pages is empty: give at least one page")
        if not any(texts):
            raise ConfigurationError("the pages hold no words")
        self._hits = tuple(hits.values())
        self._owners = tuple(owners)
        self._index = bm25s.BM25(method="lucene", backend="numpy")
        self._index.index(texts, show_progress=False)

    def __len__(self) -> int:
        return len(self._hits)

    def __repr__(self) -> str:
        return f"LocalIndexSearch({len(self)} pages)"

    @classmethod
    async def from_folder(cls, folder: str | os.PathLike[str], base_url: str) -> LocalIndexSearch:
        """Indexes the HTML pages below `folder`, which are served at `base_url`, in a thread.

        Raises:
            ConfigurationError: there is no such folder, no page in it, or `base_url` is not http(s).
        """
        return await asyncio.to_thread(lambda: cls(pages_in_folder(folder, base_url)))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the index to a new folder, or in place of an index that is there. Nobody sees it half written, and if
        the process dies meanwhile, the old one stays.

        Raises:
            ConfigurationError: `folder` holds something else than an index, or somebody else is saving there.
            OSError: it cannot be written.
        """
        write_index(Path(folder), self._write)

    def _write(self, folder: Path) -> None:
        self._index.save(str(folder))
        pages = [[hit.url, hit.title, hit.snippet] for hit in self._hits]
        text = json.dumps({"format": _FORMAT, "pages": pages, "owners": self._owners})
        (folder / _PAGES_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> LocalIndexSearch:
        """An index that `save` wrote.

        Raises:
            IndexFormatError: there is none, or it is damaged or of another version.
            MissingExtraError: bm25s is not installed.
        """
        _import_bm25s()
        try:
            return read_index(Path(folder), cls._read)
        except IndexFormatError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise IndexFormatError(f"{folder} holds no readable index of pages: {reason:.200}") from error

    @classmethod
    def _read(cls, folder: Path) -> LocalIndexSearch:
        index = cls.__new__(cls)
        content = json.loads((folder / _PAGES_FILE).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise IndexFormatError(f"{folder} is an index of format {content['format']}, not {_FORMAT}: build it anew")
        index._hits = tuple(SearchHit(*map(str, page)) for page in content["pages"])
        index._owners = tuple(map(int, content["owners"]))
        index._index = _import_bm25s().BM25.load(str(folder), load_corpus=False)
        num_indexed = int(index._index.scores["num_docs"])
        if num_indexed != len(index._owners) or not set(range(len(index._hits))).issuperset(index._owners):
            raise IndexFormatError(f"{folder} is damaged: its files do not fit together; build it anew")
        return index

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """At most `k` pages that hold a word of `query`, best first."""
        return await asyncio.to_thread(self._search, query, k)

    def _search(self, query: str, k: int) -> list[SearchHit]:
        known = [term for term in dict.fromkeys(terms(query)) if term in self._index.vocab_dict]
        if not known or k < 1:
            return []
        num_windows = min(k * _WINDOWS_PER_HIT, len(self._owners))
        found, scores = self._index.retrieve([known], k=num_windows, show_progress=False, n_threads=0)
        owners = (self._owners[i] for i, score in zip(found[0], scores[0], strict=True) if score > 0)
        return [self._hits[page] for page in dict.fromkeys(owners)][:k]


def _as_page(page: Any) -> KnownPage:
    fields = (page.url, page.title, page.text) if isinstance(page, KnownPage) else page
    if not isinstance(fields, (tuple, list)) or len(fields) != 3 or not all(isinstance(part, str) for part in fields):
        raise ConfigurationError(f"pages holds {page!r:.120}: give (url, title, text), all text")
    try:
        urlsplit(fields[0])
    except ValueError as error:
        raise ConfigurationError(f"pages holds the URL {fields[0]!r:.120}, which is malformed: {error}") from None
    return KnownPage(*fields)


def _windows(page: KnownPage) -> Iterator[list[str]]:
    """Overlapping windows of a page's words, each with the words of its title and path."""
    path = " ".join(_URL_PART.findall(urlsplit(page.url).path.removesuffix(".html")))
    about = terms(page.title) + terms(path)
    words = terms(page.text[:_MAX_TEXT_CHARS])
    for start in range(0, max(len(words) - (_WINDOW_TERMS - _WINDOW_STEP), 1), _WINDOW_STEP):
        yield words[start : start + _WINDOW_TERMS] + about


def _import_bm25s() -> Any:
    try:
        import bm25s
        import Stemmer  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"{error.name}", "search") from error
    return bm25s
