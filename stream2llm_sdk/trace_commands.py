"""The commands `stream2llm trace …`: what traces are like, their conversion, synthetic ones and recorded ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stream2llm_sdk.console import shown_errors, write_report
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import require_writable
from stream2llm_sdk.option_names import called_by_options
from stream2llm_sdk.record_commands import app as record_app
from stream2llm_sdk.synth_command import synth
from stream2llm_sdk.trace_options import (
    SOURCE_HELP,
    ArrivalsOption,
    DropOption,
    Form,
    FromOption,
    LimitOption,
    Numbers,
    NumbersOption,
    SkipOption,
    ToOption,
    read,
    with_trace_options,
    write,
)

if TYPE_CHECKING:
    from stream2llm_sdk.traces.trace import Trace

__all__ = ["app"]

app = typer.Typer(
    name="trace",
    help="Traces of retrieval: which context came when.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command(short_help="Print what a workload is like.")
def stats(
    path: Annotated[Path, typer.Argument(help=SOURCE_HELP)],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Counts tokens that are not recorded. Left out, they are estimated."),
    ] = None,
    template_tokens: Annotated[int, typer.Option(min=0, help="Length of the prompt's template, added to each.")] = 0,
    form: FromOption = None,
    skip_bad: SkipOption = False,
    limit: LimitOption = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all of it to this file.")
    ] = None,
) -> None:
    """Print what a workload is like: tokens, times between chunks, chunks per query, and what updates undo.

    As in the paper, an update counts as a chunk. The time between those of a vector search is that between the
    beginnings of their searches, where the traces say when these were.
    """
    from stream2llm_sdk.trace_tables import show_skipped, show_statistics

    console = Console()
    with shown_errors():
        if json_file is not None:
            require_writable(json_file, "--json")
        from stream2llm_sdk.tokenizer import load_tokenizer
        from stream2llm_sdk.traces.statistics import workload_statistics

        found = read(path, form, skip_bad, limit)
        show_skipped(console, found.skipped)
        counter = load_tokenizer(tokenizer) if tokenizer is not None else None
        workloads = workload_statistics(found, tokenizer=counter, num_template_tokens=template_tokens)
    show_statistics(console, workloads)
    report = {
        "path": str(path),
        "workloads": [workload.to_dict() for workload in workloads],
        "skipped": [str(error) for error in found.skipped],
    }
    write_report(json_file, lambda: report)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help=SOURCE_HELP)],
    target: Annotated[Path, typer.Argument(help="A .parquet file, or a new folder for a published format.")],
    form: FromOption = None,
    to: ToOption = None,
    drop: DropOption = False,
    skip_bad: SkipOption = False,
    limit: LimitOption = None,
    arrivals: ArrivalsOption = None,
    arrivals_are: NumbersOption = Numbers.DELAYS,
    arrivals_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write when the questions come, as --arrivals-are says.")
    ] = None,
) -> None:
    """Convert traces between the published formats and Parquet.

    Parquet holds everything. A published format holds no arrivals, tenants, numbers of tokens and the like: traces that
    have them are refused, unless --drop is given. Traces without texts, as `trace synth` draws them without --texts,
    are refused in any case.
    """
    from stream2llm_sdk.trace_tables import show_skipped

    console = Console()
    with shown_errors():
        from stream2llm_sdk.traces.arrivals_file import read_arrival_times, with_arrivals, write_arrival_times
        from stream2llm_sdk.traces.trace_set import check_target

        with called_by_options(with_trace_options):
            kind = check_target(target, to and to.value)
        if arrivals_out is not None:
            require_writable(arrivals_out, "--arrivals-out")
        delays = arrivals_are is Numbers.DELAYS
        times_s = read_arrival_times(arrivals, delays=delays) if arrivals is not None else None
        found = read(source, form, skip_bad, limit)
        show_skipped(console, found.skipped)
        traces = found.traces if times_s is None else with_arrivals(found.traces, times_s)
        arrivals_s = _arrivals_of(traces) if arrivals_out is not None else []
        if arrivals_out is not None and kind != Form.PARQUET:
            traces = [replace(trace, arrival_s=None) for trace in traces]
        write(console, traces, target, to, drop)
        if arrivals_out is not None:
            write_arrival_times(arrivals_s, arrivals_out, delays=delays)


def _arrivals_of(traces: Iterable[Trace]) -> list[float]:
    times_s = []
    for trace in traces:
        if trace.arrival_s is None:
            raise ConfigurationError(f"--arrivals-out: trace {trace.trace_id!r} does not say when it comes")
        times_s.append(trace.arrival_s)
    return times_s


app.command()(synth)
app.add_typer(record_app)
