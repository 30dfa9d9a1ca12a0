"""`stream2llm trace`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stream2llm_sdk.context import Append, Chunk, Replace
from stream2llm_sdk.trace_commands import app
from stream2llm_sdk.traces.trace import TimedUpdate, Trace
from stream2llm_sdk.traces.trace_set import read_traces, write_traces


def run(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


@pytest.fixture
def crawls(tmp_path: Path) -> Path:
    updates = (TimedUpdate(0.5, Append(())), TimedUpdate(2.0, Append(Chunk("some text", "https://a.org"))))
    traces = [Trace(f"crawler-{n}", "why?", updates, tag="crawler") for n in range(3)]
    write_traces(traces, folder := tmp_path / "crawls", kind="crawler")
    return folder


def test_stats_print_the_tables_and_write_them(crawls: Path, tmp_path: Path) -> None:
    printed = run("stats", crawls, "--json", tmp_path / "stats.json", "--template-tokens", 60)
    assert "crawler, 3 queries" in printed
    assert "│ mean │ 64 │ 2.000 │ 1,500.00 │ 2.00 │ 2,000.00 │" in printed
    assert "tokens are ESTIMATED as characters / 4" in printed
    report = json.loads((tmp_path / "stats.json").read_text())
    assert report["workloads"][0]["num_tokens"]["mean"] == 64
    assert report["skipped"] == []


def test_stats_say_what_updates_undo(tmp_path: Path) -> None:
    pools = (
        TimedUpdate(1, Replace([Chunk("aaaa", "a"), Chunk("b" * 8, "b")])),
        TimedUpdate(2, Replace(Chunk("b" * 8))),
    )
    write_traces([Trace("a", "", pools, tag="anns")], tmp_path / "a.parquet")
    printed = run("stats", tmp_path / "a.parquet")
    assert "anns, what updates undo" in printed
    assert "│ max │ 3 │ 3 │ 0.00 │" in printed


def test_bad_traces_end_it_or_are_counted(crawls: Path) -> None:
    (crawls / "query_1.csv").write_text("type,endTime\n")
    assert "TraceError" in run("stats", crawls, status=1)
    printed = run("stats", crawls, "--skip-bad")
    assert "1 skipped" in printed
    assert "query_1.csv, column 'startTime': the column is missing" in printed
    assert "crawler, 2 queries" in printed


def test_convert_goes_to_parquet_and_back(crawls: Path, tmp_path: Path) -> None:
    assert "3 traces written" in run("convert", crawls, tmp_path / "a.parquet")
    run("convert", tmp_path / "a.parquet", tmp_path / "back", "--to", "crawler")
    assert read_traces(tmp_path / "back").traces == read_traces(crawls).traces


def test_convert_takes_arrivals_and_gives_them_back(crawls: Path, tmp_path: Path) -> None:
    (delays := tmp_path / "poisson_delays_1.txt").write_text("1\n1.5\n0.25\n")
    run("convert", crawls, tmp_path / "a.parquet", "--arrivals", delays)
    assert [trace.arrival_s for trace in read_traces(tmp_path / "a.parquet")] == [1, 2.5, 2.75]
    back = ("convert", tmp_path / "a.parquet", tmp_path / "back", "--to", "crawler")
    assert "does not hold arrival_s (of 3)" in run(*back, status=1)
    run(*back, "--arrivals-out", tmp_path / "times.txt", "--arrivals-are", "times")
    assert (tmp_path / "times.txt").read_text().split() == ["1", "2.5", "2.75"]
    assert "does not say when it comes" in run(
        "convert", crawls, tmp_path / "b.parquet", "--arrivals-out", tmp_path / "none.txt", status=1
    )


def test_synth_and_convert_speak_of_their_options(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "a.parquet")
    for options, words in (
        (("--update-share", 2), "--update-share=2.0 must be a number between 0 and 1"),
        (("--rate", 1, "--variation", -1), "--variation=-1.0 must be"),
        (("--burst-every", 3), "--burst-every=3.0 and --burst-size=0 go together"),
        (("--max-tokens", 5_000, "--output-spread", 1), "--max-tokens=5000.0 must be 1 to 4096"),
    ):
        printed = run("synth", "mixed", *out, *options, status=1)
        assert words.replace("5000.0", "5000") in " ".join(printed.split()).replace("5000.0", "5000")


def test_a_failed_convert_leaves_no_arrivals(tmp_path: Path) -> None:
    run("synth", "crawler", "--num-queries", 3, "--rate", 1, "--out", tmp_path / "a.parquet")
    times = tmp_path / "times.txt"
    out = ("--to", "crawler", "--drop", "--arrivals-out", times)
    assert "no texts" in run("convert", tmp_path / "a.parquet", tmp_path / "back", *out, status=1)
    assert not times.exists()
    assert not (tmp_path / "back").exists()


def test_convert_says_what_it_drops(tmp_path: Path) -> None:
    trace = Trace("crawler-0", "", (TimedUpdate(0, Append(())),), tenant="a", tag="crawler")
    write_traces([trace], tmp_path / "a.parquet")
    out = ("convert", tmp_path / "a.parquet", tmp_path / "out", "--to", "crawler")
    assert "does not hold tenant (of 1)" in run(*out, status=1)
    assert "Give --drop to leave that out" in run(*out, status=1)
    dropped = run(*out, "--drop")
    assert "left out: tenant (of 1)" in dropped
    assert "1 trace written" in dropped


def test_where_nothing_can_be_written_is_said_before_the_work(crawls: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "a.parquet"
    assert "there is no folder" in run("convert", tmp_path / "no traces", missing, status=1)
    assert "there is no folder" in run("synth", "anns", "--out", missing, status=1)
    assert "--json" in run("stats", tmp_path / "no traces", "--json", tmp_path, status=1)
    assert "say which kind" in run("convert", tmp_path / "no traces", tmp_path / "out", status=1)
    assert "new folder" in run("synth", "crawler", "--out", crawls, "--to", "crawler", status=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("convert", "crawls", "out"), "say which kind, --to crawler, --to anns or --to parquet"),
        (("stats", "crawls", "--from", "parquet"), "--from='parquet' is a file, which this is not"),
        (("stats", "crawls", "--limit", 0), "--limit=0 must be at least 1, or left out for all"),
        (("stats", "notes.txt"), "its name does not say what it is: give --from="),
        (("stats", "empty"), "it is empty. If an application records its traffic there, no question was recorded"),
        (("stats", "mixed"), "nor traffic-*.jsonl nor a recording is in it, and a .parquet file is named itself"),
        (("stats", "parquet"), "name a .parquet file itself, such as parquet/a.parquet"),
    ],
)
def test_what_cannot_be_read_or_written_is_said_in_the_commands_words(
    crawls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "mixed/notes.txt", "parquet/a.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    assert says in run(*arguments, status=1)


def test_synth_draws_what_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "a.parquet"
    options = ("--num-queries", 40, "--seed", 3, "--out", out)
    run("synth", "mixed", *options, "--rate", 2, "--tenant", "a=1", "--tenant", "b=3", "--max-tokens", 9)
    traces = read_traces(out).traces
    assert {trace.tag for trace in traces} == {"crawler", "anns"}
    assert {trace.tenant for trace in traces} == {"a", "b"}
    assert {trace.max_tokens for trace in traces} == {9}
    assert all(trace.arrival_s for trace in traces)
    run("synth", "mixed", *options, "--rate", 2, "--tenant", "a=1", "--tenant", "b=3", "--max-tokens", 9)
    assert read_traces(out).traces == traces


def test_synth_takes_recorded_arrivals_and_bursts(tmp_path: Path) -> None:
    (delays := tmp_path / "delays.txt").write_text("1\n1\n1\n1\n")
    out = tmp_path / "a.parquet"
    run("synth", "crawler", "--num-queries", 4, "--out", out, "--arrivals", delays)
    assert [trace.arrival_s for trace in read_traces(out)] == [1, 2, 3, 4]
    run("synth", "crawler", "--num-queries", 4, "--out", out, "--burst-every", 5, "--burst-size", 2)
    assert [trace.arrival_s for trace in read_traces(out)] == [5, 5, 10, 10]


def test_synth_refuses_what_cannot_be(tmp_path: Path) -> None:
    for option in (
        ("--tenant", "a"),
        ("--tenant", "=1"),
        ("--tenant", "a=1", "--tenant", "a=2"),
        ("--output-spread", 1),
        ("--max-tokens", 5_000, "--output-spread", 1),
        ("--burst-size", 2),
        ("--rate", 0),
    ):
        assert "ConfigurationError" in run("synth", "anns", "--out", tmp_path / "a.parquet", *option, status=1)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (("--variation", 2), "--rate"),
        (("--arrival-seed", 2), "--rate"),
        (("--arrivals-are", "times"), "--arrivals"),
        (("--popularity-exponent", 2), "--num-shared-documents"),
    ],
)
def test_synth_refuses_an_option_that_another_one_must_give_effect(
    tmp_path: Path, options: tuple[Any, ...], needed: str
) -> None:
    printed = " ".join(run("synth", "anns", "--out", tmp_path / "a.parquet", *options, status=1).split())
    assert f"{options[0]} has no effect without {needed}" in printed
    assert not (tmp_path / "a.parquet").exists()


@pytest.mark.parametrize(
    ("kind", "option"),
    [("crawler", ("--update-share", 0.3)), ("anns", ("--update-share", 0.5)), ("crawler", ("--search-gap", "last"))],
)
def test_an_option_without_effect_is_refused(tmp_path: Path, kind: str, option: tuple[Any, ...]) -> None:
    printed = run("synth", kind, "--out", tmp_path / "a.parquet", *option, status=1)
    assert f"{option[0]} is for" in printed
    assert f"no effect on {kind}" in printed


def test_without_pyarrow_the_extra_is_named(crawls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "stream2llm-sdk[traces]" in run("convert", crawls, tmp_path / "a.parquet", status=1)
    assert "crawler, 3 queries" in run("stats", crawls)
