"""Synthetic loads: when requests come, and when the parts of their prompts do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.lcp import TokenArray

__all__ = ["SimulatedChunk", "SimulatedRequest", "TokenSpan", "anns_like", "crawler_like", "poisson_arrivals"]

TokenSpan = tuple[int, int]
"""`(first_id, length)`: the consecutive token ids `first_id .. first_id + length - 1`. A text of its own gets ids of
its own, so two prompts agree exactly as far as their spans do, and a prompt costs nothing until it is sent."""

_NUM_TEMPLATE_TOKENS = 60
_NUM_QUESTION_TOKENS = 30


@dataclass(frozen=True, slots=True)
class SimulatedChunk:
    """One message of a stream.

    Attributes:
        offset_s: seconds after the request's arrival.
        kind: 'append' (the spans go behind the prompt) or 'replace' (they are the whole prompt).
        spans: the tokens.
    """

    offset_s: float
    kind: Literal["append", "replace"]
    spans: tuple[TokenSpan, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of this message."""
        return sum(length for _, length in self.spans)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request: it arrives, then its prompt comes in chunks. The last chunk completes the prompt.

    Attributes:
        arrival_s: when the user asked, in seconds of virtual time.
        chunks: at least one, in the order of their offsets.
        max_tokens: output tokens; exactly as many are generated.
        tenant: whose request it is.
        tag: whatever tells kinds of requests apart.

    Raises:
        ConfigurationError: there is no chunk, the offsets decrease, or the prompt ends empty.
    """

    arrival_s: float
    chunks: tuple[SimulatedChunk, ...]
    max_tokens: int = 1
    tenant: str = ""
    tag: str = ""

    def __post_init__(self) -> None:
        offsets = [chunk.offset_s for chunk in self.chunks]
        if not offsets:
            raise ConfigurationError("a simulated request needs at least one chunk")
        if not (0 <= self.arrival_s < math.inf and offsets[0] >= 0) or offsets != sorted(offsets):
            raise ConfigurationError(
                f"times must not be negative and offsets must not decrease, got arrival {self.arrival_s}, {offsets}"
            )
        if self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.num_prompt_tokens:
            raise ConfigurationError("the last chunk of a simulated request leaves an empty prompt")

    @property
    def context_complete_s(self) -> float:
        """When the last chunk arrives, in seconds of virtual time."""
        return self.arrival_s + self.chunks[-1].offset_s

    @property
    def final_spans(self) -> tuple[TokenSpan, ...]:
        """The whole prompt after the last chunk."""
        first = max((index for index, chunk in enumerate(self.chunks) if chunk.kind == "replace"), default=0)
        return tuple(span for chunk in self.chunks[first:] for span in chunk.spans)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the whole prompt after the last chunk."""
        return sum(length for _, length in self.final_spans)

    @property
    def longest_prompt_tokens(self) -> int:
        """The most tokens that the prompt has at any time."""
        longest = length = 0
        for chunk in self.chunks:
            length = chunk.num_tokens + (length if chunk.kind == "append" else 0)
            longest = max(longest, length)
        return longest


def token_ids(spans: Iterable[TokenSpan]) -> TokenArray:
    """The spans' token ids, 1-d."""
    parts = [np.arange(first, first + length, dtype=np.int32) for first, length in spans]
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype=np.int32)])


def poisson_arrivals(num_requests: int, rate_per_s: float, seed: int) -> npt.NDArray[np.float64]:
    """Arrival times in seconds, `num_requests` of them, as a Poisson process has them."""
    if not (rate_per_s > 0 and num_requests >= 0):
        raise ConfigurationError(f"need a rate > 0 and requests >= 0, got {rate_per_s} and {num_requests}")
    return np.cumsum(np.random.default_rng((seed, 1)).exponential(1 / rate_per_s, num_requests))


def crawler_like(
    num_requests: int,
    rate_per_s: float,
    *,
    seed: int,
    arrival_seed: int | None = None,
    delay_multiplier: float = 1.0,
    max_prompt_tokens: int = 125_000,
    tenant: str = "",
) -> list[SimulatedRequest]:
    """Append-mode requests like those of a web crawler, fitted to Stream2LLM's published statistics.

    A search takes a lognormal time (median 2.3 s); then the stream opens with the template, and 1 to 16 pages follow
    (normal, 6.9 ± 2.3) after lognormal gaps (median 0.7 s), the question with the last one. Page lengths are lognormal
    with a part that a query's pages share; 8 % of the pages are empty. Published totals: 8,889 tokens on average,
    median 5,749, P95 28,372; 9.2 s of retrieval.

    Args:
        num_requests: how many.
        rate_per_s: requests a second (Poisson).
        seed: of the prompts, and of the arrivals unless `arrival_seed` is given.
        arrival_seed: of the arrivals, to meet the same prompts in another order of events.
        delay_multiplier: stretches the gaps between pages; 10 gives the published runs under memory pressure.
        max_prompt_tokens: longer prompts get all their pages halved until they fit.
        tenant: of all the requests.
    """
    generator = np.random.default_rng(seed)
    arrivals = poisson_arrivals(num_requests, rate_per_s, seed if arrival_seed is None else arrival_seed)
    texts = _Texts()
    return [
        SimulatedRequest(
            float(arrival_s),
            tuple(_crawl(generator, texts, delay_multiplier, max_prompt_tokens)),
            tenant=tenant,
            tag="crawler",
        )
        for arrival_s in arrivals
    ]


def _crawl(
    generator: np.random.Generator, texts: _Texts, delay_multiplier: float, max_prompt_tokens: int
) -> Iterator[SimulatedChunk]:
    num_pages = int(np.clip(np.rint(generator.normal(6.9, 2.3)), 1, 16))
    query_spread = 0.72 * generator.normal()
    sizes = np.minimum(585 * np.exp(1.1 * generator.normal(size=num_pages) + query_spread), 40_000).astype(int)
    sizes[generator.random(num_pages) < 0.08] = 0
    sizes = np.maximum(1, sizes)
    sizes[-1] += _NUM_QUESTION_TOKENS
    while sizes.sum() + _NUM_TEMPLATE_TOKENS > max_prompt_tokens:
        sizes = np.maximum(1, sizes // 2)
    gaps_s = delay_multiplier * 0.70067 * np.exp(0.9 * generator.normal(size=num_pages))
    offset_s = 2.3 * np.exp(0.5 * generator.normal())
    yield SimulatedChunk(float(offset_s), "append", (texts.template,))
    for size, gap_s in zip(sizes, gaps_s, strict=True):
        offset_s += gap_s
        yield SimulatedChunk(float(offset_s), "append", (texts.new(int(size)),))


def anns_like(
    num_requests: int,
    rate_per_s: float,
    *,
    seed: int,
    arrival_seed: int | None = None,
    delay_multiplier: float = 1.0,
    search_gap: Literal["first", "last"] = "first",
    num_documents: int = 10,
    max_prompt_tokens: int = 110_000,
    tenant: str = "",
) -> list[SimulatedRequest]:
    """Update-mode requests like those of a disk-based vector search, fitted to Stream2LLM's published statistics.

    The top-k is refined 0 to 25 times after lognormal gaps (median 37 ms). Each refinement inserts one new document, at
    a geometric(0.5) distance from the end, where it pushes the last one out; it resends template, documents and
    question. One long gap (median 3.3 s) is the search itself. Published totals: 13,006 tokens on average, median
    10,126, P95 30,618; 4.5 s of retrieval.

    Args:
        num_requests: how many.
        rate_per_s: requests a second (Poisson).
        seed: of the prompts, and of the arrivals unless `arrival_seed` is given.
        arrival_seed: of the arrivals, to meet the same prompts in another order of events.
        delay_multiplier: stretches all gaps; 30, with the long gap last, gives the published runs under pressure.
        search_gap: where the long gap is: before the first documents, which fits the published runs without pressure,
            or before the last refinement, so that streams hold KV meanwhile.
        num_documents: k.
        max_prompt_tokens: longer prompts get all their documents halved until they fit.
        tenant: of all the requests.
    """
    if search_gap not in ("first", "last"):
        raise ConfigurationError(f"search_gap must be 'first' or 'last', got {search_gap!r}")
    generator = np.random.default_rng(seed)
    arrivals = poisson_arrivals(num_requests, rate_per_s, seed if arrival_seed is None else arrival_seed)
    texts = _Texts()
    requests = []
    for arrival_s in arrivals:
        gaps_s = _refinement_gaps_s(generator)
        gaps_s[0 if search_gap == "first" else -1] = 3.3 * np.exp(0.42 * generator.normal())
        offsets_s = delay_multiplier * np.cumsum(gaps_s)
        prompts = _refined_prompts(generator, texts, len(gaps_s), num_documents, max_prompt_tokens)
        chunks = tuple(
            SimulatedChunk(float(offset_s), "replace", spans)
            for offset_s, spans in zip(offsets_s, prompts, strict=True)
        )
        requests.append(SimulatedRequest(float(arrival_s), chunks, tenant=tenant, tag="anns"))
    return requests


def _refinement_gaps_s(generator: np.random.Generator) -> npt.NDArray[np.float64]:
    num_pools = int(np.clip(generator.negative_binomial(4, 4 / (4 + 3.42)) + 1, 1, 26))
    return np.minimum(0.0367 * np.exp(1.75 * generator.normal(size=num_pools)), 8.9)


def _refined_prompts(
    generator: np.random.Generator, texts: _Texts, num_pools: int, num_documents: int, max_prompt_tokens: int
) -> Iterator[tuple[TokenSpan, ...]]:
    """The prompt with each top-k in turn."""
    median = 420 * np.exp(0.1 * generator.normal())

    def new_document() -> TokenSpan:
        return texts.new(int(np.clip(median * np.exp(1.5 * generator.normal()), 20, 60_000)))

    pool = [new_document() for _ in range(num_documents)]
    question = texts.new(_NUM_QUESTION_TOKENS)
    for index in range(num_pools):
        if index:
            pool.insert(max(0, num_documents - int(generator.geometric(0.5))), new_document())
            del pool[num_documents:]
        while _length(pool) + _NUM_TEMPLATE_TOKENS + _NUM_QUESTION_TOKENS > max_prompt_tokens:
            pool = [(first, max(1, length // 2)) for first, length in pool]
        yield (texts.template, *pool, question)


def _length(spans: Sequence[TokenSpan]) -> int:
    return sum(length for _, length in spans)


class _Texts:
    """Hands out token ids that nothing else has. The template is everybody's."""

    def __init__(self) -> None:
        self.template: TokenSpan = (0, _NUM_TEMPLATE_TOKENS)
        self._next_id = _NUM_TEMPLATE_TOKENS

    def new(self, length: int) -> TokenSpan:
        span = (self._next_id, length)
        self._next_id += length
        return span
