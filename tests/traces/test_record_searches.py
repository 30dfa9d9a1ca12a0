"""Recording vector searches: the windows of a search, and the processes that search."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from small_index import DeadlyEmbedder, build_small_index, questions

from stream2llm_sdk.context import Replace
from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, RecordingError
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.manifest import MANIFEST_FILE
from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
from stream2llm_sdk.retrievers.diskann.search_options import EmissionGate, SearchOptions
from stream2llm_sdk.traces import read_traces
from stream2llm_sdk.traces.recording.anns import SearchSpec
from stream2llm_sdk.traces.recording.cpu_claims import claim_cpu, keep_threads_off
from stream2llm_sdk.traces.recording.published_searches import NODE
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.record_searches import record_searches
from stream2llm_sdk.traces.recording.run import run_recording
from stream2llm_sdk.traces.recording.search_windows import SearchWindow, search_in_windows

QUERY = "What cancels tasks in a section?"
EVERY_POOL = SearchOptions(k=5, search_list_size=40, beam_width=4, gate=None)
GATED = SearchOptions(k=5, search_list_size=40, beam_width=4, gate=EmissionGate(2, 1.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_index(tmp_path_factory.mktemp("recording") / "index")


@pytest.fixture(autouse=True)
def own_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run at the same time do not take each other's CPUs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")


def searched(folder: Path, options: SearchOptions) -> tuple[list[SearchWindow], list[str]]:
    """The windows of a search, and the sources of what an ordinary search finds."""
    with DiskANNIndex.open(folder) as index:
        begin = partial(index.begin_search, QUERY, options)
        windows = search_in_windows(begin, every_pool=options.gate is None)
        return windows, [chunk.text for chunk in index.search(QUERY, options)]


@pytest.mark.parametrize("options", [EVERY_POOL, GATED], ids=["every pool", "gated"])
def test_the_windows_of_a_search_follow_one_another_and_end_with_its_result(
    folder: Path, options: SearchOptions
) -> None:
    windows, found = searched(folder, options)
    assert windows[0].begin_s == 0
    assert windows[0].iterations[0] == 0
    for before, after in itertools.pairwise(windows):
        assert after.begin_s == before.end_s < after.end_s
        assert after.iterations[0] == before.iterations[1] <= after.iterations[1]
    with DiskANNIndex.open(folder) as index:
        texts = [index.chunk(node, distance).text for node, distance in zip(*pool_of(windows[-1]), strict=True)]
        search = index.begin_search(QUERY, options)
        while search.run().name != "FINISHED":
            pass
    assert texts == found
    assert windows[-1].iterations[1] == search.num_iterations


def pool_of(window: SearchWindow) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return window.pool.nodes, window.pool.distances


def test_without_a_gate_there_is_a_window_for_every_change_of_the_pool(folder: Path) -> None:
    windows, _ = searched(folder, EVERY_POOL)
    changes = []
    with DiskANNIndex.open(folder) as index:
        search, before = index.begin_search(QUERY, EVERY_POOL), ()
        while search.advance(1).name != "FINISHED":
            if search.pool.nodes != before:
                changes.append((search.num_iterations, before := search.pool.nodes))
    assert len(changes) > 3
    assert [(window.iterations[1], window.pool.nodes) for window in windows[:-1]] == changes


async def test_with_a_gate_there_are_the_pools_that_the_retriever_sends(folder: Path) -> None:
    windows, _ = searched(folder, GATED)
    options = {"k": GATED.k, "search_list_size": GATED.search_list_size, "beam_width": GATED.beam_width}
    async with DiskANNRetriever(folder, gate=GATED.gate, **options) as retriever:  # type: ignore[arg-type]
        sent = [[chunk.text for chunk in update.chunks] async for update in retriever.stream(QUERY)]
    with DiskANNIndex.open(folder) as index:
        pools = [[index.chunk(n, d).text for n, d in zip(*pool_of(window), strict=True)] for window in windows]
    assert len(pools) > 1
    assert [pool for place, pool in enumerate(pools) if place == 0 or pool != pools[place - 1]] == sent


def test_a_cpu_is_claimed_once_and_free_again_when_its_owner_is_killed() -> None:
    program = (
        "from stream2llm_sdk.traces.recording.cpu_claims import claim_cpu; claim = claim_cpu([1001, 1000]); "
        "print(claim.cpu, flush=True); input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "1001\n"
        mine = claim_cpu([1001, 1000])
        assert mine is not None
        assert mine.cpu == 1000
        assert claim_cpu([1001, 1000]) is None
        other.kill()
        other.wait()
        again = claim_cpu([1001, 1000])
        assert again is not None
        assert again.cpu == 1001
        for claim in (mine, again):
            claim.release()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_are_kept_off_cpus_until_it_is_undone() -> None:
    allowed = os.sched_getaffinity(0)
    taken = max(allowed)
    undo = keep_threads_off([taken])
    assert os.sched_getaffinity(0) == allowed - {taken}
    undo()
    assert os.sched_getaffinity(0) == allowed


async def test_searches_run_in_a_process_with_a_cpu_for_itself(folder: Path) -> None:
    allowed = os.sched_getaffinity(0)
    recorder = await SearchSpec(folder, EVERY_POOL, concurrency=1).start()
    try:
        (cpu,) = recorder.cpus
        (process,) = recorder.process_ids
        assert os.sched_getaffinity(process) == {cpu}
        assert len(allowed) == 1 or cpu not in os.sched_getaffinity(0)
        assert claim_cpu([cpu]) is None
        trace = await recorder.record(Question("7", QUERY))
    finally:
        await recorder.aclose()
    assert os.sched_getaffinity(0) == allowed
    claim = claim_cpu([cpu])
    assert claim is not None
    claim.release()
    _, found = searched(folder, EVERY_POOL)
    assert [chunk.text for chunk in trace.final_chunks] == found
    assert all(timed.iterations is not None and timed.begin_s is not None for timed in trace.updates)
    assert trace.updates[-1].update.chunks[0].metadata.keys() == {"part", NODE}


async def test_a_question_whose_process_dies_is_asked_again_once(folder: Path, tmp_path: Path) -> None:
    spec = SearchSpec(folder, EVERY_POOL, embedder=DeadlyEmbedder, concurrency=1)
    recorder = await spec.start()
    try:
        assert (await recorder.record(Question("0", f"die once {tmp_path / 'mark'}"))).updates
        with pytest.raises(RecordingError, match="its search process died 2 times: it ended with status -6"):
            await recorder.record(Question("1", "die"))
        assert (await recorder.record(Question("2", QUERY))).updates
    finally:
        await recorder.aclose()


async def test_a_cancelled_search_leaves_a_recorder_that_works_and_nothing_behind_it(folder: Path) -> None:
    recorder = await SearchSpec(folder, EVERY_POOL, concurrency=1).start()
    try:
        searching = asyncio.create_task(recorder.record(Question("0", QUERY)))
        await asyncio.sleep(0)
        searching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await searching
        assert (await recorder.record(Question("1", QUERY))).updates
        processes = recorder.process_ids
    finally:
        await recorder.aclose()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_what_cannot_be_recorded_is_refused_before_it_begins(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="concurrency=0: give"):
        SearchSpec(folder, concurrency=0)
    with pytest.raises(ConfigurationError, match="concurrency=2 with cold=True"):
        SearchSpec(folder, cold=True, concurrency=2)
    with pytest.raises(ConfigurationError, match=r"no column 'year'"):
        SearchSpec(folder, filter={"year": 2024}).settings()
    with pytest.raises(IndexFormatError, match="is no index"):
        SearchSpec(tmp_path).settings()
    with pytest.raises(ConfigurationError, match=r"was built with embedder 'wordllama.*not 'another'"):
        SearchSpec(folder, embedder=WithOtherName).settings()


class WithOtherName(DeadlyEmbedder):
    name = "another"


async def test_more_searches_at_once_than_cpus_are_refused(folder: Path) -> None:
    everybody = [claim_cpu([cpu]) for cpu in os.sched_getaffinity(0)]
    with pytest.raises(ConfigurationError, match="CPUs is left for a search: other recordings"):
        await SearchSpec(folder, concurrency=1).start()
    for claim in everybody:
        assert claim is not None
        claim.release()
    with pytest.raises(ConfigurationError, match=r"concurrency=4097: .* disturb each other's times"):
        await SearchSpec(folder, concurrency=4097).start()


async def test_what_fails_in_the_processes_ends_the_recording(folder: Path, tmp_path: Path) -> None:
    spec = SearchSpec(tmp_path / "moved", EVERY_POOL, concurrency=1)
    with pytest.raises(IndexFormatError, match="is no index"):
        await spec.start()


async def test_a_recording_has_each_document_once_and_its_published_form_replays_the_same(
    folder: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "recording", {"filter": {"part": {"$gte": 1}}, "concurrency": 1}
    texts_asked = [question.text for question in questions(24)]
    summary = await record_searches(
        texts_asked, out, publish=tmp_path / "published", index=folder, options=EVERY_POOL, **options
    )
    assert (summary.num_questions, summary.num_failed) == (24, 0)
    assert 0.2 < summary.figures["disturbance"] < 5
    traces = read_traces(out / "traces.parquet")
    documents = {chunk.text for trace in traces for timed in trace.updates for chunk in timed.update.chunks}
    lines = (out / "documents.jsonl").read_text().splitlines()
    assert len(lines) == len(documents)
    assert "the " not in (out / "journal.jsonl").read_text()
    assert all(chunk.metadata["part"] >= 1 for trace in traces for chunk in trace.final_chunks)

    published = read_traces(tmp_path / "published")
    assert len(published) == 24
    for ours, theirs in zip(traces, published, strict=True):
        assert [(t.begin_s, t.offset_s, t.iterations) for t in ours.updates] == [
            (t.begin_s, t.offset_s, t.iterations) for t in theirs.updates
        ]
        assert [texts(t.update) for t in ours.updates] == [texts(t.update) for t in theirs.updates]
    corpus = (tmp_path / "published" / "retrieved_corpus_content.part.0.json").read_text()
    assert corpus.count("How one") == len(documents)


def texts(update: object) -> list[str]:
    assert isinstance(update, Replace)
    return [chunk.text for chunk in update.chunks]


async def test_a_recording_goes_on_with_the_same_settings_only(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "recording"
    await run_recording(SearchSpec(folder, EVERY_POOL, concurrency=1), questions(3), out)
    with pytest.raises(ConfigurationError, match="search_list_size=40"):
        await run_recording(SearchSpec(folder, SearchOptions(5, 41, 4, gate=None), concurrency=1), questions(4), out)
    manifest = folder / MANIFEST_FILE
    before = manifest.read_bytes()
    try:
        manifest.write_bytes(before + b"\n")  # as if the index had been built again
        with pytest.raises(ConfigurationError, match="was begun with index="):
            await run_recording(SearchSpec(folder, EVERY_POOL, concurrency=1), questions(4), out)
    finally:
        manifest.write_bytes(before)
