"""The figures of a report, but for the timeline: TTFT, memory, queues, preemptions, costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.traces.report.phases import Phase, Span
from stream2llm_sdk.traces.report.preemptions import KINDS
from stream2llm_sdk.traces.report.reported_run import ReportedRun
from stream2llm_sdk.traces.report.style import (
    PHASE_COLOURS,
    blank,
    line_styles,
    log_axis,
    new_figure,
    panels,
    plain,
    png,
)

__all__ = ["Picture", "average_counts", "draw_costs", "draw_memory", "draw_preemptions", "draw_queues", "draw_ttft"]

_EMPTY_IN = 1.4
_NUM_BINS = 400
_NUM_BARS = 60
_SHORTEST_S = 1e-4
_TIME = "run time (s)"
_NO_TRAIL = "the engine kept no trails in this run"
# What is in the engine: a retrieval that has sent nothing is not.
_STACKED = tuple(phase for phase in PHASE_COLOURS if phase is not Phase.RETRIEVING)
_METRICS = (
    ("ttft_from_context_complete_s", "From the complete context to the first token"),
    ("ttft_from_request_s", "From the question to the first token"),
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
    figure = new_figure(6.4)
    plots = figure.subplots(2, 2)
    for column, (metric, title) in enumerate(_METRICS):
        body, tail = plots[0][column], plots[1][column]
        body.set_title(title)
        values = [np.sort(np.maximum(_known(run, metric), _SHORTEST_S)) for run in runs]
        if not any(len(each) for each in values):
            blank(body, "no request was answered")
            blank(tail, "no request was answered")
            continue
        _draw_distributions(body, tail, runs, values)
    _legend_below(figure, plots[0][0])
    caption = (
        "Times to the first token of the requests that were answered (their number in brackets). Above, the share that "
        "was served within a time; below, on a logarithmic scale, the share that took at least so long: the tail. "
        f"Times under {1e3 * _SHORTEST_S:g} ms are drawn there."
    )
    return Picture("ttft", "Time to first token", caption, png(figure))


def _known(run: ReportedRun, metric: str) -> npt.NDArray[np.float64]:
    known = [value for request in run.run.succeeded if (value := getattr(request, metric)) is not None]
    return np.array(known, dtype=np.float64)


def _draw_distributions(
    body: Any, tail: Any, runs: Sequence[ReportedRun], values: Sequence[npt.NDArray[np.float64]]
) -> None:
    every = np.concatenate(values)
    low, high = every.min() / 1.2, every.max() * 1.2
    for run, each, style in zip(runs, values, line_styles(len(runs)), strict=True):
        number = len(each)
        if not number:
            continue
        label = f"{plain(run.label)} ({number:,})"
        shares = np.arange(number + 1) / number
        body.step([low, *each, high], [*shares, 1.0], where="post", label=label, **style)
        # The line that falls at the slowest request leaves the plot: zero is nowhere on a logarithmic axis.
        tail.step([low, *each, each[-1]], [1.0, *shares[:0:-1], 1e-12], where="pre", **style)
    for plot in (body, tail):
        log_axis(plot, "x", low, high)
        plot.set_xlabel("TTFT (s)")
    body.set(ylim=(0, 1.01), ylabel="share served within it (CDF)")
    least = 0.8 / max(map(len, values))
    log_axis(tail, "y", least, 1.1)
    tail.set_ylabel("share that took as long (CCDF)")
    for percent in (percent for percent in (50, 95, 99) if 1 - percent / 100 > least):
        share = 1 - percent / 100
        tail.axhline(share, color="#8C8C8C", linewidth=0.6, linestyle=":", zorder=1)
        tail.text(0.004, share, f"P{percent}", transform=tail.get_yaxis_transform(), va="bottom", fontsize=7)


def _legend_below(figure: Any, plot: Any) -> None:
    handles, labels = plot.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(handles)))


def draw_memory(runs: Sequence[ReportedRun]) -> Picture:
    """How full the KV cache was, and how many blocks host memory held."""
    figure = new_figure(4.6)
    on_gpu, on_host = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    styles = line_styles(len(runs))
    columns = ((on_gpu, "kv_usage", 100.0), (on_host, "num_host_blocks_used", 1.0))
    for plot, column, factor in columns:
        drawn = [_draw_samples(plot, run, column, factor, style) for run, style in zip(runs, styles, strict=True)]
        if not any(drawn):
            blank(plot, "no samples of this were taken" if plot is on_gpu else "nothing was swapped to host memory")
    on_gpu.set(ylabel="KV blocks in use (%)", ylim=(0, 102), xlabel=_TIME)
    on_gpu.tick_params(labelbottom=True)
    on_host.set(ylabel="blocks in host memory", xlabel=_TIME)
    on_host.set_ylim(bottom=0)
    if (end_s := max(run.end_s for run in runs)) > 0:
        on_host.set_xlim(0, end_s)
    _legend_below(figure, on_gpu)
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
    figure, plots = panels(len(runs), 3.2, sharex=True, sharey=True)
    end_s = max(run.end_s for run in runs)
    edges = np.linspace(0, end_s, _NUM_BINS + 1) if end_s > 0 else np.array([0.0, 1.0])
    counts = [average_counts([span for trail in run.trails for span in trail.spans], edges) for run in runs]
    most = max(float(np.sum([each[phase] for phase in _STACKED], axis=0).max()) for each in counts)
    for run, plot, each in zip(runs, plots, counts, strict=True):
        plot.set(title=plain(run.label), xlabel=_TIME, ylabel="requests in the engine")
        present = [phase for phase in _STACKED if each[phase].any()]
        if not present:
            blank(plot, "no request came into the engine")
            continue
        stacked = [np.append(each[phase], each[phase][-1]) for phase in present]
        plot.stackplot(edges, stacked, colors=[PHASE_COLOURS[phase] for phase in present], step="post", linewidth=0)
        plot.set(xlim=(0, end_s), ylim=(0, 1.05 * most))
    _phase_legend(figure, [phase for phase in _STACKED if any(each[phase].any() for each in counts)])
    width_s = edges[1] - edges[0]
    caption = (
        f"Requests in the engine by what they were doing, one on top of the other, averaged over each {width_s:.3g} s. "
        "The colours are those of the timeline. Requests whose retrieval has sent nothing yet are left out."
    )
    return Picture("queues", "Queue lengths", caption, png(figure))


def _phase_legend(figure: Any, shown: Sequence[Phase]) -> None:
    from matplotlib.patches import Patch

    if shown:
        handles = [Patch(facecolor=PHASE_COLOURS[phase], label=phase.value) for phase in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))


def draw_preemptions(runs: Sequence[ReportedRun]) -> Picture:
    """When requests lost their KV, by kind."""
    from matplotlib.ticker import MaxNLocator

    height_in = 2.8 if any(run.preemptions for run in runs) else _EMPTY_IN
    figure, plots = panels(len(runs), height_in, sharex=True, sharey=True)
    end_s = max(run.end_s for run in runs)
    edges = np.linspace(0, end_s, _NUM_BARS + 1)
    for run, plot in zip(runs, plots, strict=True):
        plot.set(title=plain(run.label), xlabel=_TIME)
        if not run.preemptions or not end_s > 0:
            blank(plot, "no preemptions in this run" if run.has_trails else _NO_TRAIL)
            continue
        times = [[found.run_s for found in run.preemptions if found.kind is kind] for kind in KINDS]
        labels = [f"{kind.value} ({len(moments):,})" for kind, moments in zip(KINDS, times, strict=True)]
        plot.hist(times, bins=edges, stacked=True, color=[PHASE_COLOURS[kind] for kind in KINDS], label=labels)
        plot.set(xlim=(0, end_s), ylabel=f"preemptions in {edges[1]:.3g} s")
        plot.yaxis.set_major_locator(MaxNLocator(integer=True))
        plot.legend(loc="best")
    caption = (
        f"How often requests lost their KV, in each {edges[1]:.3g} s: dropped, to be computed again, or moved to host "
        "memory."
    )
    return Picture("preemptions", "Preemptions", caption, png(figure))


def draw_costs(runs: Sequence[ReportedRun]) -> Picture:
    """What each preemption was predicted to cost, against what it cost."""
    is_empty = not any(len(_cost_points(run, kind)) for run in runs for kind in KINDS)
    figure, plots = panels(len(runs), _EMPTY_IN if is_empty else 5.2)
    if len(plots) == 1 and not is_empty:
        plots[0].set_box_aspect(1)  # two in a row are nearly square by themselves
    for run, plot in zip(runs, plots, strict=True):
        plot.set_title(plain(run.label))
        points = {kind: _cost_points(run, kind) for kind in KINDS}
        if any(map(len, points.values())):
            _draw_costs(plot, points)
        elif run.has_trails:
            blank(plot, "no preempted request came back" if run.preemptions else "no preemptions in this run")
        else:
            blank(plot, _NO_TRAIL)
    # A plot may lack a kind that another has.
    entries = {label: handle for plot in plots for handle, label in zip(*plot.get_legend_handles_labels(), strict=True)}
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=2)
    caption = (
        "Each point is a preemption after which the request came back. Predicted is what the cost model expected when "
        "it decided, for a swap the copy out and back; real is the time from being admitted again until it had again "
        "what it had. Above the dashed line that took longer than predicted, as it does where the steps in which it "
        "came back computed much for others too. A real time of 0 (the KV was back within the step) is drawn as a "
        "triangle on the lower edge."
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


def _draw_costs(plot: Any, points: Mapping[Phase, npt.NDArray[np.float64]]) -> None:
    every = np.concatenate(list(points.values()))
    positive = every[every > 0]
    low, high = positive.min() / 2, positive.max() * 2
    plot.plot([low, high], [low, high], color="black", linestyle="--", linewidth=0.8, label="predicted = real")
    for (kind, found), marker in zip(points.items(), ("o", "s"), strict=True):
        is_timed = found[:, 1] > 0
        timed, at_once = found[is_timed], found[~is_timed, 0]
        style = {"color": PHASE_COLOURS[kind], "alpha": 0.55, "linewidths": 0}
        if len(timed):
            plot.scatter(*timed.T, s=14, marker=marker, label=kind.value, **style)
        if len(at_once):
            heights = np.full(len(at_once), low)
            plot.scatter(at_once, heights, s=26, marker="v", clip_on=False, label=f"{kind.value}, real 0 s", **style)
    log_axis(plot, "x", low, high)
    log_axis(plot, "y", low, high)
    plot.set(xlabel="predicted (s)", ylabel="real (s)")
