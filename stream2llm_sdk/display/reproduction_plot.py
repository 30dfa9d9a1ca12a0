"""Simulated times to first token beside the published ones and beside the bound."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.display.plots import PLOT_INK, Plot, new_plot, plot_style, themed
from stream2llm_sdk.display.theme import BLUE, GREEN, VERMILION
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.report.style import log_axis
from stream2llm_sdk.traces.reproduce.cells import ALL_ARMS, OUR_ARMS
from stream2llm_sdk.traces.reproduce.judgement import PERCENTILES, Judge
from stream2llm_sdk.traces.reproduce.published import ARMS, PUBLISHED, PublishedRun

if TYPE_CHECKING:
    from stream2llm_sdk.traces.reproduce.report import Reproduction

__all__ = ["arm_name", "bound_s", "reproduction_plot", "run_arms", "runs_of"]

_MOST_RUNS = 4
_ROW_IN, _AROUND_IN = 0.2, 0.8
_CAPTION = (
    "Time to first token from the complete context. Rings are published; dots are simulated, medians of the draws: "
    "blue by the published system's own decisions, green by this project's scheduler. The dashed line is the bound: "
    "the last chunk's prefill alone on an idle machine, which no schedule reaches under load."
)


def arm_name(arm: str) -> str:
    """An arm, for people."""
    return {"NON_STREAMING": "without streaming", "DEFAULT_VLLM": "vLLM's order"}.get(arm, arm)


def runs_of(report: Reproduction, parts: Sequence[str] = ()) -> list[PublishedRun]:
    """The runs that were run, in the published order, whose name holds any of the parts."""
    judge = report.judge
    chosen = [run for run in PUBLISHED if not parts or any(part in run.name for part in parts)]
    # Whole prompts are never preempted: runs that differ in how they preempt share that arm.
    streamed = [run for run in chosen if set(run_arms(judge, run)) - {ARMS[0]}]
    return streamed or [run for run in chosen if run_arms(judge, run)]


def run_arms(judge: Judge, run: PublishedRun) -> list[str]:
    """The arms of a run that were run."""
    return [arm for arm in ALL_ARMS if judge.of(run, arm)]


def bound_s(judge: Judge, run: PublishedRun) -> tuple[float, ...]:
    """P50, P95 and P99 of the bound, in s: the same for all arms."""
    draws = [draw for arm in run_arms(judge, run) for draw in judge.of(run, arm)]
    return tuple(statistics.median(float(draw["bound_ttft_s"][index]) for draw in draws) for index in range(3))


def reproduction_plot(report: Reproduction, parts: Sequence[str]) -> Plot:
    """A row of plots for each run, one for each percentile."""
    judge = report.judge
    runs = runs_of(report, parts)
    if not runs:
        raise ConfigurationError(f"no run whose name holds {' or '.join(map(repr, parts)) or 'anything'} was run")
    shown = runs if parts else runs[:_MOST_RUNS]
    heights = [_AROUND_IN + _ROW_IN * len(run_arms(judge, run)) for run in shown]
    with plot_style():
        figure = new_plot(sum(heights) + 0.2, 9.5)
        plots = figure.subplots(len(shown), 3, squeeze=False, height_ratios=heights)
        for row, run in zip(plots, shown, strict=True):
            _draw_run(row, judge, run)
        left_out = f" {len(runs) - len(shown)} more were run: name them to plot()." if len(runs) > len(shown) else ""
        return themed(figure, "Simulated and published", _CAPTION + left_out)


def _draw_run(plots: Sequence[Any], judge: Judge, run: PublishedRun) -> None:
    arms = run_arms(judge, run)
    bounds = bound_s(judge, run)
    for index, (plot, percent) in enumerate(zip(plots, PERCENTILES, strict=True)):
        ours = [judge.ttft_s(run, arm)[index] for arm in arms]
        theirs = [run.ttft_s[arm][index] if arm in run.ttft_s else None for arm in arms]
        known = [*ours, *(value for value in theirs if value is not None), bounds[index]]
        plot.axvline(bounds[index], color=VERMILION, linestyle="--", linewidth=1.0)
        for place, (arm, value, published) in enumerate(zip(arms, ours, theirs, strict=True)):
            plot.plot(value, place, "o", color=GREEN if arm in OUR_ARMS else BLUE, markersize=5)
            if published is not None:
                plot.plot(
                    published, place, "o", color=PLOT_INK, markerfacecolor="none", markersize=9, markeredgewidth=1
                )
        log_axis(plot, "x", min(known) / 1.5, max(known) * 1.5)
        plot.set_yticks(range(len(arms)), [arm_name(arm) for arm in arms] if index == 0 else [], fontsize=8)
        plot.set(ylim=(len(arms) - 0.4, -0.6), title=f"{run.name}\nP{percent}" if index == 0 else f"P{percent}")
        plot.tick_params(axis="x", labelsize=8)
    plots[1].set_xlabel("TTFT (s)", fontsize=8)
