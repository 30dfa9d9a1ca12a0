"""Traces in a notebook: one as a picture of what came when, and sets of them as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stream2llm_sdk.context import Chunk, ContextMode
from stream2llm_sdk.display.markup import Markup, block, facts, fold, legend, note, seconds, table
from stream2llm_sdk.display.svg import Svg, time_axis
from stream2llm_sdk.display.theme import INK, NEW, VOID, Fill
from stream2llm_sdk.traces.statistics import num_common_documents
from stream2llm_sdk.traces.token_counts import TokenCounts, TokenSource

if TYPE_CHECKING:
    from stream2llm_sdk.traces.statistics import WorkloadStatistics
    from stream2llm_sdk.traces.trace import Trace
    from stream2llm_sdk.traces.trace_set import TraceSet

__all__ = ["statistics_html", "trace_html", "trace_set_html"]

_WIDTH, _LEFT, _RIGHT, _ROW = 770.0, 34.0, 430.0, 20.0
_MOST_ROWS, _MOST_TRACES = 30, 12
_LETTERS = 48
_UNDERWAY = Fill(INK, 0.25)


def trace_html(trace: Trace) -> str:
    """What came when, which of it was new, and what failed."""
    counts = TokenCounts([trace])
    num_tokens = sum(map(counts.chunk, trace.final_chunks))
    estimated = "about " if TokenSource.ESTIMATE in counts.sources else ""
    kind = "appends" if trace.mode is ContextMode.APPEND else "replaces its context"
    figures = [
        ("trace", trace.trace_id),
        ("kind", f"{trace.tag}, {kind}" if trace.tag else kind),
        ("updates", len(trace.updates)),
        ("complete after", seconds(trace.duration_s)),
        ("context tokens", f"{estimated}{num_tokens:,}"),
    ]
    if trace.failures:
        figures.append(("failures", len(trace.failures)))
    return str(block(facts(figures), _picture(trace, counts), _legend(trace), title=trace.query or trace.trace_id))


def _picture(trace: Trace, counts: TokenCounts) -> Markup:
    rows = list(_rows(trace, counts))
    left_out = len(rows) - _MOST_ROWS
    rows = rows[:_MOST_ROWS]
    end_s = max([trace.duration_s, *(failure.offset_s for failure in trace.failures)])
    svg = Svg(_WIDTH, _ROW * len(rows) + 28, f"{len(trace.updates):,} updates in {seconds(end_s)}")
    scale = (_RIGHT - _LEFT) / end_s if end_s else 0.0
    bottom = _ROW * len(rows) + 6
    time_axis(svg, _LEFT, _RIGHT, 2, bottom, end_s)
    for number, (begin_s, offset_s, fill, text) in enumerate(rows):
        top = 4 + _ROW * number
        x = _LEFT + scale * offset_s
        if begin_s is not None:
            tip = f"from {seconds(begin_s)} to {seconds(offset_s)}"
            svg.rect(_LEFT + scale * begin_s, top + 4, scale * (offset_s - begin_s), 8, _UNDERWAY, tip)
        svg.rect(x - 2, top + 1, 4, 14, fill, f"{text}, at {seconds(offset_s)}")
        svg.text(_LEFT - 8, top + 12, number + 1, anchor="end", opacity=0.72)
        svg.text(_RIGHT + 14, top + 12, text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…")
    return svg.markup() + (note(f"and {left_out:,} more") if left_out > 0 else Markup(""))


def _rows(trace: Trace, counts: TokenCounts) -> Iterator[tuple[float | None, float, Fill, str]]:
    """When it began and came, its colour and its text, by time."""
    rows: list[tuple[float | None, float, Fill, str]] = []
    before: Sequence[Chunk] = ()
    for timed in trace.updates:
        chunks = timed.update.chunks
        if trace.mode is ContextMode.APPEND:
            text = _appended(chunks, counts)
        else:
            text = _replaced(before, chunks, counts)
            before = chunks
        rows.append((timed.begin_s, timed.offset_s, NEW, text))
    rows += [(None, f.offset_s, VOID, f"failed: {f.source}: {f.reason}") for f in trace.failures]
    return iter(sorted(rows, key=lambda row: row[1]))


def _appended(chunks: Sequence[Chunk], counts: TokenCounts) -> str:
    if not chunks:
        return "no text: a search ended"
    name = chunks[0].title or chunks[0].source
    others = f" and {len(chunks) - 1:,} more" if len(chunks) > 1 else ""
    return f"+{sum(map(counts.chunk, chunks)):,} tokens  {name}{others}"


def _replaced(before: Sequence[Chunk], after: Sequence[Chunk], counts: TokenCounts) -> str:
    kept = num_common_documents(before, after)
    text = f"{len(after):,} document{'' if len(after) == 1 else 's'}, {sum(map(counts.chunk, after)):,} tokens"
    if not before:
        return text
    void = sum(map(counts.chunk, before[kept:]))
    return f"{text}, {void:,} void" if void else f"{text}, none void"


def _legend(trace: Trace) -> Markup:
    colours = [(NEW.colour, 1.0, "came")]
    if any(timed.begin_s is not None for timed in trace.updates):
        colours.insert(0, (_UNDERWAY.colour, _UNDERWAY.opacity, "under way"))
    if trace.failures:
        colours.append((VOID.colour, 1.0, "failed"))
    return legend(colours)


def trace_set_html(traces: TraceSet) -> str:
    """How many traces of which kind there are, the first of them, and what could not be read."""
    kinds: dict[tuple[str, str], list[Trace]] = {}
    for trace in traces:
        kinds.setdefault((trace.tag, trace.mode.value), []).append(trace)
    summary = [
        (tag or "–", mode, len(kind), *_medians(kind), sum(len(trace.failures) for trace in kind))
        for (tag, mode), kind in kinds.items()
    ]
    headings = ("tag", "mode", "traces", "median updates", "median time", "failures")
    first = [
        (trace.trace_id, trace.query[:100], trace.tag, len(trace.updates), seconds(trace.duration_s))
        for trace in traces.traces[:_MOST_TRACES]
    ]
    shown = f"the first {len(first)}" if len(first) < len(traces) else "all of them"
    rows = table(("trace", "question", "tag", "updates", "complete after"), first, right=(4,))
    skipped = [(str(error),) for error in traces.skipped[:_MOST_TRACES]]
    why = fold(f"{len(traces.skipped):,} skipped", table(("why",), skipped)) if skipped else ""
    return str(block(table(headings, summary, right=(4,)), fold(shown, rows), why, title=f"{len(traces):,} traces"))


def _medians(traces: Sequence[Trace]) -> tuple[float, str]:
    """Updates, and the time of the retrieval."""
    num_updates = statistics.median(len(trace.updates) for trace in traces)
    return num_updates, seconds(statistics.median(trace.duration_s for trace in traces))


def statistics_html(kind: WorkloadStatistics) -> str:
    """The tables of one kind of trace."""
    from stream2llm_sdk.traces.statistics_tables import statistics_tables

    parts: list[Markup] = []
    for each in statistics_tables(kind):
        columns = range(1, len(each.headings))
        parts.append(table([heading.replace("\n", " ") for heading in each.headings], each.rows, right=columns))
        parts.append(note(each.remark))
    return str(block(*parts, title=f"{kind.name}, {kind.num_queries:,} queries"))
