"""The published tables beside what was simulated, in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import Markup, block, facts, fold, note, seconds, table
from stream2llm_sdk.display.reproduction_plot import arm_name, bound_s, run_arms, runs_of
from stream2llm_sdk.display.run_view import plot_or_note
from stream2llm_sdk.traces.reproduce.cells import NUM_QUERIES
from stream2llm_sdk.traces.reproduce.judgement import PERCENTILES, TOLERANCES, Judge
from stream2llm_sdk.traces.reproduce.published import PublishedRun
from stream2llm_sdk.traces.reproduce.report import FITTED

if TYPE_CHECKING:
    from stream2llm_sdk.traces.reproduce.report import Reproduction

__all__ = ["reproduction_html"]

_MOST_SHOWN = 3
_DEFINITION = (
    "TTFT counts from the complete context to the first token, as published: retrieval is not in it. Ratios are "
    "simulated over published."
)


def reproduction_html(report: Reproduction) -> str:
    """Figures, a table of the first runs, the others folded, and the plot."""
    judge = report.judge
    runs = runs_of(report)
    if not runs:
        return str(block(note("nothing was run"), title="The published tables in virtual time"))
    tables = [_run_table(judge, run) for run in runs]
    shown, others = tables[:_MOST_SHOWN], tables[_MOST_SHOWN:]
    draws = f"{len(report.draws)} draw{'s' * (len(report.draws) > 1)}"
    size = "" if report.num_queries is None else f", {report.num_queries:,} queries in each run"
    # Judged is what was run as it was published.
    judged = report.figures if report.num_queries is None else {}
    return str(
        block(
            facts((name.replace("_", " "), f"{value:.3g}") for name, value in judged.items()),
            note(f"{_DEFINITION} Medians of {draws}{size}; published were {_published_sizes(runs)}."),
            *shown,
            fold(f"{len(others)} more runs", *others) if others else "",
            _over_bound(judge, runs) if not others else fold("How far from the bound", _over_bound(judge, runs)),
            plot_or_note(report.plot),
            fold("What was fitted, and what counts as a miss", note(FITTED), note(TOLERANCES)),
            title="The published tables in virtual time",
        )
    )


def _published_sizes(runs: Sequence[PublishedRun]) -> str:
    names = {"crawler": "crawls", "anns": "searches"}
    return " and ".join(
        f"{NUM_QUERIES[kind]:,} {names[kind]}" for kind in names if any(r.workload == kind for r in runs)
    )


def _over_bound(judge: Judge, runs: Sequence[PublishedRun]) -> Markup:
    """Simulated TTFT over the least that any schedule could give, a row for each arm of each run."""
    rows = [
        (run.name, arm_name(arm), *(f"{us / least:.2f}×" for us, least in zip(ours, bound_s(judge, run), strict=True)))
        for run in runs
        for arm in run_arms(judge, run)
        if (ours := judge.ttft_s(run, arm))
    ]
    headings = ("run", "served by", *(f"P{percent}" for percent in PERCENTILES))
    return table(headings, rows, caption="How far from the bound: simulated TTFT over it", right=range(2, 5))


def _run_table(judge: Judge, run: PublishedRun) -> Markup:
    headings = [""]
    for percent in PERCENTILES:
        headings += [f"P{percent}", "published", "ratio"]
    rows: list[tuple[object, ...]] = []
    for arm in run_arms(judge, run):
        ours, theirs = judge.ttft_s(run, arm), run.ttft_s.get(arm)
        row: list[object] = [arm_name(arm)]
        for index, value in enumerate(ours):
            published = None if theirs is None else theirs[index]
            row += [seconds(value), seconds(published), "–" if published is None else f"{value / published:.2f}"]
        rows.append(tuple(row))
    bound: list[object] = [Markup("<i>bound</i>")]
    for value in bound_s(judge, run):
        bound += [seconds(value), "", ""]
    return table(headings, [*rows, tuple(bound)], caption=run.name, right=range(1, 10))
