"""A request's trail as a picture: what it was doing when, what arrived, and both times to the first token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import Markup, block, fold, note, seconds, table
from stream2llm_sdk.display.svg import Svg, time_axis
from stream2llm_sdk.display.theme import GREEN, INK, NEW, PHASES, VOID, Fill
from stream2llm_sdk.traces.report.phases import Mark, Phase, Span, phase_spans
from stream2llm_sdk.trail import EventType

if TYPE_CHECKING:
    from stream2llm_sdk.trail import EventTrail

__all__ = ["trail_html", "trail_picture"]

_LEFT, _RIGHT, _WIDTH = 204.0, 744.0, 770.0
_LANE, _BAR = 22.0, 14.0
_MOST_ROWS = 200
# What is nearer than this to the one before is drawn as one.
_SMALLEST_GAP_PX = 0.4


@dataclass(frozen=True, slots=True)
class _Lane:
    name: str
    fill: Fill
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        return sum(span.duration_s for span in self.spans)


_NAMES = {
    Phase.AWAITING_CHUNK: "waits for a chunk",
    Phase.AWAITING_TURN: "waits for its turn",
    Phase.QUEUED: "queued, no KV",
    Phase.DROPPED: "preempted, KV dropped",
    Phase.SWAPPED: "preempted, KV on host",
}


def trail_html(trail: EventTrail) -> str:
    """The trail as a picture, its events below."""
    if not trail:
        return str(block(note("no events: the engine keeps no trail"), title=trail.request_id))
    rows = trail.rows()
    events = table(
        ("at", "event", ""),
        [(seconds(row["at_s"]), row["type"], _details(row["data"])) for row in rows[:_MOST_ROWS]],
        right=(0,),
    )
    left_out = note(f"and {len(rows) - _MOST_ROWS:,} more: see rows()") if len(rows) > _MOST_ROWS else ""
    return str(block(trail_picture(trail), fold(f"{len(rows):,} events", events, left_out), title=trail.request_id))


def _details(data: dict[str, object]) -> str:
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in data.items()
        if value not in ("", None)
    )


def trail_picture(trail: EventTrail) -> Markup:
    """The picture alone; of a trail with at least one event."""
    zero_s = trail[0].monotonic_s
    marks = [Mark(event.type, event.monotonic_s - zero_s, event.data) for event in trail]
    end_s = marks[-1].run_s
    lanes = _lanes(marks)
    spans = _waits(trail, marks)
    height = 14 + _LANE * (1 + len(lanes)) + (8 + 24 * len(spans) if spans else 0) + 22
    svg = Svg(_WIDTH, height, f"Timeline of request {trail.request_id} over {seconds(end_s)}")
    scale = (_RIGHT - _LEFT) / end_s if end_s else 0.0
    bottom = height - 22
    time_axis(svg, _LEFT, _RIGHT, 4, bottom, end_s)
    _draw_context(svg, marks, scale)
    for row, lane in enumerate(lanes, start=1):
        _draw_lane(svg, lane, 8 + _LANE * row, scale)
    for row, (name, start_s, stop_s) in enumerate(spans):
        _draw_wait(svg, name, _LEFT + scale * start_s, _LEFT + scale * stop_s, bottom - 24 * (len(spans) - row) + 10)
    return svg.markup()


def _lanes(marks: Sequence[Mark]) -> list[_Lane]:
    """Lanes that hold something: prefill and decode first, then what it waited for."""
    spans = list(phase_spans(marks, marks[0].run_s))
    first_token_s = next((mark.run_s for mark in marks if mark.type is EventType.FIRST_TOKEN), float("inf"))
    running = [span for span in spans if span.phase is Phase.RUNNING]
    prefill = [Span(s.phase, s.start_s, min(s.end_s, first_token_s)) for s in running if s.start_s < first_token_s]
    decode = [Span(s.phase, max(s.start_s, first_token_s), s.end_s) for s in running if s.end_s > first_token_s]
    lanes = [_Lane("prefills", PHASES[Phase.RUNNING], tuple(prefill)), _Lane("decodes", Fill(GREEN), tuple(decode))]
    lanes += [
        _Lane(name, PHASES[phase], tuple(span for span in spans if span.phase is phase))
        for phase, name in _NAMES.items()
    ]
    return [lane for lane in lanes if lane.spans]


def _waits(trail: EventTrail, marks: Sequence[Mark]) -> list[tuple[str, float, float]]:
    """Both times to the first token: name, start and end."""
    first = {kind: next((mark.run_s for mark in marks if mark.type is kind), None) for kind in EventType}
    waits = []
    for name, kind, value in (
        ("TTFT from the request", EventType.QUEUED, trail.ttft_from_request_s),
        ("TTFT from the complete context", EventType.CONTEXT_COMPLETE, trail.ttft_from_context_complete_s),
    ):
        start_s, stop_s = first[kind], first[EventType.FIRST_TOKEN]
        if value is not None and start_s is not None and stop_s is not None:
            waits.append((f"{name}: {seconds(value)}", start_s, stop_s))
    return waits


def _draw_context(svg: Svg, marks: Sequence[Mark], scale: float) -> None:
    """The first lane: while the context grows, with a mark for each part that came."""
    middle = 17.0
    complete_s = next((mark.run_s for mark in marks if mark.type is EventType.CONTEXT_COMPLETE), marks[-1].run_s)
    is_whole = scale * complete_s < 1
    svg.text(_LEFT - 10, middle + 4, "context came whole" if is_whole else "context grows", anchor="end")
    svg.rect(_LEFT, middle - 3, scale * complete_s, 6, PHASES[Phase.RETRIEVING], f"until {seconds(complete_s)}")
    for mark in marks:
        x = _LEFT + scale * mark.run_s
        if mark.type is EventType.CHUNK_ARRIVED:
            tip = f"a chunk of {mark.data.get('num_tokens', 0):,} tokens at {seconds(mark.run_s)}"
            svg.shape([(x, middle + 7), (x - 5, middle - 6), (x + 5, middle - 6)], Fill(INK, 0.8), tip)
        elif mark.type is EventType.PROMPT_UPDATED and mark.data.get("num_invalidated"):
            tip = f"{mark.data['num_invalidated']:,} computed tokens became void at {seconds(mark.run_s)}"
            svg.shape([(x, middle - 6), (x - 5, middle + 7), (x + 5, middle + 7)], VOID, tip)


def _draw_lane(svg: Svg, lane: _Lane, top: float, scale: float) -> None:
    svg.text(_LEFT - 10, top + 11.5, f"{lane.name}, {seconds(lane.seconds)}", anchor="end")
    for start_s, end_s in _joined(lane.spans, _SMALLEST_GAP_PX / scale if scale else 0.0):
        tip = f"{lane.name}: {seconds(end_s - start_s)} from {seconds(start_s)}"
        svg.rect(_LEFT + scale * start_s, top, max(1.0, scale * (end_s - start_s)), _BAR, lane.fill, tip)


def _joined(spans: Sequence[Span], gap_s: float) -> Iterator[tuple[float, float]]:
    """The spans in order, those that nearly touch as one."""
    starts = [spans[0], *(after for before, after in itertools.pairwise(spans) if after.start_s - before.end_s > gap_s)]
    ends = [*(before for before, after in itertools.pairwise(spans) if after.start_s - before.end_s > gap_s), spans[-1]]
    for first, last in zip(starts, ends, strict=True):
        yield first.start_s, last.end_s


def _draw_wait(svg: Svg, text: str, left: float, right: float, y: float) -> None:
    """A bracket over a time, with its name on the side where there is room."""
    for x in (left, right):
        svg.line(x, y - 5, x, y + 5, NEW, width=1.5)
    svg.line(left, y, right, y, NEW, width=1.5)
    if _WIDTH - right > 260:
        svg.text(right + 8, y + 4, text, bold=True)
    elif left - 8 > 250:
        svg.text(left - 8, y + 4, text, anchor="end", bold=True)
    else:
        svg.text((left + right) / 2, y - 4, text, anchor="middle", bold=True)
