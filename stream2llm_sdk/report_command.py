"""The command `stream2llm report`: what runs came to, as a page with figures and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stream2llm_sdk.console import shown_errors

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that `stream2llm replay` wrote.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The report's folder.")] = Path("report"),
) -> None:
    """Report one run, or compare several: a page with figures, and a trace of each for ui.perfetto.dev.

    The page shows the distributions of both TTFTs, a timeline of requests by what they were doing, the KV cache,
    queues, preemptions, and costs predicted against real. It is one file that needs no network; its figures lie beside
    it as PNG files.
    """
    console = Console()
    with shown_errors():
        from stream2llm_sdk.traces.report import write_report

        page = write_report(runs, out)
    console.print(f"written to {escape(str(page))}, with its figures and traces beside it")
