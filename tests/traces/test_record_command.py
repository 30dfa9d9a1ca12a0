"""`stream2llm trace record crawl`, as a user runs it, stops it and loses it."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from crawl_site import article, questions_file, slow_page, without_times
from typer.testing import CliRunner, Result
from web_server import WebServer

from stream2llm_sdk.cli import app
from stream2llm_sdk.console import STOPPED
from stream2llm_sdk.context import Append, Chunk
from stream2llm_sdk.errors import RecordingError
from stream2llm_sdk.files import FolderLock
from stream2llm_sdk.record_option_names import with_option_names
from stream2llm_sdk.traces import RecordingFolder, TimedUpdate, Trace, read_traces
from stream2llm_sdk.traces.recording.exports import export_recording
from stream2llm_sdk.traces.recording.questions import Question

ON_LOOPBACK = ("--allow-network", "127.0.0.0/8", "--no-robots", "--max-depth", "0", "--workers", "1")


@pytest.fixture
async def web() -> AsyncIterator[WebServer]:
    async with WebServer() as server:
        yield server


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["trace", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


async def run_beside(*arguments: object, code: int = 0) -> Result:
    """Beside the test's event loop: the command has its own."""
    return await asyncio.to_thread(run, *arguments, code=code)


async def start(*arguments: object) -> Process:
    command = (sys.executable, "-m", "stream2llm_sdk.cli", "trace", "record", "crawl", *map(str, arguments))
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


async def test_questions_become_traces_in_both_forms(web: WebServer, tmp_path: Path) -> None:
    gone = web.add("/gone", "", status=404)
    urls = [(web.add(f"/{n}", article(n)), gone) for n in range(3)]
    file = questions_file(tmp_path, [*urls, (gone,)])
    command = ("record", "crawl", file, "--out", tmp_path / "out", "--published", tmp_path / "published", *ON_LOOPBACK)
    output = (await run_beside(*command)).output
    for fact in ("questions │ 4", "traces │ 3", "pages │ 3", "sources that failed │ 4", "HTTP 404 Not Found │ 4"):
        assert fact in " ".join(output.split()), fact
    assert "--retry-failed asks those without a trace again" in output
    assert "left out, for the format does not hold it: " in output
    traces = read_traces(tmp_path / "out" / "traces.parquet").traces
    published = read_traces(tmp_path / "published").traces
    for trace, again in zip(traces, published, strict=True):
        assert (trace.trace_id, trace.query) == (again.trace_id, again.query)
        assert [(timed.begin_s, timed.offset_s) for timed in trace.updates] == [
            (timed.begin_s, timed.offset_s) for timed in again.updates
        ]
        assert [chunk.text for chunk in trace.final_chunks] == [chunk.text for chunk in again.final_chunks]
    assert "crawler, 3 queries" in run("stats", tmp_path / "out" / "traces.parquet").output
    num_requests = len(web.requests)
    assert "traces │ 3" in " ".join((await run_beside(*command)).output.split())
    assert len(web.requests) == num_requests
    web.add("/gone", article(9))
    assert "traces │ 4" in " ".join((await run_beside(*command, "--retry-failed")).output.split())
    assert len(web.requests) == num_requests + 1


@pytest.mark.slow
async def test_a_growing_limit_goes_on_and_other_settings_do_not(web: WebServer, tmp_path: Path) -> None:
    file = questions_file(tmp_path, [(web.add(f"/{n}", article(n)),) for n in range(4)])
    command = ("record", "crawl", file, "--out", tmp_path / "out", *ON_LOOPBACK)
    await run_beside(*command, "--limit", 2)
    await run_beside(*command, "--limit", 4, "--concurrency", 1)
    assert sorted(web.requests) == ["/0", "/1", "/2", "/3"]
    assert "is not among the 3 to be asked" in (await run_beside(*command, "--limit", 3, code=1)).output
    refused = await run_beside(*command, "--max-pages", 3, code=1)
    assert "was begun with --max-pages=10, not with --max-pages=3. A recording goes on" in refused.output
    with FolderLock(tmp_path / "out"):
        assert "is in use" in (await run_beside(*command, code=1)).output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("q.csv", "--search", "google"), "search='google': give one of dataset"),
        (("q.csv", "--max-pages", "0"), "Invalid value for '--max-pages'"),
        (("missing.csv",), "there is no such file; give questions"),
        (("q.csv", "--sample", "3"), "--sample=3: q.csv has 1 questions"),
        (("q.csv", "--search", "urls:http://a", "--page-timeout", "nan"), "--page-timeout=nan: give a positive"),
        (("q.csv", "--search", "urls:http://a", "--total-timeout", "inf"), "--total-timeout=inf: give a positive"),
        (("q.csv", "--search", "urls:http://a", "--max-page-tokens", "3"), "--max-page-tokens=3: give"),
        (("q.csv", "--search", "urls:http://a", "--published", "."), "'.' is the recording's own folder, or holds it"),
        (("q.csv", "--search", "urls:http://a", "--published", "full/.."), "or holds it"),
        (("q.csv", "--search", "urls:http://a", "--published", "link"), "'link' is a link"),
        (("q.csv", "--column", "topic"), "lacks the column 'topic'"),
        (("q.csv",), "the data set names no pages"),
        (("q.csv", "--search", "urls:ftp://a"), "only http and https are read"),
        (("q.csv", "--search", "urls:http://a", "--allow-network", "loopback"), "loopback"),
        (("q.csv", "--search", "urls:http://a", "--user-agent", "é"), "printable ASCII"),
        (("q.csv", "--search", "urls:http://a", "--published", "full"), "'full' is there already"),
        (("q.csv", "--search", "tavily"), "Tavily needs a key: set TAVILY_API_KEY in the environment"),
        (("q.csv", "--search", "local:full"), "'full' holds no saved index of pages. For a folder of HTML say where"),
        (("q.csv", "--search", "local:full"), "is served: local:full@BASE_URL"),
    ],
)
def test_what_cannot_work_is_said_and_leaves_the_folder_free(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "full" / "query_0.csv").touch()
    (tmp_path / "q.csv").write_text("query\nWhy?\n")
    result = run("record", "crawl", *arguments, "--out", "out", code=2 if "Invalid" in says else 1)
    assert says in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.glob("out/*.parquet"))


def test_exporting_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    assert "holds no recording" in run("record", "export", tmp_path, code=1).output


def test_exporting_what_has_no_trace_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    question = Question("0", "Why?")
    with RecordingFolder.begin(tmp_path / "out", "crawler", {}, [question]):
        pass
    arguments = ("record", "export", tmp_path / "out", "--published", tmp_path / "published")
    for refused in (arguments, ("stats", tmp_path / "out")):
        assert "no question has been asked in it yet: go on with the command" in run(*refused, code=1).output
    with RecordingFolder.begin(tmp_path / "out", "crawler", {}, [question]) as recording:
        recording.add(question, RecordingError("the search found no page"))
    files = sorted(tmp_path.rglob("*"))
    says = "nothing could be recorded for the only question: record again, with the same command and --retry-failed"
    for refused in (arguments, ("stats", tmp_path / "out")):
        assert says in run(*refused, code=1).output
    assert sorted(tmp_path.rglob("*")) == files


def test_reading_what_recorded_nothing_names_the_failures_and_what_is_not_exported_the_export(tmp_path: Path) -> None:
    asked = [Question(str(number), "Why?") for number in range(3)]
    with RecordingFolder.begin(tmp_path / "out", "crawler", {}, asked) as recording:
        recording.add(asked[0], RecordingError("the search found no page"))
        recording.add(asked[1], RecordingError("the search found no page"))
        export_recording(recording)
    says = "nothing could be recorded for any of the 2 questions, failures.csv says why: record again"
    assert says in run("stats", tmp_path / "out", code=1).output
    with RecordingFolder.begin(tmp_path / "out", "crawler", {}, asked) as recording:
        recording.add(asked[2], Trace("2", "Why?", (TimedUpdate(0.5, Append(Chunk("text", "http://a"))),)))
        # Also while it is recorded, by whoever holds the folder.
        assert "`stream2llm trace record export" in run("stats", tmp_path / "out", code=1).output


async def test_nothing_recorded_is_a_failure_and_binds_no_options(web: WebServer, tmp_path: Path) -> None:
    file = questions_file(tmp_path, [(web.add("/0", article(0)),)])
    command = ("record", "crawl", file, "--out", tmp_path / "out", *ON_LOOPBACK[2:])
    failed = await run_beside(*command, code=1)
    assert "Nothing could be recorded for the only question: see above why" in failed.output
    assert not web.requests
    await run_beside(*command, *ON_LOOPBACK[:2], "--retry-failed", "--scope", "site")
    settings = json.loads((tmp_path / "out" / "recording.json").read_text())["settings"]
    assert (settings["allow_networks"], settings["scope"]) == (["127.0.0.0/8"], "site")
    assert "crawler, 1 queries" in run("stats", tmp_path / "out").output
    run("convert", tmp_path / "out", tmp_path / "again.parquet")
    assert len(read_traces(tmp_path / "again.parquet")) == 1


async def test_a_full_disk_is_told_without_a_traceback(web: WebServer, tmp_path: Path) -> None:
    file = questions_file(tmp_path, [(web.add(f"/{n}", article(n)),) for n in range(3)])
    command = [sys.executable, "-m", "stream2llm_sdk.cli", "trace", "record", "crawl", str(file), "--out"]
    limited = ["prlimit", "--fsize=1500", *command, str(tmp_path / "out"), *ON_LOOPBACK]
    process = await asyncio.create_subprocess_exec(*limited, stdout=PIPE, stderr=PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 1, errors
    assert "Make room and go on with the same command" in errors.decode()
    assert "Traceback" not in errors.decode()
    await run_beside("record", "crawl", file, "--out", tmp_path / "out", *ON_LOOPBACK)
    assert len(read_traces(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("page_timeout_s=nan: give it", "--page-timeout=nan: give it"),
        ("give max_pages or max_depth.", "give --max-pages or --max-depth."),
        ("concurrency=4 with cold=True", "--concurrency=4 with --cold=True"),
        (
            "a sample of the filter, my_max_pages, /a/user_agent/b",
            "a sample of the filter, my_max_pages, /a/user_agent/b",
        ),
        (
            'begun with gate={"min_stable_expansions": 16, "min_rank_factor": 2.5}, not without gate; and',
            "begun with --gate --gate-expansions=16 --gate-rank=2.5, not without --gate; and",
        ),
        (
            'with allow_networks=["127.0.0.0/8", "::1/128"], not without allow_networks. A',
            "with --allow-network=127.0.0.0/8 --allow-network=::1/128, not without --allow-network. A",
        ),
        ("with respect_robots=true, not without respect_robots.", "with --robots, not with --no-robots."),
        ('without early_stop, not with early_stop={"patience": 2}', "without --early-stop, not with --early-stop"),
        (
            'without filter, not with filter={"year": {"$gte": 1}}. A',
            """without --filter, not with --filter='{"year": {"$gte": 1}}'. A""",
        ),
        (f'with index="{"a" * 64}", not with index="{"b" * 64}"', "with another --index"),
    ],
)
def test_arguments_are_called_by_their_options(text: str, shown: str) -> None:
    assert with_option_names(text) == shown


@pytest.mark.slow
async def test_ctrl_c_says_how_to_go_on_and_what_is_done_can_be_exported(web: WebServer, tmp_path: Path) -> None:
    file = questions_file(tmp_path, [(slow_page(web, f"/{n}", n, 0.05),) for n in range(400)])
    command = (file, "--out", tmp_path / "out", "--concurrency", 2, *ON_LOOPBACK)
    process = await start(*command)
    await web.wait_until(lambda: len(web.requests) > 10)
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()
    assert process.returncode == STOPPED
    assert "of 400 questions are done. What is done is kept in" in errors.decode()
    assert "Traceback" not in errors.decode()
    with RecordingFolder.open(tmp_path / "out") as recording:
        num_done = len(recording)
    assert num_done >= 8
    output = (await run_beside("record", "export", tmp_path / "out", "--published", tmp_path / "published")).output
    assert f"traces │ {num_done}" in " ".join(output.split())
    assert len(read_traces(tmp_path / "published")) == num_done


def outcome(folder: Path) -> Any:
    """All that a recording made, but for times."""
    with (folder / "failures.csv").open(newline="", encoding="utf-8") as stream:
        failures = sorted(row[:-1] for row in csv.reader(stream))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return [without_times(trace) for trace in read_traces(folder / "traces.parquet")], failures, summary


@pytest.mark.slow
async def test_killed_at_ten_moments_a_recording_ends_as_one_that_was_not(web: WebServer, tmp_path: Path) -> None:
    num_questions, draw = 60, random.Random(os.environ.get("SEED", "kill -9"))
    gone = web.add("/gone", "", status=404)
    urls = [
        (gone,)
        if n % 9 == 0
        else (*(slow_page(web, f"/{n}/{k}", 2 * n + k, draw.uniform(0, 0.1)) for k in (0, 1)), gone)
        for n in range(num_questions)
    ]
    file = questions_file(tmp_path, urls)
    command = ("--concurrency", 3, *ON_LOOPBACK)
    await run_beside("record", "crawl", file, "--out", tmp_path / "whole", *command)
    num_asked_of_one = len(web.requests)
    web.requests.clear()
    num_done = 0
    for _ in range(10):
        process = await start(file, "--out", tmp_path / "killed", *command)
        num_requests = len(web.requests) + draw.randrange(6, 22)
        await web.wait_until(lambda: len(web.requests) >= num_requests)  # noqa: B023 - awaited here
        await asyncio.sleep(draw.uniform(0, 0.1))
        process.kill()
        await process.communicate()
        with RecordingFolder.open(tmp_path / "killed") as recording:
            assert len(recording) >= num_done
            num_done = len(recording)
    assert 0 < num_done < num_questions, "it was killed before it ended"
    await run_beside("record", "crawl", file, "--out", tmp_path / "killed", *command)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    # Each kill costs what was under way: three questions of three pages, and one that was about to be written.
    assert len(web.requests) <= num_asked_of_one + 10 * 4 * 3
