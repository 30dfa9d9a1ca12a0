"""Manners towards the hosts that pages come from: robots.txt, few requests at once, spaced out, and off when asked."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from stream2llm_sdk.errors import ConfigurationError, FetchError, RobotsDisallowedError
from stream2llm_sdk.retrievers.web.option_checks import check_seconds
from stream2llm_sdk.retrievers.web.robots import RobotsFetcher, RobotsRules, parse_robots, robots_token

__all__ = ["DEFAULT_USER_AGENT", "Politeness", "parse_retry_after"]

_MAX_RETRY_AFTER_S = 24 * 3600.0
_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 60.0
_BUSY_STATUSES = (429, 503)


def _default_user_agent() -> str:
    try:
        release = version("stream2llm-sdk")
    except PackageNotFoundError:  # run from a source tree
        release = "0"
    return f"Mozilla/5.0 (compatible; stream2llm-sdk/{release})"


DEFAULT_USER_AGENT = _default_user_agent()
"""Says who fetches. Whoever runs a crawler adds an address at which they can be reached."""


@dataclass(slots=True)
class _Host:
    """One site, by scheme, name and port, which is also what a robots.txt speaks for. Times are `time.monotonic`'s."""

    slots: asyncio.Semaphore
    pace: asyncio.Lock = field(default_factory=asyncio.Lock)
    robots: asyncio.Lock = field(default_factory=asyncio.Lock)
    rules: RobotsRules | None = None
    rules_expire: float = 0.0
    next_start: float = 0.0
    num_users: int = 0
    num_waiting: int = 0
    num_busy_answers: int = 0


class Politeness:
    """Gives out turns to fetch from hosts. One of it is shared by all that fetch for one user agent, on one event loop.

    Args:
        user_agent: the User-Agent header; the name in it is looked for in robots.txt.
        respect_robots: whether robots.txt is read and kept to, its Crawl-delay and Request-rate included.
        per_host_concurrency: most requests to one host at the same time.
        per_host_interval_s: least seconds from the start of one request to a host to the next; a longer Crawl-delay
            wins.
        max_wait_s: longest time in seconds that a turn is waited for, where it is known that it would take longer; it
            then fails at once and says why.
        robots_ttl_s: seconds for which a robots.txt is used; RFC 9309 allows a day.
        robots_retry_s: seconds after which a robots.txt that could not be read is asked for again.
        max_hosts: hosts remembered; those unused for longest are forgotten first.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    def __init__(
        self,
        user_agent: str = DEFAULT_USER_AGENT,
        *,
        respect_robots: bool = True,
        per_host_concurrency: int = 2,
        per_host_interval_s: float = 0.0,
        max_wait_s: float = 30.0,
        robots_ttl_s: float = 24 * 3600.0,
        robots_retry_s: float = 60.0,
        max_hosts: int = 1000,
    ) -> None:
        for name, count in (("per_host_concurrency", per_host_concurrency), ("max_hosts", max_hosts)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigurationError(f"{name}={count!r}: give a whole number of at least 1")
        times = {"per_host_interval_s": per_host_interval_s, "max_wait_s": max_wait_s}
        times |= {"robots_ttl_s": robots_ttl_s, "robots_retry_s": robots_retry_s}
        for name, seconds in times.items():
            check_seconds(name, seconds, may_be_zero=True)
        if not isinstance(respect_robots, bool):
            raise ConfigurationError(f"respect_robots={respect_robots!r:.80}: give True or False")
        if not isinstance(user_agent, str) or not user_agent.strip():
            raise ConfigurationError(f"user_agent={user_agent!r:.200}: say who fetches, such as 'my-crawler/1.0'")
        self.respect_robots = respect_robots
        self._token = robots_token(user_agent)
        self._per_host_concurrency = per_host_concurrency
        self._interval_s = per_host_interval_s
        self._max_wait_s = max_wait_s
        self._robots_ttl_s = robots_ttl_s
        self._robots_retry_s = robots_retry_s
        self._max_hosts = max_hosts
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(
        self, url: str, fetch_robots: RobotsFetcher, *, deadline: float | None = None
    ) -> AsyncIterator[None]:
        """Waits until `url` may be requested; the request belongs inside the `async with`.

        Turns of one host are given in the order in which they were asked for. A wait that is cancelled takes no
        other's turn.

        Args:
            url: what is to be requested.
            fetch_robots: how the host's robots.txt is fetched, if it is not known yet.
            deadline: when the caller gives up, in the event loop's time; None if never.

        Raises:
            RobotsDisallowedError: the host's robots.txt forbids the page, or cannot be read.
            FetchError: the wait would be longer than `max_wait_s` or go beyond `deadline`.
        """
        name = _origin(url)
        host = self._host(name)
        host.num_users += 1
        try:
            rules = await self._allowed(host, name, url, fetch_robots)
            interval_s = max(self._interval_s, rules.crawl_delay_s)
            self._check_wait(host, name, interval_s, host.num_waiting, deadline)
            async with host.slots:
                await self._start(host, name, interval_s, deadline)
                yield
        finally:
            host.num_users -= 1
            self._forget_some()

    def note_response(self, url: str, status: int, retry_after: str | None = None) -> float:
        """Remembers how a host answered. After 429 and 503 it gets no request for the time that it asked for, or else
        for 1 s, doubled with each such answer in a row up to 60 s.

        Args:
            url: what was asked for.
            status: the answer's HTTP status.
            retry_after: the value of its Retry-After header.

        Returns:
            Seconds until the host may be asked again; 0 if at once.
        """
        host = self._host(_origin(url))
        if status not in _BUSY_STATUSES:
            if status < 400:
                host.num_busy_answers = 0
            return 0.0
        backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(host.num_busy_answers, 10))
        host.num_busy_answers += 1
        asked_s = parse_retry_after(retry_after)
        wait_s = backoff_s if asked_s is None else asked_s
        host.next_start = max(host.next_start, time.monotonic() + wait_s)
        return wait_s

    async def _allowed(self, host: _Host, name: str, url: str, fetch_robots: RobotsFetcher) -> RobotsRules:
        if not self.respect_robots:
            return RobotsRules()
        rules = await self._rules(host, name, fetch_robots)
        if not await rules.allows(url):
            raise RobotsDisallowedError(rules.refusal or f"robots.txt of {name} forbids it for {self._token!r}")
        return rules

    async def _rules(self, host: _Host, name: str, fetch_robots: RobotsFetcher) -> RobotsRules:
        # If the one who fetches is cancelled, the next in the line fetches.
        async with host.robots:
            now = time.monotonic()
            if host.rules is None or now >= host.rules_expire:
                answer = await fetch_robots(f"{name}/robots.txt")
                if answer.status in _BUSY_STATUSES:
                    wait_s = answer.retry_after_s if answer.retry_after_s is not None else _FIRST_BACKOFF_S
                    host.next_start = max(host.next_start, time.monotonic() + wait_s)
                fresh = await parse_robots(answer, self._token)
                if not (fresh.refusal and host.rules is not None and not host.rules.refusal):
                    host.rules = fresh  # rules that were read once hold while new ones cannot be read
                ttl_s = self._robots_retry_s if fresh.refusal else self._robots_ttl_s
                host.rules_expire = time.monotonic() + ttl_s
            return host.rules

    async def _start(self, host: _Host, name: str, interval_s: float, deadline: float | None) -> None:
        """Returns when the next request may start. The lock is a queue, and who leaves it early reserved nothing."""
        host.num_waiting += 1
        try:
            async with host.pace:
                while (wait_s := host.next_start - time.monotonic()) > 0:
                    self._check_wait(host, name, interval_s, 0, deadline)
                    await asyncio.sleep(wait_s)
                host.next_start = time.monotonic() + interval_s
        finally:
            host.num_waiting -= 1

    def _check_wait(self, host: _Host, name: str, interval_s: float, num_before: int, deadline: float | None) -> None:
        wait_s = host.next_start - time.monotonic() + num_before * interval_s
        left_s = math.inf if deadline is None else deadline - asyncio.get_running_loop().time()
        if wait_s <= 0 or wait_s <= min(self._max_wait_s, left_s):
            return
        why = "asked to be left alone" if host.num_busy_answers else f"gets one request in {interval_s:g} s"
        bound = f"max_wait_s={self._max_wait_s:g}" if self._max_wait_s <= left_s else "the time left"
        raise FetchError(f"{name} {why}; its next turn is beyond {bound}: try again in {math.ceil(wait_s)} s")

    def _host(self, name: str) -> _Host:
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(asyncio.Semaphore(self._per_host_concurrency))
        self._hosts.move_to_end(name)
        return host

    def _forget_some(self) -> None:
        if len(self._hosts) <= self._max_hosts:
            return
        unused = [name for name, host in self._hosts.items() if not host.num_users]
        for name in unused[: len(self._hosts) - self._max_hosts]:
            del self._hosts[name]


def parse_retry_after(value: str | None) -> float | None:
    """The seconds that a Retry-After header asks for, given as a number or as a date; at most a day. None without one
    that can be read."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(float(value[:9]), _MAX_RETRY_AFTER_S)
    try:
        moment = parsedate_to_datetime(value)
        seconds = moment.timestamp() - time.time()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
    return min(max(0.0, seconds), _MAX_RETRY_AFTER_S)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    default_port = {"http": ":80", "https": ":443"}.get(parts.scheme, "")
    return f"{parts.scheme}://{parts.netloc.lower().removesuffix(default_port)}"
