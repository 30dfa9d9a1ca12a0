"""The command `stream2llm`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stream2llm_sdk import __version__
from stream2llm_sdk.calibrate_command import calibrate
from stream2llm_sdk.console import shown_errors, write_report
from stream2llm_sdk.demo.ways import DEFAULT_QUESTION, Demo, DemoMode, DemoOptions
from stream2llm_sdk.files import require_writable
from stream2llm_sdk.index_command import app as index_app
from stream2llm_sdk.replay_command import replay
from stream2llm_sdk.report_command import report
from stream2llm_sdk.reproduce_command import reproduce
from stream2llm_sdk.trace_commands import app as trace_app

__all__ = ["app"]

app = typer.Typer(
    name="stream2llm",
    help="Retrieval that streams into the model while it is still running.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Retrieval that streams into the model while it is still running."""


@app.command(short_help="Answer a question with streaming and without.")
def demo(
    question: Annotated[str, typer.Option(help="The question to answer.")] = DEFAULT_QUESTION,
    url: Annotated[
        list[str] | None,
        typer.Option(help="A page of the real web to read; repeat for more. Left out, Python's own documentation."),
    ] = None,
    mode: Annotated[DemoMode, typer.Option(help="Which retrieval to show.")] = DemoMode.ALL,
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name. Left out, SmolLM2-135M-Instruct from a package.")
    ] = None,
    pages: Annotated[
        int, typer.Option(help="Pages of the local documentation to crawl, 2 to 24.")
    ] = DemoOptions().num_pages,
    page_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a page. Left out, what this machine prefills between two pages.")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = DemoOptions().max_answer_tokens,
    seed: Annotated[int, typer.Option(help="Seed of the pages' delays.")] = DemoOptions().seed,
    policy: Annotated[
        str | None, typer.Option(help="Scheduling policy. Left out, the environment's SCHEDULER_TYPE, else FCFS.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything that was measured to this file.")
    ] = None,
) -> None:
    """Answer a question with and without streaming, on this machine, and compare.

    Serves the documentation of Python's standard library on the loopback with delays like those of real crawls, builds
    a DiskANN index of the same pages, and answers the question with each, streaming and not. Needs no network and no
    GPU; the first time it prepares the model, once.

    The model is a tiny one of 135M parameters, chosen for speed, and its answers are cut. On a CPU it runs in float32,
    so that both ways give the same answer, token for token.

    The DiskANN search is paced (min_iteration_s): this small index would be searched within milliseconds, while a
    large one on disk takes seconds and spreads its pools over them. That is what streaming is for.
    """
    from stream2llm_sdk.demo.view import ConsoleView, show_report

    console = Console()
    with shown_errors():
        if json_file is not None:
            require_writable(json_file, "--json")
        options = DemoOptions(
            question=question,
            urls=tuple(url or ()),
            mode=mode,
            model=model,
            num_pages=pages,
            page_tokens=page_tokens,
            max_answer_tokens=answer_tokens,
            seed=seed,
            policy=policy,
        )
        report = asyncio.run(Demo(options, ConsoleView(console)).run())
    show_report(console, report)
    write_report(json_file, report.to_dict)


app.command(short_help="Measure what preemption costs on this machine.")(calibrate)
app.command(short_help="Replay traces on a model, or in virtual time.")(replay)
app.command(short_help="Make a page of figures of one run, or of several.")(report)
app.command(short_help="Run the published matrix again, in virtual time.")(reproduce)
app.add_typer(index_app)
app.add_typer(trace_app)

if __name__ == "__main__":
    app()
