"""Drives a recording: asks what has not been asked, keeps each outcome at once, and writes the results at the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stream2llm_sdk.errors import ConfigurationError, RecordingError
from stream2llm_sdk.tasks import cancel_and_wait, uncancelled
from stream2llm_sdk.traces.recording.exports import (
    check_published_target,
    earlier_summary,
    export_recording,
    exports_are_whole,
    publish_recording,
)
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.recorder import Outcome, OutcomeSource, Recorder, RecorderSpec
from stream2llm_sdk.traces.recording.recording import RecordingFolder
from stream2llm_sdk.traces.recording.recording_config import writing
from stream2llm_sdk.traces.recording.summary import RecordingSummary

__all__ = ["RecordingProgress", "record_here", "run_recording"]

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class RecordingProgress:
    """How far a recording is.

    Attributes:
        num_questions: of the whole recording.
        num_done: of them, those that have been asked, in earlier runs too.
        num_failed: of those asked in this run, the ones for which nothing could be recorded.
        num_before: of them, those that had been asked when this run began.
        elapsed_s: since this run began to ask.
    """

    num_questions: int
    num_done: int
    num_failed: int
    num_before: int
    elapsed_s: float

    @property
    def questions_per_s(self) -> float:
        """The rate of this run so far."""
        return (self.num_done - self.num_before) / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True)
class _End:
    """The last item of a queue."""

    error: BaseException | None = None


async def record_here(
    spec: RecorderSpec, questions: Sequence[Question]
) -> AsyncGenerator[tuple[Question, Outcome], None]:
    """Records on this event loop, `spec.concurrency` questions at the same time.

    Raises:
        ConfigurationError: the recorder cannot work as it is described.
    """
    recorder = await spec.start()
    try:
        found: asyncio.Queue[tuple[Question, Outcome] | _End] = asyncio.Queue(spec.concurrency)
        producer = asyncio.create_task(_produce(recorder, spec.concurrency, questions, found), name="record")
        try:
            while not isinstance(item := await found.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            await cancel_and_wait(producer)
    finally:
        await recorder.aclose()


async def _produce(
    recorder: Recorder,
    concurrency: int,
    questions: Sequence[Question],
    found: asyncio.Queue[tuple[Question, Outcome] | _End],
) -> None:
    remaining = iter(questions)
    end = _End()
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(questions))):
                tasks.create_task(_record(recorder, remaining, found))
    except BaseExceptionGroup as group:
        end = _End(group.exceptions[0])
    await found.put(end)


async def _record(
    recorder: Recorder, remaining: Iterator[Question], found: asyncio.Queue[tuple[Question, Outcome] | _End]
) -> None:
    for question in remaining:
        try:
            outcome: Outcome = await recorder.record(question)
        except RecordingError as error:
            outcome = error
        await found.put((question, outcome))


async def run_recording(
    spec: RecorderSpec,
    questions: Sequence[Question],
    folder: Path,
    *,
    outcomes: OutcomeSource = record_here,
    on_progress: Callable[[RecordingProgress], None] | None = None,
    retry_failed: bool = False,
    measure: Callable[[RecordingFolder], Awaitable[Mapping[str, float]]] | None = None,
    publish: Path | None = None,
    on_published: Callable[[tuple[str, ...]], None] | None = None,
) -> RecordingSummary:
    """Records traces for questions into a folder, or goes on with the recording that is in it.

    What was recorded is kept question by question, so that a run may end at any moment, killed too: the next one with
    the same questions and settings asks only those that are missing, and its result is what one run would have given
    but for times. There may be more questions than before, if those from before come first.

    Args:
        spec: what records.
        questions: in the order in which their traces will stand; each id once.
        folder: where the recording is, or will be.
        outcomes: where the questions are asked.
        on_progress: called after each question.
        retry_failed: asks again the questions for which nothing could be recorded earlier.
        measure: called when all questions have been asked, with the recording; what it returns are the summary's
            figures.
        publish: a folder to write the traces to in the published format of their kind, at the end.
        on_published: called with what that format does not hold.

    Raises:
        ConfigurationError: the folder holds something else, is in use or cannot be written; or the recording in it was
            begun with other settings or questions; or the recorder cannot work as it is described.
    """
    if not questions:
        raise ConfigurationError("there are no questions to record")
    asks_urls = getattr(spec, "asks_urls", False)  # a spec whose questions' pages do not matter need not say so
    recording = await _in_thread(
        lambda: RecordingFolder.begin(folder, spec.tag, spec.settings(), questions, asks_urls=asks_urls)
    )
    try:
        if publish is not None:
            check_published_target(publish, recording)
        to_do = [one for one in questions if not recording.is_done(one.question_id, retry_failed=retry_failed)]
        if to_do:
            with writing(folder):
                recording.discard_exports()
            await _ask(recording, outcomes(spec, to_do), len(questions), len(to_do), on_progress)
            await _in_thread(recording.sync)
        summary = None if to_do else await _in_thread(lambda: earlier_summary(recording))
        if summary is None:
            figures = await measure(recording) if measure is not None else {}
            summary = await _in_thread(lambda: export_recording(recording, figures))
        elif not await _in_thread(partial(exports_are_whole, recording, summary)):
            summary = await _in_thread(lambda: export_recording(recording))
        if publish is not None and summary.num_traces:
            dropped = await _in_thread(lambda: publish_recording(recording, publish))
            if on_published is not None:
                on_published(dropped)
        return summary
    finally:
        await _in_thread(recording.close)


async def _ask(
    recording: RecordingFolder,
    found: AsyncGenerator[tuple[Question, Outcome], None],
    num_questions: int,
    num_to_do: int,
    on_progress: Callable[[RecordingProgress], None] | None,
) -> None:
    began_s, num_before = time.monotonic(), num_questions - num_to_do
    done: set[str] = set()
    num_failed = 0
    async with contextlib.aclosing(found):
        async for question, outcome in found:
            if question.question_id in done:
                continue  # who asks elsewhere may ask twice, after a loss
            kept = await _in_thread(lambda: recording.add(question, outcome))  # noqa: B023 - awaited here
            done.add(question.question_id)
            num_failed += isinstance(kept, RecordingError)
            if on_progress is not None:
                elapsed_s = time.monotonic() - began_s
                num_done = num_before + len(done)
                on_progress(RecordingProgress(num_questions, num_done, num_failed, num_before, elapsed_s))
    if len(done) < num_to_do:
        raise ConfigurationError(
            f"{num_to_do - len(done):,} of {num_to_do:,} questions were not answered by what was to ask them; what was "
            "recorded is kept: go on with the same command"
        )


async def _in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Runs `work` to its end beside the event loop, which goes on; also if the caller is cancelled meanwhile."""
    result: Any = await uncancelled(asyncio.to_thread(work))
    return result  # type: ignore[no-any-return]
