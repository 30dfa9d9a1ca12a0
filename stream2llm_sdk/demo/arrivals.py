"""When each page of a crawl arrives, drawn like the published crawls."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from statistics import NormalDist

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["ArrivalSchedule"]


class ArrivalSchedule:
    """The arrival time of each page of one crawl, in seconds from the crawl's first request.

    The gaps between one page's arrival and the next are lognormal, fitted to the 29,656 gaps of the published
    crawler traces (arXiv 2604.16395): median 0.7007 s and a shape of 0.9 give P25 0.38, P75 1.29, P95 3.08 and
    mean 1.05 s; the traces have 0.39, 1.34, 3.08 and 1.05.

    Page *i* arrives when the first *i + 1* gaps are over, however many pages are fetched at once: concurrent
    fetches see the published spacing between pages, not each a delay of its own. The same seed and the same pages
    give the same times.

    Args:
        pages: the crawl's pages in the order in which the crawler asks for them. They arrive in a slightly
            different one: each run of `REORDER_WINDOW` pages is shuffled, so a crawler with at least that many
            fetches at once sees exactly the drawn times. A page that is not among them takes the next free
            place when its time is first asked for.
        seed: of the draws.
        time_scale: multiplies every time; 0 makes all pages arrive at once.

    Raises:
        ConfigurationError: `time_scale` is negative or not finite.
    """

    MEDIAN_GAP_S = 0.7007
    GAP_SHAPE = 0.9
    REORDER_WINDOW = 4

    def __init__(self, pages: Iterable[str] = (), *, seed: int = 0, time_scale: float = 1.0) -> None:
        if not (math.isfinite(time_scale) and time_scale >= 0):
            raise ConfigurationError(f"time_scale={time_scale!r}: give a finite number, 0 or larger")
        self.time_scale = time_scale
        self._gap_draws = random.Random(f"gaps {seed}")
        self._arrivals_s: list[float] = []
        self._places: dict[str, int] = {}
        order = list(dict.fromkeys(pages))
        shuffler = random.Random(f"order {seed}")
        for start in range(0, len(order), self.REORDER_WINDOW):
            window = order[start : start + self.REORDER_WINDOW]
            shuffler.shuffle(window)
            self._places.update((page, start + offset) for offset, page in enumerate(window))

    def arrival_s(self, page: str) -> float:
        """When `page` arrives, in seconds from the crawl's first request."""
        place = self._places.setdefault(page, len(self._places))
        while len(self._arrivals_s) <= place:
            before_s = self._arrivals_s[-1] if self._arrivals_s else 0.0
            self._arrivals_s.append(before_s + self._draw_gap_s())
        return self._arrivals_s[place] * self.time_scale

    def in_arrival_order(self) -> list[str]:
        """The pages known so far, first arrival first."""
        return sorted(self._places, key=self._places.__getitem__)

    def _draw_gap_s(self) -> float:
        # The inverse of the distribution function at a uniform draw: the same numbers on every Python.
        uniform = max(self._gap_draws.random(), 2.0**-53)
        return self.MEDIAN_GAP_S * math.exp(self.GAP_SHAPE * NormalDist().inv_cdf(uniform))
