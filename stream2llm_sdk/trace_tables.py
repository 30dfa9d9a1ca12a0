"""The statistics of traces as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stream2llm_sdk.errors import TraceError

if TYPE_CHECKING:
    from stream2llm_sdk.traces.statistics import Distribution, WorkloadStatistics

__all__ = ["show_skipped", "show_statistics"]

_SHOWN_SKIPPED = 5
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


def show_statistics(console: Console, workloads: Sequence[WorkloadStatistics]) -> None:
    """Prints what the paper's workload tables have, one table for each kind of trace, and one of what updates undo."""
    for kind in workloads:
        columns = {
            "prompt\ntokens": (kind.num_tokens, (1.0, 0)),
            "collection\ntime, s": (kind.collection_s, (1.0, 3)),
            "inter-chunk\narrival, ms": (kind.inter_chunk_ms, (1.0, 2)),
            "chunks\nper query": (kind.chunks_per_query, (1.0, 2)),
            "duration,\nms": (kind.collection_s, (1000.0, 2)),
        }
        console.print(_table(f"{kind.name}, {kind.num_queries:,} queries", columns))
        console.print(f"tokens are {kind.token_source}", markup=False, highlight=False)
        if (update := kind.update) is not None:
            columns = {
                "tokens invalidated\nby an update": (update.invalidated_tokens, (1.0, 0)),
                "by all updates\nof a query": (update.invalidated_tokens_per_query, (1.0, 0)),
                "first document\nchanged, from 0": (update.first_change, (1.0, 2)),
            }
            console.print(_table(f"{kind.name}, what updates undo", columns))
            console.print(f"queries that have more than 10,000 tokens invalidated: {update.share_over_10k:.1%}")


def show_skipped(console: Console, skipped: Sequence[TraceError]) -> None:
    """Prints how many traces were skipped, and why the first of them were."""
    if not skipped:
        return
    console.print(f"[yellow]{len(skipped):,} skipped[/]")
    for error in skipped[:_SHOWN_SKIPPED]:
        console.print(f"  {error}", markup=False, highlight=False)
    if len(skipped) > _SHOWN_SKIPPED:
        console.print(f"  and {len(skipped) - _SHOWN_SKIPPED:,} more")


def _table(title: str, columns: Mapping[str, tuple[Distribution | None, tuple[float, int]]]) -> Table:
    """A column for each distribution, with a factor to multiply it by and its number of decimals."""
    table = Table("", title=escape(title), title_justify="left")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, shown in _ROWS.items():
        table.add_row(shown, *(_cell(distribution, name, *form) for distribution, form in columns.values()))
    return table


def _cell(distribution: Distribution | None, name: str, factor: float, digits: int) -> str:
    if distribution is None:
        return "–"
    value = getattr(distribution, name)
    return f"{value:,}" if name == "n" else f"{factor * value:,.{digits}f}"
