"""What a person sees of a recording: its progress, and what came of it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stream2llm_sdk.record_option_names import with_option_names

if TYPE_CHECKING:
    from stream2llm_sdk.traces.recording.run import RecordingProgress
    from stream2llm_sdk.traces.recording.summary import RecordingSummary

__all__ = ["RecordingBar", "show_recording"]

_LINE_EVERY_S = 30.0
_SHOWN_REASONS = 8


class RecordingBar:
    """The progress of a recording, as a context: questions done, questions a second, the time left, and failures. Where
    nobody watches, a line every half minute.

    Args:
        console: where it is shown.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, rate="")
        self._line_s = time.monotonic()
        self.last: RecordingProgress | None = None

    def __enter__(self) -> RecordingBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, progress: RecordingProgress) -> None:
        """A question is done."""
        self.last = progress
        rate = _rate(progress)
        if self._console.is_terminal:
            self._progress.update(
                self._task,
                description="recording",
                total=progress.num_questions,
                completed=progress.num_done,
                rate=rate,
            )
        elif time.monotonic() - self._line_s >= _LINE_EVERY_S:
            self._line_s = time.monotonic()
            line = f"{progress.num_done:,} of {progress.num_questions:,} questions, {rate}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rate(progress: RecordingProgress) -> str:
    rate = progress.questions_per_s
    parts = [f"{rate:.2f}/s" if rate < 10 else f"{rate:,.0f}/s"]
    if rate:
        parts.append(f"{_duration((progress.num_questions - progress.num_done) / rate)} left")
    if progress.num_failed:
        parts.append(f"{progress.num_failed:,} failed")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def show_recording(console: Console, summary: RecordingSummary, updates: str) -> None:
    """Prints what came of a recording.

    Args:
        console: where.
        summary: the recording.
        updates: what its updates are called: "pages".
    """
    from stream2llm_sdk.traces.recording.recording import TRACES_FILE

    table = Table(title=escape(str(summary.folder)), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("questions", f"{summary.num_questions:,}")
    table.add_row("traces", f"{summary.num_traces:,}")
    table.add_row(updates, f"{summary.num_updates:,}")
    table.add_row("questions without a trace", f"{summary.num_failed:,}")
    table.add_row("sources that failed", f"{summary.num_source_failures:,}")
    for name, value in summary.figures.items():
        table.add_row(escape(name), f"{value:,.3f}")
    console.print(table)
    for title, reasons in (
        ("questions without a trace", summary.failed_reasons),
        ("sources that failed", summary.source_reasons),
    ):
        if reasons:
            console.print(_reasons(title, dict(reasons)))
    if summary.num_traces:
        console.print(f"traces in {summary.folder / TRACES_FILE}", markup=False, highlight=False, soft_wrap=True)
    if summary.num_failed:
        console.print("--retry-failed asks those without a trace again", highlight=False)


def _reasons(title: str, reasons: dict[str, int]) -> Table:
    table = Table("why", title=title, title_justify="left")
    table.add_column("", justify="right")
    shown = list(reasons.items())[:_SHOWN_REASONS]
    for reason, count in shown:
        table.add_row(escape(with_option_names(reason)), f"{count:,}")
    if len(reasons) > len(shown):
        table.add_row("others", f"{sum(reasons.values()) - sum(count for _, count in shown):,}")
    return table
