"""What a workload is like: the tables by which the Stream2LLM paper describes its traces, for any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stream2llm_sdk.context import Chunk, ContextMode
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.tokenizer import Tokenizer
from stream2llm_sdk.traces.token_counts import TokenCounts
from stream2llm_sdk.traces.trace import Trace

__all__ = ["Distribution", "UpdateStatistics", "WorkloadStatistics", "num_common_documents", "workload_statistics"]

_MUCH_INVALIDATED_TOKENS = 10_000


@dataclass(frozen=True, slots=True)
class Distribution:
    """A set of numbers: how many, and how they are spread. Percentiles are interpolated; `std` divides by `n`."""

    n: int
    mean: float
    std: float
    min: float
    p5: float
    p25: float
    p50: float
    p75: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """The distribution of these numbers; None of none."""
        if not len(values):
            return None
        numbers = np.asarray(values, dtype=np.float64)
        quantiles = np.percentile(numbers, (0, 5, 25, 50, 75, 95, 99, 100)).tolist()
        return cls(len(numbers), float(numbers.mean()), float(numbers.std()), *quantiles)


@dataclass(frozen=True, slots=True)
class UpdateStatistics:
    """What updates of a replaced context undo. An update keeps the documents that it begins with like the one before;
    tokens behind them are prefilled again.

    Attributes:
        invalidated_tokens: of the context before, by update, the first of a trace not counted; None if there is none.
        invalidated_tokens_per_query: the sum over a trace's updates.
        first_change: the position of the first document that changed, from 0, by update.
        share_over_10k: the share of traces that have more than 10,000 tokens invalidated.
    """

    invalidated_tokens: Distribution | None
    invalidated_tokens_per_query: Distribution
    first_change: Distribution | None
    share_over_10k: float


@dataclass(frozen=True, slots=True)
class WorkloadStatistics:
    """The statistics of the traces of one kind.

    Attributes:
        name: their tag, or their mode where they have none.
        num_queries: how many there are.
        token_source: where numbers of tokens are from, in words.
        num_tokens: of the complete context, the question and the template.
        collection_s: from the question to the last update, which completes the context.
        inter_chunk_ms: from one update to the next; None where all traces have just one. As in the paper, the end of
            a crawl's search counts as an update, like each page. Of a vector search it is the time for which each top-k
            but the last stood, which is from the start of its window to the start of the next: the wait before it was
            sent.
        chunks_per_query: updates of a trace, counted so.
        update: only for traces that replace their context.
        failures_per_query: sources that failed, such as pages; None where no trace has recorded any.
    """

    name: str
    num_queries: int
    token_source: str
    num_tokens: Distribution
    collection_s: Distribution
    inter_chunk_ms: Distribution | None
    chunks_per_query: Distribution
    update: UpdateStatistics | None
    failures_per_query: Distribution | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.trace_view import statistics_html

        return statistics_html(self)


def workload_statistics(
    traces: Iterable[Trace], *, tokenizer: Tokenizer | None = None, num_template_tokens: int = 0
) -> list[WorkloadStatistics]:
    """The statistics of each kind of trace (by tag and mode), in the order in which the kinds first occur.

    Args:
        traces: at least one.
        tokenizer: counts the tokens that the traces do not record; without one they are estimated, and
            `token_source` says so.
        num_template_tokens: the length of the prompt's template, to add to every prompt.

    Raises:
        ConfigurationError: there are no traces.
    """
    kinds: dict[tuple[str, ContextMode], list[Trace]] = {}
    for trace in traces:
        kinds.setdefault((trace.tag, trace.mode), []).append(trace)
    if not kinds:
        raise ConfigurationError("there are no traces to describe")
    return [_statistics(tag or mode.value, kind, tokenizer, num_template_tokens) for (tag, mode), kind in kinds.items()]


def _statistics(
    name: str, traces: Sequence[Trace], tokenizer: Tokenizer | None, num_template_tokens: int
) -> WorkloadStatistics:
    counts = TokenCounts(traces, tokenizer)
    num_tokens = [
        num_template_tokens + counts.query(trace) + sum(map(counts.chunk, trace.final_chunks)) for trace in traces
    ]
    is_update = traces[0].mode is ContextMode.UPDATE
    num_failures = [len(trace.failures) for trace in traces]
    gaps_ms = [1000 * gap_s for trace in traces for gap_s in _gaps_s(trace)]
    return WorkloadStatistics(
        name=name,
        num_queries=len(traces),
        num_tokens=_some(num_tokens),
        collection_s=_some([trace.duration_s for trace in traces]),
        inter_chunk_ms=Distribution.of(gaps_ms),
        chunks_per_query=_some([len(trace.updates) for trace in traces]),
        update=_update_statistics(traces, counts) if is_update else None,
        token_source=", ".join(sorted(counts.sources)),
        failures_per_query=_some(num_failures) if any(num_failures) else None,
    )


def _gaps_s(trace: Trace) -> list[float]:
    """The times between chunks as they were published: of a search, between the begins of their windows."""
    times_s = [timed.offset_s for timed in trace.updates]
    if trace.mode is ContextMode.UPDATE:
        follows_s = [0.0, *times_s[:-1]]
        times_s = [
            before_s if timed.begin_s is None else timed.begin_s
            for timed, before_s in zip(trace.updates, follows_s, strict=True)
        ]
    return [after - before for before, after in pairwise(times_s)]


def _update_statistics(traces: Sequence[Trace], counts: TokenCounts) -> UpdateStatistics:
    invalidated: list[int] = []
    first_change: list[int] = []
    per_query: list[int] = []
    for trace in traces:
        begin = len(invalidated)
        for before, after in zip(trace.updates, trace.updates[1:], strict=False):
            kept = num_common_documents(before.update.chunks, after.update.chunks)
            first_change.append(kept)
            invalidated.append(sum(map(counts.chunk, before.update.chunks[kept:])))
        per_query.append(sum(invalidated[begin:]))
    return UpdateStatistics(
        invalidated_tokens=Distribution.of(invalidated),
        invalidated_tokens_per_query=_some(per_query),
        first_change=Distribution.of(first_change),
        share_over_10k=sum(value > _MUCH_INVALIDATED_TOKENS for value in per_query) / len(per_query),
    )


def num_common_documents(before: Sequence[Chunk], after: Sequence[Chunk]) -> int:
    """How many documents two contexts both begin with: what an update leaves as it is."""
    kept = 0
    for old, new in zip(before, after, strict=False):
        if (old.source, old.text) != (new.source, new.text):
            break
        kept += 1
    return kept


def _some(values: Sequence[float]) -> Distribution:
    distribution = Distribution.of(values)
    assert distribution is not None, "each kind has a trace"
    return distribution
