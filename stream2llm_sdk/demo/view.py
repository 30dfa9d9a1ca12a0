"""The demonstration on a terminal: lines while it works, then answers, sources and a table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stream2llm_sdk.answer import AnswerPiece
from stream2llm_sdk.context import Append, SourceFailure
from stream2llm_sdk.demo.ways import DemoReport, DemoRun, PageBudget
from stream2llm_sdk.gathering import ContextEvent

if TYPE_CHECKING:
    from stream2llm_sdk.serving.engine import StreamProgress

__all__ = ["ConsoleView", "show_report"]


class ConsoleView:
    """Prints one line for each thing that happens, with the seconds since its beginning."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._began_s = self._started_s
        self._speaking = False
        self._prefilled = 0

    def step(self, text: str) -> None:
        self._line(self._started_s, escape(text))

    def budget(self, budget: PageBudget) -> None:
        speed = f"this machine prefills {budget.prefill_tokens_per_s:.0f} tokens/s"
        line = f"{speed}: the model reads up to {budget.page_tokens} tokens of each page"
        if not budget.keeps_up:
            line += " [yellow](prefill cannot keep up with a page every 0.7 s here; streaming gains less)[/]"
        self._line(self._started_s, line)

    def begin(self, name: str) -> None:
        self._console.rule(f"[bold]{escape(name)}[/]")
        self._began_s = time.monotonic()
        self._speaking = False
        self._prefilled = 0

    def context(self, event: ContextEvent) -> None:
        item = event.item
        if isinstance(item, SourceFailure):
            self._line(self._began_s, f"[red]failed[/] {escape(item.source)}: {escape(item.reason)}")
        elif isinstance(item, Append):
            for chunk in item.chunks:
                name = escape(chunk.title or chunk.source)
                self._line(self._began_s, f"page   {name} · context {event.num_context_tokens} tokens")
        else:
            names = ", ".join(escape(chunk.title or chunk.source) for chunk in item.chunks[:3])
            self._line(
                self._began_s,
                f"pool   {len(item.chunks)} passages ({names}, …) · context {event.num_context_tokens} tokens",
            )

    def progress(self, progress: StreamProgress) -> None:
        if progress.num_tokens_computed != self._prefilled and not self._speaking:
            self._prefilled = progress.num_tokens_computed
            self._line(self._began_s, f"[dim]prefilled {progress.num_computed} of {progress.num_tokens} tokens[/]")

    def piece(self, piece: AnswerPiece) -> None:
        if not self._speaking:
            self._speaking = True
            self._console.print(f"[dim]{time.monotonic() - self._began_s:7.2f} s[/] [bold green]answer[/] ", end="")
        self._console.print(piece.text, end="", markup=False, highlight=False)

    def end(self, run: DemoRun) -> None:
        self._console.print()

    def _line(self, since_s: float, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - since_s:7.2f} s[/] {text}", highlight=False)


def show_report(console: Console, report: DemoReport) -> None:
    """Prints the answers with their sources, and the table of all ways."""
    console.rule("[bold]answers[/]")
    for run in report.runs:
        console.print(f"[bold]{escape(run.name)}[/]")
        console.print(run.answer.text.strip() or "(no text)", markup=False, highlight=False)
        for number, source in enumerate(run.answer.sources, start=1):
            place = f"tokens {source.start}–{source.end}{', cut' if source.was_cut else ''}"
            console.print(
                f"  [dim]{number:2} {escape(source.title)} {escape(source.source)} ({place})[/]", highlight=False
            )
        console.print()
    console.print(_table(report))
    for line in _notes(report):
        console.print(line, highlight=False)


def _table(report: DemoReport) -> Table:
    table = Table(title=escape(report.question), title_justify="left")
    table.add_column("")
    for run in report.runs:
        table.add_column(escape(run.name), justify="right")

    def row(label: str, *values: str) -> None:
        table.add_row(label, *values)

    answers = [run.answer for run in report.runs]
    row("TTFT from context complete, s", *(_seconds(a.timings.ttft_from_context_complete_s) for a in answers))
    row("TTFT from request, s", *(_seconds(a.timings.ttft_from_request_s) for a in answers))
    row("retrieval, s", *(_seconds(a.timings.retrieval_s) for a in answers))
    row("whole answer, s", *(_seconds(a.timings.total_s) for a in answers))
    row("prompt, tokens", *(str(a.tokens.prompt) for a in answers))
    row("prefilled, tokens", *(str(a.tokens.prefilled) for a in answers))
    row("recomputed, tokens", *(str(a.tokens.recomputed) for a in answers))
    row("invalidated, tokens", *(str(a.tokens.invalidated) for a in answers))
    row("from prefix cache, tokens", *(str(a.tokens.cached) for a in answers))
    row("sources", *(str(len(a.sources)) for a in answers))
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _notes(report: DemoReport) -> list[str]:
    notes = []
    for name, value in report.figures().items():
        notes.append(f"{name} (not streaming / streaming): [bold]{value:.2f}[/]")
    for retrieval in dict.fromkeys(run.retrieval for run in report.runs):
        same = "the same" if report.same_prompt(retrieval) else "[yellow]not the same[/]"
        notes.append(f"{retrieval}: {same} chunks in the same order both ways")
    if not report.budget.keeps_up:
        notes.append("[yellow]prefill could not keep up with the pages on this machine[/]")
    return notes
