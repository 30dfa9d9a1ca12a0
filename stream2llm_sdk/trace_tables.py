"""The statistics of traces as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stream2llm_sdk.errors import TraceError

if TYPE_CHECKING:
    from stream2llm_sdk.traces.statistics import WorkloadStatistics

__all__ = ["show_skipped", "show_statistics"]

_SHOWN_SKIPPED = 5


def show_statistics(console: Console, workloads: Sequence[WorkloadStatistics]) -> None:
    """Prints what the paper's workload tables have, one table for each kind of trace, and one of what updates undo."""
    from stream2llm_sdk.traces.statistics_tables import statistics_tables

    for kind in workloads:
        for each in statistics_tables(kind):
            table = Table(each.headings[0], title=escape(each.title), title_justify="left")
            for heading in each.headings[1:]:
                table.add_column(heading, justify="right", no_wrap=True)
            for row in each.rows:
                table.add_row(*row)
            console.print(table)
            console.print(each.remark, markup=False, highlight=False)


def show_skipped(console: Console, skipped: Sequence[TraceError]) -> None:
    """Prints how many traces were skipped, and why the first of them were."""
    if not skipped:
        return
    console.print(f"[yellow]{len(skipped):,} skipped[/]")
    for error in skipped[:_SHOWN_SKIPPED]:
        console.print(f"  {error}", markup=False, highlight=False)
    if len(skipped) > _SHOWN_SKIPPED:
        console.print(f"  and {len(skipped) - _SHOWN_SKIPPED:,} more")
