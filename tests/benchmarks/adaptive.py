"""Whether ADAPTIVE earns its place: policies on a load of streams and on one of answers, in virtual time.

Streams: crawler-like, 4 a second with the gaps between pages stretched tenfold, 66,000 KV blocks, one output token;
what counts is the P99 of the TTFT from the complete context. Answers: whole prompts (median 800 tokens) with answers of
a median of 150 tokens, 4 a second and one burst of 300, on a device with 40,000 tokens of KV; what counts is the mean
time to the last token. Medians of 3 draws, every policy on the same ones.

Figures: `worst_<policy>`, the policy's result over that of the best policy of the same load and draw, on its worst load
(median of the draws); 1 would be the best everywhere. `vllm_over_fcfs`, the mean time to the last token of vLLM's own
scheduler over FCFS's, which looks ahead, at 4 a second.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from harness import main

POLICIES = ("FCFS", "LCAS", "SRPF", "SVF", "ADAPTIVE")
LOADS = ("streams", "answers", "burst")
DRAWS = range(3)


def streams(draw: int) -> dict[str, Any]:
    from stream2llm_sdk.traces.arrivals import Arrivals
    from stream2llm_sdk.traces.simulated import simulated_requests
    from stream2llm_sdk.traces.synthesis import synthesize
    from stream2llm_sdk.traces.synthesis_options import SynthesisOptions

    traces = synthesize("crawler", 1_500, seed=0, options=SynthesisOptions(delay_multiplier=10.0))
    arrivals = Arrivals(rate_per_s=4.0).draw(len(traces), seed=draw)
    return {"requests": simulated_requests(traces, arrivals=arrivals.tolist()), "num_gpu_blocks": 66_000}


def answers(draw: int, *, burst: bool) -> dict[str, Any]:
    from stream2llm_sdk.serving.simulator.latency import StepLatency
    from stream2llm_sdk.serving.simulator.workloads import SimulatedChunk, SimulatedRequest

    random = np.random.default_rng((7, draw))
    num_requests, arrival_s, next_id, requests = (300 if burst else 400), 0.0, 0, []
    for _ in range(num_requests):
        arrival_s += 0.0 if burst else random.exponential(1 / 4)
        num_prompt = int(np.clip(800 * np.exp(1.2 * random.normal()), 20, 12_000))
        num_output = int(np.clip(150 * np.exp(random.normal()), 1, 2_000))
        prompt = SimulatedChunk(0.0, "append", ((next_id, num_prompt),))
        requests.append(SimulatedRequest(arrival_s, (prompt,), max_tokens=num_output))
        next_id += num_prompt
    latency = StepLatency(0.012, 16e9, 4 * 32 * 4096, 150e12, messaging_s=0.002)
    return {"requests": requests, "num_gpu_blocks": 2_500, "max_num_seqs": 256, "latency": latency}


def one_run(load: str, policy: str | None, draw: int) -> dict[str, Any]:
    from stream2llm_sdk.serving.simulator.load import simulate

    arguments = streams(draw) if load == "streams" else answers(draw, burst=load == "burst")
    result = simulate(arguments.pop("requests"), policy=policy, streaming=policy is not None, **arguments)
    if load == "streams":
        value = result.percentile("ttft_from_context_complete_s", 99)
    else:
        value = statistics.mean(request.finished_s - request.arrival_s for request in result.requests)
    run = {"load": load, "policy": policy or "vLLM", "draw": draw, "value_s": value, **result.summary()}
    print(f"{load:8} {run['policy']:9} {draw}: {value:8.3f} s", flush=True)
    return run


def measure() -> tuple[dict[str, float], list[dict[str, Any]]]:
    runs = [one_run(load, policy, draw) for load in LOADS for draw in DRAWS for policy in POLICIES]
    value = {(run["load"], run["policy"], run["draw"]): run["value_s"] for run in runs}
    figures = {}
    for policy in POLICIES:
        by_load = [
            statistics.median(
                value[load, policy, draw] / min(value[load, other, draw] for other in POLICIES) for draw in DRAWS
            )
            for load in LOADS
        ]
        figures[f"worst_{policy.lower()}"] = max(by_load)
    stock = [one_run("answers", None, draw) for draw in DRAWS]
    ratios = [run["value_s"] / value["answers", "FCFS", run["draw"]] for run in stock]
    return {**figures, "vllm_over_fcfs": statistics.median(ratios)}, runs + stock


if __name__ == "__main__":
    main(__doc__, measure)
