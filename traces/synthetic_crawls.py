"""Draws of web crawls with the published statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stream2llm_sdk.traces.distributions import FloatArray, IntArray, QuantileCurve, generator, normal_scores
from stream2llm_sdk.traces.synthesis_options import NUM_QUESTION_TOKENS, NUM_TEMPLATE_TOKENS, SynthesisOptions

__all__ = ["Crawl", "draw_crawls"]

# Published: 29,656 times between the chunks of 4,322 crawls.
_GAP_S = QuantileCurve.of_sample(
    29_656,
    {0.05: 0.08185, 0.25: 0.38712, 0.5: 0.70067, 0.75: 1.33952, 0.95: 3.07799, 0.99: 5.29335},
    minimum=0.00301,
    maximum=34.94656,
)
_MAX_PAGES = 16
_PAGES_SCORES = (-3.6, -2.0, 0.0, 2.0, 3.6)
_PAGES_AT_SCORES = (0.0, 3.05, 6.86, 10.7, 16.0)
_SEARCH_MEDIAN_S, _SEARCH_SPREAD = 2.2, 0.4
_PAGE_MEDIAN_TOKENS, _PAGE_SPREAD, _QUERY_SPREAD = 590.0, 1.1, 0.745
_MAX_PAGE_TOKENS = 40_000
_EMPTY_SHARE = 0.08
_MAX_PROMPT_TOKENS = 125_000


@dataclass(frozen=True, slots=True)
class Crawl:
    """One crawl.

    Attributes:
        search_s: until the search for pages ended.
        gaps_s: the wait for each page after that.
        page_tokens: their lengths, at least 1.
    """

    search_s: float
    gaps_s: FloatArray
    page_tokens: IntArray


def draw_crawls(num_crawls: int, *, seed: int, options: SynthesisOptions) -> Iterator[Crawl]:
    """Crawls with the statistics published for 4,322 (4,309 in the token and collection-time row).

    * Waits between chunks: independent, through all published quantiles and extremes.
    * Pages: 0 to 16, 6.86 on average, so 1 to 17 chunks with the search, 7.86 on average. The waits are one fewer than
      the chunks in the published numbers too (29,656 = 4,322 · 6.86), so the wait for the search is none of them. It is
      lognormal: the published duration (9.87 s on average) leaves 2.6 s for it, the published collection time (9.22 s)
      2.0 s. Those two rows differ by 7 % in mean and median and by 2 % at P95; durations here lie between them.
    * Pages' lengths: lognormal, with a part that the pages of a query share; 8 % of the pages are empty and keep one
      token, the line break that the published driver puts behind each page; none has more than 40,000.

    Independent waits give the published spread of durations, so no correlation is needed; none is published. Prompts
    over the limit have their pages halved until they fit.
    """
    scores = normal_scores(generator(seed, "crawl pages"), num_crawls)
    num_pages = np.rint(np.interp(scores, _PAGES_SCORES, _PAGES_AT_SCORES)).astype(int)
    crawl_of_page = np.repeat(np.arange(num_crawls), num_pages)
    gaps_s = _GAP_S(normal_scores(generator(seed, "crawl gaps"), len(crawl_of_page)))
    search_scores = normal_scores(generator(seed, "crawl search"), num_crawls)
    search_s = _SEARCH_MEDIAN_S * np.exp(_SEARCH_SPREAD * search_scores)
    page_tokens = _page_tokens(seed, num_crawls, crawl_of_page, options.max_prompt_tokens or _MAX_PROMPT_TOKENS)
    ends = np.cumsum(num_pages)
    for first_s, start, stop in zip(search_s.tolist(), ends - num_pages, ends, strict=True):
        yield Crawl(first_s, gaps_s[start:stop], page_tokens[start:stop])


def _page_tokens(seed: int, num_crawls: int, crawl_of_page: IntArray, max_prompt_tokens: int) -> IntArray:
    num_pages = len(crawl_of_page)
    shared = _QUERY_SPREAD * normal_scores(generator(seed, "crawl sizes"), num_crawls)
    own = _PAGE_SPREAD * normal_scores(generator(seed, "crawl page sizes"), num_pages)
    sizes = np.minimum(_PAGE_MEDIAN_TOKENS * np.exp(own + shared[crawl_of_page]), _MAX_PAGE_TOKENS)
    sizes[generator(seed, "crawl empty pages").random(num_pages) < _EMPTY_SHARE] = 0
    room = max_prompt_tokens - NUM_TEMPLATE_TOKENS - NUM_QUESTION_TOKENS - _MAX_PAGES
    totals = np.maximum(np.bincount(crawl_of_page, sizes, minlength=num_crawls), 1)
    halvings = np.maximum(0, np.ceil(np.log2(totals / room)))
    fitting: IntArray = np.maximum(1, sizes / 2 ** halvings[crawl_of_page]).astype(np.int64)
    return fitting
