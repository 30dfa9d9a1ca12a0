"""The embedded engine over its processes: one engine for the module, a tiny real model."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
from prompt_scripts import tokens

from stream2llm_sdk.errors import (
    ConfigurationError,
    EmptyPromptError,
    EngineDeadError,
    EngineError,
    EngineStartError,
    PromptError,
    PromptTooLongError,
    StreamAbortedError,
    StreamError,
    StreamFinishedError,
    StreamIdleError,
    UnsupportedFeatureError,
)
from stream2llm_sdk.serving import SchedulerMetrics, SchedulingOptions, Stream2LLMEngine, StreamLimits
from stream2llm_sdk.serving.admission import Admission
from stream2llm_sdk.trail import EventType

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

GREEDY = {"max_tokens": 8, "ignore_eos": True}
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 40,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
async def engine(model: Path) -> AsyncIterator[Stream2LLMEngine]:
    scheduling = SchedulingOptions(host_kv_bytes=8 << 20, preemption_mode="swap")
    metrics = SchedulerMetrics()
    async with Stream2LLMEngine(model, progress=None, scheduling=scheduling, metrics=metrics, **ENGINE_ARGS) as engine:
        yield engine
        snapshot = await engine.call("snapshot", [])
        assert snapshot["num_host_blocks_used"] == 0
    assert not [child.name() for child in psutil.Process().children() if child.name().startswith("VLLM")]


@pytest.fixture(autouse=True)
async def nothing_left(engine: Stream2LLMEngine) -> AsyncIterator[None]:
    """After each test the engine is as it was: no stream, no request, every block free, no task."""
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    assert engine.num_open_streams == 0
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert not {task for task in left if "stream2llm" in task.get_name()}, left


async def whole(engine: Stream2LLMEngine, prompt: list[int], sampling: dict[str, Any] | None = None) -> list[int]:
    return [token async for output in engine.generate(prompt, sampling or GREEDY) for token in output.token_ids]


async def read(stream: Any) -> tuple[list[int], str, str | None]:
    ids, text, reason = [], "", None
    async for output in stream:
        ids += output.token_ids
        text += output.text
        reason = output.finish_reason or reason
    return ids, text, reason


async def computed(stream: Any, num_tokens: int) -> None:
    """Waits until the engine has computed so much of the stream's prompt."""
    while (await stream.progress()).num_computed < num_tokens:
        await asyncio.sleep(0.02)


async def test_append_gives_the_whole_prompts_answer(engine: Stream2LLMEngine) -> None:
    parts = [tokens(random.Random(i), n) for i, n in enumerate((200, 70, 1, 33))]
    stream = await engine.open(parts[0], GREEDY)
    assert stream.is_streaming_prompt
    assert not stream.is_streaming_prompt_finished
    assert not stream.is_prompt_update
    for part in parts[1:-1]:
        await stream.append(part)
    await computed(stream, 270)
    update = await stream.finish(parts[-1])
    assert (update.num_tokens, update.lcp) == (304, 271)
    assert stream.is_streaming_prompt_finished
    ids, text, reason = await read(stream)
    prompt = [token for part in parts for token in part]
    assert ids == await whole(engine, prompt)
    assert reason == "length"
    plain = [output.text async for output in engine.generate(prompt, GREEDY)]
    assert text == "".join(plain)


async def test_replace_keeps_the_prefix_and_gives_the_whole_prompts_answer(engine: Stream2LLMEngine) -> None:
    rng = random.Random(9)
    first = tokens(rng, 300)
    async with await engine.open(first, GREEDY, mode="update") as stream:
        assert stream.is_prompt_update
        await computed(stream, 299)
        second = first[:190] + tokens(rng, 90)
        update = await stream.replace(second)
        assert (update.lcp, update.num_invalidated) == (190, 109)
        await stream.finish()
        ids, _, _ = await read(stream)
        trail = await stream.trail()
    assert ids == await whole(engine, second)
    end = trail.last(EventType.FINISHED)
    assert end is not None
    assert end.data["num_tokens_invalidated"] == 109
    assert trail.count(EventType.PROMPT_UPDATED) == 2


async def test_a_stream_may_begin_empty(engine: Stream2LLMEngine) -> None:
    prompt = tokens(random.Random(1), 40)
    stream = await engine.open([], GREEDY, mode="update")
    with pytest.raises(EmptyPromptError, match="no tokens"):
        await stream.finish()
    await stream.replace(prompt[:7])
    await stream.finish(prompt[7:])
    ids, _, _ = await read(stream)
    assert ids == await whole(engine, prompt)


@pytest.mark.parametrize("sent", [[], [7]])
async def test_a_client_that_says_nothing_and_goes_harms_nobody(engine: Stream2LLMEngine, sent: list[int]) -> None:
    """vLLM #34532: a realtime client that committed without having sent anything, or went away at once, ended the
    engine, and with it everybody else's answers."""
    prompt = tokens(random.Random(34532), 60)
    other = await engine.open(prompt[:30], GREEDY)
    silent = await engine.open([], GREEDY)
    for nothing in ((), []):
        with pytest.raises(EmptyPromptError, match="no tokens"):
            await silent.finish(nothing)
    await silent.append(sent)
    reading = asyncio.create_task(read(silent))
    await silent.abort()
    assert await reading == ([], "", "abort")
    with pytest.raises(StreamAbortedError):
        await silent.finish()
    await other.finish(prompt[30:])
    assert (await read(other))[0] == await whole(engine, prompt)
    assert engine.num_open_streams == 0


async def test_nothing_comes_out_while_the_prompt_is_open(engine: Stream2LLMEngine) -> None:
    stream = await engine.open(tokens(random.Random(2), 150), GREEDY)
    await computed(stream, 149)
    reading = asyncio.create_task(read(stream))
    done, _ = await asyncio.wait({reading}, timeout=0.3)
    assert not done
    await stream.finish()
    assert len((await reading)[0]) == 8


async def test_an_idle_stream_costs_no_steps_and_no_processor_time(engine: Stream2LLMEngine) -> None:
    async with await engine.open(tokens(random.Random(3), 300), GREEDY) as stream:
        await computed(stream, 299)
        cores = [child for child in psutil.Process().children(recursive=True) if "VLLM" in child.name()]
        assert cores
        await asyncio.sleep(2)  # the worker polls for a moment before it goes to sleep
        before = [sum(core.cpu_times()[:2]) for core in cores]
        await asyncio.sleep(1.5)
        used = [sum(core.cpu_times()[:2]) - start for core, start in zip(cores, before, strict=True)]
        assert max(used) < 0.75
        assert (await stream.progress()).num_computed == 299


async def test_plain_requests_pass_more_parked_streams_than_the_engine_has_places(engine: Stream2LLMEngine) -> None:
    streams = [await engine.open(tokens(random.Random(i), 60), GREEDY) for i in range(7)]
    try:
        for stream in streams:
            await computed(stream, 59)
        assert len(await whole(engine, tokens(random.Random(99), 200))) == 8
        for stream in streams:
            await stream.finish()
        answers = [await read(stream) for stream in streams]
        for index, (ids, _, _) in enumerate(answers):
            assert ids == await whole(engine, tokens(random.Random(index), 60))
    finally:
        for stream in streams:
            await stream.abort()


async def test_a_complete_request_takes_the_memory_of_idle_streams_and_they_get_it_back(
    engine: Stream2LLMEngine,
) -> None:
    # 39 blocks of 32 tokens: two idle streams of 600 tokens hold 38 of them.
    prompts = [tokens(random.Random(50 + i), 600) for i in range(2)]
    streams = [await engine.open(prompt[:590], GREEDY) for prompt in prompts]
    for stream in streams:
        await computed(stream, 589)
    plain = tokens(random.Random(60), 500)
    answer = await whole(engine, plain)
    trails = [await stream.trail() for stream in streams]
    assert sum(trail.count(EventType.PREEMPTED_SWAP) for trail in trails) == 1
    for stream, prompt in zip(streams, prompts, strict=True):
        await stream.finish(prompt[590:])
    assert [(await read(stream))[0] for stream in streams] == [await whole(engine, prompt) for prompt in prompts]
    assert answer == await whole(engine, plain)
    ends = [(await stream.trail())[-1].data for stream in streams]
    assert [end["num_tokens_recomputed"] for end in ends] == [0, 0]
    assert sum(end["num_tokens_loaded"] > 0 for end in ends) == 1
    swapped = next(trail for trail in [await stream.trail() for stream in streams] if trail.count(EventType.RESUMED))
    preemption, resumed = swapped.first(EventType.PREEMPTED_SWAP), swapped.first(EventType.RESUMED)
    assert preemption is not None
    assert resumed is not None
    assert preemption.data["num_tokens"] == 589
    assert preemption.data["predicted_s"] > 0
    assert resumed.data["num_loaded"] + resumed.data["num_found"] == 589
    assert resumed.data["num_recomputed"] == 0
    metrics = (await engine.observe_metrics()).render()
    assert 'stream2llm_preemptions_total{kind="swap"} 1.0' in metrics
    assert "stream2llm_ttft_from_request_seconds_count" in metrics


async def test_the_engine_ends_a_stream_that_nobody_feeds(
    engine: Stream2LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "admission", Admission(StreamLimits(idle_timeout_s=0.2)))
    stream = await engine.open(tokens(random.Random(3), 40), GREEDY)
    with pytest.raises(StreamIdleError, match="idle_timeout_s"):
        await asyncio.wait_for(read(stream), timeout=30)
    with pytest.raises(StreamIdleError):
        await stream.append([5])
    assert engine.num_open_streams == 0


async def test_an_answer_that_nobody_reads_takes_no_place_and_can_still_be_read(engine: Stream2LLMEngine) -> None:
    prompt = tokens(random.Random(8), 30)
    stream = await engine.open(prompt, GREEDY, finished=True, request_id="unread")
    async with asyncio.timeout(30):
        while engine.num_open_streams:
            await asyncio.sleep(0.05)
    assert engine.admission.snapshot()["num_waiting"] == 0
    again = await engine.open(prompt, GREEDY, finished=True, request_id="unread")
    assert (await read(stream))[0] == (await read(again))[0]


async def test_the_trail_tells_the_request_from_begin_to_end(engine: Stream2LLMEngine) -> None:
    stream = await engine.open(tokens(random.Random(4), 90), GREEDY)
    await computed(stream, 89)
    await stream.finish(tokens(random.Random(5), 30))
    await read(stream)
    trail = await stream.trail()
    assert trail[0].type is EventType.QUEUED
    assert trail[-1].type is EventType.FINISHED
    times = [event.monotonic_s for event in trail]
    assert times == sorted(times)
    life = times[-1] - times[0]
    assert sum(interval.duration_s for interval in trail.intervals()) == pytest.approx(life)
    assert trail.duration_s(EventType.KV_ON_GPU) > 0
    assert 0 < trail.ttft_from_context_complete_s < trail.ttft_from_request_s <= life
    assert await stream.trail() is trail


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "words"),
    [
        ([], GREEDY, EmptyPromptError, "no tokens"),
        (list(range(3, 400)) * 3, GREEDY, PromptTooLongError, "1023"),
        ([3, 9_999], GREEDY, PromptError, "9999"),
        ([3, -1], GREEDY, PromptError, "-1"),
        ([3, 1.5], GREEDY, PromptError, "whole numbers"),
        ([[3], [4]], GREEDY, PromptError, "2-dimensional"),
        ("text", GREEDY, PromptError, "str"),
        ([True, False], GREEDY, PromptError, "bool"),
        ([3], {"n": 2}, UnsupportedFeatureError, "n=2"),
        ([3], {"seed": 7}, UnsupportedFeatureError, "seed=7"),
        ([3], {"prompt_logprobs": 1}, UnsupportedFeatureError, "prompt_logprobs"),
        ([3], {"max_tokens": 0}, ConfigurationError, "max_tokens=0"),
        ([3], {"temperature": -1}, ConfigurationError, "temperature"),
        ([3], {"nonsense": 1}, ConfigurationError, "nonsense"),
        ([3], 5, ConfigurationError, "int"),
        ([3], {"ignore_eos": 1}, ConfigurationError, "bool"),
        ([3], {"max_tokens": True}, ConfigurationError, "max_tokens=True"),
        ([3], {"min_tokens": 1.5, "max_tokens": 4}, ConfigurationError, "min_tokens|int"),
        ([3], {"logit_bias": {9_999: 1.0}}, ConfigurationError, "9999"),
        ([3], {"allowed_token_ids": [9_999]}, ConfigurationError, "allowed_token_ids"),
        ([3], {"stop_token_ids": [9_999]}, ConfigurationError, "9999"),
        ([3], {"logprobs": 1_000_000}, ConfigurationError, "1000000"),
    ],
)
async def test_bad_requests_are_refused(
    engine: Stream2LLMEngine, prompt: Any, sampling: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await engine.open(prompt, sampling, finished=True)


async def test_logprobs_come_with_the_tokens(engine: Stream2LLMEngine) -> None:
    stream = await engine.open(tokens(random.Random(6), 40), {**GREEDY, "logprobs": 2})
    await stream.finish()
    outputs = [output async for output in stream]
    for output in outputs:
        assert output.logprobs is not None
        for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True):
            assert len(logprobs) == 2
            assert max(logprobs, key=logprobs.__getitem__) == token_id
            assert logprobs[token_id] < 0
    assert sum(len(output.token_ids) for output in outputs) == GREEDY["max_tokens"]


async def test_a_refused_update_leaves_the_stream_as_it_was(engine: Stream2LLMEngine) -> None:
    prompt = tokens(random.Random(6), 100)
    stream = await engine.open(prompt, GREEDY)
    for bad, error in (([9_999], PromptError), (tokens(random.Random(7), 1_000), PromptTooLongError)):
        with pytest.raises(error):
            await stream.append(bad)
    with pytest.raises(UnsupportedFeatureError, match="append mode"):
        await stream.replace(prompt)
    await stream.finish()
    for late in (stream.append, stream.finish):
        with pytest.raises(StreamFinishedError):
            await late([3])
    ids, _, _ = await read(stream)
    assert ids == await whole(engine, prompt)


async def test_abort_ends_the_stream_everywhere(engine: Stream2LLMEngine) -> None:
    stream = await engine.open(tokens(random.Random(8), 120), GREEDY)
    reading = asyncio.create_task(read(stream))
    await stream.abort()
    await stream.abort()
    assert (await reading) == ([], "", "abort")
    with pytest.raises(StreamAbortedError):
        await stream.append([3])
    assert (await stream.trail())[-1].type is EventType.ABORTED


async def test_an_abort_that_is_cancelled_is_carried_out(engine: Stream2LLMEngine) -> None:
    stream = await engine.open(tokens(random.Random(21), 50), GREEDY)
    appending = asyncio.create_task(stream.append([3, 4, 5]))
    await asyncio.sleep(0)
    aborting = asyncio.create_task(stream.abort())
    await asyncio.sleep(0)
    aborting.cancel()
    await asyncio.gather(appending, aborting, return_exceptions=True)
    assert engine.num_open_streams == 0
    assert await engine.reset_prefix_cache()


async def test_a_second_reader_is_told(engine: Stream2LLMEngine) -> None:
    async with await engine.open(tokens(random.Random(22), 50), GREEDY) as stream:
        first = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        with pytest.raises(StreamError, match="being read"):
            await read(stream)
        await stream.finish()
        assert len((await first)[0]) == 8


@pytest.mark.parametrize("request_id", ["", "\ud800", "a\nb", 7])
async def test_a_bad_request_id_is_refused(engine: Stream2LLMEngine, request_id: Any) -> None:
    with pytest.raises(ConfigurationError, match="request_id"):
        await engine.open([3], GREEDY, request_id=request_id)


async def test_another_event_loop_is_told(engine: Stream2LLMEngine) -> None:
    def ask() -> None:
        asyncio.run(engine.open([3], GREEDY))

    with pytest.raises(EngineError, match="event loop"):
        await asyncio.to_thread(ask)


async def test_cancelled_updates_do_not_tear_the_prompt(engine: Stream2LLMEngine) -> None:
    """A cancelled append has either happened or not: what the stream says it holds is what the engine holds."""
    rng = random.Random(11)
    stream = await engine.open(tokens(rng, 30), GREEDY)
    pieces = [tokens(rng, 10) for _ in range(12)]
    prompt = tokens(random.Random(11), 30)
    for index, piece in enumerate(pieces):
        appending = asyncio.create_task(stream.append(piece))
        for _ in range(index % 4):
            await asyncio.sleep(0)
        appending.cancel()
        await asyncio.gather(appending, return_exceptions=True)
        length = len(prompt)
        await stream.append([])
        if stream.num_tokens > length:
            prompt += piece
    await stream.finish()
    ids, _, _ = await read(stream)
    assert ids == await whole(engine, prompt)


async def test_a_cancelled_open_leaves_nothing(engine: Stream2LLMEngine) -> None:
    for turns in range(8):
        opening = asyncio.create_task(engine.open(tokens(random.Random(turns), 50), GREEDY))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        (result,) = await asyncio.gather(opening, return_exceptions=True)
        if not isinstance(result, BaseException):
            await result.abort()
        assert engine.num_open_streams == 0
    limits = await engine.call("progress", [[]])
    assert limits == {}


async def test_many_streams_at_once(engine: Stream2LLMEngine) -> None:
    async def one(index: int) -> bool:
        rng = random.Random(200 + index)
        prompt = tokens(rng, rng.randrange(10, 120))
        async with await engine.open(prompt, GREEDY, mode="update") as stream:
            for _ in range(rng.randrange(1, 4)):
                await asyncio.sleep(rng.random() * 0.05)
                prompt = prompt[: rng.randrange(0, len(prompt))] + tokens(rng, rng.randrange(1, 60))
                await stream.replace(prompt)
            await stream.finish()
            ids, _, _ = await read(stream)
        return ids == await whole(engine, prompt)

    assert all(await asyncio.gather(*(one(index) for index in range(20))))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"speculative_config": {"method": "ngram"}}, UnsupportedFeatureError, "speculative"),
        ({"pipeline_parallel_size": 2}, UnsupportedFeatureError, "pipeline"),
        ({"data_parallel_size": 2}, UnsupportedFeatureError, "data_parallel_size=2"),
        ({"scheduler_cls": "x.Y"}, UnsupportedFeatureError, "policy"),
        ({"scheduler_reserve_full_isl": True}, UnsupportedFeatureError, "scheduler_reserve_full_isl=True"),
        ({"policy": "BEST"}, ConfigurationError, "DEFAULT_VLLM, FCFS"),
        ({"policy": 5}, ConfigurationError, "policy must be a str"),
        ({"scheduling": {}}, ConfigurationError, "scheduling must be a SchedulingOptions"),
        ({"limits": {}}, ConfigurationError, "limits must be a StreamLimits"),
        ({"metrics": "x"}, ConfigurationError, "metrics must be a SchedulerMetrics"),
    ],
)
async def test_engine_arguments_that_cannot_work_are_refused_at_once(
    model: Path, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Stream2LLMEngine(model, **arguments)


async def test_engine_arguments_that_ask_for_nothing_are_taken(model: Path) -> None:
    off = {"pipeline_parallel_size": 1, "scheduler_reserve_full_isl": False, "skip_tokenizer_init": False}
    Stream2LLMEngine(model, speculative_config=None, **off)


async def test_the_environment_chooses_the_policy(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDULER_TYPE", "default_vllm")
    assert Stream2LLMEngine(model).policy == "DEFAULT_VLLM"
    assert Stream2LLMEngine(model, policy="fcfs").policy == "FCFS"
    monkeypatch.setenv("SCHEDULER_TYPE", "nonsense")
    with pytest.raises(ConfigurationError, match="nonsense"):
        Stream2LLMEngine(model)


async def test_an_engine_that_was_not_started_says_so(model: Path) -> None:
    engine = Stream2LLMEngine(model)
    with pytest.raises(EngineError, match="start"):
        await engine.open([3])
    await engine.aclose()
    with pytest.raises(EngineError, match="closed"):
        await engine.start()


async def test_a_model_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="neither a folder nor"):
        await Stream2LLMEngine(tmp_path / "absent", progress=None).start()
    with pytest.raises(ConfigurationError, match="cannot serve"):
        await Stream2LLMEngine(tmp_path, progress=None).start()


async def test_an_engine_without_room_for_its_longest_prompt_says_so(model: Path) -> None:
    arguments = {**ENGINE_ARGS, "num_gpu_blocks_override": 8}
    with pytest.raises(EngineStartError, match=r"KV cache.*(1024|max_model_len)"):
        await Stream2LLMEngine(model, progress=None, **arguments).start()
    assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ


async def test_a_start_that_is_cancelled_ends_soon_and_leaves_nothing(model: Path) -> None:
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    starting = asyncio.create_task(Stream2LLMEngine(model, progress=None, **ENGINE_ARGS).start())
    while all(child.pid in known for child in psutil.Process().children()):
        await asyncio.sleep(0.1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=20)
    assert not [child.name() for child in alive if "resource_tracker" not in " ".join(child.cmdline())]


async def test_a_killed_program_leaves_no_process(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import asyncio
import psutil
from stream2llm_sdk.serving import Stream2LLMEngine

async def main():
    async with Stream2LLMEngine({str(model)!r}, progress=None, **{ENGINE_ARGS!r}):
        print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
        await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""
    )
    running = await asyncio.create_subprocess_exec(sys.executable, program, stdout=asyncio.subprocess.PIPE)
    assert running.stdout is not None
    pids = list(map(int, (await running.stdout.readline()).split()))
    assert len(pids) >= 2
    children = [psutil.Process(pid) for pid in pids]
    running.kill()
    await running.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=30)
    for child in alive:
        child.kill()
    assert not alive


async def test_when_the_core_dies_every_stream_hears_of_it(model: Path) -> None:
    """Last in the module: it starts an engine of its own, and kills that engine's core."""
    arguments = {**ENGINE_ARGS, "num_gpu_blocks_override": 40}
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    async with Stream2LLMEngine(model, progress=None, **arguments) as dying:
        waiting = await dying.open(tokens(random.Random(1), 50), GREEDY)
        unsent = await dying.open([], GREEDY)
        readers = [asyncio.create_task(read(stream)) for stream in (waiting, unsent)]
        await asyncio.sleep(0.2)
        for child in psutil.Process().children(recursive=True):
            if child.pid not in known and "EngineCor" in child.name():
                os.kill(child.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), timeout=60)
        assert [type(result) for result in results] == [EngineDeadError, EngineDeadError]
        for operation in (waiting.append([3]), dying.open([3]), waiting.progress()):
            with pytest.raises(EngineDeadError, match="core process ended"):
                await operation
    assert not {child.pid for child in psutil.Process().children(recursive=True) if child.is_running()} - known
