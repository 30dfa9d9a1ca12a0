"""One question's crawl: the search's pages as they come, then their links, the most relevant first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from stream2llm_sdk.context import Append, Chunk, SourceFailure
from stream2llm_sdk.errors import RetrievalError
from stream2llm_sdk.retrievers.search.provider import SearchHit, SearchProvider
from stream2llm_sdk.retrievers.web.canonical_url import canonical_url, names_same_page
from stream2llm_sdk.retrievers.web.crawl_options import CrawlLimits
from stream2llm_sdk.retrievers.web.duplicates import SeenTexts, Shingles
from stream2llm_sdk.retrievers.web.frontier import Candidate, Frontier
from stream2llm_sdk.retrievers.web.page import ConvertedPage
from stream2llm_sdk.retrievers.web.page_reader import PageReader, ReadPage

__all__ = ["Crawl", "CrawlEvent", "Emit"]


@dataclass(frozen=True, slots=True)
class CrawlEvent:
    """Something that happened in a crawl, and when, in the event loop's time: taken as it happened, however late it is
    consumed.

    Attributes:
        item: a page, or what failed. None when the search has named the first page to read: the first event of all, for
            which a search that streams need not be at its end.
        at: when it was there.
        began: when the work on it began: the search, or the fetch of the page with its first request, after any wait
            for a turn at its host. None of a failure.
    """

    item: Append | SourceFailure | None
    at: float
    began: float | None = None


Emit = Callable[[CrawlEvent], Awaitable[None]]

_MAX_REASONS = 5
_JUDGED_CHARACTERS = 8_000
_LINKS_AT_ONCE = 25  # a few milliseconds

_logger = logging.getLogger(__name__)


class Crawl:
    """Reads pages for one question and emits each when it is there. Use it once.

    It ends when `max_pages` pages were emitted, when no page is left that may be read, or at the deadline. A page
    that fails or says nothing new makes room for the next best one, until `max_fetches` were tried.

    Args:
        query: the question.
        search: gives the pages to begin with.
        frontier: what to read next.
        reader: reads one page.
        seen: the texts that were emitted.
        limits: when to stop.
        per_host_concurrency: most pages read from one host at the same time; others go first meanwhile.
        deadline: in the event loop's time.
    """

    def __init__(
        self,
        query: str,
        search: SearchProvider,
        frontier: Frontier,
        reader: PageReader,
        seen: SeenTexts,
        limits: CrawlLimits,
        *,
        per_host_concurrency: int,
        deadline: float,
    ) -> None:
        self._query = query
        self._search = search
        self._frontier = frontier
        self._reader = reader
        self._seen = seen
        self._limits = limits
        self._per_host_concurrency = per_host_concurrency
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_searching = True
        self._search_error: RetrievalError | None = None
        self._reading: Counter[str] = Counter()  # pages in work, by host
        self._began = self._loop.time()
        self._num_hits = self._num_fetches = self._num_emitted = 0
        self._emitted_urls: set[str] = set()
        self._failures: list[SourceFailure] = []

    async def run(self, emit: Emit) -> None:
        """Reads everything. A slow `emit` holds back the reader that calls it.

        Raises:
            RetrievalError: the search failed or found nothing, or every page failed.
        """
        async with asyncio.TaskGroup() as tasks:
            finding = tasks.create_task(self._find(emit))
            async with asyncio.TaskGroup() as readers:
                for _ in range(min(self._limits.concurrency, self._limits.max_pages)):
                    readers.create_task(self._read_pages(emit))
            finding.cancel()  # a search may go on after the last page that is wanted
        if not self._num_hits:
            raise self._search_error or RetrievalError(f"the search found no page for {self._query!r:.200}")
        if not self._num_emitted:
            raise RetrievalError(f"no page could be read: {_summary(self._failures)}")

    async def _find(self, emit: Emit) -> None:
        try:
            async with asyncio.timeout_at(self._deadline) as total, contextlib.aclosing(self._found()) as hits:
                async for hit in hits:
                    num_before = self._num_hits
                    self._num_hits += self._frontier.add_hit(hit)
                    if not num_before and self._num_hits:
                        await emit(CrawlEvent(None, self._loop.time(), self._began))
                    self._changed.set()
                    if self._num_hits == self._limits.max_pages:
                        break
        except RetrievalError as error:
            self._search_error = error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # an extension module's panic is no Exception
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            message = f"the search failed: {type(error).__name__}: {error}"
            if total.expired():
                message = f"the search took longer than total_timeout_s={self._limits.total_timeout_s}"
            self._search_error = RetrievalError(message)
            self._search_error.__cause__ = error
        finally:
            self._is_searching = False
            self._changed.set()
        if self._search_error is not None and self._num_hits:
            failure = SourceFailure(type(self._search).__name__, " ".join(str(self._search_error).split()))
            await emit(CrawlEvent(failure, self._loop.time()))

    async def _found(self) -> AsyncGenerator[SearchHit, None]:
        """The search's pages, as they come if it can stream them."""
        stream: Any = getattr(self._search, "stream", None)
        if stream is None:
            for hit in await self._search.search(self._query, self._limits.max_pages):
                yield _checked(hit)
            return
        hits = stream(self._query, self._limits.max_pages)
        try:
            async for hit in hits:
                yield _checked(hit)
        finally:
            if (close := getattr(hits, "aclose", None)) is not None:
                await close()

    async def _read_pages(self, emit: Emit) -> None:
        while (candidate := await self._next()) is not None:
            try:
                outcome = await self._reader.read(candidate.url)
                item = await self._judged(candidate, outcome)
            finally:
                self._reading[candidate.host] -= 1
                self._changed.set()
            if item is not None:
                began = outcome.began if isinstance(item, Append) and isinstance(outcome, ReadPage) else None
                await emit(CrawlEvent(item, self._loop.time(), began))

    async def _next(self) -> Candidate | None:
        """The next page to read, waited for; None when there will be none."""
        while True:
            num_reading = self._reading.total()
            if self._num_emitted + num_reading < self._limits.max_pages:
                candidate = self._pop()
                if candidate is not None:
                    return candidate
            if not num_reading and self._is_at_end:
                self._changed.set()
                return None
            self._changed.clear()
            await self._changed.wait()

    @property
    def _is_at_end(self) -> bool:
        """Whether nothing more is to be read, now that no page is being read."""
        is_full = self._num_emitted >= self._limits.max_pages or self._num_fetches >= self._limits.max_fetches
        return is_full or not self._is_searching

    def _pop(self) -> Candidate | None:
        if self._num_fetches >= self._limits.max_fetches:
            return None
        if self._loop.time() >= self._deadline:
            self._frontier.drop_links()  # the search's pages are reported as not read
        busy = {host for host, num in self._reading.items() if num >= self._per_host_concurrency}
        candidate = self._frontier.pop(busy)
        while candidate is not None and _key(candidate.url) in self._emitted_urls:  # a redirect has led there
            candidate = self._frontier.pop(busy)
        if candidate is not None:
            self._num_fetches += 1
            self._reading[candidate.host] += 1
        return candidate

    async def _judged(self, candidate: Candidate, outcome: ReadPage | SourceFailure) -> Append | SourceFailure | None:
        """What to emit about a page; None if it says what another one has said."""
        if isinstance(outcome, SourceFailure):
            self._failures.append(outcome)
            return outcome
        page = outcome.page
        urls = {_key(outcome.url)}
        self._frontier.claim(outcome.url)
        if names_same_page(outcome.url, page.canonical_url):
            urls.add(_key(page.canonical_url))
            self._frontier.claim(page.canonical_url)
        if urls & self._emitted_urls:
            return None
        relevance = self._frontier.relevance((page.markdown or page.title)[:_JUDGED_CHARACTERS])
        await self._follow(page, candidate, relevance)
        if not page.markdown:
            reason = page.refusal or outcome.note or "the page has no text"
            self._failures.append(failure := SourceFailure(candidate.url, reason))
            return failure
        shingles = Shingles(frozenset(page.shingle_hashes)) if page.shingle_hashes else Shingles.of(page.markdown)
        if (earlier := self._seen.add(shingles, outcome.url)) is not None:
            _logger.debug("%s says what was read already (%s)", outcome.url, earlier)
            return None
        self._emitted_urls |= urls
        self._num_emitted += 1
        return Append(_chunk(candidate, outcome, relevance))

    async def _follow(self, page: ConvertedPage, candidate: Candidate, relevance: float) -> None:
        for start in range(0, len(page.links), _LINKS_AT_ONCE):
            if self._frontier.add_links(page.links[start : start + _LINKS_AT_ONCE], candidate, relevance):
                self._changed.set()
            await asyncio.sleep(0)


def _checked(hit: Any) -> SearchHit:
    if not isinstance(hit, SearchHit):
        raise RetrievalError(f"the search returned {hit!r:.80}, which is not a SearchHit")
    return hit


def _chunk(candidate: Candidate, read: ReadPage, relevance: float) -> Chunk:
    metadata = {**read.page.metadata, "depth": candidate.depth}
    metadata |= {"language": read.page.language} if read.page.language else {}
    metadata |= {"note": read.note} if read.note else {}
    title = read.page.title or candidate.title
    return Chunk(read.page.markdown, source=read.url, title=title, score=relevance, metadata=metadata)


def _key(url: str) -> str:
    try:
        return canonical_url(url)
    except ValueError:
        return url


def _summary(failures: list[SourceFailure]) -> str:
    reasons = [f"{failure.source}: {failure.reason}" for failure in failures[:_MAX_REASONS]]
    if len(failures) > _MAX_REASONS:
        reasons.append(f"and {len(failures) - _MAX_REASONS} more")
    return "; ".join(reasons)
