"""Which page to read next: search results first, then links, the most relevant to the question first."""

from __future__ import annotations

import mimetypes
import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.lexical import terms
from stream2llm_sdk.retrievers.search.provider import SearchHit
from stream2llm_sdk.retrievers.web.canonical_url import canonical_url, host_of, is_same_site
from stream2llm_sdk.retrievers.web.page import PageLink

__all__ = ["Candidate", "Frontier", "LinkOptions", "LinkScope"]

LinkScope = Literal["any", "site", "host"]

_K1, _B = 1.2, 0.75
_TEXT_WEIGHT, _URL_WEIGHT, _CONTEXT_WEIGHT = 3.0, 2.0, 1.0
_INHERITED = 0.3
_OUTSIDE_MAIN = 0.5
_LEAST_WEIGHT = 0.25  # of the rarest word's; without it a word that all links share would count nothing
_MAX_PENDING = 2_000
_MAX_URL_CHARACTERS = 2_000
_READABLE = ("text/html", "application/xhtml+xml", "text/plain", "text/markdown", "application/pdf")
_TYPES = mimetypes.MimeTypes(filenames=())  # not the system's, so that every machine follows the same links
_ALWAYS_PAGES = re.compile(r"\.(com|php\d?|aspx?|jsp|cgi|py|pl|do|exe|c|h|java|rs)\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """How links are followed from the pages that a search or a list of URLs gives.

    Args:
        max_depth: most links between such a page and one that is read; 0 follows none. 2 is the depth of the crawls
            that the Stream2LLM paper measured.
        scope: where links may lead: `"any"` host, the same `"site"` (the host, `www.` aside), or exactly the `"host"`
            of the page that the search gave.
        max_pages_per_host: most pages of one host that are reached by links, so that one site does not use up the
            crawl; None for no bound.
        min_relevance: least relevance of a link's own words to the question, from 0 to 1. Above 0, a link has to
            share a word with the question.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    max_depth: int = 2
    scope: LinkScope = "any"
    max_pages_per_host: int | None = 5
    min_relevance: float = 0.001

    def __post_init__(self) -> None:
        if not isinstance(self.max_depth, int) or isinstance(self.max_depth, bool) or self.max_depth < 0:
            raise ConfigurationError(f"max_depth={self.max_depth!r}: give a whole number, 0 to follow no links")
        if self.scope not in get_args(LinkScope):
            raise ConfigurationError(f"scope={self.scope!r}: choose one of {', '.join(map(repr, get_args(LinkScope)))}")
        most = self.max_pages_per_host
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise ConfigurationError(f"max_pages_per_host={most!r}: give a whole number of at least 1, or None")
        least = self.min_relevance
        if isinstance(least, bool) or not isinstance(least, (int, float)) or not 0 <= least <= 1:
            raise ConfigurationError(f"min_relevance={least!r}: give a number from 0 to 1")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A page that may be read.

    Attributes:
        url: as it was found; not trusted.
        title: what the search or the link calls it.
        depth: links between it and the search.
        root: the search's page from which it was reached; itself at depth 0.
        relevance: that of the link to the question when it was chosen, 0 to 1; 1 at depth 0.
    """

    url: str
    title: str = ""
    depth: int = 0
    root: str = ""
    relevance: float = 1.0

    @property
    def host(self) -> str:
        """Host and port."""
        return host_of(self.url)


class Frontier:
    """The pages of one crawl that are known and not yet read. Each page is given out once, whatever its URL's form.

    Search results come first, in their order: the search has ranked them. Links follow by Shark-search's rule
    (Hersovici et al., "The shark-search algorithm", 1998), `0.3 · parent's relevance + 0.7 · the link's own`, with BM25
    for the link's own relevance, over the words of its text, its URL and its surroundings weighted 3 : 2 : 1
    (Robertson, Zaragoza and Taylor, "Simple BM25 extension to multiple weighted fields", 2004), divided by the most
    that the question's words can give. Word statistics are those of all links seen so far, so links are compared anew
    each time that one is chosen. Links outside of a page's main text count half.

    At most 2,000 links are kept.
    """

    def __init__(self, query: str, options: LinkOptions) -> None:
        self._options = options
        self._terms = {term: column for column, term in enumerate(dict.fromkeys(terms(query)))}
        self._known: set[str] = set()
        self._hits: deque[Candidate] = deque()
        self._links: list[Candidate] = []
        shape = (_MAX_PENDING, len(self._terms))
        self._frequencies: npt.NDArray[np.float64] = np.zeros(shape)  # row i belongs to self._links[i]
        self._lengths, self._parents, self._factors = (
            np.ones(_MAX_PENDING),
            np.zeros(_MAX_PENDING),
            np.ones(_MAX_PENDING),
        )
        self._num_documents, self._num_words = 0, 0.0
        self._documents_with = np.zeros(len(self._terms))
        self._pages_of_host: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._hits) + len(self._links)

    def add_hit(self, hit: SearchHit) -> bool:
        """Puts a search result behind the others. False if its page is known."""
        url = hit.url.strip()
        if not self.claim(url):
            return False
        self._hits.append(Candidate(url, hit.title, root=url))
        return True

    def claim(self, url: str) -> bool:
        """Marks the page at `url` as read or being read, so that it is not given out. False if it was known."""
        key = _key(url)
        if key in self._known:
            return False
        self._known.add(key)
        return True

    def add_links(self, links: Sequence[PageLink], parent: Candidate, relevance: float) -> int:
        """Adds the links of a page that was read; `relevance` is the page's own, 0 to 1.

        Returns:
            How many are new and may be followed.
        """
        if parent.depth >= self._options.max_depth or not self._terms:
            return 0
        num_added = 0
        for link in links:
            if self._is_followed(link.url, parent) and self.claim(link.url):
                self._add(link, parent, relevance)
                num_added += 1
        return num_added

    def pop(self, busy_hosts: Collection[str] = ()) -> Candidate | None:
        """The best page that is not on a busy host; None if there is none for now."""
        for index, hit in enumerate(self._hits):
            if hit.host not in busy_hosts:
                del self._hits[index]
                return hit
        return self._pop_link(busy_hosts)

    def drop_links(self) -> None:
        """Forgets all links, for when there is no time left."""
        self._links.clear()

    def relevance(self, text: str) -> float:
        """How much of the question a text speaks about, 0 to 1: the share of the question's words in it, rare ones
        counting more, and each more the more often it occurs."""
        if not self._terms:
            return 0.0
        frequencies = np.zeros(len(self._terms))
        for term in terms(text):
            if (column := self._terms.get(term)) is not None:
                frequencies[column] += 1
        weights = self._weights()
        return float((frequencies / (frequencies + _K1)) @ weights / weights.sum())

    def _is_followed(self, url: str, parent: Candidate) -> bool:
        if len(url) > _MAX_URL_CHARACTERS or not url.startswith(("http://", "https://")):
            return False
        scope = self._options.scope
        if scope == "host" and host_of(url) != host_of(parent.root):
            return False
        return (scope != "site" or is_same_site(url, parent.root)) and _may_be_a_page(url)

    def _add(self, link: PageLink, parent: Candidate, relevance: float) -> None:
        frequencies, length = np.zeros(len(self._terms)), 0.0
        url_words = unquote(urlsplit(link.url).path + " " + urlsplit(link.url).query)
        fields = ((link.text, _TEXT_WEIGHT), (url_words, _URL_WEIGHT), (link.context, _CONTEXT_WEIGHT))
        for text, weight in fields:
            for term in terms(text):
                length += weight
                if (column := self._terms.get(term)) is not None:
                    frequencies[column] += weight
        self._num_documents += 1
        self._num_words += length
        self._documents_with += frequencies > 0
        row = len(self._links)
        candidate = Candidate(link.url, link.text, parent.depth + 1, parent.root)
        if row == _MAX_PENDING:
            row = int(np.argmin(self._scores()[0]))
            self._links[row] = candidate
        else:
            self._links.append(candidate)
        self._frequencies[row], self._lengths[row], self._parents[row] = frequencies, length, relevance
        self._factors[row] = 1.0 if link.in_main else _OUTSIDE_MAIN

    def _pop_link(self, busy_hosts: Collection[str]) -> Candidate | None:
        scores, own = self._scores()
        for row in np.argsort(-scores, kind="stable"):
            candidate, most = self._links[row], self._options.max_pages_per_host
            if own[row] < self._options.min_relevance or candidate.host in busy_hosts:
                continue
            if most is not None and self._pages_of_host.get(candidate.host, 0) >= most:
                continue
            self._pages_of_host[candidate.host] = self._pages_of_host.get(candidate.host, 0) + 1
            self._remove(int(row))
            relevance = float(scores[row])
            return Candidate(candidate.url, candidate.title, candidate.depth, candidate.root, relevance)
        return None

    def _scores(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Of every link the score, and the part of it that is the link's own relevance."""
        num = len(self._links)
        mean_length = self._num_words / max(self._num_documents, 1) or 1.0
        frequencies, weights = self._frequencies[:num], self._weights()
        saturation = _K1 * (1 - _B + _B * self._lengths[:num] / mean_length)
        own = (frequencies / (frequencies + saturation[:, None])) @ weights / (weights.sum() or 1.0)
        own = own * self._factors[:num]
        return _INHERITED * self._parents[:num] + (1 - _INHERITED) * own, own

    def _weights(self) -> npt.NDArray[np.float64]:
        others = self._num_documents - self._documents_with
        weights: npt.NDArray[np.float64] = np.log1p((others + 0.5) / (self._documents_with + 0.5))
        least: float = _LEAST_WEIGHT * weights.max(initial=0.0)
        return weights.clip(least)

    def _remove(self, row: int) -> None:
        last = len(self._links) - 1
        for column in (self._frequencies, self._lengths, self._parents, self._factors):
            column[row] = column[last]
        self._links[row] = self._links[last]
        self._links.pop()


def _key(url: str) -> str:
    try:
        return canonical_url(url)
    except ValueError:
        return url


def _may_be_a_page(url: str) -> bool:
    try:
        path = urlsplit(url).path
    except ValueError:
        return False
    kind = _TYPES.guess_type(path.rpartition("/")[2], strict=False)
    return kind == (None, None) or (kind[0] in _READABLE and kind[1] is None) or bool(_ALWAYS_PAGES.search(path))
