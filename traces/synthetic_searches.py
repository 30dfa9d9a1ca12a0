"""Draws of vector searches on disk with the published statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stream2llm_sdk.traces.distributions import FloatArray, IntArray, QuantileCurve, generator, normal_scores
from stream2llm_sdk.traces.synthesis_options import NUM_QUESTION_TOKENS, NUM_TEMPLATE_TOKENS, SynthesisOptions

__all__ = ["Search", "draw_searches"]

# Published: 17,067 times between the chunks of 4,997 searches, from the start of one's row to the start of the next.
_GAP_S = QuantileCurve.of_sample(
    17_067,
    {0.05: 0.00139, 0.25: 0.01125, 0.5: 0.03668, 0.75: 0.12433, 0.95: 0.69880, 0.99: 2.07926},
    minimum=0.00021,
    maximum=8.91665,
)
_MAX_POOLS = 26
_POOLS_MEDIAN, _POOLS_SPREAD = 3.83, 0.53
_SEARCH_MEDIAN_S_AND_SPREAD = {"replayed": (3.45, 0.47), "all": (3.03, 0.18)}
_DOCUMENT_MEDIAN_TOKENS, _DOCUMENT_SPREAD, _QUERY_SPREAD = 512.0, 1.27, 0.28
_DOCUMENT_TOKENS = (20, 40_000)
_BOOK_SHARE, _BOOK_TOKENS = 0.002, (40_000, 95_000)
_MAX_PROMPT_TOKENS = 110_000
# Measured: with an early return that looks at recall, searches of a graph on disk that is in no cache let their first
# top-k out after 21 to 34 % of their time (k 10, L 320, W 8; two corpora). The middle of that.
_SHARE_BEFORE_FIRST = 0.275


@dataclass(frozen=True, slots=True)
class Search:
    """One search. Its documents are numbered in the order in which they were found.

    Attributes:
        waits_s: the wait for each top-k.
        before_first_s: the part of the first wait in which there was no top-k yet.
        pools: each top-k, as numbers of documents in the order of the prompt.
        document_tokens: their lengths, by number.
        shared_ranks: which of the shared documents they are, by number; None where the search has its own.
    """

    waits_s: FloatArray
    pools: tuple[tuple[int, ...], ...]
    document_tokens: IntArray
    shared_ranks: IntArray | None = None
    before_first_s: float = 0.0


def draw_searches(num_searches: int, *, seed: int, options: SynthesisOptions) -> Iterator[Search]:
    """Searches with the statistics published for 4,997 (durations, chunks, waits) and for the 500 that were replayed
    (prompt lengths, collection times).

    * Waits: a row of a trace is a top-k and the window of time in which it stood. The published times between chunks go
      from start to start, so they are all windows but the last (3.42 of 4.42 a search, 0.54 s together), drawn
      independently through all published quantiles and extremes. What else makes up the durations, lognormal, is the
      last window, in which the search goes on and finds nothing new, and the time before the first top-k, of which
      nothing is published; see `_SHARE_BEFORE_FIRST`. The replay driver waits for each window and then sends its top-k:
      the last one comes after the long wait. The two published rows of durations differ by 23 % in mean and by 58 % at
      P95, so `options.durations` says which one is met.
    * Chunks: lognormal, rounded, 1 to 26, median 4.
    * Documents: lognormal lengths with a small part that those of a search share. 0.2 % are books of 40,000 to 95,000
      tokens (log-uniform): the published P99 of TTFT at the lowest rate, 3.1 s, is that of a prompt of about 75,000
      tokens, which no lognormal distribution with the published P95 of 30,618 has.
    * A refinement inserts one new document at a place that is as likely as any other and pushes the last one out. Where
      it really goes is not published.

    Prompts over the limit have all documents of the search halved until the longest one fits.
    """
    scores = normal_scores(generator(seed, "search pools"), num_searches)
    num_gaps = np.clip(np.rint(_POOLS_MEDIAN * np.exp(_POOLS_SPREAD * scores)), 1, _MAX_POOLS).astype(int) - 1
    gaps_s = _GAP_S(normal_scores(generator(seed, "search gaps"), int(num_gaps.sum())))
    median_s, spread = _SEARCH_MEDIAN_S_AND_SPREAD[options.durations]
    long_s = median_s * np.exp(spread * normal_scores(generator(seed, "search waits"), num_searches))
    distances = generator(seed, "search positions").integers(1, options.num_documents + 1, len(gaps_s))
    num_documents = options.num_documents + num_gaps
    tokens, ranks = _documents(seed, num_documents, options)
    ends, document_ends = np.cumsum(num_gaps), np.cumsum(num_documents)
    max_prompt_tokens = options.max_prompt_tokens or _MAX_PROMPT_TOKENS
    for index, (end, document_end) in enumerate(zip(ends, document_ends, strict=True)):
        gaps = slice(end - num_gaps[index], end)
        documents = slice(document_end - num_documents[index], document_end)
        between_s, before_first_s = gaps_s[gaps], 0.0
        waits_s = np.array([*between_s, long_s[index]])
        if options.search_gap == "first":
            waits_s = np.array([long_s[index], *between_s])
        elif options.search_gap == "split" and len(between_s):
            before_first_s = min(_SHARE_BEFORE_FIRST * float(waits_s.sum()), float(long_s[index]))
            waits_s[0] += before_first_s
            waits_s[-1] -= before_first_s
        pools = _pools(options.num_documents, distances[gaps])
        own_tokens = _fitting(tokens[documents], pools, max_prompt_tokens)
        shared_ranks = None if ranks is None else ranks[documents]
        yield Search(waits_s, pools, own_tokens, shared_ranks, before_first_s)


def _documents(seed: int, num_documents: IntArray, options: SynthesisOptions) -> tuple[IntArray, IntArray | None]:
    """Lengths of all documents, one search's after the other's, and their ranks where they are shared."""
    num_shared = options.num_shared_documents
    if not num_shared:
        shared = normal_scores(generator(seed, "search sizes"), len(num_documents))
        return _lengths(seed, int(num_documents.sum()), np.repeat(shared, num_documents)), None
    most = (options.max_prompt_tokens or _MAX_PROMPT_TOKENS) - NUM_TEMPLATE_TOKENS - NUM_QUESTION_TOKENS
    scores = normal_scores(generator(seed, "search sizes"), num_shared)
    lengths = np.minimum(_lengths(seed, num_shared, scores), max(1, most // options.num_documents))
    popularity = np.cumsum(np.arange(1, num_shared + 1) ** -options.popularity_exponent)
    random = generator(seed, "search popularity")
    found = [_distinct(random, popularity, int(number)) for number in num_documents]
    ranks = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    return lengths[ranks], ranks


def _lengths(seed: int, number: int, shared_scores: FloatArray) -> IntArray:
    own = _DOCUMENT_SPREAD * normal_scores(generator(seed, "search document sizes"), number)
    sizes = np.clip(_DOCUMENT_MEDIAN_TOKENS * np.exp(own + _QUERY_SPREAD * shared_scores), *_DOCUMENT_TOKENS)
    random = generator(seed, "search books")
    is_book = random.random(number) < _BOOK_SHARE
    shortest, longest = _BOOK_TOKENS
    sizes[is_book] = shortest * (longest / shortest) ** random.random(number)[is_book]
    return sizes.astype(int)


def _distinct(random: np.random.Generator, popularity: FloatArray, number: int) -> IntArray:
    """`number` different ranks, each drawn by its popularity; if that hardly ever hits another one, the next ones."""
    drawn = np.searchsorted(popularity, popularity[-1] * random.random(20 * number))
    ranks = dict.fromkeys([*drawn.tolist(), *range(number)])
    return np.array(list(ranks)[:number], dtype=np.int64)


def _pools(num_documents: int, distances: IntArray) -> tuple[tuple[int, ...], ...]:
    pool = list(range(num_documents))
    pools = [tuple(pool)]
    for number, distance in enumerate(distances.tolist(), start=num_documents):
        pool.insert(max(0, num_documents - distance), number)
        del pool[num_documents:]
        pools.append(tuple(pool))
    return tuple(pools)


def _fitting(tokens: IntArray, pools: tuple[tuple[int, ...], ...], max_prompt_tokens: int) -> IntArray:
    room = max_prompt_tokens - NUM_TEMPLATE_TOKENS - NUM_QUESTION_TOKENS
    while tokens.sum() > room and max(tokens[list(pool)].sum() for pool in pools) > room:
        tokens = np.maximum(1, tokens // 2)
    return tokens
