"""What it costs to replace a prompt, and to find the common prefix of two.

Figures: `replace_9k_ms`, replacing a prompt of 9,000 tokens in the scheduler at an LCP of half of it, block hashes
included (prefix caching on, all tokens computed before), median; `lcp_100k_ms`, the longest common prefix of two
prompts of 100,000 tokens that differ at the end, median. Expected: 1 to 1.7 ms (hashing 280 new blocks dominates) and
under 0.1 ms. The real engine core runs without a model.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving"))

NUM_TOKENS = 9_000
MAX_MODEL_LEN = 16_384
RUNS = 40


def lcp_ms() -> list[float]:
    from stream2llm_sdk.serving.lcp import longest_common_prefix

    generator = np.random.default_rng(0)
    old = generator.integers(0, 100_000, 100_000, dtype=np.int32)
    new = old.copy()
    new[-1] += 1
    times = []
    for _ in range(RUNS):
        started_s = time.perf_counter()
        assert longest_common_prefix(old, new) == len(old) - 1
        times.append((time.perf_counter() - started_s) * 1e3)
    return times


def replace_ms() -> list[float]:
    import tiny_models

    from stream2llm_sdk.testing.core_driver import CoreDriver

    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.make_llama_config(Path(folder) / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_MODEL_LEN}))
        with CoreDriver(
            model,
            scheduler_cls="stream2llm_sdk.serving.scheduler.Stream2LLMScheduler",
            num_gpu_blocks=2_000,
            max_num_batched_tokens=8_192,
            max_model_len=MAX_MODEL_LEN,
            scheduler_reserve_full_isl=False,
        ) as driver:
            return [one_replace_ms(driver, f"r{run}", tokens) for run in range(RUNS)]


def one_replace_ms(driver: Any, request_id: str, tokens: Any) -> float:
    prompt = tokens(NUM_TOKENS)
    flags = {"is_streaming_prompt": True, "is_prompt_update": True}
    driver.add(request_id, prompt, extra_args={"stream2llm": flags})
    driver.run_until_idle()
    changed = np.array(prompt[: NUM_TOKENS // 2] + tokens(NUM_TOKENS // 2), dtype=np.int32).tobytes()
    started_s = time.perf_counter()
    answer = driver.call("update", [request_id, "replace", changed, False, time.monotonic()])
    elapsed_ms = (time.perf_counter() - started_s) * 1e3
    assert answer["lcp"] >= NUM_TOKENS // 2, answer
    driver.abort(request_id)
    driver.run_until_idle()
    return elapsed_ms


def measure() -> tuple[dict[str, float], list[dict[str, float]]]:
    lcp, replace = lcp_ms(), replace_ms()
    figures = {"replace_9k_ms": statistics.median(replace), "lcp_100k_ms": statistics.median(lcp)}
    return figures, [{"replace_9k_ms": a, "lcp_100k_ms": b} for a, b in zip(replace, lcp, strict=True)]


if __name__ == "__main__":
    main(__doc__, measure)
