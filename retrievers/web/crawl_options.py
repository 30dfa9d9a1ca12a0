"""What one crawl may use, and how it behaves towards the hosts that it reads from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.web.option_checks import check_seconds
from stream2llm_sdk.retrievers.web.politeness import Politeness
from stream2llm_sdk.value_checks import is_whole

__all__ = ["CrawlLimits", "FetchMode", "PolitenessOptions", "check_fetch_mode"]

FetchMode = Literal["http", "browser", "auto"]
"""How pages are fetched: by HTTP, in a browser, or by HTTP and, for those that only scripts fill, in a browser."""


def check_fetch_mode(fetch: str) -> None:
    """Raises ConfigurationError unless `fetch` is a `FetchMode`."""
    if not isinstance(fetch, str) or fetch not in get_args(FetchMode):
        raise ConfigurationError(f"fetch={fetch!r}: choose one of {', '.join(map(repr, get_args(FetchMode)))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrawlLimits:
    """What one crawl may use; `CrawlerRetriever` explains each.

    Raises:
        ConfigurationError: a limit is not a positive number.
    """

    max_pages: int
    concurrency: int
    page_timeout_s: float
    total_timeout_s: float
    max_page_bytes: int
    num_workers: int
    max_fetches: int
    read_ahead: int

    def __post_init__(self) -> None:
        for name in ("max_pages", "concurrency", "max_page_bytes", "num_workers", "max_fetches", "read_ahead"):
            value = getattr(self, name)
            if not is_whole(value, 1):
                raise ConfigurationError(f"{name}={value!r}: give a whole number of at least 1")
        for name in ("page_timeout_s", "total_timeout_s"):
            check_seconds(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolitenessOptions:
    """How one crawler behaves towards hosts.

    Attributes:
        respect_robots: whether robots.txt is read and kept to, its Crawl-delay and Request-rate included.
        per_host_concurrency: most requests to one host at the same time.
        per_host_interval_s: least seconds from the start of one request to a host to the next; a longer Crawl-delay
            wins.
        max_wait_s: longest time in seconds that a turn is waited for, where it is known that it would take longer.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    respect_robots: bool = True
    per_host_concurrency: int = 2
    per_host_interval_s: float = 0.0
    max_wait_s: float = 30.0

    def __post_init__(self) -> None:
        self.start("check/1")

    def start(self, user_agent: str) -> Politeness:
        """What gives out turns, for one event loop."""
        return Politeness(
            user_agent,
            respect_robots=self.respect_robots,
            per_host_concurrency=self.per_host_concurrency,
            per_host_interval_s=self.per_host_interval_s,
            max_wait_s=self.max_wait_s,
        )
