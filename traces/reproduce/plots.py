"""The matrix as pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.traces.extras import require_matplotlib
from stream2llm_sdk.traces.reproduce.cells import CURVE_PERCENTILES, NUM_QUERIES, OUR_ARMS
from stream2llm_sdk.traces.reproduce.published import ARMS, PUBLISHED, PublishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from stream2llm_sdk.traces.reproduce.report import Reproduction

__all__ = ["write_plots"]

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7"),
    *("#0072B2", "#D55E00", "#F0E442", "#999999", "#882255"),
)
_TTFT = "TTFT from the complete context (s)"
_Draw = Callable[[list["Axes"], "Reproduction", list[PublishedRun]], None]
_BY_ARM = dict(zip((*ARMS, *OUR_ARMS), _COLOURS, strict=False))


def write_plots(report: Reproduction, folder: Path) -> list[Path]:
    """Writes PNGs of what was run into `folder`: CCDFs of TTFT, TTFT against the rate, preemptions, invalidated tokens.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    for pattern in ("ttft_*.png", "ccdf_*.png", "preemptions.png", "invalidation.png"):  # of an earlier report
        for file in folder.glob(pattern):
            file.unlink()
    judge = report.judge
    by_name: dict[str, list[PublishedRun]] = {}
    for run in PUBLISHED:
        if any(judge.of(run, arm) for arm in _BY_ARM):
            kind = "pressure" if run.is_under_pressure else f"{run.hardware}_{run.workload}"
            by_name.setdefault(kind, []).append(run)
    pressure = by_name.pop("pressure", [])
    written = []
    for name, runs in by_name.items():
        written.append(_picture(folder / f"ttft_{name}.png", 3, _rates, report, runs))
        written.append(_picture(folder / f"ccdf_{name}.png", 1, _ccdfs, report, runs[-1:]))
    if pressure:
        written.append(_picture(folder / "ccdf_pressure.png", len(pressure), _ccdfs, report, pressure))
        written.append(_picture(folder / "preemptions.png", len(pressure), _preemptions, report, pressure))
    if anns := by_name.get("h200_anns"):
        written.append(_picture(folder / "invalidation.png", 1, _invalidation, report, anns))
    return written


def _picture(file: Path, num_axes: int, draw: _Draw, report: Reproduction, runs: list[PublishedRun]) -> Path:
    num_columns = min(3, num_axes)
    num_rows = -(-num_axes // num_columns)
    figure = require_matplotlib().figure.Figure(figsize=(5.2 * num_columns, 4 * num_rows), layout="constrained")
    draw(list(figure.subplots(num_rows, num_columns, squeeze=False).flat), report, runs)
    figure.savefig(file, dpi=110)
    return file


def _of(runs: list[PublishedRun], what: str) -> str:
    return f"{runs[0].hardware.upper()} {runs[0].workload}, {what}"


def _median(draws: list[Any], name: str, index: int) -> float:
    return statistics.median(float(draw[name][index]) for draw in draws)


def _rates(axes: list[Axes], report: Reproduction, runs: list[PublishedRun]) -> None:
    """TTFT against the rate at three percentiles: lines are simulated, rings are published."""
    judge = report.judge
    for index, percentile in enumerate(("P50", "P95", "P99")):
        for arm, colour in _BY_ARM.items():
            found = [(run.rate_per_s, _median(draws, "ttft_s", index)) for run in runs if (draws := judge.of(run, arm))]
            if found:
                style = "-" if arm in ARMS else "--"
                axes[index].plot(*zip(*found, strict=True), style, color=colour, marker=".", label=arm)
            published = [(run.rate_per_s, run.ttft_s[arm][index]) for run in runs if arm in run.ttft_s]
            if published:
                axes[index].plot(*zip(*published, strict=True), "o", color=colour, markerfacecolor="none", markersize=8)
        axes[index].set(
            xscale="log", yscale="log", xlabel="queries a second", ylabel=_TTFT, title=_of(runs, percentile)
        )
        axes[index].set_xticks([run.rate_per_s for run in runs], [f"{run.rate_per_s:g}" for run in runs], minor=False)
        axes[index].grid(alpha=0.3)
    axes[0].legend(fontsize=7, title="lines: simulated, rings: published", title_fontsize=7)


def _ccdfs(axes: list[Axes], report: Reproduction, runs: list[PublishedRun]) -> None:
    judge = report.judge
    for ax, run in zip(axes, runs, strict=False):
        for arm, colour in _BY_ARM.items():
            if draws := judge.of(run, arm):
                # A run of n requests tells nothing of rarer ones than 1 in n.
                rarest = max(1e-3, 1 / (report.num_queries or NUM_QUERIES[run.workload]))
                above = [share for percent in CURVE_PERCENTILES if (share := 1 - percent / 100) >= rarest * (1 - 1e-9)]
                seconds = [_median(draws, "ttft_curve_s", index) for index in range(len(above))]
                ax.plot(seconds, above, "-" if arm in ARMS else "--", color=colour, label=arm)
        ax.set(xscale="log", yscale="log", xlabel=_TTFT, ylabel="share of requests above", title=run.name)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=6)


def _preemptions(axes: list[Axes], report: Reproduction, runs: list[PublishedRun]) -> None:
    judge = report.judge
    for ax, run in zip(axes, runs, strict=False):
        arms = [arm for arm in ARMS[1:] if judge.of(run, arm)]
        ours = [statistics.median(draw["num_preemptions"] for draw in judge.of(run, arm)) for arm in arms]
        places = list(range(len(arms)))
        ax.bar([place - 0.2 for place in places], ours, 0.4, color=_COLOURS[5], label="simulated")
        theirs = [run.num_preemptions[arm][0] for arm in arms]
        ax.bar([place + 0.2 for place in places], theirs, 0.4, color=_COLOURS[1], label="published")
        ax.set_xticks(places, arms, fontsize=7)
        ax.set(ylabel="preemptions", title=run.name)
        ax.legend(fontsize=7)


def _invalidation(axes: list[Axes], report: Reproduction, runs: list[PublishedRun]) -> None:
    judge, ax = report.judge, axes[0]
    for arm in ARMS[1:]:
        found = [
            (run.rate_per_s, _median(draws, "invalidated_tokens", 1)) for run in runs if (draws := judge.of(run, arm))
        ]
        if found:
            ax.plot(*zip(*found, strict=True), marker=".", color=_BY_ARM[arm], label=arm)
    ax.set(xlabel="queries a second", ylabel="tokens made void, P95 of requests", title="H200 anns")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)
