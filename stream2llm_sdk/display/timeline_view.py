"""The timeline of a run: a row a request, coloured by what it was doing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import seconds
from stream2llm_sdk.display.plots import Plot
from stream2llm_sdk.display.svg import Svg, time_axis
from stream2llm_sdk.display.theme import INK, PHASES, Fill
from stream2llm_sdk.traces.report.phases import Phase, RequestTrail, Span
from stream2llm_sdk.traces.report.reported_run import read_runs
from stream2llm_sdk.traces.report.timeline import shown_requests
from stream2llm_sdk.trail import EventType

if TYPE_CHECKING:
    from stream2llm_sdk.traces.run_folder import RunFolder

__all__ = ["timeline_plot"]

_WIDTH, _LEFT, _RIGHT = 860.0, 8.0, 846.0
_LEGEND, _COLUMNS = 18.0, 3
_ROW = 9.0
# Runs of one phase that are this near to each other are drawn as one: a step is often less than a pixel.
_SMALLEST_GAP_PX = 0.5


def timeline_plot(folder: RunFolder, most: int) -> Plot:
    """The timeline of at most so many requests, of those in a row that together waited longest for the engine."""
    (run,) = read_runs(folder)
    shown = [trail for trail in shown_requests(run.trails, most) if trail.spans]
    if not shown:
        return Plot("Timeline", Svg(_WIDTH, 10, "Timeline").markup(), "No request came into the engine.")
    start_s = shown[0].request.arrival_s
    end_s = max(trail.end_s for trail in shown)
    phases = [phase for phase in PHASES if any(trail.seconds_in(phase) > 0 for trail in shown)]
    top = _LEGEND * -(-(len(phases) + 2) // _COLUMNS) + 6
    bottom = top + _ROW * len(shown) + 4
    svg = Svg(_WIDTH, bottom + 22, f"Timeline of {len(shown)} requests over {seconds(end_s - start_s)}")
    _draw_legend(svg, phases)
    time_axis(svg, _LEFT, _RIGHT, top, bottom, end_s - start_s)
    scale = (_RIGHT - _LEFT) / (end_s - start_s) if end_s > start_s else 0.0
    for row, trail in enumerate(shown):
        _draw_row(svg, trail, top + 3 + _ROW * row, start_s, scale)
    since = f", from {seconds(start_s)} of the run" if start_s else ""
    number = len(run.trails)
    which = (
        f"All {number:,} requests"
        if number == len(shown)
        else (
            f"{len(shown):,} of {number:,} requests: those in a row, by arrival, that together waited longest for the "
            "engine"
        )
    )
    return Plot("Timeline", svg.markup(), f"{which}; a row each, the first to arrive on top{since}.")


def _draw_legend(svg: Svg, phases: Sequence[Phase]) -> None:
    width = _WIDTH / _COLUMNS
    for index in range(len(phases) + 2):
        x, y = _LEFT + width * (index % _COLUMNS), 4 + _LEGEND * (index // _COLUMNS)
        if index < len(phases):
            svg.rect(x, y, 14, 9, PHASES[phases[index]])
        elif index == len(phases):
            svg.line(x + 7, y, x + 7, y + 9, Fill(INK))
        else:
            svg.dot(x + 7, y + 4.5, 2.5, Fill(INK))
        label = phases[index].value if index < len(phases) else ("a chunk came", "first token")[index - len(phases)]
        svg.text(x + 20, y + 9, label, size=11)


def _draw_row(svg: Svg, trail: RequestTrail, y: float, start_s: float, scale: float) -> None:
    # Running is drawn last and at least a pixel wide, however short it was.
    spans = sorted(_merged(trail.spans, scale), key=lambda span: span.phase is Phase.RUNNING)
    for span in spans:
        is_running = span.phase is Phase.RUNNING
        width = max(1.0 if is_running else 0.0, scale * span.duration_s)
        tip = f"{trail.request.query_id}: {span.phase.value}, {seconds(span.duration_s)}"
        x = _LEFT + scale * (span.start_s - start_s)
        svg.rect(x, y, width, _ROW - 2, PHASES[span.phase], tip="" if is_running else tip)
    for mark in trail.marks:
        x = _LEFT + scale * (mark.run_s - start_s)
        if mark.type is EventType.CHUNK_ARRIVED:
            svg.line(x, y - 1, x, y + 3, Fill(INK, 0.8))
        elif mark.type is EventType.FIRST_TOKEN:
            svg.dot(x, y + (_ROW - 2) / 2, 2.2, Fill(INK))


def _merged(spans: Sequence[Span], scale: float) -> Iterator[Span]:
    """The spans, with those of one phase put together where what is between them cannot be seen."""
    open_spans: dict[Phase, Span] = {}
    for span in spans:
        before = open_spans.get(span.phase)
        if before is not None and scale * (span.start_s - before.end_s) <= _SMALLEST_GAP_PX:
            open_spans[span.phase] = Span(span.phase, before.start_s, span.end_s, before.data)
            continue
        if before is not None:
            yield before
        open_spans[span.phase] = span
    yield from open_spans.values()
