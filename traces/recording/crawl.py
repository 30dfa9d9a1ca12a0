"""Recording crawls: each question's search and pages, with the times at which they began and were there."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stream2llm_sdk.context import Append, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, RecordingError, RetrievalError
from stream2llm_sdk.retrievers.web.crawl import CrawlEvent
from stream2llm_sdk.retrievers.web.crawl_options import FetchMode, PolitenessOptions, check_fetch_mode
from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
from stream2llm_sdk.retrievers.web.frontier import LinkOptions, LinkScope
from stream2llm_sdk.retrievers.web.option_checks import check_seconds
from stream2llm_sdk.retrievers.web.page import ExtractionOptions
from stream2llm_sdk.retrievers.web.politeness import DEFAULT_USER_AGENT
from stream2llm_sdk.traces.crawler_format import CRAWLER
from stream2llm_sdk.traces.recording.questions import Question, read_questions
from stream2llm_sdk.traces.recording.run import RecordingProgress, run_recording
from stream2llm_sdk.traces.recording.searches import asked_question, check_questions, check_search, open_search
from stream2llm_sdk.traces.recording.summary import RecordingSummary
from stream2llm_sdk.traces.trace import TimedFailure, TimedUpdate, Trace
from stream2llm_sdk.value_checks import is_whole

__all__ = ["CrawlRecorder", "CrawlSpec", "record_crawls"]

_ON_RESUME_OF_NO_ACCOUNT = ("concurrency", "num_workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrawlSpec:
    """How crawls are recorded. `CrawlerRetriever` explains what is its own.

    Questions that are recorded at the same time share the hosts' turns and the converters. What one of them waits for
    such is part of its times, as it would be in a service that answers so many; with `concurrency=1` there is nothing
    to wait for.

    Attributes:
        search: what finds the pages to begin with; see `searches.SEARCHES`.
        max_pages: most pages a question, all of which may be fetched at the same time.
        max_depth: how far links are followed from the search's pages; 0 reads these alone. If left out, 2, and 0 for a
            search 'urls:…', which says itself what is read.
        scope: where links may lead, as in `LinkOptions`: to 'any' host, or the 'site' or 'host' of the search's page.
        max_page_tokens: most tokens of a page, the passages that matter for the question; None keeps whole pages.
        fetch: by 'http', in a 'browser', or 'auto'.
        respect_robots, per_host_concurrency, per_host_interval_s: how hosts are treated; see `PolitenessOptions`.
        page_timeout_s, total_timeout_s: longest times of a page and of a question.
        allow_networks: networks that are not public and may be read.
        user_agent: says who fetches.
        concurrency: questions at the same time.
        num_workers: processes that convert pages.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    search: str = "dataset"
    max_pages: int = 10
    max_depth: int | None = None
    scope: LinkScope = "any"
    max_page_tokens: int | None = 2_000
    fetch: FetchMode = "http"
    respect_robots: bool = True
    per_host_concurrency: int = 2
    per_host_interval_s: float = 0.0
    page_timeout_s: float = 10.0
    total_timeout_s: float = 30.0
    allow_networks: tuple[str, ...] = ()
    user_agent: str = DEFAULT_USER_AGENT
    concurrency: int = 4
    num_workers: int = 2

    def __post_init__(self) -> None:
        check_search(self.search)
        if self.max_depth is None:
            object.__setattr__(self, "max_depth", 0 if self.search.startswith("urls:") else 2)
        for name, least in (("concurrency", 1), ("max_pages", 1), ("num_workers", 1)):
            if not is_whole(value := getattr(self, name), least):
                raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}")
        for name in ("page_timeout_s", "total_timeout_s"):
            check_seconds(name, getattr(self, name))
        check_fetch_mode(self.fetch)
        self._links(), self._politeness(), self._extraction()

    @property
    def tag(self) -> str:
        """Traces are called 'crawler-<question's id>'."""
        return CRAWLER

    @property
    def asks_urls(self) -> bool:
        """Whether the pages that each question names are read."""
        return self.search == "dataset"

    def settings(self) -> Mapping[str, Any]:
        """All but what decides only how fast it goes."""
        return {name: value for name, value in asdict(self).items() if name not in _ON_RESUME_OF_NO_ACCOUNT}

    async def start(self) -> CrawlRecorder:
        """Opens the search and the crawler, and starts the processes that convert pages.

        Raises:
            ConfigurationError: they cannot work as they are described.
            MissingExtraError: what they need is not installed.
        """
        crawler = self.crawler(await open_search(self.search))
        try:
            await crawler.warm_up()
        except RetrievalError as error:
            await crawler.aclose()
            raise ConfigurationError(f"pages cannot be converted here: {error}") from error
        except BaseException:
            await crawler.aclose()
            raise
        return CrawlRecorder(crawler)

    def crawler(self, search: Any) -> CrawlerRetriever:
        """The crawler that is described, for a search of one's own."""
        return CrawlerRetriever(
            search=search,
            links=self._links(),
            max_pages=self.max_pages,
            # As many as the questions can use: what one question's pages do must not depend on the others'.
            concurrency=self.concurrency * self.max_pages,
            page_timeout_s=self.page_timeout_s,
            total_timeout_s=self.total_timeout_s,
            extraction=self._extraction(),
            fetch=self.fetch,
            politeness=self._politeness(),
            num_workers=self.num_workers,
            allow_networks=self.allow_networks,
            user_agent=self.user_agent,
        )

    def _links(self) -> LinkOptions:
        assert self.max_depth is not None, "it was set at once"
        return LinkOptions(max_depth=self.max_depth, scope=self.scope)

    def _extraction(self) -> ExtractionOptions:
        return ExtractionOptions(max_page_tokens=self.max_page_tokens)

    def _politeness(self) -> PolitenessOptions:
        return PolitenessOptions(
            respect_robots=self.respect_robots,
            per_host_concurrency=self.per_host_concurrency,
            per_host_interval_s=self.per_host_interval_s,
            max_wait_s=self.total_timeout_s,
        )


class CrawlRecorder:
    """Crawls for questions and makes traces of it. It owns the crawler.

    A trace begins when its question's crawl does. Its first update, of nothing, opens the prompt, when the search has
    named the first page to read: for all but a search that streams, that is its end. Each page is an update of one
    chunk, from its first request, after any wait for a turn at its host, until its text is there. The crawler takes
    these times as things happen; nothing that is done with them later stretches them.
    """

    def __init__(self, crawler: CrawlerRetriever) -> None:
        self._crawler = crawler

    async def record(self, question: Question) -> Trace:
        """The crawl for a question.

        Raises:
            RecordingError: the search failed or found nothing, or no page could be read.
        """
        asked_question.set(question)
        start = asyncio.get_running_loop().time()
        events: list[CrawlEvent] = []
        try:
            async with contextlib.aclosing(self._crawler.events(question.text)) as found:
                async for event in found:
                    events.append(event)  # noqa: PERF401 - kept if it fails
        except RetrievalError as error:
            reason = " ".join(str(error).split())
            raise RecordingError(_without_failures(reason), _failures(events, start)) from error
        return Trace(
            question.question_id,
            question.text,
            tuple(_updates(events, start)),
            tag=CRAWLER,
            failures=_failures(events, start),
        )

    async def aclose(self) -> None:
        """Ends the crawler's processes."""
        await self._crawler.aclose()


async def record_crawls(
    questions: str | Iterable[Question | str],
    out: str | os.PathLike[str],
    *,
    publish: str | os.PathLike[str] | None = None,
    retry_failed: bool = False,
    on_progress: Callable[[RecordingProgress], None] | None = None,
    **options: Any,
) -> RecordingSummary:
    """Records crawls into a folder, or goes on with the recording in it, as `stream2llm trace record crawl` does.

    Args:
        questions: texts or `Question`s, or where they are read from, as `read_questions` takes it.
        out: the folder of the recording; see `RecordingFolder`.
        publish: a folder to write the published form of the traces to, at the end.
        retry_failed: asks again the questions for which nothing could be recorded earlier.
        on_progress: called after each question.
        options: as in `CrawlSpec`.

    Raises:
        ConfigurationError: an option has a value that cannot work, the questions cannot be read, or the folder holds
            something else or a recording with other settings or questions.
        MissingExtraError: what the extras `crawler` and `traces` bring is not installed.
    """
    spec = CrawlSpec(**options)
    if isinstance(questions, str):
        asked = await asyncio.to_thread(read_questions, questions)
    else:
        asked = [one if isinstance(one, Question) else Question(str(n), one) for n, one in enumerate(questions)]
    check_questions(spec.search, asked)
    return await run_recording(
        spec,
        asked,
        Path(out),
        on_progress=on_progress,
        retry_failed=retry_failed,
        publish=None if publish is None else Path(publish),
    )


def _updates(events: Iterable[CrawlEvent], start: float) -> Iterable[TimedUpdate]:
    for event in sorted(events, key=lambda event: event.at):
        if not isinstance(event.item, SourceFailure):
            began = event.at if event.began is None else event.began
            yield TimedUpdate(event.at - start, event.item or Append(()), began - start)


def _failures(events: Iterable[CrawlEvent], start: float) -> tuple[TimedFailure, ...]:
    failures = ((event.at - start, event.item) for event in events if isinstance(event.item, SourceFailure))
    return tuple(TimedFailure(offset_s, item.source, item.reason) for offset_s, item in failures)


def _without_failures(reason: str) -> str:
    """A reason that does not repeat those of the pages, which are kept with it."""
    head, colon, _ = reason.partition("no page could be read:")
    return f"{head}no page could be read" if colon else reason
