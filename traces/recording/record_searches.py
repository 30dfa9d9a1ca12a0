"""Recording vector searches from Python, in one call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from stream2llm_sdk.traces.recording.anns import SearchSpec, measured_disturbance
from stream2llm_sdk.traces.recording.questions import Question, read_questions
from stream2llm_sdk.traces.recording.recorder import OutcomeSource
from stream2llm_sdk.traces.recording.run import RecordingProgress, record_here, run_recording
from stream2llm_sdk.traces.recording.summary import RecordingSummary

__all__ = ["record_searches"]


async def record_searches(
    questions: str | Iterable[Question | str],
    out: str | os.PathLike[str],
    *,
    publish: str | os.PathLike[str] | None = None,
    retry_failed: bool = False,
    on_progress: Callable[[RecordingProgress], None] | None = None,
    outcomes: OutcomeSource = record_here,
    **options: Any,
) -> RecordingSummary:
    """Records vector searches into a folder, or goes on with the recording in it: `stream2llm trace record anns`.

    ::

        summary = await record_searches("questions.txt", "searches", index="my-index", options=SearchOptions(gate=None))
        print(summary.num_traces, summary.figures["disturbance"])

    Args:
        questions: texts or `Question`s, or where they are read from, as `read_questions` takes it.
        out: the folder of the recording; see `RecordingFolder`.
        publish: a folder to write the published form of the traces to, at the end.
        retry_failed: asks again the questions for which nothing could be recorded earlier.
        on_progress: called after each question.
        outcomes: where the searches run; `record_on_ray(…)` for a cluster, where their disturbance is not measured.
        options: as in `SearchSpec`.

    Raises:
        ConfigurationError: an option has a value that cannot work, the questions cannot be read, or the folder holds
            something else or a recording with other settings or questions.
        IndexFormatError: there is no index, or it is damaged.
        MissingExtraError: what the extras `diskann` and `traces` bring is not installed.
    """
    spec = SearchSpec(**options)
    if isinstance(questions, str):
        asked = await asyncio.to_thread(read_questions, questions)
    else:
        asked = [one if isinstance(one, Question) else Question(str(n), one) for n, one in enumerate(questions)]
    return await run_recording(
        spec,
        asked,
        Path(out),
        outcomes=outcomes,
        on_progress=on_progress,
        retry_failed=retry_failed,
        measure=partial(measured_disturbance, spec) if outcomes is record_here else None,
        publish=None if publish is None else Path(publish),
    )
