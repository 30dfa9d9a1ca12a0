"""What commands share: how they show errors to people, and how they read options."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from stream2llm_sdk.errors import ConfigurationError, Stream2LLMError

__all__ = [
    "STOPPED",
    "counted",
    "is_given",
    "json_object",
    "option_of",
    "refuse_without",
    "shown_errors",
    "write_report",
]

STOPPED = 130
"""The exit status that shells expect of a command that Ctrl-C ended."""


@contextmanager
def shown_errors() -> Iterator[None]:
    """Shows an error of the SDK, or of a file, on stderr, without a traceback, and ends the command with status 1."""
    try:
        yield
    except BrokenPipeError:  # who read the output has seen enough
        raise
    except (Stream2LLMError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
            text = f"{os.fsdecode(error.filename)}: {error.strerror}"
        console = Console(stderr=True)
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def counted(number: int, noun: str) -> str:
    """So many of something: "1 trace", "1,200 traces"."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the user gave the option of this parameter, rather than leaving it at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def option_of(name: str) -> str:
    """The option of a command's parameter."""
    return f"--{name.replace('_', '-')}"


def refuse_without(context: typer.Context, needed: str, is_there: bool, names: Iterable[str]) -> None:
    """Refuses those of the parameters `names` that the user gave where the option `needed` is not there.

    Raises:
        ConfigurationError: they would have no effect.
    """
    if not is_there and (idle := [option_of(name) for name in names if is_given(context, name)]):
        has = "has" if len(idle) == 1 else "have"
        raise ConfigurationError(f"{', '.join(idle)} {has} no effect without {needed}: add that, or leave them out")


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """The object that an option such as '--filter' gives as JSON; None where it was not given.

    Raises:
        ConfigurationError: it is something else.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{option} {text!r:.200}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{option} {text!r:.200}: give a JSON object")
    return found


def write_report(json_file: Path | None, content: Callable[[], Any]) -> None:
    """Writes to the file of `--json` what `content` gives, if there is one. To be called where errors are not shown."""
    if json_file is not None:
        with shown_errors():
            json_file.write_text(json.dumps(content(), indent=2) + "\n", encoding="utf-8")
