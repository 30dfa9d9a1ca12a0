"""The command `stream2llm reproduce`: the published tables, run again in virtual time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stream2llm_sdk.console import STOPPED, shown_errors
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import FolderLock, require_own_folder, require_writable, write_whole

__all__ = ["reproduce"]

_JOURNAL = "cells.jsonl"


def reproduce(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where reports and the journal go; made if absent.")],
    draws: Annotated[int, typer.Option(min=1, help="Draws of the arrivals; figures are medians over them.")] = 5,
    queries: Annotated[
        int | None, typer.Option(min=10, help="Queries of each run. Left out, as many as were published.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Left out, one for each core.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only runs whose name holds this, such as 'crawler', 'H200 anns' or '×10'; repeat for more."),
    ] = None,
    ours: Annotated[bool, typer.Option(help="Also this project's policies on the same loads.")] = True,
    svf: Annotated[bool, typer.Option("--svf", help="The experiments of the SVF paper instead.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures and all runs to this file too.")
    ] = None,
) -> None:
    """Run the published matrix on the published system's own decisions and on this project's scheduler.

    Nothing is served and no GPU is needed: the real scheduler runs in virtual time on drawn traces. A run that was
    stopped goes on where it was when it is started again with the same folder; one with --svf begins anew.
    """
    console = Console()
    with shown_errors():
        if json_file is not None:
            require_writable(json_file, "--json")
        if svf and (only or not ours):
            raise ConfigurationError("--svf runs other experiments: leave out --only and --no-ours")
        require_own_folder(out, (_JOURNAL, "reproduction.json", "svf.json"), "reproduction")
        runs = _runs(only or [])
        out.mkdir(parents=True, exist_ok=True)
        with FolderLock(out):
            work = (
                partial(_svf, draws, queries, jobs) if svf else partial(_matrix, out, draws, queries, jobs, runs, ours)
            )
            try:
                report = _shown(console, work)
            except KeyboardInterrupt:
                going_on = f"what ran is kept in {out / _JOURNAL}; the same command goes on"
                console.print(f"[yellow]stopped; {escape('nothing is kept' if svf else going_on)}[/]")
                raise typer.Exit(STOPPED) from None
            markdown = _write(report, out, "svf" if svf else "reproduction", json_file)
    console.print(
        Markdown(markdown if svf else markdown.partition("\n## ")[0])
    )  # the matrix is too wide for a terminal
    console.print(f"All tables {'are' if svf else 'and pictures are'} in {out}", markup=False)


def _shown(console: Console, work: Callable[[Callable[..., None]], Any]) -> Any:
    """What the work comes to, with a bar that it moves."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=None)

        def show(num_done: int, num_all: int, name: str = "") -> None:
            bar.update(task, completed=num_done, total=num_all, description=name or "simulating")

        return work(show)


def _write(report: Any, out: Path, stem: str, json_file: Path | None) -> str:
    """Writes a report's files, and gives its text."""
    markdown: str = report.to_markdown()
    write_whole(out / f"{stem}.md", markdown)
    text = json.dumps(report.to_dict(), indent=2) + "\n"
    write_whole(out / f"{stem}.json", text)
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")
    if stem == "reproduction":
        from stream2llm_sdk.traces.reproduce.plots import write_plots

        write_plots(report, out)
    return markdown


def _runs(only: list[str]) -> list[Any]:
    from stream2llm_sdk.traces.reproduce import published_runs

    return published_runs(*only)


def _svf(draws: int, queries: int | None, jobs: int | None, show: Callable[..., None]) -> Any:
    from stream2llm_sdk.traces.svf_lab import run_svf_lab

    return run_svf_lab(num_draws=draws, num_requests=queries or 200, jobs=jobs or os.cpu_count() or 1, progress=show)


def _matrix(
    out: Path,
    draws: int,
    queries: int | None,
    jobs: int | None,
    runs: list[Any],
    ours: bool,
    show: Callable[..., None],
) -> Any:
    from stream2llm_sdk.traces.reproduce import ARMS, reproduce

    return reproduce(
        runs,
        arms=None if ours else ARMS,
        num_draws=draws,
        num_queries=queries,
        out=out,
        jobs=jobs,
        measure_invalidation=any(run.workload == "anns" for run in runs),
        progress=show,
    )
