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
    """Prints one line for each thing that happens, with the seconds since its beginning.

    An answer is shown as it comes on a terminal; elsewhere, in a file or a log, it is one line when it is complete.
    """

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
            if self._console.is_terminal:
                self._line(self._began_s, "[bold green]answer[/] ", end="")
        if self._console.is_terminal:
            self._console.print(piece.text, end="", markup=False, highlight=False)

    def end(self, run: DemoRun) -> None:
        if self._console.is_terminal:
            self._console.print()
        else:
            self._line(self._began_s, f"[bold green]answer[/] {escape(_one_line(run.answer.text))}")

    def _line(self, since_s: float, text: str, end: str = "\n") -> None:
        self._console.print(f"[dim]{time.monotonic() - since_s:7.2f} s[/] {text}", highlight=False, end=end)


def show_report(console: Console, report: DemoReport) -> None:
    """Prints the answers with their sources, the table of all ways, what its words mean, and the ratios in words."""
    console.rule("[bold]answers[/]")
    for retrieval in dict.fromkeys(run.retrieval for run in report.runs):
        for line in (*_answers(report, retrieval), *_sources(report, retrieval), ""):
            console.print(line, highlight=False)
    console.print(_table(report))
    for line in (*_LEGEND, "", *_notes(report)):
        console.print(line, highlight=False)


def _answers(report: DemoReport, retrieval: str) -> list[str]:
    """The answers of both ways, once if they are the same."""
    runs = [run for run in report.runs if run.retrieval == retrieval]
    texts = [escape(run.answer.text.strip()) or "(no text)" for run in runs]
    if report.same_answer(retrieval):
        return [f"[bold]{escape(retrieval)}, both ways[/]", texts[0]]
    return [line for run, text in zip(runs, texts, strict=True) for line in (f"[bold]{escape(run.name)}[/]", text)]


def _sources(report: DemoReport, retrieval: str) -> list[str]:
    """What the model read: one list if it is the same both ways, else both."""
    runs = [run for run in report.runs if run.retrieval == retrieval]
    if report.same_prompt(retrieval):
        return ["[dim]sources, the same both ways:[/]", *_source_list(runs[0])]
    lines = []
    for run in runs:
        lines += [f"[dim]sources, {escape(run.name)}:[/]", *_source_list(run)]
    return lines


def _source_list(run: DemoRun) -> list[str]:
    lines = []
    for number, source in enumerate(run.answer.sources, start=1):
        place = f"tokens {source.start}–{source.end}{', cut' if source.was_cut else ''}"
        lines.append(f"  [dim]{number:2} {escape(source.title)} {escape(source.source)} ({place})[/]")
    return lines


_LEGEND = (
    "TTFT is the time to the first token of the answer: [bold]from context[/], from the moment when the context was "
    "complete (the definition that papers use); [bold]from request[/], from the question (what a person waits).",
    "[bold]prefilled[/]: prompt tokens run through the model. While a prompt is open its last token is held back, so "
    'that nothing is sampled early: "prefilled 34 of 35" is all there is to do. [bold]recomputed[/]: those of them '
    "that were computed again after a preemption. [bold]invalidated[/]: computed tokens that became void because the "
    "context before them changed. [bold]prefix cache[/]: tokens found there and not computed.",
)

_ROUNDING = (
    ": a prefill that is cut at other places rounds differently in 16-bit types, with stock vLLM too; in float32 the "
    "answers are the same"
)


def _table(report: DemoReport) -> Table:
    table = Table(title=escape(report.question), title_justify="left")
    table.add_column("", no_wrap=True)  # with four ways the table fits 80 columns
    for run in report.runs:
        table.add_column(f"{escape(run.retrieval)}\n{'' if run.streaming else 'not '}streaming", justify="right")

    def row(label: str, *values: str) -> None:
        table.add_row(label, *values)

    answers = [run.answer for run in report.runs]
    row("TTFT from context, s", *(_seconds(a.timings.ttft_from_context_complete_s) for a in answers))
    row("TTFT from request, s", *(_seconds(a.timings.ttft_from_request_s) for a in answers))
    row("retrieval, s", *(_seconds(a.timings.retrieval_s) for a in answers))
    row("whole answer, s", *(_seconds(a.timings.total_s) for a in answers))
    row("prompt, tokens", *(str(a.tokens.prompt) for a in answers))
    row("prefilled, tokens", *(str(a.tokens.prefilled) for a in answers))
    row("recomputed, tokens", *(str(a.tokens.recomputed) for a in answers))
    row("invalidated, tokens", *(str(a.tokens.invalidated) for a in answers))
    row("prefix cache, tokens", *(str(a.tokens.cached) for a in answers))
    row("sources", *(str(len(a.sources)) for a in answers))
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "(no text)"


def _notes(report: DemoReport) -> list[str]:
    notes = []
    for name, value in report.figures().items():
        retrieval = "diskann" if name.startswith("diskann_") else "crawler"
        what = (
            "the first token, counted from the complete context, took"
            if name.endswith("ttft_context_complete_ratio")
            else "the whole answer, retrieval included, took"
        )
        notes.append(
            f"{retrieval}: {what} [bold]{value:.2f}[/] times as long without streaming as with it {escape(f'[{name}]')}"
        )
    retrievals = dict.fromkeys(run.retrieval for run in report.runs)
    notes += [f"{retrieval}: {_comparison(report, retrieval)}" for retrieval in retrievals]
    if "diskann" in retrievals:
        notes.append("diskann: the search was paced, to take as long as one of a large index on disk")
    if not report.budget.keeps_up:
        notes.append("[yellow]prefill could not keep up with the pages on this machine[/]")
    return notes


def _comparison(report: DemoReport, retrieval: str) -> str:
    """Whether both ways read and said the same, and if not, where they differ."""
    position = report.first_difference(retrieval)
    if not report.same_prompt(retrieval):
        prompt = "[yellow]not the same chunks in the same order both ways[/] (see the sources)"
        answer = "the same answer" if position is None else f"answers that differ from token {position + 1} on"
        return f"{prompt}, {answer}"
    prompt = "the same chunks in the same order both ways"
    if position is None:
        return f"{prompt}, and [bold]the same answer, token for token[/]"
    why = "" if report.dtype == "float32" else _ROUNDING
    return f"{prompt}, but [yellow]the answers differ from token {position + 1} on[/]{why}"
