"""How commands show errors to people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from stream2llm_sdk.errors import Stream2LLMError

__all__ = ["STOPPED", "is_given", "shown_errors"]

STOPPED = 130
"""The exit status that shells expect of a command that Ctrl-C ended."""


@contextmanager
def shown_errors() -> Iterator[None]:
    """Shows an error of the SDK on stderr, without a traceback, and ends the command with status 1."""
    try:
        yield
    except Stream2LLMError as error:
        console = Console(stderr=True)
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the user gave the option of this parameter, rather than leaving it at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
