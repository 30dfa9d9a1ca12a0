"""The demo command, whole, with a tiny model: it runs from the command line and writes what it measured."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from rich.console import Console
from typer.testing import CliRunner

from stream2llm_sdk.answer import Answer, AnswerPiece, ContextEnd, Source, Timings, TokenCounts
from stream2llm_sdk.cli import app
from stream2llm_sdk.context import Chunk
from stream2llm_sdk.demo.view import ConsoleView, show_report
from stream2llm_sdk.demo.ways import DEFAULT_QUESTION, Demo, DemoMode, DemoOptions, DemoReport, DemoRun, PageBudget
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.trail import EventTrail


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for option in ("--question", "--url", "--mode", "--model", "--pages", "--json", "--seed", "--policy"):
        assert option in result.output
    for words in ("paced (min_iteration_s)", "135M parameters", "float32"):
        assert words in result.output


def test_the_commands_are_there_without_a_heavy_import() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert {"demo", "calibrate"} <= set(result.output.split())
    code = "import sys, stream2llm_sdk.cli; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--question", " "], "question is empty"),
        (["--pages", "1"], "num_pages=1"),
        (["--page-tokens", "3"], "page_tokens=3"),
        (["--policy", "BEST"], "unknown scheduling policy 'BEST'"),
        (["--url", "https://example.org", "--mode", "diskann"], "only the crawler"),
    ],
)
def test_bad_options_are_errors_that_say_why(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert words in result.output


@pytest.mark.parametrize(
    ("place", "words"),
    [("none/x.json", "there is no folder"), (".", "it is a folder"), ("file/x.json", "there is no folder")],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(Demo, "run", lambda _demo: pytest.fail("it was started"))
    result = CliRunner().invoke(app, ["demo", "--json", str(tmp_path / place)], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert result.output.startswith("ConfigurationError: --json ")
    assert words in result.output


@pytest.mark.skipif(os.geteuid() == 0, reason="everything may be written by root")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    result = CliRunner().invoke(app, ["demo", "--json", str(tmp_path / "x.json")], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert "may not be written" in result.output


def answer_of(token_ids: tuple[int, ...], num_sources: int = 3) -> Answer:
    sources = [Source(Chunk("text", f"http://a/{i}", f"page {i}"), "r", 10 * i, 10 * i + 9, False) for i in range(9)]
    return Answer(
        question=DEFAULT_QUESTION,
        text=" ".join(f"word{token}" for token in token_ids),
        token_ids=token_ids,
        finish_reason="length",
        sources=tuple(sources[:num_sources]),
        dropped=(),
        failures=(),
        context_end=ContextEnd.RETRIEVED,
        timings=Timings(1.0, 10.0, 10.1, 10.5, 12.0),
        tokens=TokenCounts(1350, 32, 1350, 0, 120, 0),
        trail=EventTrail("r", ()),
    )


def report_of(*answers: Answer, dtype: str = "float32") -> DemoReport:
    """Answers of the crawler streaming and not, then of DiskANN."""
    ways = [("crawler", True), ("crawler", False), ("diskann", True), ("diskann", False)]
    runs = [DemoRun(*way, answer) for way, answer in zip(ways, answers, strict=False)]
    return DemoReport(DEFAULT_QUESTION, "model", PageBudget(900.0, 128, True), 20.0, dtype, runs)


def shown(report: DemoReport, width: int = 80) -> str:
    """The report as a file gets it; every line is within the width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    show_report(console, report)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return str(text)


def test_the_report_of_four_ways_is_readable_in_80_columns() -> None:
    text = shown(report_of(*[answer_of((1, 2, 3))] * 4))
    for label in ("TTFT from context, s", "whole answer, s", "invalidated, tokens", "prefix cache, tokens"):
        assert re.search(rf"│ {label} +│( +[\d.]+ │){{4}}", text), text
    assert text.count("page 2 http://a/2 (tokens 20–29)") == 2  # once for each retrieval
    words = " ".join(text.split())
    assert words.count("the same answer, token for token") == 2
    assert "0.50" in text
    for key in ("[ttft_context_complete_ratio]", "[diskann_answer_time_ratio]"):
        assert key in words
    for term in ("from request, from the question", "last token is held back", "recomputed:", "search was paced"):
        assert term in words


@pytest.mark.parametrize(
    ("second", "position"), [((1, 2, 3), None), ((1, 2, 4), 2), ((1, 2), 2), ((1, 2, 3, 4), 3), ((), 0)]
)
def test_answers_are_compared_token_by_token(second: tuple[int, ...], position: int | None) -> None:
    report = report_of(answer_of((1, 2, 3)), answer_of(second))
    assert report.first_difference("crawler") == position
    assert report.same_answer("crawler") is (position is None)
    assert [run["same_answer"] for run in report.to_dict()["runs"]] == [position is None] * 2


@pytest.mark.parametrize(("dtype", "has_reason"), [("float32", False), ("auto", True)])
def test_a_report_says_where_answers_differ(dtype: str, has_reason: bool) -> None:
    text = " ".join(shown(report_of(answer_of((1, 2, 3)), answer_of((1, 5, 3)), dtype=dtype)).split())
    assert "the answers differ from token 2 on" in text
    assert "crawler, streaming word1 word2 word3 crawler, not streaming word1 word5 word3" in text
    assert ("16-bit" in text) is has_reason


def test_a_report_shows_both_source_lists_where_they_differ() -> None:
    text = " ".join(shown(report_of(answer_of((1,)), answer_of((1,), num_sources=2))).split())
    assert "sources, crawler, streaming: 1 page 0" in text
    assert "not the same chunks in the same order both ways (see the sources), the same answer" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_is_one_line_where_there_is_no_terminal(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
    view = ConsoleView(console)
    view.begin("crawler, streaming")
    for piece in ("word1", " word2"):
        view.piece(AnswerPiece(piece))
    before = console.file.getvalue()  # type: ignore[attr-defined]
    view.end(DemoRun("crawler", True, answer_of((1, 2))))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert ("word1 word2" in before) is is_terminal
    assert lines[-1].endswith("s answer word1 word2")


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
        assert run["same_answer"]
        assert len(run["token_ids"]) == run["tokens"]["output"] > 0
        assert run["trail"][0]["type"] == "QUEUED"
        assert run["trail"][-1]["type"] == "FINISHED"
        assert run["tokens"]["prefilled"] >= run["tokens"]["prompt"]
        assert run["sources"]
    for words in ("TTFT from context", "cut at 6 tokens", "the same answer, token for token"):
        assert words in result.stdout
    assert report["dtype"] in ("float32", "auto")
    assert "the DiskANN search is paced" in " ".join(result.stdout.split())
