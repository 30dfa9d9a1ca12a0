"""Throughput of plain requests with this project's scheduler, against stock vLLM's, and the cost of the trail.

Two engines with the same tiny model (so that scheduling weighs as much as it ever can) run the same load in turn, in
one script. Figures: `plain_throughput_ratio`, output tokens per second of ours over stock vLLM's for requests that the
SDK knows nothing about, median of the pairs; `traced_throughput_ratio`, the same with requests that the SDK traces,
over ours untraced. Expected: 0.99 to 1 for the first (one dictionary look-up a request and step), 0.98 or more for the
second; at least 0.97 for the first.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving"))

NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, PAIRS = 64, 96, 48, 9
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
            runs = []
            for pair in range(PAIRS):
                traced = {"stream2llm": {"is_streaming_prompt": False, "sent_s": time.monotonic()}}
                runs.append(
                    {
                        "stock": await tokens_per_s(stock, None, f"stock-{pair}"),
                        "ours": await tokens_per_s(ours, None, f"ours-{pair}"),
                        "traced": await tokens_per_s(ours, traced, f"traced-{pair}"),
                    }
                )
            return runs
        finally:
            await asyncio.to_thread(stock.shutdown)


def measure() -> tuple[dict[str, float], list[dict[str, float]]]:
    import tiny_models

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.make_llama(Path(folder) / "model")
        runs = asyncio.run(compare(model))
    figures = {
        "plain_throughput_ratio": statistics.median(run["ours"] / run["stock"] for run in runs),
        "traced_throughput_ratio": statistics.median(run["traced"] / run["ours"] for run in runs),
    }
    return figures, runs


if __name__ == "__main__":
    main(__doc__, measure)
