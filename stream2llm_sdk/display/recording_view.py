"""A recording in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import block, facts, fold, table

if TYPE_CHECKING:
    from stream2llm_sdk.traces.recording.summary import RecordingSummary

__all__ = ["summary_html"]


def summary_html(summary: RecordingSummary) -> str:
    """What came of the questions, and why some of it failed."""
    figures: list[tuple[str, object]] = [
        ("questions", summary.num_questions),
        ("traces", summary.num_traces),
        ("updates", summary.num_updates),
        ("questions that failed", summary.num_failed),
        ("sources that failed", summary.num_source_failures),
        *((name.replace("_", " "), float(value)) for name, value in summary.figures.items()),
    ]
    reasons = [
        *((reason, "question", count) for reason, count in summary.failed_reasons.items()),
        *((reason, "source", count) for reason, count in summary.source_reasons.items()),
    ]
    why = fold("why", table(("reason", "what failed", "how often"), reasons)) if reasons else ""
    return str(block(facts(figures), why, title=f"Recording {summary.folder.name}"))
