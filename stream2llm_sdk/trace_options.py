"""What the commands `stream2llm trace …` have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from stream2llm_sdk.console import counted
from stream2llm_sdk.option_names import OptionNames, called_by_options

if TYPE_CHECKING:
    from stream2llm_sdk.traces.trace import Trace
    from stream2llm_sdk.traces.trace_set import TraceSet

__all__ = [
    "SOURCE_HELP",
    "ArrivalsOption",
    "DropOption",
    "Form",
    "FromOption",
    "LimitOption",
    "Numbers",
    "NumbersOption",
    "SkipOption",
    "ToOption",
    "read",
    "with_trace_options",
    "write",
]


class Form(StrEnum):
    """A format of traces."""

    CRAWLER = "crawler"
    ANNS = "anns"
    PARQUET = "parquet"


class Numbers(StrEnum):
    """What the numbers in a file of arrivals are."""

    DELAYS = "delays"
    TIMES = "times"


SOURCE_HELP = (
    "A .parquet file, the folder of a recording or of recorded traffic, a folder of query_*.csv, or a folder with a "
    "query_trace_map_*.json or that file."
)
_SKIP_HELP = "Skip and count traces that cannot be read, instead of stopping at the first."

FromOption = Annotated[Form | None, typer.Option("--from", help="Its format. Left out, it is seen from the path.")]
ToOption = Annotated[
    Form | None, typer.Option("--to", help="The format to write. Left out, Parquet for a path that ends in .parquet.")
]
SkipOption = Annotated[bool, typer.Option("--skip-bad", help=_SKIP_HELP)]
LimitOption = Annotated[int | None, typer.Option(help="Read at most so many traces.")]
DropOption = Annotated[bool, typer.Option("--drop", help="Leave out what the format does not hold, and say what.")]
ArrivalsOption = Annotated[
    Path | None, typer.Option("--arrivals", metavar="FILE", help="When the questions come: a number of seconds a line.")
]
NumbersOption = Annotated[
    Numbers, typer.Option("--arrivals-are", help="Waits since the arrival before, as published, or times.")
]

_NAMES = OptionNames(
    {"kind": "--from", "limit": "--limit"},
    (
        (r"\bsay which kind, .*", lambda found: re.sub(r"'(\w+)'", r"--to \1", found[0])),
        (r"\bdrop=True\b", "--drop"),
        (r"(?<=must be at least 1, or )None for all", "left out for all"),
    ),
)


def with_trace_options(text: str) -> str:
    """A text about the reading and writing of traces with the options in place of the arguments of code."""
    return _NAMES(text)


def read(path: Path, form: Form | None, skip_bad: bool, limit: int | None) -> TraceSet:
    """Reads traces as the options say."""
    from stream2llm_sdk.traces.trace_set import read_traces

    with called_by_options(with_trace_options):
        return read_traces(path, kind=form and form.value, on_error="skip" if skip_bad else "raise", limit=limit)


def write(console: Console, traces: Sequence[Trace], target: Path, to: Form | None, drop: bool) -> None:
    """Writes traces, and says what was written and what left out."""
    from stream2llm_sdk.traces.trace_set import write_traces

    with called_by_options(with_trace_options):
        dropped = write_traces(traces, target, kind=to and to.value, drop=drop)
    console.print(f"{counted(len(traces), 'trace')} written to {escape(str(target))}")
    if dropped:
        console.print(f"[yellow]left out:[/] {escape(', '.join(dropped))}")
