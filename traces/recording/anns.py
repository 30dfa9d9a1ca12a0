"""Recording vector searches: what is searched and how, and who does it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError, RecordingError
from stream2llm_sdk.retrievers.diskann.filters import MetadataFilter
from stream2llm_sdk.retrievers.diskann.manifest import MANIFEST_FILE, Manifest
from stream2llm_sdk.retrievers.diskann.search_options import SearchOptions
from stream2llm_sdk.retrievers.embedding import Embedder
from stream2llm_sdk.traces.anns_format import ANNS
from stream2llm_sdk.traces.parquet_rows import row_of
from stream2llm_sdk.traces.recording.child_process import unpacked
from stream2llm_sdk.traces.recording.cpu_claims import one_cpu_a_core
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.search_pool import SearchPool
from stream2llm_sdk.traces.recording.search_process import Asked, SearchJob, open_index
from stream2llm_sdk.traces.trace import Trace

if TYPE_CHECKING:
    from stream2llm_sdk.traces.recording.recording import RecordingFolder

__all__ = ["MAX_DISTURBANCE", "SearchRecorder", "SearchSpec", "default_concurrency", "measured_disturbance"]

MAX_DISTURBANCE = 1.1
"""Above this, searches that ran at the same time have disturbed each other's times noticeably."""

_SAMPLE, _LEAST_SAMPLE = 32, 5
_SAMPLE_S = 20.0


def default_concurrency() -> int:
    """As many searches at once as there are CPU cores, but one, which is for all that is not searching."""
    return max(1, len(one_cpu_a_core(os.sched_getaffinity(0))) - 1)


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """Records the searches of one index. Every question's trace has an update for each window of its search.

    An update's offset is when the search held that pool, counted from the question, whose embedding is part of the
    first window; its `begin_s` is the end of the window before, and `iterations` are those done by the window's begin
    and by its end. The last update comes with the end of the search, when its pool is known to be final, even if it is
    the one before. The row number of each document in the index is in its metadata.

    Attributes:
        index: the folder of the index.
        options: how each search runs. With a gate, the pools that it lets out are recorded, as `DiskANNRetriever` sends
            them; without, every change of the pool.
        filter: which documents may be found, as `MetadataFilter` says.
        embedder: a name as `embedder_of` takes it, or a function that makes it and pickles, such as its class; None for
            the one that the index's manifest names.
        cold: whether the graph file is dropped from the page cache before each search, as if the index were much larger
            than memory.
        concurrency: searches at once, each in a process with a CPU for itself, which holds the quantiser's codes of the
            index: a quarter of a byte a dimension and document.

    Raises:
        ConfigurationError: a value is out of range, there are more searches at once than CPUs, or `cold` asks for one.
    """

    index: Path
    options: SearchOptions = field(default_factory=lambda: SearchOptions(gate=None))
    filter: Mapping[str, Any] | None = None
    embedder: str | Callable[[], Embedder] | None = None
    cold: bool = False
    concurrency: int = field(default_factory=default_concurrency)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", Path(self.index).absolute())
        MetadataFilter.of(self.filter)
        if not isinstance(self.concurrency, int) or isinstance(self.concurrency, bool) or self.concurrency < 1:
            raise ConfigurationError(f"concurrency={self.concurrency!r:.80}: give a whole number of at least 1")
        if self.cold and self.concurrency > 1:
            raise ConfigurationError(
                f"concurrency={self.concurrency} with cold=True: each search would drop what the others have read; "
                "give concurrency=1"
            )

    @property
    def tag(self) -> str:
        """'anns', as the published vector searches' traces."""
        return ANNS

    def settings(self) -> dict[str, Any]:
        """What must be the same for a recording to go on: all but where the index lies, and the concurrency.

        Raises:
            IndexFormatError: there is no index, or it is damaged.
            ConfigurationError: it was built with another embedder, or has no column that the filter needs.
        """
        open_index(self.job).close()
        manifest = Manifest.read(self.index)
        return {
            "index": hashlib.sha256((self.index / MANIFEST_FILE).read_bytes()).hexdigest(),
            "embedder": manifest.embedder,
            **asdict(self.options),
            "filter": None if self.filter is None else dict(self.filter),
            "cold": self.cold,
        }

    @property
    def job(self) -> SearchJob:
        """What a search process is told, on the machine where this is asked."""
        allowed = os.sched_getaffinity(0)
        cores = one_cpu_a_core(allowed)
        cpus = (*cores, *sorted(allowed.difference(cores), reverse=True))
        return SearchJob(self.index, self.options, self.filter, self.embedder, self.cold, cpus)

    async def start(self) -> SearchRecorder:
        """Starts the processes, and waits until they have loaded the index.

        Raises:
            ConfigurationError: there are fewer CPUs than searches at once.
            Stream2LLMError: the index cannot be opened.
        """
        self.check_cpus()
        return SearchRecorder(await SearchPool.start(self.job, self.concurrency), self.concurrency)

    def check_cpus(self) -> None:
        """Raises ConfigurationError where this machine has fewer CPUs than searches at once."""
        num_cpus = len(self.job.cpus)
        if self.concurrency > num_cpus:
            raise ConfigurationError(
                f"concurrency={self.concurrency}: {num_cpus} CPUs may be used, and searches that share one "
                f"disturb each other's times; give at most {num_cpus}"
            )


class SearchRecorder:
    """Records searches in processes. Get one from `SearchSpec.start()`."""

    def __init__(self, pool: SearchPool, concurrency: int) -> None:
        self._pool = pool
        self._concurrency = concurrency

    @property
    def cpus(self) -> list[int]:
        """The CPUs that belong to the searches."""
        return self._pool.cpus

    @property
    def process_ids(self) -> list[int]:
        """The search processes."""
        return self._pool.process_ids

    async def record(self, question: Question) -> Trace:
        """The trace of the search for one question.

        Raises:
            RecordingError: the search found nothing, or failed for this question.
            IndexFormatError: the index is damaged.
        """
        trace: Trace = unpacked(await self.record_packed(question))
        return trace

    async def record_packed(self, question: Question) -> bytes:
        """The same as the process packed it, for `unpacked` to look into where it is kept.

        Raises:
            RecordingError: the processes that searched died.
        """
        return await self._pool.search(Asked(question.question_id, question.text))

    async def disturbance(self, questions: Sequence[Question]) -> float | None:
        """How much longer searches take in a recording than alone: the median, over some of the questions, of the times
        of their search while every process searches and answers are being written down, over its time alone.

        Both are measured now, one after the other, so that both find the same in the page cache. Takes up to a minute.
        None where there are fewer than 5 for which something is found: their times would tell little.
        """
        sample = await self._warmed(questions[:: -(-len(questions) // _SAMPLE) or 1])
        if len(sample) < _LEAST_SAMPLE:
            return None
        alone = [(await self.record(question)).duration_s for question in sample]
        async with asyncio.TaskGroup() as group:
            waiting = asyncio.Semaphore(self._concurrency)
            together = [group.create_task(self._duration_among_others(question, waiting)) for question in sample]
        return statistics.median(task.result() / max(s, 1e-9) for task, s in zip(together, alone, strict=True))

    async def _warmed(self, questions: Sequence[Question]) -> list[Question]:
        """Those of the questions for which there is time. What their searches read is in the page cache afterwards."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _SAMPLE_S
        done = []
        for question in questions:
            with contextlib.suppress(RecordingError):
                await self.record(question)
                done.append(question)
            if loop.time() > end_s:
                break
        return done

    async def _duration_among_others(self, question: Question, waiting: asyncio.Semaphore) -> float:
        async with waiting:
            trace = await self.record(question)
        await asyncio.to_thread(lambda: json.dumps(row_of(trace)))  # what the recording does meanwhile
        return trace.duration_s

    async def aclose(self) -> None:
        """Ends the processes."""
        await self._pool.aclose()


async def measured_disturbance(spec: SearchSpec, recording: RecordingFolder) -> dict[str, float]:
    """For `run_recording(measure=…)`: the figure `disturbance` of `SearchRecorder.disturbance`, for some of what was
    recorded; nothing where that was too little."""
    questions = await asyncio.to_thread(_sample_of, recording)
    if not questions:
        return {}
    recorder = await spec.start()
    try:
        found = await recorder.disturbance(questions)
    finally:
        await recorder.aclose()
    return {} if found is None else {"disturbance": found}


def _sample_of(recording: RecordingFolder) -> list[Question]:
    """Some of the questions, evenly spread: only these traces are kept in memory."""
    step = -(-len(recording) // _SAMPLE) or 1
    return [Question(trace.trace_id, trace.query) for trace in islice(recording.traces(), 0, None, step)]
