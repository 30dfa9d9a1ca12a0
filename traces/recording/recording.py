"""The folder of a recording: what was recorded so far, from which it goes on however it was ended.

`recording.json` has what is recorded, and how. `journal.jsonl` has an entry for each question that has been asked and
`documents.jsonl` the texts that these name: both together are the recording. The rest is made of them once all
questions have been asked, or by `export`: `traces.parquet`, `failures.csv` and `summary.json`.

One process records into a folder at a time, and it alone writes the journal, wherever the questions are asked.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from stream2llm_sdk.errors import ConfigurationError, RecordingError
from stream2llm_sdk.files import FolderLock, read_json_object, require_own_folder, write_json
from stream2llm_sdk.traces.extras import require_pyarrow
from stream2llm_sdk.traces.losses import check_texts
from stream2llm_sdk.traces.parquet_rows import row_of, trace_of
from stream2llm_sdk.traces.recording.documents import DocumentFile
from stream2llm_sdk.traces.recording.journal import Entry, RecordingJournal
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.recorder import Outcome
from stream2llm_sdk.traces.recording.whole_text import whole_failure, whole_text, with_whole_texts
from stream2llm_sdk.traces.trace import TimedFailure, Trace

__all__ = ["CONFIG_FILE", "FAILURES_FILE", "SUMMARY_FILE", "TRACES_FILE", "RecordingFolder"]

CONFIG_FILE, SUMMARY_FILE = "recording.json", "summary.json"
TRACES_FILE, FAILURES_FILE = "traces.parquet", "failures.csv"

_JOURNAL_FILE, _DOCUMENTS_FILE = "journal.jsonl", "documents.jsonl"
_FORMAT = 1
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

    @classmethod
    def begin(cls, path: Path, tag: str, settings: Mapping[str, Any], questions: Sequence[Question]) -> RecordingFolder:
        """Begins a recording, or goes on with one.

        Args:
            path: the folder, which is made if need be.
            tag: what kind of retrieval is recorded.
            settings: how, as JSON takes it; a recording only goes on with the same.
            questions: in the order in which their traces will stand.

        Raises:
            ConfigurationError: the folder cannot be written, is in use or holds something else; or the recording in it
                was begun with other settings or other questions.
            MissingExtraError: pyarrow, which writes the traces, is not installed.
        """
        require_pyarrow()
        lock = _locked(path)
        try:
            config = _prepared(path, tag, json.loads(json.dumps(settings)))
            folder = cls(path, config, lock)
        except BaseException:
            lock.release()
            raise
        try:
            folder._number(questions)
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
            return cls(path, _read_config(path), lock)
        except BaseException:
            lock.release()
            raise

    def __len__(self) -> int:
        """Number of questions that have been asked."""
        return len(self._journal)

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
            ConfigurationError: the disk is full, or broken; what was kept before holds.
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
        try:
            self._add(question, outcome, row)
        except OSError as error:
            raise ConfigurationError(
                f"{self.path} cannot be written: {error.strerror or error}. Make room and go on with the same command"
            ) from error
        return outcome

    def _add(self, question: Question, outcome: Outcome, row: dict[str, Any] | None) -> None:
        entry: Entry = {"question": question.question_id, "number": self._numbers[question.question_id]}
        entry |= {"text": question.text, "at": datetime.now(UTC).isoformat(timespec="milliseconds")}
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
        """Has everything reach the disk."""
        self._documents.sync()
        self._journal.sync()
        self._num_unsynced, self._synced_s = 0, monotonic()

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
        """Deletes what was made of the recording, which would be read in place of it if it grew and did not end."""
        for name in (SUMMARY_FILE, TRACES_FILE, FAILURES_FILE):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the folder for others to open. Idempotent."""
        with suppress(OSError, ValueError):  # closed before
            self.sync()
        self._journal.close()
        self._documents.close()
        self._lock.release()

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

    def _number(self, questions: Sequence[Question]) -> None:
        """Says which place each question has.

        Raises:
            ConfigurationError: they are not those that have been asked, and perhaps more.
        """
        self._numbers = {question.question_id: number for number, question in enumerate(questions)}
        for question_id, number, text in self._journal.texts():
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


def _locked(path: Path) -> FolderLock:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return FolderLock(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}. Give another folder") from error


def _prepared(path: Path, tag: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the folder, written if nothing has been recorded there yet."""
    require_own_folder(path, (CONFIG_FILE,), "recording")
    journal = path / _JOURNAL_FILE
    if not (path / CONFIG_FILE).is_file() or not journal.is_file() or not journal.stat().st_size:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        new = {"format": _FORMAT, "release": _release(), "recording_id": uuid.uuid4().hex, "begun_at": now}
        write_json(path / CONFIG_FILE, {**new, "tag": tag, "settings": settings})
    config = _read_config(path)
    if config["tag"] != tag:
        raise ConfigurationError(f"{path} holds a recording of {config['tag']!r}, not {tag!r}: name another folder")
    begun = config["settings"]
    for name in sorted({*begun, *settings}):
        if begun.get(name) != settings.get(name):
            raise ConfigurationError(
                f"{path} was begun with {name}={begun.get(name)!r:.100} and cannot go on with "
                f"{settings.get(name)!r:.100}: give the same, or another folder"
            )
    return config


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json_object(path / CONFIG_FILE, "a recording's settings")
    if config.get("format") != _FORMAT:
        raise ConfigurationError(
            f"{path / CONFIG_FILE} has format={config.get('format')!r}; this release reads {_FORMAT}"
        )
    for name, kind in (("tag", str), ("recording_id", str), ("settings", dict)):
        if not isinstance(config.get(name), kind):
            raise ConfigurationError(f"{path / CONFIG_FILE} has {name}={config.get(name)!r:.80}: it is damaged")
    return config


def _release() -> str:
    from stream2llm_sdk import __version__

    return __version__
