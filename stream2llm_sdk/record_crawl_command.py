"""The command `stream2llm trace record crawl`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from stream2llm_sdk.record_ray_options import RayActorsOption, RayOption, outcome_source
from stream2llm_sdk.record_run import (
    QUESTIONS_HELP,
    ColumnOption,
    LimitOption,
    OutOption,
    PublishedOption,
    RetryOption,
    SampleOption,
    SeedOption,
    record,
    shown_record_errors,
)

__all__ = ["crawl"]


class Fetch(StrEnum):
    """How pages are fetched, for the command line."""

    HTTP = "http"
    BROWSER = "browser"
    AUTO = "auto"


class Scope(StrEnum):
    """Where links may lead, for the command line."""

    ANY = "any"
    SITE = "site"
    HOST = "host"


_SEARCH_HELP = (
    "What finds the pages to begin with: dataset (the pages that the data set names for each question), searxng:URL, "
    "tavily (key in TAVILY_API_KEY), duckduckgo, local:FOLDER@BASE_URL (a folder of HTML that is served there), "
    "local:INDEX (a saved index of that), or urls:URL,URL."
)


def crawl(
    questions: Annotated[str, typer.Argument(help=QUESTIONS_HELP)],
    out: OutOption,
    search: Annotated[str, typer.Option(help=_SEARCH_HELP)] = "dataset",
    column: ColumnOption = None,
    limit: LimitOption = None,
    sample: SampleOption = None,
    seed: SeedOption = 0,
    max_pages: Annotated[int, typer.Option(min=1, help="Most pages a question.")] = 10,
    max_depth: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How far links are followed; 0 reads the search's pages alone. Left out, 2; with urls:… 0.",
        ),
    ] = None,
    scope: Annotated[
        Scope, typer.Option(help="Where links may lead: to any host, or the site or host of the search's page.")
    ] = Scope.ANY,
    max_page_tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of a page, its passages that matter; 0 keeps whole pages.")
    ] = 2_000,
    fetch: Annotated[
        Fetch, typer.Option(help="By HTTP, in a browser, or by HTTP and, what only scripts fill, in a browser.")
    ] = Fetch.HTTP,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Questions at the same time. With 1, none waits for another's pages.")
    ] = 4,
    workers: Annotated[int, typer.Option(min=1, help="Processes that convert pages.")] = 2,
    page_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time of a page.")] = 10.0,
    total_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time of a question.")] = 30.0,
    per_host_concurrency: Annotated[
        int, typer.Option(min=1, help="Requests to a host at the same time, over all questions.")
    ] = 2,
    per_host_interval: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Least time from one request to a host to the next.")
    ] = 0.0,
    robots: Annotated[
        bool, typer.Option("--robots/--no-robots", help="Whether hosts are asked as their robots.txt allows.")
    ] = True,
    user_agent: Annotated[
        str | None, typer.Option(help="Says who fetches: add an address at which you can be reached.")
    ] = None,
    allow_network: Annotated[
        list[str] | None,
        typer.Option(metavar="CIDR", help="Read this network although it is not public, such as 127.0.0.0/8; repeat."),
    ] = None,
    published: PublishedOption = None,
    retry_failed: RetryOption = False,
    ray: RayOption = None,
    ray_actors: RayActorsOption = None,
) -> None:
    """Record crawls: each question's search and pages, with their true times, texts and failures.

    A recording that ends early, by Ctrl-C, an error or kill -9, goes on with the same command: no question that is done
    is asked again. A loss of power costs at most the questions of the last seconds. --limit may be raised, and
    --concurrency and --workers changed, when it goes on.

    DIR holds traces.parquet, failures.csv and summary.json at the end, all in the order of the questions, and the
    journal that they are made of. `stream2llm trace record export` makes them of an unfinished recording.

    A trace's times count from the start of its question's crawl. Its first update is the search's end (of a search that
    streams, its first page), and each page goes from its first request, after any wait for a turn at its host, until
    its text is there. Questions that are recorded at the same time share hosts and converters as those of a service
    do; --concurrency 1 keeps them apart. On a Ray cluster each recorder asks --concurrency questions at a time, and
    keeps to the options for hosts by itself. Traces do not say when questions come: `stream2llm replay --rate` does.
    """
    with shown_record_errors():
        from stream2llm_sdk.retrievers.web.politeness import DEFAULT_USER_AGENT
        from stream2llm_sdk.traces.recording.crawl import CrawlSpec
        from stream2llm_sdk.traces.recording.questions import read_questions
        from stream2llm_sdk.traces.recording.searches import check_questions

        spec = CrawlSpec(
            search=search,
            max_pages=max_pages,
            max_depth=max_depth,
            scope=scope.value,
            max_page_tokens=max_page_tokens or None,
            fetch=fetch.value,
            respect_robots=robots,
            per_host_concurrency=per_host_concurrency,
            per_host_interval_s=per_host_interval,
            page_timeout_s=page_timeout,
            total_timeout_s=total_timeout,
            allow_networks=tuple(allow_network or ()),
            user_agent=DEFAULT_USER_AGENT if user_agent is None else user_agent,
            concurrency=concurrency,
            num_workers=workers,
        )
        asked = read_questions(questions, column=column, limit=limit, sample=sample, seed=seed)
        check_questions(search, asked)
        outcomes = outcome_source(ray, ray_actors, cpus_per_actor=1.0)
        record(spec, asked, out, updates="pages", published=published, retry_failed=retry_failed, outcomes=outcomes)
