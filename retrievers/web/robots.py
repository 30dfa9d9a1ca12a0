"""What a site's robots.txt allows, by RFC 9309, read with Protego."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from stream2llm_sdk.errors import MissingExtraError

__all__ = ["MAX_ROBOTS_BYTES", "RobotsAnswer", "RobotsFetcher", "RobotsRules", "parse_robots", "robots_token"]

MAX_ROBOTS_BYTES = 512_000
"""How much of a robots.txt is read; RFC 9309 asks for at least 500 KiB."""

_PARSED_AT_ONCE_BYTES = 20_000
_MAX_DELAY_S = 24 * 3600.0
_COMPATIBLE = re.compile(r"\(compatible;\s*([^;()/\s]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RobotsAnswer:
    """What a request for a robots.txt gave.

    Attributes:
        status: the HTTP status after redirects; None if the server could not be reached.
        body: its first `MAX_ROBOTS_BYTES`, of a 2xx answer.
        reason: why it could not be reached, for people.
        retry_after_s: the seconds for which the server asks to be left alone.
    """

    status: int | None
    body: bytes = field(default=b"", repr=False)
    reason: str = ""
    retry_after_s: float | None = None


RobotsFetcher = Callable[[str], Awaitable[RobotsAnswer]]
"""Fetches a robots.txt by its URL. Raises nothing but CancelledError."""


@dataclass(frozen=True, slots=True)
class RobotsRules:
    """The rules of one site for one crawler.

    Attributes:
        crawl_delay_s: seconds from one request to the next; 0 if the site asks for none.
        refusal: why nothing at all may be fetched; '' where the rules decide.
    """

    crawl_delay_s: float = 0.0
    refusal: str = ""
    _rules: Any = field(default=None, repr=False)
    _token: str = ""
    _is_long: bool = False

    async def allows(self, url: str) -> bool:
        """Whether the site lets this crawler fetch `url`."""
        if self.refusal:
            return False
        if self._rules is None:
            return True
        if self._is_long:
            return bool(await asyncio.to_thread(self._rules.can_fetch, url, self._token))
        return bool(self._rules.can_fetch(url, self._token))


def robots_token(user_agent: str) -> str:
    """The name under which a robots.txt addresses this crawler: of 'Name/1.0 (…)' the name, and of
    'Mozilla/5.0 (compatible; Name/1.0; …)' too."""
    named = _COMPATIBLE.search(user_agent)
    return named[1] if named else user_agent.split("/", 1)[0].split()[0]


async def parse_robots(answer: RobotsAnswer, token: str) -> RobotsRules:
    """The rules that an answer stands for (RFC 9309, section 2.3.1): those of a 2xx body; none for other 4xx; nothing
    may be fetched while the server fails or cannot be reached. 429 counts as failing, as large crawlers count it.

    Raises:
        MissingExtraError: Protego is not installed.
    """
    status = answer.status
    if status is not None and 200 <= status < 300:
        if len(answer.body) <= _PARSED_AT_ONCE_BYTES:
            return _parsed(answer.body, token)
        return await asyncio.to_thread(_parsed, answer.body, token)  # half a megabyte takes 0.2 s
    if status is not None and 400 <= status < 500 and status != 429:
        return RobotsRules()
    reason = answer.reason or f"HTTP {status}"
    return RobotsRules(refusal=f"robots.txt cannot be read ({reason}), which forbids fetching for now")


def _parsed(body: bytes, token: str) -> RobotsRules:
    try:
        from protego import Protego
    except ImportError:
        raise MissingExtraError("protego", "crawler") from None

    rules = Protego.parse(body.decode("utf-8", errors="replace").removeprefix("\ufeff"))
    delay_s = min(rules.crawl_delay(token) or 0.0, _MAX_DELAY_S)
    rate = rules.request_rate(token)
    if rate is not None:
        delay_s = max(delay_s, min(rate.seconds, _MAX_DELAY_S) / rate.requests)
    return RobotsRules(delay_s, "", rules, token, len(body) > _PARSED_AT_ONCE_BYTES)
