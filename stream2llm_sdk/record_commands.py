"""The commands `stream2llm trace record …`: traces of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stream2llm_sdk.record_anns_command import anns
from stream2llm_sdk.record_crawl_command import crawl
from stream2llm_sdk.record_run import PublishedOption, shown_record_errors

__all__ = ["app"]

app = typer.Typer(
    name="record",
    help="Record traces: what is retrieved for questions, and when.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

app.command(short_help="Record crawls: searches and pages, with their times.")(crawl)
app.command(short_help="Record vector searches: every pool, with its times.")(anns)


@app.command(short_help="Write what has been recorded so far as traces.")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a recording, finished or not.")],
    published: PublishedOption = None,
) -> None:
    """Write traces.parquet, failures.csv and summary.json of what has been recorded so far."""
    with shown_record_errors():
        from stream2llm_sdk.errors import ConfigurationError
        from stream2llm_sdk.record_progress import show_recording
        from stream2llm_sdk.traces.recording.exports import (
            check_published_target,
            export_recording,
            publish_recording,
        )
        from stream2llm_sdk.traces.recording.recording import RecordingFolder, why_no_trace

        with RecordingFolder.open(folder) as recording:
            if not recording.num_traces:
                raise ConfigurationError(f"{folder}: {why_no_trace(folder, len(recording))}")
            if published is not None:
                check_published_target(published, recording)
            summary = export_recording(recording)
            dropped = publish_recording(recording, published) if published is not None else ()
        console = Console()
        show_recording(console, summary, "updates")
        if published is not None:
            left_out = f"; left out, for the format does not hold it: {', '.join(dropped)}" if dropped else ""
            console.print(f"published form in {published}{left_out}", markup=False, highlight=False, soft_wrap=True)
