"""A replay on the real engine, with a tiny model: what the engine says of its requests is in the folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from stream2llm_sdk.context import Append, Chunk, Replace
from stream2llm_sdk.serving import Stream2LLMEngine
from stream2llm_sdk.traces.replay import ReplayOptions, ReplayProgress, replay
from stream2llm_sdk.traces.run_folder import RunFolder
from stream2llm_sdk.traces.trace import NUM_TOKENS, TimedUpdate, Trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 100,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stream2LLMEngine]:
    model = tiny_models.make_llama(tmp_path_factory.mktemp("models") / "llama")
    async with Stream2LLMEngine(model, policy="LCAS", progress=None, **ENGINE_ARGS) as engine:
        yield engine


def page(name: str, num_tokens: int) -> Chunk:
    return Chunk("", source=name, metadata={NUM_TOKENS: num_tokens})


def traces() -> list[Trace]:
    """Six crawls and four searches, all within two seconds."""
    found = []
    for number in range(10):
        if number % 5 < 3:
            updates = [TimedUpdate(0.05 * (1 + at), Append([page(f"{number}-{at}", 60)])) for at in range(4)]
        else:
            pools = [["x", "y"], ["x", "y", f"n{number}"], ["y", f"n{number}"]]
            updates = [
                TimedUpdate(0.1 * (1 + at), Replace([page(doc, 80) for doc in pool])) for at, pool in enumerate(pools)
            ]
        found.append(Trace(f"t{number}", "", tuple(updates), arrival_s=0.1 * number, num_query_tokens=10, tag="tiny"))
    return found


@pytest.mark.parametrize("streaming", [True, False])
async def test_traces_are_replayed_on_the_engine(engine: Stream2LLMEngine, tmp_path: Path, streaming: bool) -> None:
    # A whole prompt of this size holds its memory for some tens of milliseconds only.
    options = ReplayOptions(streaming=streaming, max_tokens=4, sample_every_s=0.005)
    run = await replay(traces(), engine, options, out=tmp_path / "run")
    assert engine.num_open_streams == 0
    assert sorted(request.query_id for request in run.requests) == [f"t{number}" for number in range(10)]
    for request in run.requests:
        assert request.has_succeeded
        assert (request.num_output_tokens, request.finish_reason, request.tag) == (4, "length", "tiny")
        assert request.num_prompt_tokens in (60 + 4 * 60 + 10, 60 + 2 * 80 + 10)
        assert len(request.send_s) == (1 if not streaming else 3 if request.mode == "update" else 4)
        assert 0 < request.ttft_from_context_complete_s < request.ttft_from_request_s
        assert request.num_tokens_computed + request.num_tokens_cached >= request.num_prompt_tokens
        # The engine takes a message after it was sent, and no sooner than it was due.
        for due_s, sent_s, taken_s in zip(request.send_due_s, request.send_s, request.send_taken_s, strict=True):
            assert due_s - 1e-6 <= sent_s <= taken_s

    folder = RunFolder.open(tmp_path / "run")
    assert folder.config()["engine"]["policy"] == "LCAS"
    events = folder.events().to_pylist()
    for request in run.requests:
        own = [event for event in events if event["request_id"] == request.request_id]
        engine_events = {event["event"]: event["run_s"] for event in own if event["source"] == "engine"}
        # One clock for both processes: what the client sent and saw is around what the engine did.
        assert engine_events["QUEUED"] == pytest.approx(request.send_s[0], abs=0.01)
        assert engine_events["CONTEXT_COMPLETE"] == pytest.approx(request.context_complete_s, abs=0.01)
        assert request.context_complete_s < engine_events["FIRST_TOKEN"] <= request.first_token_s
    samples = folder.samples().to_pylist()
    assert max(row["num_requests"] for row in samples) > 1
    assert max(row["kv_usage"] for row in samples) > 0


async def test_a_stopped_replay_leaves_the_engine_empty_and_is_continued(
    engine: Stream2LLMEngine, tmp_path: Path
) -> None:
    def stop_at_the_third(progress: ReplayProgress) -> None:
        if progress.num_ended >= 3:
            task.cancel()

    work = replay(traces(), engine, out=tmp_path / "run", progress=stop_at_the_third)
    task = asyncio.ensure_future(work)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_open_streams == 0
    folder = RunFolder.open(tmp_path / "run")
    assert folder.state == "stopped"
    ended = [row["query_id"] for row in folder.requests().to_pylist() if row["finish_reason"] == "length"]
    assert 3 <= len(ended) < 10

    run = await replay(traces(), engine, out=tmp_path / "run")
    assert all(request.has_succeeded for request in run.requests)
    assert [request.query_id for request in run.requests if request.segment == 0] == ended
    assert (len(run.requests), run.num_segments) == (10, 2)
    events = folder.events().to_pylist()
    assert {event["segment"] for event in events} == {0, 1}
    assert sum(event["event"] == "FINISHED" for event in events) == 10
