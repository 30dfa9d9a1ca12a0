"""Preemption by cost against always recomputing and always swapping, in virtual time on the real scheduler.

Llama-3.1-8B on two H200 by `H200_LLAMA_8B`, FCFS, memory short: crawler-like requests at 4 a second with the gaps
between pages stretched tenfold, vector-search-like ones at 2 a second stretched thirtyfold. All three modes meet the
same requests. Figures: `p99_cost_over_best_pure_crawler` and `p99_cost_over_best_pure_anns`, the P99 of the TTFT from
the complete context with `preemption_mode="cost"` over the better of the two others, median of seven draws;
`p99_cost_over_best_pure_slow_copies`, the crawler's with copies twenty times slower, where recompute is the better one.
Expected and asked: 1.0 at most. (The published artifact's cost model asks about the wrong request: 1.16 on its crawler
runs.)
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from harness import main

MODES = ("recompute", "swap", "cost")
DRAWS = range(7)
BLOCK_SIZE = 16


def requests(kind: Any, num_requests: int, rate_per_s: float, draw: int, **options: Any) -> list[Any]:
    from stream2llm_sdk.traces.arrivals import Arrivals
    from stream2llm_sdk.traces.simulated import simulated_requests
    from stream2llm_sdk.traces.synthesis import SynthesisOptions, synthesize

    chosen = SynthesisOptions(arrivals=Arrivals(rate_per_s=rate_per_s), **options)
    return simulated_requests(synthesize(kind, num_requests, seed=0, arrival_seed=draw, options=chosen))


def loads() -> dict[str, dict[str, Any]]:
    from stream2llm_sdk.serving.cost_model import H200_LLAMA_8B, CostCurve

    def slower(curve: CostCurve) -> CostCurve:
        return CostCurve(curve.num_tokens, tuple(20 * seconds for seconds in curve.seconds))

    slow = replace(H200_LLAMA_8B, swap_out=slower(H200_LLAMA_8B.swap_out), swap_in=slower(H200_LLAMA_8B.swap_in))
    crawler = {
        "requests": lambda draw: requests("crawler", 1_000, 4.0, draw, delay_multiplier=10.0),
        "num_gpu_blocks": 60_000,
        "max_num_batched_tokens": 2_048,
        "costs": H200_LLAMA_8B,
    }
    return {
        "crawler": crawler,
        "anns": {
            "requests": lambda draw: requests("anns", 400, 2.0, draw, delay_multiplier=30.0),
            "num_gpu_blocks": 60_000,
            "max_num_batched_tokens": 8_192,
            "costs": H200_LLAMA_8B,
        },
        "slow_copies": {**crawler, "costs": slow},
    }


def one_run(mode: str, draw: int, load: dict[str, Any]) -> dict[str, Any]:
    from stream2llm_sdk.serving.simulator.load import simulate
    from stream2llm_sdk.serving.swap import swap_config

    costs, num_blocks = load["costs"], load["num_gpu_blocks"]

    def copy_latency(num_out: int, num_in: int) -> float:
        out_s = costs.swap_out_s(num_out * BLOCK_SIZE) if num_out else 0.0
        return float(out_s + (costs.swap_in_s(num_in * BLOCK_SIZE) if num_in else 0.0))

    result = simulate(
        load["requests"](draw),
        policy="FCFS",
        num_gpu_blocks=num_blocks,
        max_num_batched_tokens=load["max_num_batched_tokens"],
        copy_latency=copy_latency,
        cost_model=costs,
        scheduler_options={"preemption_mode": mode},
        kv_transfer_config=swap_config(num_host_blocks=2 * num_blocks),
    )
    return {"mode": mode, "draw": draw, **result.summary(), "wall_s": result.wall_s}


def measure() -> tuple[dict[str, float], list[dict[str, Any]]]:
    figures: dict[str, float] = {}
    all_runs: list[dict[str, Any]] = []
    metric = "ttft_from_context_complete_p99_s"
    for name, load in loads().items():
        ratios = []
        for draw in DRAWS:
            runs = {mode: one_run(mode, draw, load) for mode in MODES}
            ratios.append(runs["cost"][metric] / min(runs["recompute"][metric], runs["swap"][metric]))
            for mode, run in runs.items():
                all_runs.append({"load": name, **run})
                swaps, recomputes = run["num_swap_preemptions"], run["num_recompute_preemptions"]
                print(f"{name} {draw} {mode}: P99 {run[metric]:.3f} s, {recomputes} recomputed, {swaps} swapped")
        figures[f"p99_cost_over_best_pure_{name}"] = statistics.median(ratios)
    return figures, all_runs


if __name__ == "__main__":
    main(__doc__, measure)
