"""One tenant with a hundred open streams beside one with a single question, in virtual time on the real scheduler.

Llama-3.1-8B on two H200. The one asks one question after another, each a whole prompt of 5,749 tokens (the published
median); the other keeps a hundred crawler-like streams open all the time, more than memory holds. Figures:
`p95_ttft_ratio_<policy>`, the P95 of the single one's TTFT beside the other over that without it, median of 3 draws of
the streams, and `p95_ttft_ratio_shared_over_alone`, the worst of them. Expected: 1.2 to 1.4 (a step that is under way
has to end first). Asked: 1.5 at most.
"""

from __future__ import annotations

import statistics
from typing import Any

from harness import main

NUM_QUESTIONS, EVERY_S, NUM_TOKENS = 60, 2.0, 5_749
POLICIES = ("FCFS", "SRPF", "DEFAULT_VLLM")
DRAWS = range(3)


def questions() -> list[Any]:
    from stream2llm_sdk.serving.simulator.workloads import SimulatedChunk, SimulatedRequest

    return [
        SimulatedRequest(
            arrival_s=10.0 + index * EVERY_S,
            chunks=(SimulatedChunk(0.0, "append", ((50_000_000 + index * NUM_TOKENS, NUM_TOKENS),)),),
            tenant="one",
            tag="question",
        )
        for index in range(NUM_QUESTIONS)
    ]


def streams(draw: int) -> list[Any]:
    from stream2llm_sdk.traces.arrivals import Arrivals
    from stream2llm_sdk.traces.simulated import simulated_requests
    from stream2llm_sdk.traces.synthesis import SynthesisOptions, synthesize

    # By Little's law a hundred are open when they last about 90 s and 1.1 come a second.
    options = SynthesisOptions(arrivals=Arrivals(rate_per_s=1.1), delay_multiplier=10.0, tenants={"many": 1.0})
    return simulated_requests(synthesize("crawler", 170, seed=draw, options=options))


def one_run(policy: str, draw: int | None) -> dict[str, Any]:
    from stream2llm_sdk.serving.simulator.load import simulate

    requests = questions() + ([] if draw is None else streams(draw))
    result = simulate(requests, policy=policy, num_gpu_blocks=20_000)
    return {"policy": policy, "shared": draw is not None, "draw": draw, **result.summary(tenant="one")}


def measure() -> tuple[dict[str, float], list[dict[str, Any]]]:
    metric = "ttft_from_request_p95_s"
    figures, runs = dict[str, float](), []
    for policy in POLICIES:
        alone, shared = one_run(policy, None), [one_run(policy, draw) for draw in DRAWS]
        runs += [alone, *shared]
        figures[f"p95_ttft_ratio_{policy.lower()}"] = statistics.median(run[metric] / alone[metric] for run in shared)
    figures["p95_ttft_ratio_shared_over_alone"] = max(figures.values())
    return figures, runs


if __name__ == "__main__":
    main(__doc__, measure)
