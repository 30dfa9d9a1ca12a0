"""The demo command, whole, with a tiny model: it runs from the command line and writes what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from typer.testing import CliRunner

from stream2llm_sdk.cli import app
from stream2llm_sdk.demo.ways import DemoMode, DemoOptions
from stream2llm_sdk.errors import ConfigurationError


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for option in ("--question", "--url", "--mode", "--model", "--pages", "--json", "--seed"):
        assert option in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--question", " "], "question is empty"),
        (["--pages", "1"], "num_pages=1"),
        (["--page-tokens", "3"], "page_tokens=3"),
        (["--url", "https://example.org", "--mode", "diskann"], "only the crawler"),
    ],
)
def test_bad_options_are_errors_that_say_why(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert words in result.output


def test_urls_show_the_crawler_only() -> None:
    options = DemoOptions(urls=("https://example.org",))
    assert options.shows_crawler
    assert not options.shows_diskann
    with pytest.raises(ConfigurationError):
        DemoOptions(urls=("https://example.org",), mode=DemoMode.DISKANN)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_demo_runs_and_measures(tmp_path: Path) -> None:
    model = tiny_models.make_llama(tmp_path / "llama")
    written = tmp_path / "demo.json"
    command = ["demo", "--model", str(model), "--pages", "4", "--page-tokens", "100", "--answer-tokens", "6"]
    result = subprocess.run(
        [sys.executable, "-m", "stream2llm_sdk.cli", *command, "--json", str(written)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "240"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(written.read_text())
    ways = [(run["retrieval"], run["streaming"]) for run in report["runs"]]
    assert ways == [("crawler", True), ("crawler", False), ("diskann", True), ("diskann", False)]
    assert {"ttft_context_complete_ratio", "answer_time_ratio"} <= set(report["figures"])
    for run in report["runs"]:
        assert run["same_prompt"]
        assert run["trail"][0]["type"] == "QUEUED"
        assert run["trail"][-1]["type"] == "FINISHED"
        assert run["tokens"]["prefilled"] >= run["tokens"]["prompt"]
        assert run["sources"]
    assert "TTFT from context complete" in result.stdout
