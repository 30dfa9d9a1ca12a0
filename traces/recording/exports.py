"""What is made of a recording: our form, the published one, a table of what failed, and a summary."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError, RecordingError, TraceError
from stream2llm_sdk.files import write_json
from stream2llm_sdk.traces.anns_format import ANNS
from stream2llm_sdk.traces.parquet_format import write_parquet
from stream2llm_sdk.traces.parquet_seal import read_seal
from stream2llm_sdk.traces.recording.published_searches import as_published
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.recorder import Outcome
from stream2llm_sdk.traces.recording.recording import FAILURES_FILE, SUMMARY_FILE, TRACES_FILE, RecordingFolder
from stream2llm_sdk.traces.recording.recording_config import writing
from stream2llm_sdk.traces.recording.summary import RecordingSummary, summary_of
from stream2llm_sdk.traces.trace import Trace
from stream2llm_sdk.traces.trace_set import check_target, write_traces

__all__ = [
    "check_published_target",
    "earlier_summary",
    "export_recording",
    "exports_are_whole",
    "publish_recording",
]

_MARK = "recorded_as.json"
_FAILURE_COLUMNS = ("question_id", "question", "source", "reason", "offset_s")


def export_recording(recording: RecordingFolder, figures: Mapping[str, float] | None = None) -> RecordingSummary:
    """Writes `traces.parquet`, `failures.csv` and `summary.json` of all that has been recorded so far. The traces are
    in the order of their questions, whichever was done first; where there are none, there is no file of them.

    Args:
        recording: the recording.
        figures: what the recorder measured of itself; left out, what the last export of the same says.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    with writing(recording.path):
        if figures is None:
            earlier = earlier_summary(recording)
            figures = {} if earlier is None else earlier.figures
        recording.discard_exports()
        summary = summary_of(recording.path, recording.outcomes(), figures)
        if summary.num_traces:
            write_parquet(recording.traces(), recording.path / TRACES_FILE)
        _write_failures(recording.outcomes(), recording.path / FAILURES_FILE)
        write_json(recording.path / SUMMARY_FILE, summary.to_dict())
    return summary


def earlier_summary(recording: RecordingFolder) -> RecordingSummary | None:
    """The summary of a recording to which nothing was added since; None where there is none."""
    try:
        summary = RecordingSummary.read(recording.path / SUMMARY_FILE)
    except ConfigurationError:
        return None
    numbers = (summary.num_questions, summary.num_traces)
    return summary if numbers == (len(recording), recording.num_traces) else None


def exports_are_whole(recording: RecordingFolder, summary: RecordingSummary) -> bool:
    """Whether the traces and the failures that a recording's summary speaks of are in its folder, undamaged."""
    try:
        if summary.num_traces:
            seal = read_seal(recording.path / TRACES_FILE)
            if not all(seal.is_whole(group) for group in range(len(seal.groups))):
                return False
        with (recording.path / FAILURES_FILE).open(encoding="utf-8", newline="") as stream:
            num_rows = sum(len(row) == len(_FAILURE_COLUMNS) for row in csv.reader(stream))
    except (OSError, TraceError, ValueError, csv.Error):
        return False
    return num_rows == 1 + summary.num_failed + summary.num_source_failures


def _write_failures(outcomes: Iterable[tuple[Question, Outcome]], file: Path) -> None:
    """A row for each question for which nothing could be recorded, without a source, and one for each source that
    failed."""
    unfinished = file.with_name(f".{file.name}.tmp")
    with unfinished.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(_FAILURE_COLUMNS)
        for question, outcome in outcomes:
            asked = (question.question_id, question.text)
            if isinstance(outcome, RecordingError):
                rows.writerow((*asked, "", outcome.reason, ""))
            for failure in outcome.failures:
                rows.writerow((*asked, failure.source, failure.reason, f"{failure.offset_s:.6f}"))
    os.replace(unfinished, file)


def check_published_target(target: Path, recording: RecordingFolder) -> None:
    """Says before the work whether `publish_recording` can write to a folder, and replace it.

    Raises:
        ConfigurationError: it holds something else than what was made of this recording, may not be written, is a link,
            or one works or records in it.
    """
    _checked_target(target, recording)


def _checked_target(target: Path, recording: RecordingFolder) -> Path:
    """The target without links on its way."""
    if target.is_symlink():
        raise ConfigurationError(f"{str(target)!r} is a link, which is not replaced: name the folder itself")
    whole = target.resolve()
    for folder, what in ((recording.path, "the recording's own folder"), (Path(), "the current folder")):
        if folder.resolve().is_relative_to(whole):
            raise ConfigurationError(
                f"{str(target)!r} is {what}, or holds it: name a folder of its own for the published form"
            )
    if whole.is_mount():
        raise ConfigurationError(f"{str(target)!r} is where a disk is mounted: name a folder in it")
    mark = _mark(whole)
    if mark.get("recording_id") != recording.recording_id:
        check_target(target, recording.tag)
    elif strangers := sorted({path.name for path in whole.iterdir()}.difference([_MARK, *mark.get("files", ())])):
        raise ConfigurationError(
            f"{str(target)!r} holds {strangers[0]!r}, which was not written there by the recording and would be lost: "
            "move it, or name another folder"
        )
    return whole


def publish_recording(recording: RecordingFolder, target: Path) -> tuple[str, ...]:
    """Writes all traces in the published format of their kind, in place of what was made of this recording earlier.

    Returns:
        What the format does not hold and was left out, such as titles, scores and failures.

    Raises:
        ConfigurationError: the folder holds something else, or a trace cannot stand in the format.
    """
    target = _checked_target(target, recording)
    unfinished = target.with_name(f".{target.name}.{recording.recording_id}.part")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    try:
        traces: Iterable[Trace] = recording.traces()
        if recording.tag == ANNS:
            traces = map(as_published, traces)
        dropped = write_traces(traces, unfinished, kind=recording.tag, drop=True)
        files = sorted(path.name for path in unfinished.iterdir())
        mark = {"recording_id": recording.recording_id, "left_out": dropped, "files": files}
        write_json(unfinished / _MARK, mark)
        if target.exists():
            shutil.rmtree(target)
        unfinished.replace(target)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return dropped


def _mark(target: Path) -> Mapping[str, Any]:
    """What says in a published form from which recording it was made."""
    try:
        mark: Any = json.loads((target / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}
