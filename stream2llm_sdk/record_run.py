"""Runs a recording for the command line: with its progress, its end, and Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stream2llm_sdk.console import STOPPED, shown_errors
from stream2llm_sdk.option_names import called_by_options
from stream2llm_sdk.record_option_names import with_option_names
from stream2llm_sdk.record_progress import RecordingBar, show_recording

if TYPE_CHECKING:
    from stream2llm_sdk.traces.recording.questions import Question
    from stream2llm_sdk.traces.recording.recorder import OutcomeSource, RecorderSpec
    from stream2llm_sdk.traces.recording.recording import RecordingFolder
    from stream2llm_sdk.traces.recording.summary import RecordingSummary

__all__ = [
    "QUESTIONS_HELP",
    "ColumnOption",
    "LimitOption",
    "OutOption",
    "PublishedOption",
    "RetryOption",
    "SampleOption",
    "SeedOption",
    "check_something_recorded",
    "record",
    "shown_record_errors",
]

QUESTIONS_HELP = (
    "A .csv, .jsonl (each also .gz, .zst) or .parquet with a column problem, question or query, as SimpleQA has it; a "
    ".txt with a question a line; or hub:NAME[:CONFIG[:SPLIT]], such as hub:basicv8vc/SimpleQA::test."
)
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of the recording.")]
ColumnOption = Annotated[
    str | None, typer.Option("--column", help="The column with the questions, if it has another name.")
]
LimitOption = Annotated[
    int | None, typer.Option(min=1, help="Only the first so many questions; may be raised when a recording goes on.")
]
SampleOption = Annotated[
    int | None, typer.Option(min=1, help="Draw so many of the questions, before --limit. They keep their order.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of --sample.")]
PublishedOption = Annotated[
    Path | None,
    typer.Option("--published", metavar="DIR", help="At the end also write the published form to this folder."),
]
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Ask again where nothing could be recorded earlier.")]


@contextmanager
def shown_record_errors() -> Iterator[None]:
    """Shows errors as `shown_errors` does, with the command's options in place of the arguments that code gives."""
    with shown_errors(), called_by_options(with_option_names):
        yield


def check_something_recorded(summary: RecordingSummary) -> None:
    """Ends the command with status 1 where nothing could be recorded for any question, and says so."""
    if summary.num_questions and not summary.num_traces:
        from stream2llm_sdk.traces.recording.summary import nothing_recorded

        says = (
            f"{nothing_recorded(summary.num_questions).capitalize()}: see above why, and failures.csv. With other "
            "options the same folder begins anew."
        )
        Console(stderr=True).print(says, style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def record(
    spec: RecorderSpec,
    questions: Sequence[Question],
    out: Path,
    *,
    updates: str,
    published: Path | None = None,
    retry_failed: bool = False,
    outcomes: OutcomeSource | None = None,
    measure: Callable[[RecordingFolder], Awaitable[Mapping[str, float]]] | None = None,
) -> None:
    """Records as `run_recording` does, shows how far it is and what came of it, and on Ctrl-C says how to go on.

    Args:
        updates: what the traces' updates are called: "pages".
    """
    from stream2llm_sdk.traces.recording.run import record_here, run_recording

    console, dropped = Console(), list[str]()
    with RecordingBar(Console(stderr=True)) as bar:
        try:
            summary = asyncio.run(
                run_recording(
                    spec,
                    questions,
                    out,
                    outcomes=outcomes or record_here,
                    on_progress=bar.advance,
                    retry_failed=retry_failed,
                    measure=measure,
                    publish=published,
                    on_published=dropped.extend,
                )
            )
        except KeyboardInterrupt:
            is_done = f"{bar.last.num_done:,} of {len(questions):,} questions are done. " if bar.last else ""
            says = f"Stopped. {is_done}What is done is kept in {out}; the same command goes on from there."
            Console(stderr=True).print(says, markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(STOPPED) from None
    show_recording(console, summary, updates)
    check_something_recorded(summary)
    if published is not None:
        left_out = f"; left out, for the format does not hold it: {', '.join(dropped)}" if dropped else ""
        console.print(f"published form in {published}{left_out}", markup=False, highlight=False, soft_wrap=True)
