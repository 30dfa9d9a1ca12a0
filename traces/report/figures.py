"""The figures of a report, but for the timeline: TTFT, memory, queues, preemptions, costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.traces.report.phases import Phase, Span
from stream2llm_sdk.traces.report.preemptions import KINDS
from stream2llm_sdk.traces.report.reported_run import ReportedRun
from stream2llm_sdk.traces.report.style import PHASE_COLOURS, blank, line_styles, new_figure, panels, plain, png

__all__ = ["Picture", "average_counts", "draw_costs", "draw_memory", "draw_preemptions", "draw_queues", "draw_ttft"]

_NUM_BINS = 400
_NUM_BARS = 60
_TIME = "run time (s)"
_NO_TRAIL = "the engine kept no trails in this run"
# What is in the engine: a retrieval that has sent nothing is not.
_STACKED = tuple(phase for phase in PHASE_COLOURS if phase is not Phase.RETRIEVING)
_METRICS = (
    ("ttft_from_context_complete_s", "from the complete context to the first token"),
    ("ttft_from_request_s", "from the question to the first token"),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of a report.

    Attributes:
        name: of its file, without the ending.
        title: its heading.
        caption: how it is read.
        png: the PNG file.
    """

    name: str
    title: str
    caption: str
    png: bytes


def draw_ttft(runs: Sequence[ReportedRun]) -> Picture:
    """Distributions of both times to the first token, the body above and the tail below."""
    figure = new_figure(6.0)
    plots = figure.subplots(2, 2)
    styles = line_styles(len(runs))
    for column, (metric, title) in enumerate(_METRICS):
        body, tail = plots[0][column], plots[1][column]
        drawn = [_draw_distribution(body, tail, run, metric, style) for run, style in zip(runs, styles, strict=True)]
        body.set(title=title[0].upper() + title[1:], ylabel="share of requests, CDF")
        tail.set(ylabel="share that waits longer, CCDF")
        if not any(drawn):
            for plot in (body, tail):
                blank(plot, "no request was answered")
            continue
        body.set_ylim(0, 1.01)
        tail.set_yscale("log")
        for plot in (body, tail):
            plot.set_xscale("log")
            plot.set_xlabel("TTFT (s)")
    handles, labels = plots[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(handles)))
    caption = (
        "Times to the first token of the requests that were answered. Above, the share of requests served within a "
        "time; below, on a logarithmic scale, the share that still waited then: the tail. Times under 0.1 ms are drawn "
        "at 0.1 ms."
    )
    return Picture("ttft", "Time to first token", caption, png(figure))


def _draw_distribution(body: Any, tail: Any, run: ReportedRun, metric: str, style: dict[str, Any]) -> bool:
    known = [value for request in run.run.succeeded if (value := getattr(request, metric)) is not None]
    if not known:
        return False
    values = np.sort(np.maximum(np.array(known), 1e-4))
    number = len(values)
    label = f"{plain(run.label)} ({number:,})"
    body.step(values, np.arange(1, number + 1) / number, where="post", label=label, **style)
    # The share that waits at least as long, so that the slowest request is on the logarithmic scale too.
    tail.step(values, np.arange(number, 0, -1) / number, where="pre", label=label, **style)
    return True


def draw_memory(runs: Sequence[ReportedRun]) -> Picture:
    """How full the KV cache was, and how many blocks host memory held."""
    figure = new_figure(4.6)
    on_gpu, on_host = figure.subplots(2, 1, sharex=True)
    styles = line_styles(len(runs))
    columns = ((on_gpu, "kv_usage", 100.0), (on_host, "num_host_blocks_used", 1.0))
    for plot, column, factor in columns:
        drawn = [_draw_samples(plot, run, column, factor, style) for run, style in zip(runs, styles, strict=True)]
        if not any(drawn):
            blank(plot, "no samples of this were taken" if plot is on_gpu else "nothing was swapped to host memory")
    on_gpu.set(ylabel="KV blocks in use (%)", ylim=(0, 102))
    on_host.set(ylabel="blocks in host memory", xlabel=_TIME)
    on_host.set_ylim(bottom=0)
    handles, labels = on_gpu.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(handles)))
    caption = (
        "The share of the GPU's KV blocks that were in use, and the blocks that host memory held for requests that "
        "were swapped out, as sampled by the run."
    )
    return Picture("kv_occupancy", "KV occupancy", caption, png(figure))


def _draw_samples(plot: Any, run: ReportedRun, column: str, factor: float, style: dict[str, Any]) -> bool:
    values = run.samples[column] * factor
    if not np.isfinite(values).any() or (column == "num_host_blocks_used" and not np.nanmax(values) > 0):
        return False
    times = run.samples["run_s"]
    # A run that was stopped has no samples until it went on.
    breaks = np.flatnonzero(np.diff(run.samples["segment"]) > 0) + 1
    times, values = np.insert(times, breaks, times[breaks]), np.insert(values, breaks, np.nan)
    plot.step(times, values, where="post", linewidth=1.0, label=plain(run.label), **style)
    return True


def average_counts(spans: Iterable[Span], edges_s: npt.NDArray[np.float64]) -> dict[Phase, npt.NDArray[np.float64]]:
    """How many spans of each phase there were at once, on average between each two edges (ascending)."""
    starts: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    ends: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    for span in spans:
        starts[span.phase].append(span.start_s)
        ends[span.phase].append(span.end_s)
    widths = np.diff(edges_s)
    return {
        phase: np.diff(_elapsed(starts[phase], edges_s) - _elapsed(ends[phase], edges_s)) / widths for phase in Phase
    }


def _elapsed(moments_s: Sequence[float], times_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """At each time, the seconds since each of the moments before it, in sum."""
    moments = np.sort(np.array(moments_s, dtype=np.float64))
    past = np.searchsorted(moments, times_s)
    return np.asarray(past * times_s - np.concatenate([[0.0], np.cumsum(moments)])[past])


def draw_queues(runs: Sequence[ReportedRun]) -> Picture:
    """How many requests were in each phase."""
    figure, plots = panels(len(runs), 3.2, sharey=True)
    used: list[Phase] = []
    for run, plot in zip(runs, plots, strict=True):
        plot.set(title=plain(run.label), xlabel=_TIME, ylabel="requests in the engine")
        spans = [span for trail in run.trails for span in trail.spans]
        if not run.end_s > 0 or not any(span.phase in _STACKED for span in spans):
            blank(plot, "no request came into the engine")
            continue
        edges = np.linspace(0, run.end_s, _NUM_BINS + 1)
        counts = average_counts(spans, edges)
        present = [phase for phase in _STACKED if counts[phase].any()]
        used += present
        stacked = [np.append(counts[phase], counts[phase][-1]) for phase in present]
        plot.stackplot(edges, stacked, colors=[PHASE_COLOURS[phase] for phase in present], step="post", linewidth=0)
        plot.set_xlim(0, run.end_s)
        plot.set_ylim(bottom=0)
    _phase_legend(figure, used)
    caption = (
        f"Requests in the engine by what they were doing, one on top of the other, averaged over each {_NUM_BINS}th of "
        "the run. The colours are those of the timeline. Requests whose retrieval has sent nothing yet are left out."
    )
    return Picture("queues", "Queue lengths", caption, png(figure))


def _phase_legend(figure: Any, used: Iterable[Phase]) -> None:
    from matplotlib.patches import Patch

    shown = [phase for phase in PHASE_COLOURS if phase in set(used)]
    if shown:
        handles = [Patch(facecolor=PHASE_COLOURS[phase], label=phase.value) for phase in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))


def draw_preemptions(runs: Sequence[ReportedRun]) -> Picture:
    """When requests lost their KV, by kind."""
    figure, plots = panels(len(runs), 2.8, sharey=True)
    for run, plot in zip(runs, plots, strict=True):
        plot.set(title=plain(run.label), xlabel=_TIME)
        if not run.preemptions or not run.end_s > 0:
            blank(plot, "no preemptions in this run" if run.has_trails else _NO_TRAIL)
            continue
        edges = np.linspace(0, run.end_s, _NUM_BARS + 1)
        times = [[found.run_s for found in run.preemptions if found.kind is kind] for kind in KINDS]
        labels = [f"{kind.value} ({len(moments):,})" for kind, moments in zip(KINDS, times, strict=True)]
        plot.hist(times, bins=edges, stacked=True, color=[PHASE_COLOURS[kind] for kind in KINDS], label=labels)
        plot.set(xlim=(0, run.end_s), ylabel=f"preemptions in {edges[1]:.3g} s")
        plot.legend(loc="best")
    caption = (
        f"How often requests lost their KV, in each {_NUM_BARS}th of the run: dropped, to be computed again, or moved "
        "to host memory."
    )
    return Picture("preemptions", "Preemptions", caption, png(figure))


def draw_costs(runs: Sequence[ReportedRun]) -> Picture:
    """What each preemption was predicted to cost, against what it cost."""
    figure, plots = panels(len(runs), 4.2)
    for run, plot in zip(runs, plots, strict=True):
        plot.set(title=plain(run.label))
        points = {kind: _cost_points(run, kind) for kind in KINDS}
        if not any(len(found) for found in points.values()):
            reason = (
                "no preempted request came back with a prediction" if run.preemptions else "no preemptions in this run"
            )
            blank(plot, reason if run.has_trails else _NO_TRAIL)
            continue
        _draw_costs(plot, points)
    caption = (
        "Each point is a preemption after which the request came back. Predicted is what the cost model expected when "
        "it decided, for a swap the copy out and back; real is the time from being admitted again until it had again "
        "what it had. Above the dashed line it was dearer than predicted. A real time of 0 (the KV was back within the "
        "step) is drawn as a triangle on the lower edge."
    )
    return Picture("costs", "Costs, predicted against real", caption, png(figure))


def _cost_points(run: ReportedRun, kind: Phase) -> npt.NDArray[np.float64]:
    """Rows of predicted and real seconds."""
    points = [
        (found.predicted_s, found.actual_s)
        for found in run.preemptions
        if found.kind is kind and found.predicted_s and found.actual_s is not None
    ]
    return np.array(points, dtype=np.float64).reshape(-1, 2)


def _draw_costs(plot: Any, points: dict[Phase, npt.NDArray[np.float64]]) -> None:
    every = np.concatenate(list(points.values()))
    positive = every[every > 0]
    low, high = positive.min() / 2, positive.max() * 2
    plot.plot([low, high], [low, high], color="black", linestyle="--", linewidth=0.8, label="predicted = real")
    for (kind, found), marker in zip(points.items(), ("o", "s"), strict=True):
        if not len(found):
            continue
        is_timed = found[:, 1] > 0
        style = {"color": PHASE_COLOURS[kind], "s": 14, "alpha": 0.55, "linewidths": 0}
        label = f"{kind.value} ({len(found):,})"
        plot.scatter(*found[is_timed].T, marker=marker, label=label, **style)
        at_once = found[~is_timed]
        if len(at_once):
            label = f"{kind.value}, real 0 s ({len(at_once):,})"
            plot.scatter(
                at_once[:, 0], np.full(len(at_once), low), marker="v", label=label, clip_on=False, **style | {"s": 26}
            )
    plot.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    plot.set(xlabel="predicted (s)", ylabel="real (s)")
    plot.legend(loc="upper left")
