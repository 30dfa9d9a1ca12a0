"""A recording's folder holds what was recorded, whatever happens to whoever records."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import resource
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from stream2llm_sdk.context import Append, Chunk
from stream2llm_sdk.errors import ConfigurationError, RecordingError
from stream2llm_sdk.traces import TimedFailure, TimedUpdate, Trace, read_traces
from stream2llm_sdk.traces.recording.exports import check_published_target, export_recording, publish_recording
from stream2llm_sdk.traces.recording.journal import RecordingJournal
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.recorder import Outcome
from stream2llm_sdk.traces.recording.recording import RecordingFolder
from stream2llm_sdk.traces.recording.run import RecordingProgress, run_recording
from stream2llm_sdk.traces.recording.summary import kind_of_reason, summary_of

QUESTIONS = [Question(str(number), f"question {number}?") for number in range(8)]
SETTINGS = {"search": "urls", "networks": ("a", "b")}


def trace_for(question: Question, text: str = "") -> Trace:
    number = int(question.question_id)
    chunk = Chunk(text or f"page {number}", f"http://{number}", score=0.5, metadata={"depth": 1})
    updates = (TimedUpdate(0.25, Append(()), 0.0), TimedUpdate(1.0 + number, Append([chunk, SHARED]), 0.25))
    failures = (TimedFailure(0.5, "http://gone", "HTTP 404 Not Found"),) * (number % 2)
    return Trace(question.question_id, question.text, updates, tag="crawler", failures=failures)


SHARED = Chunk("the same on every page, and kept once", "http://shared", "shared")


def outcome_for(question: Question) -> Outcome:
    if question.question_id == "3":
        return RecordingError("the search found no page", (TimedFailure(0.1, "http://x", "HTTP 500 Broken"),))
    return trace_for(question)


def expected() -> list[Trace]:
    traces = [outcome for question in QUESTIONS if isinstance(outcome := outcome_for(question), Trace)]
    return [replace(trace, trace_id=f"crawler-{trace.trace_id}") for trace in traces]


def begin(folder: Path, questions: Sequence[Question] = QUESTIONS, **settings: Any) -> RecordingFolder:
    return RecordingFolder.begin(folder, "crawler", {**SETTINGS, **settings}, questions)


def add(folder: Path, *questions: Question) -> None:
    with begin(folder) as recording:
        for question in questions:
            recording.add(question, outcome_for(question))


def test_traces_come_in_the_order_of_their_questions_whichever_was_done_first(tmp_path: Path) -> None:
    add(tmp_path, *QUESTIONS[4:], *QUESTIONS[2::-1])
    with begin(tmp_path) as recording:
        assert [one.question_id for one in QUESTIONS if not recording.is_done(one.question_id)] == ["3"]
        recording.add(QUESTIONS[3], outcome_for(QUESTIONS[3]))
        summary = export_recording(recording, {"disturbance": 1.01})
        assert recording.trace_of("5") == expected()[4]
        assert recording.trace_of("3") is None
    assert list(read_traces(tmp_path / "traces.parquet")) == expected()
    assert (summary.num_questions, summary.num_traces, summary.num_failed) == (8, 7, 1)
    assert (summary.num_updates, summary.num_source_failures) == (7, 4)
    assert summary.failed_reasons == {"the search found no page": 1}
    assert list(summary.source_reasons.items()) == [("HTTP 404 Not Found", 3), ("HTTP 500 Broken", 1)]
    assert json.loads((tmp_path / "summary.json").read_text())["figures"] == {"disturbance": 1.01}
    with (tmp_path / "failures.csv").open(newline="") as stream:
        rows = [(row["question_id"], row["source"], row["reason"], row["offset_s"]) for row in csv.DictReader(stream)]
    assert rows[:3] == [
        ("1", "http://gone", "HTTP 404 Not Found", "0.500000"),
        ("3", "", "the search found no page", ""),
        ("3", "http://x", "HTTP 500 Broken", "0.100000"),
    ]


def test_a_text_is_kept_once(tmp_path: Path) -> None:
    add(tmp_path, *QUESTIONS)
    assert (tmp_path / "documents.jsonl").read_text().count(SHARED.text) == 1
    assert SHARED.text not in (tmp_path / "journal.jsonl").read_text()


@pytest.mark.parametrize("name", ["journal.jsonl", "documents.jsonl"])
def test_what_a_crash_cut_short_is_asked_again(name: str, tmp_path: Path) -> None:
    add(tmp_path, *QUESTIONS[:5])
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-7])
    with begin(tmp_path) as recording:
        missing = [one for one in QUESTIONS[:5] if not recording.is_done(one.question_id)]
        assert [one.question_id for one in missing] == ["4"]
        assert recording.num_damaged == 1
    add(tmp_path, *missing, *QUESTIONS[5:])
    with begin(tmp_path) as recording:
        assert recording.num_damaged == 0
        assert list(recording.traces()) == expected()


def test_an_entry_is_never_read_with_texts_of_another(tmp_path: Path) -> None:
    """A loss of power took the last texts; others have been written in their place since."""
    add(tmp_path, *QUESTIONS[:3])
    file = tmp_path / "documents.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    add(tmp_path, QUESTIONS[5])
    with begin(tmp_path) as recording:
        assert recording.trace_of("2") is None
        assert recording.trace_of("5") == expected()[4]


def test_a_damaged_line_costs_its_own_question(tmp_path: Path) -> None:
    add(tmp_path, *QUESTIONS)
    file = tmp_path / "journal.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b"question 4", b"question 9")
    file.write_bytes(b"".join(lines))
    with begin(tmp_path) as recording:
        assert [one.question_id for one in QUESTIONS if not recording.is_done(one.question_id)] == ["4"]


def test_a_disk_that_fills_up_leaves_what_was_kept(tmp_path: Path) -> None:
    add(tmp_path, *QUESTIONS[:2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with begin(tmp_path) as recording:
        size = max(file.stat().st_size for file in tmp_path.glob("*.jsonl"))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
            with pytest.raises(ConfigurationError, match=r"cannot be written.*Make room"):
                recording.add(QUESTIONS[2], trace_for(QUESTIONS[2]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    add(tmp_path, *QUESTIONS[2:])
    with begin(tmp_path) as recording:
        assert recording.num_damaged == 0
        assert list(recording.traces()) == expected()


def test_a_full_disk_closes_the_folder_and_leaves_the_first_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    recording = begin(tmp_path)
    recording.add(QUESTIONS[0], outcome_for(QUESTIONS[0]))
    size = (tmp_path / "documents.jsonl").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
        for question in QUESTIONS[1:3]:
            with pytest.raises(ConfigurationError, match="Make room"):
                recording.add(question, trace_for(question, "long " * 9_000))
            assert (tmp_path / "documents.jsonl").stat().st_size == size
        recording.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    add(tmp_path, *QUESTIONS[1:])
    with begin(tmp_path) as again:
        assert list(again.traces()) == expected()


def test_half_a_line_that_a_full_disk_took_is_forgotten(tmp_path: Path) -> None:
    def entry(number: int, text: str) -> dict[str, Any]:
        return {"question": str(number), "number": number, "text": text, "at": "", "trace": None}

    journal = RecordingJournal(tmp_path / "journal.jsonl", holds=lambda entry: True)
    journal.append(entry(0, "a"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "journal.jsonl").stat().st_size + 10, hard))
        with pytest.raises(OSError, match="File too large"):
            journal.append(entry(1, "b" * 10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.append(entry(2, "c"))
    assert [found["number"] for found in journal] == [0, 2]
    journal.close()
    with contextlib.closing(RecordingJournal(tmp_path / "journal.jsonl", holds=lambda entry: True)) as again:
        assert (len(again), again.num_damaged) == (2, 0)


def test_other_settings_or_questions_are_refused_by_name(tmp_path: Path) -> None:
    add(tmp_path, *QUESTIONS[:4])
    with pytest.raises(ConfigurationError, match=r'was begun with search="urls", not with search="tavily"\. A rec'):
        begin(tmp_path, search="tavily")
    with pytest.raises(ConfigurationError, match=r"was begun without depth, not with depth=2\. A recording"):
        begin(tmp_path, depth=2)
    with pytest.raises(
        ConfigurationError, match=r'without depth, not with depth=2; with networks=\["a", "b"\], not wit'
    ):
        begin(tmp_path, depth=2, networks=())
    with pytest.raises(ConfigurationError, match=r"was begun with depth=null, not with depth=\{\}\. A recording"):
        begin(tmp_path, depth={})
    with pytest.raises(ConfigurationError, match=r"without d, not with d=0; and 2 more\. A recording"):
        begin(tmp_path, **dict.fromkeys("abcdef", 0))
    with pytest.raises(ConfigurationError, match="holds a recording of 'crawler', not 'anns'"):
        RecordingFolder.begin(tmp_path, "anns", SETTINGS, QUESTIONS)
    with pytest.raises(ConfigurationError, match="question '3', which is not among the 3 to be asked"):
        begin(tmp_path, QUESTIONS[:3])
    with pytest.raises(ConfigurationError, match=r"question '0' as number 1, .*; now number 8"):
        begin(tmp_path, QUESTIONS[::-1])
    with pytest.raises(ConfigurationError, match=r"'question 1\?'; now number 2 is 'other'"):
        begin(tmp_path, [QUESTIONS[0], Question("1", "other"), *QUESTIONS[2:]])
    begin(tmp_path, QUESTIONS[:4]).close()
    begin(tmp_path, [*QUESTIONS, Question("8", "more?")]).close()


def test_settings_with_which_nothing_was_recorded_do_not_bind(tmp_path: Path) -> None:
    begin(tmp_path, search="wrong").close()
    add(tmp_path, QUESTIONS[0])


def test_a_folder_without_a_trace_begins_anew_with_other_settings_or_questions(tmp_path: Path) -> None:
    add(tmp_path, QUESTIONS[3])
    with begin(tmp_path) as recording:
        assert recording.is_done("3")
        export_recording(recording)
    with begin(tmp_path, search="tavily") as recording:
        assert (len(recording), recording.tag) == (0, "crawler")
        assert not (tmp_path / "summary.json").exists()
        recording.add(QUESTIONS[3], outcome_for(QUESTIONS[3]))
    with begin(tmp_path, QUESTIONS[::-1], search="tavily") as recording:
        assert not recording.is_done("3")
        recording.add(QUESTIONS[0], outcome_for(QUESTIONS[0]))
    with begin(tmp_path, QUESTIONS[::-1], search="tavily") as recording:
        assert list(recording.traces()) == expected()[:1]


def test_other_pages_of_a_question_are_refused_where_they_are_asked(tmp_path: Path) -> None:
    def begin_with(*urls: str, asks_urls: bool = True) -> RecordingFolder:
        return RecordingFolder.begin(tmp_path, "crawler", {}, [Question("0", "why?", urls)], asks_urls=asks_urls)

    with begin_with("http://a", asks_urls=False) as recording:
        recording.add(Question("0", "why?"), trace_for(QUESTIONS[0]))
    with begin_with("http://b") as recording:  # what was kept without is taken as it is
        recording.add(Question("0", "why?", ("http://b",)), trace_for(QUESTIONS[0]))
    begin_with("http://b").close()
    begin_with("http://c", asks_urls=False).close()
    with pytest.raises(ConfigurationError, match=r"question '0' with other pages \(urls\)"):
        begin_with("http://c")


@pytest.mark.parametrize("how", ["deleted", "renamed", "replaced", "emptied"])
def test_a_folder_that_goes_away_is_noticed(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    recording = begin(folder)
    recording.add(QUESTIONS[0], outcome_for(QUESTIONS[0]))
    if how == "emptied":
        (folder / "journal.jsonl").unlink()
    elif how == "deleted":
        shutil.rmtree(folder)
    else:
        folder.rename(tmp_path / "elsewhere")
    if how == "replaced":
        folder.mkdir()
    for write in (
        lambda: recording.add(QUESTIONS[1], outcome_for(QUESTIONS[1])),
        recording.sync,
        lambda: export_recording(recording),
    ):
        with pytest.raises(ConfigurationError, match=r"deleted or re(named|placed) while it was recorded to"):
            write()
    recording.close()
    assert how != "replaced" or not list(folder.iterdir())
    begin(tmp_path / ("elsewhere" if how == "renamed" else "out")).close()


def test_a_folder_of_something_else_or_in_use_is_refused(tmp_path: Path) -> None:
    with begin(tmp_path / "a"), pytest.raises(ConfigurationError, match="in use"):
        begin(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"holds 'notes\.txt' and no recording"):
        begin(tmp_path / "b")
    with pytest.raises(ConfigurationError, match="holds no recording"):
        RecordingFolder.open(tmp_path / "b")
    (tmp_path / "c").write_text("a file")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        begin(tmp_path / "c")


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 9}', '{"format": 1, "tag": 7}'])
def test_settings_that_cannot_be_read_are_named(content: str, tmp_path: Path) -> None:
    add(tmp_path, QUESTIONS[0])
    (tmp_path / "recording.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"recording\.json"):
        RecordingFolder.open(tmp_path)


def test_texts_that_no_format_holds_are_made_whole(tmp_path: Path) -> None:
    bad = Chunk(
        "nul \0, half \ud83d, whole \U0001f600", "http://\udc00", metadata={"when": {1, 2}, "odd": float("nan")}
    )
    trace = Trace("x", "?", (TimedUpdate(0, Append(())), TimedUpdate(1, Append(bad))), tag="crawler")
    with begin(tmp_path) as recording:
        kept = recording.add(QUESTIONS[0], replace(trace, failures=(TimedFailure(0, "a\0", "b\ud800"),)))
        assert isinstance(kept, Trace)
        export_recording(recording)
        publish_recording(recording, tmp_path / "published")
        assert list(recording.traces()) == list(read_traces(tmp_path / "traces.parquet")) == [kept]
    (chunk,) = kept.final_chunks
    assert (chunk.text, chunk.source) == ("nul \ufffd, half \ufffd, whole \U0001f600", "http://\ufffd")


@pytest.mark.parametrize(
    "metadata",
    [None, 0, {"pair": "\ud83d\ude00"}, {"\ud83d\ude00": 1}, {"deep": {"huge": 10**5000}}],
    ids=["none", "zero", "pair", "pair as name", "huge"],
)
def test_metadata_is_kept_as_it_is_read_back(metadata: Any, tmp_path: Path) -> None:
    trace = Trace("x", "?", (TimedUpdate(1, Append(Chunk("text", metadata=metadata))),), tag="crawler")
    with begin(tmp_path) as recording:
        kept = recording.add(QUESTIONS[0], trace)
        assert isinstance(kept, Trace)
        export_recording(recording)
        assert list(recording.traces()) == list(read_traces(tmp_path / "traces.parquet")) == [kept]


def test_a_number_that_is_too_long_is_a_failure_of_its_question(tmp_path: Path) -> None:
    trace = Trace("x", "?", (TimedUpdate(1, Append(Chunk("text", metadata={"huge": 10**5000}))),), tag="crawler")
    with begin(tmp_path) as recording:
        kept = recording.add(QUESTIONS[0], trace)
    assert isinstance(kept, RecordingError)
    assert "metadata=<dict> is not what JSON holds" in kept.reason


def test_a_trace_that_cannot_be_written_is_a_failure_of_its_question(tmp_path: Path) -> None:
    with begin(tmp_path) as recording:
        kept = recording.add(QUESTIONS[0], trace_for(QUESTIONS[0], "x" * ((1 << 24) + 1)))
        assert isinstance(kept, RecordingError)
        assert "characters, where at most" in kept.reason
        assert recording.is_done("0")
        assert not recording.is_done("0", retry_failed=True)


@pytest.mark.parametrize("name", [".", "..", "work", "work/..", "work/out", "work/out/..", "link", "work/../work"])
def test_the_published_form_goes_to_a_folder_of_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "work" if name[0] == "." else tmp_path)
    with begin(tmp_path / "work" / "out") as recording:
        recording.add(QUESTIONS[0], outcome_for(QUESTIONS[0]))
        before = sorted(tmp_path.rglob("*"))
        for ask in (check_published_target, lambda target, recording: publish_recording(recording, target)):
            with pytest.raises(ConfigurationError, match=r"is a link|or holds it"):
                ask(Path(name), recording)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_published_form_is_replaced_by_its_own_recording_alone(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "query_0.csv").write_text("")
    with begin(tmp_path / "a") as recording:
        for question in QUESTIONS[:2]:
            recording.add(question, outcome_for(question))
        publish_recording(recording, published := tmp_path / "published")
        dropped = publish_recording(recording, published)
        assert "failures (of 1)" in dropped
        with pytest.raises(ConfigurationError, match="is there already"):
            publish_recording(recording, other)
        (published / "notes.txt").write_text("mine")
        with pytest.raises(ConfigurationError, match=r"holds 'notes\.txt', which was not written"):
            publish_recording(recording, published)
        assert (published / "notes.txt").read_text() == "mine"
        (published / "notes.txt").unlink()
    read = read_traces(published)
    assert [trace.trace_id for trace in read] == ["crawler-0", "crawler-1"]
    with begin(tmp_path / "b") as recording, pytest.raises(ConfigurationError, match="is there already"):
        publish_recording(recording, published)


@dataclass
class Script:
    """A recorder whose outcomes are known, and which says what is under way."""

    concurrency: int = 2
    tag: str = "crawler"
    asked: list[str] = field(default_factory=list)
    active: int = 0
    most: int = 0
    stop_at: str = ""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False
    error: BaseException | None = None

    def settings(self) -> Mapping[str, Any]:
        return SETTINGS

    async def start(self) -> Script:
        return self

    async def record(self, question: Question) -> Trace:
        self.asked.append(question.question_id)
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            if question.question_id == self.stop_at:
                self.stopped.set()
                if self.error is not None:
                    raise self.error
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        finally:
            self.active -= 1
        if isinstance(outcome := outcome_for(question), RecordingError):
            raise outcome
        return outcome

    async def aclose(self) -> None:
        self.is_closed = True


async def test_a_run_asks_so_many_at_once_and_says_how_far_it_is(tmp_path: Path) -> None:
    script, seen = Script(concurrency=3), list[RecordingProgress]()
    summary = await run_recording(script, QUESTIONS, tmp_path, on_progress=seen.append)
    assert (script.most, script.active, script.is_closed) == (3, 0, True)
    assert [progress.num_done for progress in seen] == list(range(1, 9))
    assert (seen[-1].num_failed, seen[-1].num_questions) == (1, 8)
    assert summary.num_traces == 7
    assert list(read_traces(tmp_path / "traces.parquet")) == expected()


async def test_a_run_that_was_cancelled_goes_on_where_it_was(tmp_path: Path) -> None:
    script = Script(concurrency=1, stop_at="5")
    task = asyncio.create_task(run_recording(script, QUESTIONS, tmp_path))
    await script.stopped.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert (script.active, script.is_closed) == (0, True)
    assert not (tmp_path / "summary.json").exists()
    again = Script(concurrency=4)
    summary = await run_recording(again, QUESTIONS, tmp_path)
    assert again.asked[-3:] == ["5", "6", "7"]
    assert set(again.asked) <= {"4", "5", "6", "7"}  # what had not been written down when it was cancelled
    assert summary.num_questions == 8
    assert list(read_traces(tmp_path / "traces.parquet")) == expected()
    once_more = Script()
    assert await run_recording(once_more, QUESTIONS, tmp_path) == summary
    assert once_more.asked == []


async def test_an_error_of_the_recorder_ends_the_run_and_keeps_what_is_done(tmp_path: Path) -> None:
    script = Script(concurrency=1, stop_at="2", error=OSError("the network is gone"))
    with pytest.raises(OSError, match="network is gone"):
        await run_recording(script, QUESTIONS, tmp_path)
    assert script.is_closed
    with RecordingFolder.open(tmp_path) as recording:
        assert len(recording) == 2


async def test_failed_questions_are_asked_again_only_when_asked_for(tmp_path: Path) -> None:
    await run_recording(Script(), QUESTIONS, tmp_path)
    more = [*QUESTIONS, Question("8", "more?")]
    script = Script()
    await run_recording(script, more, tmp_path)
    assert script.asked == ["8"]
    script = Script()
    summary = await run_recording(script, more, tmp_path, retry_failed=True)
    assert script.asked == ["3"]
    assert (summary.num_questions, summary.num_failed) == (9, 1)


async def test_who_asks_elsewhere_may_answer_twice_but_not_too_little(tmp_path: Path) -> None:
    async def twice(_: Any, questions: Sequence[Question]) -> AsyncGenerator[tuple[Question, Outcome], None]:
        for question in [*questions[:4], *questions]:
            yield question, outcome_for(question)

    async def too_little(_: Any, questions: Sequence[Question]) -> AsyncGenerator[tuple[Question, Outcome], None]:
        yield questions[0], outcome_for(questions[0])

    summary = await run_recording(Script(), QUESTIONS, tmp_path / "a", outcomes=twice)
    assert summary.num_questions == 8
    assert len((tmp_path / "a" / "journal.jsonl").read_bytes().splitlines()) == 8
    with pytest.raises(ConfigurationError, match="7 of 8 questions were not answered"):
        await run_recording(Script(), QUESTIONS, tmp_path / "b", outcomes=too_little)


async def test_figures_are_measured_at_the_end_and_kept(tmp_path: Path) -> None:
    async def measure(recording: RecordingFolder) -> dict[str, float]:
        return {"disturbance": float(len(recording))}

    summary = await run_recording(Script(), QUESTIONS, tmp_path, measure=measure)
    assert summary.figures == {"disturbance": 8.0}
    assert await run_recording(Script(), QUESTIONS, tmp_path, measure=measure) == summary
    with RecordingFolder.open(tmp_path) as recording:
        assert export_recording(recording) == summary


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
@pytest.mark.parametrize("name", ["traces.parquet", "failures.csv", "summary.json"])
async def test_results_that_are_missing_or_damaged_are_written_again(name: str, damage: str, tmp_path: Path) -> None:
    async def measure(recording: RecordingFolder) -> dict[str, float]:
        return {"disturbance": 1.0}

    summary = await run_recording(Script(), QUESTIONS, tmp_path, measure=measure)
    file = tmp_path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "short" else b"XXXX," + content[5:200] + b"\n")
    script = Script()
    assert await run_recording(script, QUESTIONS, tmp_path, measure=measure) == summary
    assert script.asked == []
    assert list(read_traces(tmp_path)) == expected()
    if name != "traces.parquet":
        assert file.read_bytes() == content


def test_a_kind_whose_cases_have_the_same_words_is_called_by_them(tmp_path: Path) -> None:
    failures = tuple(
        TimedFailure(0, "x", reason)
        for reason in ("host name 'a.org' cannot be resolved",) * 2 + ("took 2.5 s", "took 3.5 s")
    )
    outcomes = [(QUESTIONS[0], RecordingError("http://a.org cannot be asked", failures))]
    summary = summary_of(tmp_path, outcomes, {})
    assert summary.failed_reasons == {"http://a.org cannot be asked": 1}
    assert summary.source_reasons == {"host name 'a.org' cannot be resolved": 2, "took N s": 2}


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("HTTP 404 Not Found", "HTTP 404 Not Found"),
        ("http://a.org/x?y=1 took 12.5 s", "URL took N s"),
        ("robots.txt of https://a.org forbids it for 'stream2llm'", "robots.txt of URL forbids it for '…'"),
        ("not finished within page_timeout_s=10.0", "not finished within page_timeout_s=10.0"),
    ],
)
def test_reasons_of_a_kind_are_counted_together(reason: str, kind: str) -> None:
    assert kind_of_reason(reason) == kind
