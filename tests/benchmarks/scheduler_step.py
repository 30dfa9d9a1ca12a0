"""Time of a scheduling step: this project's plan and hand-over against upstream's scheduler alone.

The real scheduler and KV cache manager over the executor without a model: 50 prompts of 9,000 tokens, block size 16,
8,192 tokens a step, FCFS, upstream's and ours in turn in one process; processor time of the scheduling thread, with the
garbage collector off, as `timeit` has it. The rounds are the same step for step, and of each step its fastest round
counts: whatever else the machine does only ever makes a step slower.

Figures: `prefill_steps_ratio_apc_off` and `prefill_steps_ratio_apc_on` (prefix caching), steps a second of ours over
upstream's while prompts are prefilled, for whole steps (`schedule` and `update_from_output`) in which requests that
were prefilled decode along; one stream is open, so that ours plans every step. `open_steps_ratio_apc_off` and `_on`,
the harder comparison: `schedule` alone, no decodes, all 50 prompts open streams with ours and plain requests with
upstream's. `growth_500_over_50`, the time of a step with 500 open streams over that with 50.
Expected: 0.88 and 0.93 for the first two (a plan costs 40 microseconds, the hand-over 12, the records 20, in a step of
700; what decodes is served together and costs next to nothing), 0.6 and 0.8 for the next two (a step of upstream's that
has little to do takes 0.12 ms), below 2 for the last (putting and removing are binary searches). Asked: 0.85 at least,
14 at most.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving"))

NUM_TOKENS, ROUNDS = 9_000, 20
OURS = "stream2llm_sdk.serving.scheduler.Stream2LLMScheduler"
OPEN = {"stream2llm": {"is_streaming_prompt": True, "is_prompt_update": False, "sent_s": 0.0}}


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 500) for _ in range(NUM_TOKENS)] for _ in range(count)]


def step_times_s(
    model: Path, num_requests: int, *, ours: bool, prefix_caching: bool, decoding: bool = False
) -> list[float]:
    """Processor seconds of each step that prefills: of `schedule`, and with `decoding` of `update_from_output` too."""
    from stream2llm_sdk.testing.core_driver import CoreDriver

    with CoreDriver(
        model,
        scheduler_cls=OURS if ours else None,
        prefix_caching=prefix_caching,
        num_gpu_blocks=num_requests * 600,
        block_size=16,
        max_num_batched_tokens=8_192,
        max_num_seqs=num_requests + 1,
        max_model_len=16_384,
        hf_overrides={"max_position_embeddings": 16_384},
        scheduler_reserve_full_isl=False,
        additional_config={"stream2llm": {"policy": "FCFS"}},
    ) as driver:
        schedule, update = driver.scheduler.schedule, driver.scheduler.update_from_output
        times: list[float] = []
        is_prefill = [False]

        def scheduling(*args: Any) -> Any:
            started_s = time.thread_time()
            output = schedule(*args)
            took_s = time.thread_time() - started_s
            is_prefill[0] = output.total_num_scheduled_tokens > num_requests
            if is_prefill[0]:
                times.append(took_s)
            return output

        def updating(*args: Any) -> Any:
            started_s = time.thread_time()
            outputs = update(*args)
            if decoding and is_prefill[0]:
                times[-1] += time.thread_time() - started_s
            return outputs

        driver.scheduler.schedule, driver.scheduler.update_from_output = scheduling, updating
        extra_args = OPEN if ours and not decoding else None
        if ours and decoding:
            driver.add("open", [5, 6, 7], extra_args=OPEN)
        for index, prompt in enumerate(prompts(num_requests)):
            driver.add(f"r{index}", prompt, max_tokens=200 if decoding else 1, extra_args=extra_args)
        num_prefill = num_requests * (NUM_TOKENS + 1) // 8_192
        gc.collect()
        gc.disable()
        try:
            while driver.has_work() and len(times) < num_prefill:
                driver.step()
        finally:
            gc.enable()
        driver.abort(list(driver.scheduler.requests))
        while driver.has_work():
            driver.step()
        return times


def steps_ratio(model: Path, **options: Any) -> tuple[float, list[dict[str, float]]]:
    rounds: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for ours, times in rounds.items():
            times.append(step_times_s(model, 50, ours=ours, **options))
    num_steps = {len(times) for every in rounds.values() for times in every}
    assert max(num_steps) - min(num_steps) <= 1, num_steps
    fastest = {ours: statistics.mean(map(min, zip(*times, strict=False))) for ours, times in rounds.items()}
    runs = [
        {"upstream_ms": statistics.mean(upstream) * 1e3, "ours_ms": statistics.mean(ours) * 1e3}
        for upstream, ours in zip(rounds[False], rounds[True], strict=True)
    ]
    return fastest[False] / fastest[True], runs


def measure() -> tuple[dict[str, float], list[dict[str, Any]]]:
    import tiny_models

    figures: dict[str, float] = {}
    all_runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.make_llama_config(Path(folder) / "model")
        for name, decoding in (("prefill", True), ("open", False)):
            for caching in (False, True):
                figure = f"{name}_steps_ratio_apc_{'on' if caching else 'off'}"
                figures[figure], runs = steps_ratio(model, prefix_caching=caching, decoding=decoding)
                all_runs += [{"figure": figure, **run} for run in runs]
        growth = []
        for _ in range(2):
            per_step = {
                count: statistics.mean(step_times_s(model, count, ours=True, prefix_caching=False))
                for count in (50, 500)
            }
            growth.append(per_step[500] / per_step[50])
            all_runs.append({"figure": "growth", "ms_50": per_step[50] * 1e3, "ms_500": per_step[500] * 1e3})
        figures["growth_500_over_50"] = statistics.median(growth)
    return figures, all_runs


if __name__ == "__main__":
    main(__doc__, measure)
