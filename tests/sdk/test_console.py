"""Errors of commands, as people see them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import typer

from stream2llm_sdk.console import shown_errors, write_report
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import write_whole


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


def test_a_report_that_cannot_be_written_is_an_error_like_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        write_report(Path("/dev/full"), lambda: {"figure": 1})
    assert "No space left on device" in capsys.readouterr().err
    write_report(None, lambda: pytest.fail("nothing is asked for"))


def test_a_file_that_cannot_be_written_whole_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "figures.json").write_text("before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "figures.json", "after")
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]
    assert (tmp_path / "figures.json").read_text() == "before"
