"""The folder of a recording: what was recorded so far, from which it goes on however it was ended.

`recording.json` has what is recorded, and how. `journal.jsonl` has an entry for each question that has been asked and
`documents.jsonl` the texts that these name: both together are the recording. The rest is made of them once all
questions have been asked, or by `export`: `traces.parquet`, `failures.csv` and `summary.json`.

One process records into a folder at a time, and it alone writes the journal, wherever the questions are asked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from stream2llm_sdk.errors import ConfigurationError, RecordingError
from stream2llm_sdk.files import FolderLock
from stream2llm_sdk.traces.extras import require_pyarrow
from stream2llm_sdk.traces.losses import check_texts
from stream2llm_sdk.traces.parquet_rows import row_of, trace_of
from stream2llm_sdk.traces.recording.documents import DocumentFile
from stream2llm_sdk.traces.recording.journal import Entry, RecordingJournal, num_without_trace
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.recorder import Outcome
from stream2llm_sdk.traces.recording.recording_config import (
    CONFIG_FILE,
    begin_config,
    check_settings,
    prepare_config,
    read_config,
    writing,
)
from stream2llm_sdk.traces.recording.summary import nothing_recorded
from stream2llm_sdk.traces.recording.whole_text import whole_failure, whole_text, with_whole_texts
from stream2llm_sdk.traces.trace import TimedFailure, Trace

__all__ = [
    "CONFIG_FILE",
    "FAILURES_FILE",
    "SUMMARY_FILE",
    "TRACES_FILE",
    "RecordingFolder",
    "why_no_trace",
    "why_not_exported",
]

TRACES_FILE, FAILURES_FILE, SUMMARY_FILE = "traces.parquet", "failures.csv", "summary.json"

_JOURNAL_FILE, _DOCUMENTS_FILE = "journal.jsonl", "documents.jsonl"
_SYNC_EVERY, _SYNC_AFTER_S = 64, 5.0


class RecordingFolder:
    """A recording that is open: nobody else can write into it. Use it as a context, or `close` it.

    It is made by `begin`, which opens one to record, or `open`, for one that is there.

    Attributes:
        path: the folder.
        tag: what kind of retrieval is recorded.
        recording_id: what tells this recording from any other.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], lock: FolderLock) -> None:
        """Use `begin` or `open`."""
        self.path = path
        self.tag: str = config["tag"]
        self.recording_id: str = config["recording_id"]
        self._lock = lock
        self._documents = DocumentFile(path / _DOCUMENTS_FILE)
        try:
            self._journal = RecordingJournal(path / _JOURNAL_FILE, holds=self._holds)
        except BaseException:
            self._documents.close()
            raise
        self._num_unsynced, self._synced_s = 0, monotonic()
        self._numbers: dict[str, int] = {}
        self._keeps_urls = False

    @classmethod
    def begin(
        cls,
        path: Path,
        tag: str,
        settings: Mapping[str, Any],
        questions: Sequence[Question],
        *,
        asks_urls: bool = False,
    ) -> RecordingFolder:
        """Begins a recording, or goes on with one. One in which there is no trace yet begins anew where the settings or
        questions are others.

        Args:
            path: the folder, which is made if need be.
            tag: what kind of retrieval is recorded.
            settings: how, as JSON takes it; a recording only goes on with the same.
            questions: in the order in which their traces will stand.
            asks_urls: whether the pages that a question names decide what is recorded, and must be the same too.

        Raises:
            ConfigurationError: the folder cannot be written, is in use or holds something else; or the recording in it
                was begun with other settings or other questions.
            MissingExtraError: pyarrow, which writes the traces, is not installed.
        """
        require_pyarrow()
        settings = json.loads(json.dumps(settings))
        lock = _locked(path)
        try:
            with writing(path):
                prepare_config(path, tag, settings, path / _JOURNAL_FILE)
                folder = cls(path, read_config(path), lock)
        except BaseException:
            lock.release()
            raise
        try:
            folder._go_on(tag, settings, questions, asks_urls)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RecordingFolder:
        """Opens a recording that is there, whole or not.

        Raises:
            ConfigurationError: there is none, it is in use, or of another version.
        """
        path = Path(path)
        if not (path / CONFIG_FILE).is_file():
            raise ConfigurationError(f"{path} holds no recording: name the folder that a recording was written to")
        lock = _locked(path)
        try:
            with writing(path):
                return cls(path, read_config(path), lock)
        except BaseException:
            lock.release()
            raise

    def __len__(self) -> int:
        """Number of questions that have been asked."""
        return len(self._journal)

    @property
    def num_traces(self) -> int:
        """Number of questions for which something could be recorded."""
        return self._journal.num_traces

    @property
    def num_damaged(self) -> int:
        """Questions whose entries did not hold when the folder was opened, and are asked again."""
        return self._journal.num_damaged

    def is_done(self, question_id: str, *, retry_failed: bool = False) -> bool:
        """Whether the question `question_id` need not be asked again: it gave a trace, or, unless `retry_failed`,
        nothing could be recorded for it."""
        return self._journal.has_trace(question_id) or (question_id in self._journal and not retry_failed)

    def add(self, question: Question, outcome: Outcome) -> Outcome:
        """Keeps what became of a question, in place of an earlier outcome. When it returns it survives the end of the
        process; what came in the last seconds may be lost with the machine's power.

        Args:
            question: what was asked.
            outcome: its trace, or why there is none.

        Returns:
            The outcome that was kept: a RecordingError for a trace that cannot be written.

        Raises:
            ConfigurationError: the disk is full, or broken, and what was kept before holds; or the folder was deleted,
                renamed or replaced.
        """
        row: dict[str, Any] | None = None
        if isinstance(outcome, Trace):
            try:
                outcome = with_whole_texts(outcome, f"{self.tag}-{question.question_id}", question.text)
                check_texts(outcome)
                row = row_of(outcome)
            except ConfigurationError as error:
                outcome = RecordingError(f"its trace cannot be written: {error}")
        else:
            outcome = RecordingError(whole_text(outcome.reason), tuple(map(whole_failure, outcome.failures)))
        self.check_in_place()
        with writing(self.path):
            self._add(question, outcome, row)
        return outcome

    def _add(self, question: Question, outcome: Outcome, row: dict[str, Any] | None) -> None:
        entry: Entry = {"question": question.question_id, "number": self._numbers[question.question_id]}
        entry |= {"text": question.text, "at": datetime.now(UTC).isoformat(timespec="milliseconds")}
        if self._keeps_urls:
            entry["urls"] = _digest(question.urls)
        if isinstance(outcome, RecordingError):
            failures = [[failure.offset_s, failure.source, failure.reason] for failure in outcome.failures]
            entry |= {"trace": None, "reason": outcome.reason, "failures": failures}
        else:
            assert row is not None, "a trace has a row"
            row["chunks"] = self._documents.refs(row["chunks"])
            entry["trace"] = row
        self._journal.append(entry)
        self._num_unsynced += 1
        if self._num_unsynced >= _SYNC_EVERY or monotonic() - self._synced_s > _SYNC_AFTER_S:
            self.sync()

    def sync(self) -> None:
        """Has everything reach the disk.

        Raises:
            ConfigurationError: the disk is full, or broken; or the folder was deleted, renamed or replaced.
        """
        self.check_in_place()
        with writing(self.path):
            self._documents.sync()
            self._journal.sync()
        self._num_unsynced, self._synced_s = 0, monotonic()

    def check_in_place(self) -> None:
        """Raises ConfigurationError where the folder, or the recording in it, was deleted, renamed or replaced."""
        if not self._lock.is_of(self.path):
            there = "; what is there now is another folder, which is left alone" if self.path.exists() else ""
            says = f"{self.path} was deleted or renamed while it was recorded to{there}"
        elif not (self._journal.is_in_place() and self._documents.is_in_place()):
            says = f"files of the recording in {self.path} were deleted or replaced while it was recorded to"
        else:
            return
        raise ConfigurationError(
            f"{says}. Move the recording back and go on with the same command, which begins anew where nothing is left"
        )

    def traces(self) -> Iterator[Trace]:
        """What was recorded, in the order of the questions."""
        for entry in self._journal:
            if (trace := self._trace(entry)) is not None:
                yield trace

    def trace_of(self, question_id: str) -> Trace | None:
        """What was recorded for a question; None where it has not been asked, or nothing could be recorded."""
        return self._trace(self._journal[question_id]) if question_id in self._journal else None

    def outcomes(self) -> Iterator[tuple[Question, Outcome]]:
        """What became of each question that has been asked, in their order."""
        for entry in self._journal:
            question = Question(entry["question"], entry["text"])
            trace = self._trace(entry)
            if trace is not None:
                yield question, trace
            else:
                failures = tuple(TimedFailure(*failure) for failure in entry["failures"])
                yield question, RecordingError(entry["reason"], failures)

    def discard_exports(self) -> None:
        """Deletes what was made of the recording, which would be read in place of it if it grew and did not end.

        Raises:
            ConfigurationError: the folder was deleted, renamed or replaced.
            OSError: they cannot be deleted.
        """
        self.check_in_place()
        for name in (SUMMARY_FILE, TRACES_FILE, FAILURES_FILE):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the folder for others to open. Idempotent."""
        with ExitStack() as stack:
            stack.callback(self._lock.release)
            stack.callback(self._documents.close)
            stack.callback(self._journal.close)
            with suppress(ConfigurationError, ValueError):  # what failed before fails again; or it is closed
                self.sync()

    def __enter__(self) -> RecordingFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _holds(self, entry: Entry) -> bool:
        """Whether the documents that an entry names are there: a loss of power may have taken them alone."""
        row = entry["trace"]
        return row is None or all(number < len(self._documents) for number, _ in row["chunks"])

    def _trace(self, entry: Entry) -> Trace | None:
        if (row := entry["trace"]) is None:
            return None
        return trace_of({**row, "chunks": self._documents.chunks(row["chunks"])}, self._journal.file, entry["number"])

    def _go_on(self, tag: str, settings: Mapping[str, Any], questions: Sequence[Question], asks_urls: bool) -> None:
        self._keeps_urls = asks_urls
        self._numbers = {question.question_id: number for number, question in enumerate(questions)}
        try:
            check_settings(self.path, read_config(self.path), tag, settings)
            self._check_questions(questions)
        except ConfigurationError:
            if self.num_traces:
                raise
            with writing(self.path):
                self.discard_exports()
                self._journal.clear()
                self._documents.clear()
                config = begin_config(self.path, tag, settings)
            self.tag, self.recording_id = config["tag"], config["recording_id"]

    def _check_questions(self, questions: Sequence[Question]) -> None:
        """Raises ConfigurationError where they are not those that have been asked, and perhaps more."""
        for question_id, number, text, urls in self._journal.texts():
            now = self._numbers.get(question_id)
            if now is None:
                raise ConfigurationError(
                    f"{self.path} has recorded question {question_id!r:.80}, which is not among the {len(questions):,} "
                    "to be asked: give the same questions, and a --limit that is not smaller, or another folder"
                )
            if now != number or questions[now].text != text:
                raise ConfigurationError(
                    f"{self.path} has recorded question {question_id!r:.80} as number {number + 1:,}, {text!r:.80}; "
                    f"now number {now + 1:,} is {questions[now].text!r:.80}: give the same questions, or another folder"
                )
            if self._keeps_urls and urls not in (None, _digest(questions[now].urls)):
                raise ConfigurationError(
                    f"{self.path} has recorded question {question_id!r:.80} with other pages (urls) than it names now: "
                    "give the same questions, or another folder"
                )


def why_no_trace(folder: Path, num_asked: int) -> str:
    """Why a recording holds no trace although so many questions have been asked, and what to do."""
    if not num_asked:
        return "no question has been asked in it yet: go on with the command that records"
    see = f", {FAILURES_FILE} says why" if (folder / FAILURES_FILE).is_file() else ""
    return (
        f"{nothing_recorded(num_asked)}{see}: record again, with the same command and --retry-failed, or with other "
        "options"
    )


def why_not_exported(folder: Path) -> str:
    """Why a recording's traces are not written, and what to do. Somebody may be recording there."""
    num_asked = num_without_trace(folder / _JOURNAL_FILE)
    if num_asked is not None:
        return why_no_trace(folder, num_asked)
    return f"this recording's {TRACES_FILE} is not written yet: `stream2llm trace record export {folder}` writes it"


def _digest(urls: Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps(urls).encode(), digest_size=8).hexdigest()


def _locked(path: Path) -> FolderLock:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return FolderLock(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}. Give another folder") from error
