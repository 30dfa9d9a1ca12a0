"""The clock of a replay, and how late is too late."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Protocol

__all__ = ["HostClock", "ReplayClock", "allowed_lag_s"]

LEAST_ALLOWED_LAG_S = 0.001
"""Less than this cannot be asked of an event loop, whose timers have a resolution of a millisecond."""
MOST_ALLOWED_LAG_S = 0.010
ALLOWED_LAG_SHARE = 0.05


class ReplayClock(Protocol):
    """Where a replay's times come from, and what it waits by."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...

    async def sleep_until(self, monotonic_s: float) -> None:
        """Returns at that time, or at once if it has passed."""
        ...


class HostClock:
    """The host's clocks; the engine's trails have the same monotonic one."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    async def sleep_until(self, monotonic_s: float) -> None:
        wait_s = monotonic_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)


def allowed_lag_s(median_ttft_s: float | None) -> float:
    """The P95 of the send lag up to which a run's figures hold.

    Messages that go out later than that make another load than the one asked for: 10 ms, or 5 % of the median TTFT
    from complete context where that is less, but at least 1 ms, the resolution of an event loop's timers.
    """
    share_s = math.inf if median_ttft_s is None else ALLOWED_LAG_SHARE * median_ttft_s
    return max(LEAST_ALLOWED_LAG_S, min(MOST_ALLOWED_LAG_S, share_s))
