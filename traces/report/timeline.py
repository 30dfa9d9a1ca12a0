"""The timeline: a row a request, coloured by what it was doing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stream2llm_sdk.traces.report.figures import Picture
from stream2llm_sdk.traces.report.phases import Phase, RequestTrail
from stream2llm_sdk.traces.report.reported_run import ReportedRun
from stream2llm_sdk.traces.report.style import PHASE_COLOURS, blank, new_figure, plain, png
from stream2llm_sdk.trail import EventType

__all__ = ["MOST_ROWS", "draw_timeline", "shown_requests"]

MOST_ROWS = 60
_WAITING = (Phase.QUEUED, Phase.AWAITING_TURN, Phase.DROPPED, Phase.SWAPPED)
_ROW_IN = 0.105


def shown_requests(trails: Sequence[RequestTrail], most: int = MOST_ROWS) -> Sequence[RequestTrail]:
    """Requests that arrived one after the other, at most so many: those that together waited longest for the engine.

    Waiting is being queued, being passed over with KV in memory, and being preempted. Of several equal stretches it is
    the first.

    Args:
        trails: in the order of their arrivals.
        most: how many may be shown.
    """
    if len(trails) <= most:
        return trails
    waits = np.concatenate([[0.0], np.cumsum([trail.seconds_in(*_WAITING) for trail in trails])])
    first = int(np.argmax(np.round(waits[most:] - waits[:-most], 9)))
    return trails[first : first + most]


def draw_timeline(run: ReportedRun, name: str) -> Picture:
    """The timeline of one run.

    Args:
        run: whose it is.
        name: of the picture's file, without the ending.
    """
    shown = [trail for trail in shown_requests(run.trails) if trail.spans]
    figure = new_figure(1.6 + _ROW_IN * max(12, len(shown)))
    plot = figure.subplots()
    if shown:
        _draw_rows(figure, plot, shown)
    else:
        blank(plot, "no request came into the engine")
    plot.set_title(plain(run.label))
    return Picture(name, f"Timeline: {run.label}", _caption(run, len(shown)), png(figure))


def _caption(run: ReportedRun, num_shown: int) -> str:
    number = len(run.trails)
    which = f"All {number:,} requests"
    if number > num_shown:
        which = (
            f"{num_shown:,} of {number:,} requests: the {num_shown:,} in a row, by arrival, that together waited "
            "longest for the engine (queued, passed over, or preempted)"
        )
    return (
        f"{which}; a row each, the first to arrive on top. A tick is a chunk that came, a dot the first token. Running "
        "is drawn at least a pixel wide, however short it was. The whole run is in the trace file."
    )


def _draw_rows(figure: Any, plot: Any, shown: Sequence[RequestTrail]) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for phase, colour in PHASE_COLOURS.items():
        boxes = list(_boxes(shown, phase))
        if boxes:
            is_on_top = phase is Phase.RUNNING
            edge = (
                {"edgecolors": colour, "linewidths": 0.5, "zorder": 3} if is_on_top else {"linewidths": 0, "zorder": 2}
            )
            plot.add_collection(PolyCollection(boxes, facecolors=colour, **edge))
            handles.append(Patch(facecolor=colour, label=phase.value))
    for kind, style, label in (
        (EventType.CHUNK_ARRIVED, {"marker": 2, "markersize": 3.0, "markeredgewidth": 0.6}, "a chunk came"),
        (EventType.FIRST_TOKEN, {"marker": "o", "markersize": 2.4, "markeredgewidth": 0}, "first token"),
    ):
        points = [(mark.run_s, row) for row, trail in enumerate(shown) for mark in trail.marks if mark.type is kind]
        if points:
            times, rows = zip(*points, strict=True)
            plot.plot(times, rows, linestyle="", color="black", zorder=4, **style)
            handles.append(Line2D([], [], linestyle="", color="black", label=label, **style))
    start_s, end_s = shown[0].request.arrival_s, max(trail.end_s for trail in shown)
    margin_s = max(0.005 * (end_s - start_s), 1e-6)
    plot.set(xlim=(start_s - margin_s, end_s + margin_s), ylim=(len(shown) - 0.4, -0.6), yticks=[])
    plot.set(xlabel="run time (s)", ylabel="requests, by arrival")
    plot.grid(axis="y", visible=False)
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _boxes(shown: Sequence[RequestTrail], phase: Phase) -> Iterator[list[tuple[float, float]]]:
    for row, trail in enumerate(shown):
        top, bottom = row - 0.4, row + 0.4
        for span in trail.spans:
            if span.phase is phase:
                yield [(span.start_s, top), (span.end_s, top), (span.end_s, bottom), (span.start_s, bottom)]
