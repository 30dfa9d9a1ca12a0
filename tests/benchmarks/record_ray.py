"""What Ray costs a recording: the same vector searches recorded on a Ray of this machine, and by default, in turn.

1,000 questions on an index of the installed documentation of Python, k 10, L 320, W 8, every pool, one search at a
time, each way on 2 CPUs. Timed is from the 200th outcome that is written down to the last one, so that starting
processes, Ray, and loading the index are left out. Figures: `ray_over_local_ratio`, the median of 5 pairs, asked: at
most 1.5; `local_ms` and `ray_ms` a question. Expected: 1.1 to 1.4. A search takes 2 to 4 ms, and Ray's own processes
share the CPU that is not the searches' with what writes the outcomes down.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from doc_corpus import doc_questions, write_corpus
from harness import Measured, main

NUM_QUESTIONS, LEFT_OUT, PAIRS, NUM_PAGES = 1_000, 200, 5, 500


async def ms_a_question(spec: Any, asked: list[Any], folder: Path, outcomes: Any) -> float:
    from stream2llm_sdk.traces.recording.run import RecordingProgress, run_recording

    done_s: list[float] = []

    def take_time(progress: RecordingProgress) -> None:
        done_s.append(time.perf_counter())

    summary = await run_recording(spec, asked, folder, outcomes=outcomes, on_progress=take_time)
    assert summary.num_traces == len(asked)
    return 1e3 * (done_s[-1] - done_s[LEFT_OUT - 1]) / (len(asked) - LEFT_OUT)


async def compare(folder: Path) -> Measured:
    from stream2llm_sdk.retrievers.diskann.search_options import SearchOptions
    from stream2llm_sdk.traces.recording.anns import SearchSpec
    from stream2llm_sdk.traces.recording.questions import Question, read_questions
    from stream2llm_sdk.traces.recording.ray_run import record_on_ray
    from stream2llm_sdk.traces.recording.run import record_here

    found = read_questions(str(folder / "questions.jsonl"))
    asked = [Question(str(number), found[number % len(found)].text) for number in range(NUM_QUESTIONS)]
    spec = SearchSpec(folder / "index", SearchOptions(10, 320, 8, gate=None), concurrency=1)
    ways = {"local": record_here, "ray": record_on_ray("local", num_actors=1, batch_size=32)}
    runs = []
    for pair in range(PAIRS):
        run: dict[str, float] = {}
        for name in sorted(ways, reverse=pair % 2 == 1):
            run[f"{name}_ms"] = await ms_a_question(spec, asked, folder / f"{name}{pair}", ways[name])
        runs.append({**run, "ray_over_local_ratio": run["ray_ms"] / run["local_ms"]})
        print(", ".join(f"{name} {value:.3f}" for name, value in runs[-1].items()), flush=True)
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}, runs


def measure() -> Measured:
    from stream2llm_sdk.retrievers.diskann.build import build_index
    from stream2llm_sdk.retrievers.diskann.corpus import open_corpus
    from stream2llm_sdk.retrievers.diskann.splitter import PassageSplitter

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        titles = write_corpus(folder / "corpus.parquet", limit=NUM_PAGES)
        doc_questions(folder / "questions.jsonl", titles, 500)
        build_index(open_corpus(folder / "corpus.parquet"), folder / "index", splitter=PassageSplitter(256)).close()
        return asyncio.run(compare(folder))


if __name__ == "__main__":
    main(__doc__, measure)
