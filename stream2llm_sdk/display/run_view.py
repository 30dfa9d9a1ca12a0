"""Runs in a notebook: figures of replays and of simulated loads, alone and beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.display.markup import Markup, block, facts, note, seconds, table
from stream2llm_sdk.errors import MissingExtraError

if TYPE_CHECKING:
    from stream2llm_sdk.display.plots import Plot
    from stream2llm_sdk.serving.simulator.load_result import SimulationResult
    from stream2llm_sdk.traces.comparison import Comparison
    from stream2llm_sdk.traces.replay_run import ReplayRun
    from stream2llm_sdk.traces.run_folder import RunFolder

__all__ = ["comparison_html", "folder_html", "load_html", "plot_or_note", "replay_html"]

_PERCENTS = ("P50", "P95", "P99")
_TTFTS = (
    ("ttft_from_context_complete", "TTFT from the complete context"),
    ("ttft_from_request", "TTFT from the question"),
)

_COUNTS = (
    ("num_recompute_preemptions", "preemptions: KV dropped"),
    ("num_swap_preemptions", "preemptions: KV to the host"),
    ("num_tokens_computed", "prompt tokens computed"),
    ("num_tokens_recomputed", "of these again, after a preemption"),
)


def plot_or_note(plot: Callable[[], Plot]) -> object:
    """The plot's drawing and caption, or a note where matplotlib is not installed."""
    try:
        drawn = plot()
    except MissingExtraError as error:
        return note(str(error))
    return Markup("").join((drawn.svg, note(drawn.caption)))


def comparison_html(comparison: Comparison) -> str:
    """The runs' figures, a column each, and the plot."""
    found = comparison.rows()
    rows: list[tuple[object, ...]] = [
        (f"{title}, {percent}", *(seconds(row[f"{metric}_{percent.lower()}_s"]) for row in found))
        for metric, title in _TTFTS
        for percent in _PERCENTS
    ]
    rows += [(title, *(f"{row[name]:,}" for row in found)) for name, title in _COUNTS]
    rows.append(("first arrival to last token", *(seconds(row["completion_time_s"]) for row in found)))
    named = table(("", *(row["name"] for row in found)), rows, right=range(1, len(found) + 1))
    what = "One run" if len(found) == 1 else f"{len(found)} runs"
    return str(block(named, plot_or_note(comparison.plot), title=f"{what} of {found[0]['num_requests']:,} requests"))


def replay_html(run: ReplayRun) -> str:
    """A replay's figures, its warnings, and both TTFTs."""
    parts: list[object] = [facts(_replay_facts(run)), *map(_warning, run.warnings)]
    if run.succeeded:
        parts += [_times(run.summary()), plot_or_note(run.plot)]
    return str(block(*parts, title=_title(run)))


def folder_html(folder: RunFolder) -> str:
    """A run as its folder has it, with its timeline."""
    from stream2llm_sdk.traces.run_keeper import load_run

    run = load_run(folder)
    parts: list[object] = [facts(_replay_facts(run)), *map(_warning, run.warnings)]
    if run.succeeded:
        drawn = folder.plot()
        parts += [_times(run.summary()), drawn.svg, note(drawn.caption)]
    return str(block(*parts, title=f"{folder.path.name}: {_title(run)}"))


def _title(run: ReplayRun) -> str:
    engine = run.config.get("engine", {})
    streaming = run.config.get("options", {}).get("streaming", True)
    how = "streamed" if streaming else "whole prompts"
    where = "in virtual time" if engine.get("kind") == "simulated" else "on a real engine"
    return f"Replay {where}, {engine.get('policy') or 'vLLM’s own scheduler'}, {how}"


def _replay_facts(run: ReplayRun) -> list[tuple[object, object]]:
    figures = run.summary()
    total = f"{figures['num_requests']:,} of {run.num_expected:,}"
    named: list[tuple[object, object]] = [("state", run.state.value), ("requests answered", total)]
    if run.succeeded:
        rate = figures["requests_per_s"]
        named += [
            ("first arrival to last token", seconds(run.duration_s)),
            ("requests per second", None if rate is None else f"{rate:.3g}"),
            ("prompt tokens computed", figures["num_tokens_computed"]),
            ("of these again", figures["num_tokens_recomputed"]),
            ("preemptions", figures["num_preemptions"]),
            ("made void by updates", figures["num_tokens_invalidated"]),
        ]
    return named


def _warning(text: str) -> Markup:
    return Markup("<div style='margin:0.3em 0'>⚠ {}</div>").format(text)


def _times(figures: dict[str, Any]) -> Markup:
    """Both TTFTs and, of a replay, the time until the last token."""
    titles = [*_TTFTS, *([("e2e_latency", "until the last token")] if "e2e_latency_p50_s" in figures else [])]
    rows = [
        (title, *(seconds(figures[f"{name}_{percent.lower()}_s"]) for percent in _PERCENTS)) for name, title in titles
    ]
    return table(("", *_PERCENTS), rows, right=(1, 2, 3))


def load_html(result: SimulationResult) -> str:
    """A simulated load's figures, and both TTFTs."""
    if not result.requests:
        return str(block(note("it has no requests"), title="Simulated load"))
    figures = result.summary()
    named: list[tuple[object, object]] = [
        ("requests", len(result.requests)),
        ("virtual time", seconds(result.virtual_s)),
        ("of it in steps", f"{result.busy_s / result.virtual_s:.0%}" if result.virtual_s else None),
        ("steps", result.num_steps),
        ("most KV in use", f"{result.peak_kv_usage:.0%}"),
        ("preemptions: dropped", figures["num_recompute_preemptions"]),
        ("to the host", figures["num_swap_preemptions"]),
        ("tokens computed", figures["num_tokens_computed"]),
        ("of these again", figures["num_tokens_recomputed"]),
        ("simulated in", seconds(result.wall_s)),
    ]
    return str(block(facts(named), _by_tenant(result), plot_or_note(result.plot), title="Simulated load"))


def _by_tenant(result: SimulationResult) -> Markup:
    """Both TTFTs, of each tenant where there are several."""
    if len(result.tenants) < 2:
        return _times(result.summary())
    headings = ["tenant", "requests", *(f"{title}, {percent}" for _, title in _TTFTS for percent in _PERCENTS)]
    rows: list[Sequence[object]] = []
    for tenant in result.tenants:
        figures = result.summary(tenant=tenant)
        times = (seconds(figures[f"{name}_{percent.lower()}_s"]) for name, _ in _TTFTS for percent in _PERCENTS)
        rows.append((tenant or "(none named)", sum(r.tenant == tenant for r in result.requests), *times))
    return table(headings, rows, right=range(2, 8))
