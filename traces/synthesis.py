"""Synthetic traces with the statistics of the published ones."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from stream2llm_sdk.context import Append, Chunk, Replace
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.distributions import generator, normal_scores, stratified
from stream2llm_sdk.traces.filler import filler_question, filler_text
from stream2llm_sdk.traces.synthesis_options import NUM_QUESTION_TOKENS, OutputLength, SynthesisOptions
from stream2llm_sdk.traces.synthetic_crawls import Crawl, draw_crawls
from stream2llm_sdk.traces.synthetic_searches import Search, draw_searches
from stream2llm_sdk.traces.trace import NUM_TOKENS, TimedUpdate, Trace
from stream2llm_sdk.value_checks import is_whole, plain

__all__ = ["OutputLength", "SynthesisOptions", "TraceKind", "synthesize"]

TraceKind = Literal["crawler", "anns", "mixed"]
"""'crawler': append mode, a web crawl. 'anns': update mode, a vector search on disk. 'mixed': both."""

_DEFAULTS = SynthesisOptions()
_MOST_QUERIES, _MOST_SEED = 1_000_000_000, 2**64
# Sources of documents are numbers, as in the published corpus: those of a seed, in them the shared ones first, then
# those of one search after the other.
_DOCUMENTS_OF_A_SEED, _DOCUMENTS_OF_A_SEARCH = 10**12, 10**6


def synthesize(
    kind: TraceKind,
    num_queries: int,
    *,
    seed: int,
    arrival_seed: int | None = None,
    options: SynthesisOptions = _DEFAULTS,
) -> list[Trace]:
    """Draws traces with the statistics of Stream2LLM's published ones; see `draw_crawls` and `draw_searches`.

    Statistics of 4,000 are within 10 % of all published ones (prompt lengths with a template of 60 tokens). A crawl
    opens with an empty `Append`, when its search has ended, and has a page in every further one. A vector search has
    the whole top-k in every `Replace`. Sources are unique, also among seeds, and equal sources are equal texts; the
    same seed with other options may give a source another length.

    Args:
        kind: what retrieves.
        num_queries: how many traces.
        seed: of everything but the arrivals. The same arguments give the same traces.
        arrival_seed: of the arrivals, to meet the same prompts at other times; left out, `seed`.
        options: see `SynthesisOptions`.

    Raises:
        ConfigurationError: the kind is unknown, a number is negative, or fewer arrivals were recorded.
    """
    num_queries, seed = plain(num_queries), plain(seed)
    arrival_seed = seed if arrival_seed is None else plain(arrival_seed)
    _check(kind, num_queries, seed, arrival_seed)
    if not isinstance(options, SynthesisOptions):
        raise ConfigurationError(f"options={options!r:.80} must be SynthesisOptions")
    is_search = _which_are_searches(kind, num_queries, seed, options.update_share)
    num_searches = sum(is_search)
    crawls = iter(draw_crawls(num_queries - num_searches, seed=seed, options=options))
    searches = iter(draw_searches(num_searches, seed=seed, options=options))
    assembly = _Assembly(seed, texts=options.texts)
    columns = zip(
        is_search,
        _arrivals(num_queries, arrival_seed, options),
        _tenants(num_queries, seed, options),
        _output_lengths(num_queries, seed, options),
        strict=True,
    )
    traces = []
    for index, (searched, arrival_s, tenant, max_tokens) in enumerate(columns):
        fields = {"arrival_s": arrival_s, "tenant": tenant, "max_tokens": max_tokens}
        if searched:
            trace = assembly.search(index, next(searches), **fields)
        else:
            trace = assembly.crawl(index, next(crawls), **fields)
        if options.delay_multiplier != 1:
            trace = trace.stretched(options.delay_multiplier, first=searched)
        traces.append(trace)
    return traces


def _check(kind: str, num_queries: int, seed: int, arrival_seed: int) -> None:
    if kind not in get_args(TraceKind):
        raise ConfigurationError(f"kind={kind!r}: choose one of {', '.join(get_args(TraceKind))}")
    for name, value, most in (
        ("num_queries", num_queries, _MOST_QUERIES),
        ("seed", seed, _MOST_SEED),
        ("arrival_seed", arrival_seed, _MOST_SEED),
    ):
        if not is_whole(value, 0, most):
            raise ConfigurationError(f"{name}={value!r:.80} must be a whole number of 0 to {most:,}")


def _which_are_searches(kind: TraceKind, num_queries: int, seed: int, update_share: float) -> list[bool]:
    share = {"crawler": 0.0, "anns": 1.0, "mixed": update_share}[kind]
    drawn = stratified(generator(seed, "modes"), num_queries) < share
    return [bool(searched) for searched in drawn]


def _arrivals(num_queries: int, seed: int, options: SynthesisOptions) -> list[float] | list[None]:
    if options.arrivals is None:
        return [None] * num_queries
    return [float(time_s) for time_s in options.arrivals.draw(num_queries, seed=seed)]


def _tenants(num_queries: int, seed: int, options: SynthesisOptions) -> list[str]:
    if not options.tenants:
        return [""] * num_queries
    names, ends = list(options.tenants), np.cumsum(list(options.tenants.values()))
    drawn = np.searchsorted(ends, ends[-1] * stratified(generator(seed, "tenants"), num_queries), side="right")
    return [names[min(index, len(names) - 1)] for index in drawn]


def _output_lengths(num_queries: int, seed: int, options: SynthesisOptions) -> list[int] | list[int | None]:
    length = options.max_tokens
    if not isinstance(length, OutputLength):
        return [length] * num_queries
    scores = normal_scores(generator(seed, "output lengths"), num_queries)
    drawn = np.clip(np.rint(length.median * np.exp(length.spread * scores)), 1, length.most)
    return [int(number) for number in drawn]


class _Assembly:
    """Makes traces of what was drawn."""

    def __init__(self, seed: int, *, texts: bool) -> None:
        self._seed, self._texts = seed, texts

    def crawl(self, index: int, crawl: Crawl, **fields: Any) -> Trace:
        offset_s = crawl.search_s
        updates = [TimedUpdate(offset_s, Append(()))]
        for page, (gap_s, num_tokens) in enumerate(zip(crawl.gaps_s.tolist(), crawl.page_tokens.tolist(), strict=True)):
            offset_s += gap_s
            chunk = self._chunk(f"https://example.org/{self._seed}/{index}/{page}", num_tokens)
            updates.append(TimedUpdate(offset_s, Append(chunk)))
        return self._trace("crawler", index, updates, fields)

    def search(self, index: int, search: Search, **fields: Any) -> Trace:
        names = range(len(search.document_tokens)) if search.shared_ranks is None else search.shared_ranks.tolist()
        first = self._seed * _DOCUMENTS_OF_A_SEED
        if search.shared_ranks is None:
            first += _DOCUMENTS_OF_A_SEARCH * (index + 1)
        chunks = [
            self._chunk(str(first + name), num_tokens)
            for name, num_tokens in zip(names, search.document_tokens.tolist(), strict=True)
        ]
        offsets_s = np.cumsum(search.waits_s).tolist()
        begins_s = [search.before_first_s, *offsets_s[:-1]]
        updates = [
            TimedUpdate(offset_s, Replace(chunks[number] for number in pool), begin_s)
            for offset_s, pool, begin_s in zip(offsets_s, search.pools, begins_s, strict=True)
        ]
        return self._trace("anns", index, updates, fields)

    def _chunk(self, source: str, num_tokens: int) -> Chunk:
        text = filler_text(source, num_tokens, self._seed) if self._texts else ""
        return Chunk(text, source=source, metadata={NUM_TOKENS: num_tokens})

    def _trace(self, tag: str, index: int, updates: list[TimedUpdate], fields: dict[str, Any]) -> Trace:
        name = f"{tag}-{self._seed}-{index}"
        return Trace(
            trace_id=name,
            query=filler_question(name, NUM_QUESTION_TOKENS, self._seed) if self._texts else "",
            updates=tuple(updates),
            num_query_tokens=NUM_QUESTION_TOKENS,
            tag=tag,
            **fields,
        )
