"""Throughput of plain requests with this project's scheduler, against stock vLLM's, and the cost of the trail.

Two engines with the same tiny model (so that scheduling weighs as much as it ever can) run the same load in turn, in
one script; which goes first rotates. Figures: `plain_throughput_ratio`, output tokens per second of ours over stock
vLLM's for requests that the SDK knows nothing about, median of the rounds; `traced_throughput_ratio`, the same with
requests that the SDK traces, over ours untraced; `trail_step_cost`, the time that the scheduler spends more in a step
when all of its requests are traced, as a share of the step, in an engine core of this process. Expected: 0.99 to 1 for
the first (one dictionary look-up a request and step), 0.98 or more for the second, about 0.01 for the third; the first
has to be 0.97 at least, the third 0.02 at most.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving"))

NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, ROUNDS = 64, 96, 48, 12
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 64,
    "block_size": 32,
    "kv_cache_memory_bytes": 128 << 20,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 500) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)]


async def tokens_per_s(llm: Any, extra_args: dict[str, Any] | None, tag: str) -> float:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    async def one(index: int, prompt: list[int]) -> int:
        params = SamplingParams(
            temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, detokenize=False, extra_args=extra_args
        )
        count = 0
        async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), params, f"{tag}-{index}"):
            count = len(output.outputs[0].token_ids)
        return count

    started_s = time.perf_counter()
    counts = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts())))
    assert counts == [NUM_OUTPUT_TOKENS] * NUM_REQUESTS
    return sum(counts) / (time.perf_counter() - started_s)


async def compare(model: Path) -> list[dict[str, float]]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from stream2llm_sdk.serving.vllm_engine import Stream2LLMEngine

    own_args = {name: value for name, value in ENGINE_ARGS.items() if name != "enable_prefix_caching"}
    async with Stream2LLMEngine(str(model), enable_prefix_caching=False, policy="DEFAULT_VLLM", **own_args) as engine:
        ours = engine._running()
        stock = await asyncio.to_thread(
            AsyncLLM.from_engine_args, AsyncEngineArgs(model=str(model), async_scheduling=False, **ENGINE_ARGS)
        )
        try:
            await tokens_per_s(ours, None, "warm-up")
            await tokens_per_s(stock, None, "warm-up")
            traced = {"stream2llm": {"is_streaming_prompt": False, "sent_s": time.monotonic()}}
            kinds: list[tuple[str, Any, Any]] = [("stock", stock, None), ("ours", ours, None), ("traced", ours, traced)]
            runs: list[dict[str, float]] = []
            for round_ in range(ROUNDS):
                runs.append({})
                for turn in range(len(kinds)):
                    name, llm, extra_args = kinds[(round_ + turn) % len(kinds)]
                    runs[-1][name] = await tokens_per_s(llm, extra_args, f"{name}-{round_}")
            return runs
        finally:
            await asyncio.to_thread(stock.shutdown)


def step_costs(model: Path) -> list[dict[str, float]]:
    """Milliseconds a step: the whole of it, and what the scheduler takes of it, without and with the trail."""
    from stream2llm_sdk.testing.core_driver import CoreDriver

    core_args = {name: value for name, value in ENGINE_ARGS.items() if name != "enable_prefix_caching"}
    with CoreDriver(
        model,
        scheduler_cls="stream2llm_sdk.serving.scheduler.Stream2LLMScheduler",
        executor="model",
        prefix_caching=False,
        num_gpu_blocks=NUM_REQUESTS * 6,
        **core_args,
    ) as driver:
        scheduler, scheduling_s = driver.scheduler, [0.0]

        def timed(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                started_s = time.perf_counter()
                try:
                    return method(*args, **kwargs)
                finally:
                    scheduling_s[0] += time.perf_counter() - started_s

            return call

        for name in ("add_request", "schedule", "update_from_output"):
            setattr(scheduler, name, timed(getattr(scheduler, name)))

        def run(tag: str, extra_args: dict[str, Any] | None) -> tuple[float, float]:
            scheduling_s[0], started_s, num_steps = 0.0, time.perf_counter(), 0
            for index, prompt in enumerate(prompts()):
                driver.add(f"{tag}-{index}", prompt, max_tokens=NUM_OUTPUT_TOKENS, extra_args=extra_args)
            while scheduler.has_requests():
                driver.step()
                num_steps += 1
            return (time.perf_counter() - started_s) / num_steps * 1e3, scheduling_s[0] / num_steps * 1e3

        traced = {"stream2llm": {"is_streaming_prompt": False, "sent_s": time.monotonic()}}
        run("warm-up", None)
        runs = []
        for round_ in range(2 * ROUNDS):
            order = [("plain", None), ("traced", traced)]
            costs = {name: run(f"{name}-{round_}", extra) for name, extra in (order if round_ % 2 else order[::-1])}
            runs.append(
                {
                    "plain_step_ms": costs["plain"][0],
                    "plain_scheduling_ms": costs["plain"][1],
                    "traced_scheduling_ms": costs["traced"][1],
                }
            )
        return runs


def measure() -> tuple[dict[str, float], list[dict[str, float]]]:
    import tiny_models

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.make_llama(Path(folder) / "model")
        runs = asyncio.run(compare(model))
        steps = step_costs(model)
    figures = {
        "plain_throughput_ratio": statistics.median(run["ours"] / run["stock"] for run in runs),
        "traced_throughput_ratio": statistics.median(run["traced"] / run["ours"] for run in runs),
        "trail_step_cost": statistics.median(
            (run["traced_scheduling_ms"] - run["plain_scheduling_ms"]) / run["plain_step_ms"] for run in steps
        ),
    }
    return figures, [*runs, *steps]


if __name__ == "__main__":
    main(__doc__, measure)
