"""The statistics of traces as tables, for whatever shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stream2llm_sdk.traces.statistics import Distribution, WorkloadStatistics

__all__ = ["StatisticsTable", "statistics_tables"]

_ROWS = {
    "n": "n",
    "mean": "mean",
    "std": "std",
    "min": "min",
    "p5": "P5",
    "p25": "P25",
    "p50": "median",
    "p75": "P75",
    "p95": "P95",
    "p99": "P99",
    "max": "max",
}
_Columns = Mapping[str, tuple[Distribution | None, tuple[float, int]]]


@dataclass(frozen=True, slots=True)
class StatisticsTable:
    """A table of distributions.

    Attributes:
        title: its heading.
        headings: of the columns, in one or two lines; the first is empty.
        rows: a figure of each distribution, behind the figure's name.
        remark: what is to be known beside it.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remark: str


def statistics_tables(kind: WorkloadStatistics) -> Iterator[StatisticsTable]:
    """What the Stream2LLM paper's workload tables have, and what updates undo where a context is replaced."""
    columns: dict[str, tuple[Distribution | None, tuple[float, int]]] = {
        "prompt\ntokens": (kind.num_tokens, (1.0, 0)),
        "collection\ntime, s": (kind.collection_s, (1.0, 3)),
        "inter-chunk\narrival, ms": (kind.inter_chunk_ms, (1.0, 2)),
        "chunks\nper query": (kind.chunks_per_query, (1.0, 2)),
        "duration,\nms": (kind.collection_s, (1000.0, 2)),
    }
    remark = f"tokens are {kind.token_source}"
    if (failures := kind.failures_per_query) is not None:
        remark += f"; sources that failed: {failures.mean:,.2f} a query, at most {failures.max:,.0f}"
    yield _table(f"{kind.name}, {kind.num_queries:,} queries", columns, remark)
    if (update := kind.update) is not None:
        columns = {
            "tokens invalidated\nby an update": (update.invalidated_tokens, (1.0, 0)),
            "by all updates\nof a query": (update.invalidated_tokens_per_query, (1.0, 0)),
            "first document\nchanged, from 0": (update.first_change, (1.0, 2)),
        }
        remark = f"queries that have more than 10,000 tokens invalidated: {update.share_over_10k:.1%}"
        yield _table(f"{kind.name}, what updates undo", columns, remark)


def _table(title: str, columns: _Columns, remark: str) -> StatisticsTable:
    """A column for each distribution, with a factor to multiply it by and its number of decimals."""
    rows = tuple(
        (shown, *(_cell(distribution, name, *form) for distribution, form in columns.values()))
        for name, shown in _ROWS.items()
    )
    return StatisticsTable(title, ("", *columns), rows, remark)


def _cell(distribution: Distribution | None, name: str, factor: float, digits: int) -> str:
    if distribution is None:
        return "–"
    value = getattr(distribution, name)
    return f"{value:,}" if name == "n" else f"{factor * value:,.{digits}f}"
