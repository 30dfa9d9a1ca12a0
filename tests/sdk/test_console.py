"""Errors of commands, as people see them."""

from __future__ import annotations

import errno

import pytest
import typer

from stream2llm_sdk.console import shown_errors
from stream2llm_sdk.errors import ConfigurationError


def test_an_error_of_a_file_is_shown_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, shown_errors():
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/requests.parquet")
    assert ended.value.exit_code == 1
    assert "OSError: /somewhere/requests.parquet: No space left on device" in capsys.readouterr().err


def test_an_error_of_the_sdk_is_shown_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), shown_errors():
        raise ConfigurationError("rate=-1 must be above 0 [bold]")
    assert "ConfigurationError: rate=-1 must be above 0 [bold]" in capsys.readouterr().err


def test_whoever_reads_the_output_may_have_seen_enough() -> None:
    with pytest.raises(BrokenPipeError), shown_errors():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
