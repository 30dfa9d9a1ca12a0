"""Scheduling policies against each other on the same loads, in virtual time on the real scheduler.

Crawler-like requests at 4 a second with the gaps between pages stretched tenfold, so that open streams hold more KV
than there is: the published runs under memory pressure (Llama-3.1-8B on two H200), with 79,000 KV blocks and 66,000.
Every policy meets the same prompts and, draw by draw, the same arrivals. Figures: `p99_<policy>_over_fcfs`, the P99 of
the TTFT from the complete context, over FCFS's with the same draw, median of the draws, with 79,000 blocks;
`p99_<policy>_over_fcfs_66k` with 66,000. Printed besides: P50, P95 and P99 of both TTFTs and the preemptions, medians
of the draws. The published P99 of MCPS and of vLLM's order are 14 and 13 times FCFS's, LCAS's is 1.1 times. P99 of one
policy varies by a factor of up to 2.7 between draws, the ratios by up to 2.
"""

from __future__ import annotations

import statistics
from typing import Any

from harness import main

NUM_REQUESTS, RATE_PER_S, DELAY_MULTIPLIER = 1_500, 4.0, 10.0
NUM_BLOCKS = {"": 79_000, "_66k": 66_000}
DRAWS = range(3)
COLUMNS = [
    *(f"ttft_from_{start}_p{percent}_s" for start in ("context_complete", "request") for percent in (50, 95, 99)),
    "num_recompute_preemptions",
    "num_swap_preemptions",
]


def one_run(policy: str, num_blocks: int, draw: int) -> dict[str, Any]:
    from stream2llm_sdk.serving.simulator.load import simulate
    from stream2llm_sdk.traces.arrivals import Arrivals
    from stream2llm_sdk.traces.simulated import simulated_requests
    from stream2llm_sdk.traces.synthesis import SynthesisOptions, synthesize

    options = SynthesisOptions(arrivals=Arrivals(rate_per_s=RATE_PER_S), delay_multiplier=DELAY_MULTIPLIER)
    requests = simulated_requests(synthesize("crawler", NUM_REQUESTS, seed=0, arrival_seed=draw, options=options))
    result = simulate(requests, policy=policy, num_gpu_blocks=num_blocks)
    run = {"policy": policy, "num_blocks": num_blocks, "draw": draw, **result.summary()}
    return {**run, "num_steps": result.num_steps, "wall_s": result.wall_s}


def print_table(num_blocks: int, runs: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n{num_blocks} blocks: TTFT in s from the complete context and from the request, preemptions")
    print(f"{'':14}{'P50':>9}{'P95':>9}{'P99':>9}{'P50':>9}{'P95':>9}{'P99':>9}{'recompute':>11}{'swap':>7}")
    for policy, draws in runs.items():
        medians = [statistics.median(run[column] for run in draws) for column in COLUMNS]
        times = "".join(f"{value:9.3f}" for value in medians[:6])
        print(f"{policy:14}{times}{medians[6]:11.0f}{medians[7]:7.0f}", flush=True)


def measure() -> tuple[dict[str, float], list[dict[str, Any]]]:
    from stream2llm_sdk.serving.policies import POLICIES

    figures: dict[str, float] = {}
    all_runs: list[dict[str, Any]] = []
    metric = "ttft_from_context_complete_p99_s"
    for suffix, num_blocks in NUM_BLOCKS.items():
        runs = {policy: [one_run(policy, num_blocks, draw) for draw in DRAWS] for policy in POLICIES}
        print_table(num_blocks, runs)
        for policy, draws in runs.items():
            all_runs += draws
            if policy != "FCFS":
                ratios = [run[metric] / fcfs[metric] for run, fcfs in zip(draws, runs["FCFS"], strict=True)]
                figures[f"p99_{policy.lower()}_over_fcfs{suffix}"] = statistics.median(ratios)
    return figures, all_runs


if __name__ == "__main__":
    main(__doc__, measure)
