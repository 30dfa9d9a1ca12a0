"""The experiments of the SVF paper (arXiv 2606.22327) on the real scheduler in virtual time, and what it left out.

Published as its set-up: vLLM with Llama-3.1-8B on an A100 of 80 GB, chats and long contexts, bursts of 200 and Poisson
arrivals. Here the device is a model of one, and the requests are drawn (`chat_loads`). Memory is 'ample' where the
engine has the device to itself, 'short' where a fraction of it. On the whole device a burst of these long contexts is
bound by prefill, not by memory, and then every order takes as long in all: SVF still has the lowest mean, but its P95
is that of the longest outputs, which it serves last. The published runs found memory short there; their outputs may
have been longer than those assumed here.

Who knows what: FCFS, which is vLLM's own order with vLLM's own way of admitting, nothing; SJF and SVF what a
predictor, trained on other requests, expects of each; 1-bit SVF only whether it expects a long or a short output,
which the mean of that class in the training requests stands for, in the order and in the look-ahead; the Oracle
variants the true lengths. The predictor sees the prompt's length and the words of its question; the time that it takes
is not counted.

Not in the paper: open streams, whose prompts still grow. There SVF ranks by the forecast of the final length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace

import numpy as np

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator.clock import StepFacts
from stream2llm_sdk.serving.simulator.hardware import A100, LLAMA_3_1_8B, num_kv_blocks
from stream2llm_sdk.serving.simulator.latency import step_latency
from stream2llm_sdk.serving.simulator.load import simulate
from stream2llm_sdk.serving.simulator.load_result import SimulationResult
from stream2llm_sdk.serving.simulator.workloads import SimulatedRequest
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.traces.chat_loads import (
    CHAT,
    LONG_CONTEXT,
    MAX_CONTEXT_TOKENS,
    MAX_OUTPUT_TOKENS,
    draw_requests,
    length_records,
    with_known_lengths,
)
from stream2llm_sdk.traces.simulated import simulated_requests
from stream2llm_sdk.traces.svf_contenders import PUBLISHED, WITH_STREAMS, Contender, Predictors
from stream2llm_sdk.traces.svf_report import Scenario, SVFReport, SVFResult
from stream2llm_sdk.traces.synthesis import synthesize
from stream2llm_sdk.traces.synthesis_options import NUM_TEMPLATE_TOKENS, OutputLength, SynthesisOptions
from stream2llm_sdk.value_checks import is_whole
from stream2llm_sdk.worker_pool import worker_pool

__all__ = ["run_svf_lab"]

Progress = Callable[[int, int], None]
"""Told `(cells done, cells in all)` whenever a cell is done."""

NUM_TRAINING_REQUESTS = 2_000
_TRAINING_SEED, _HELD_OUT_SEED, _OTHER_SEED = 1_000_003, 1_000_033, 2_000_003
_TOKEN_BUDGET = 2_048
_BLOCK_SIZE = 16
_LONG_WAIT = 5.0

_A100_LLAMA_8B = step_latency(LLAMA_3_1_8B, A100)
# The share of the device that the engine may use. At nine tenths there are 430,000 tokens of KV. A burst of 200 chats
# holds 57,000 at its largest, one of 200 long contexts 2,100,000, but there prefill leaves no time to fill so much. So
# memory is short where the engine has a fraction of the device: 8,900 and 86,000 tokens.
_GPU_MEMORY_UTILIZATION = {
    ("chat", "short"): 0.25,
    ("chat", "ample"): 0.9,
    ("long-context", "short"): 0.37,
    ("long-context", "ample"): 0.9,
    ("streams and chat", "short"): 0.37,
}
_LOADS = {load.name: load for load in (CHAT, LONG_CONTEXT)}

# Requests a second: what FCFS can just serve in short memory; of chats twice that, since 200 are soon served.
_RATES_PER_S = {"chat": 14.0, "long-context": 0.5, "streams and chat": 1.4}


SCENARIOS: list[tuple[Scenario, tuple[Contender, ...]]] = [
    *(
        (Scenario(load, arrivals, memory), PUBLISHED)
        for load in ("chat", "long-context")
        for arrivals, memory in (("burst", "short"), ("burst", "ample"), ("Poisson", "short"))
    ),
    (Scenario("streams and chat", "Poisson", "short"), WITH_STREAMS),
]
"""What is run, and by whom."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One simulation."""

    scenario: Scenario
    contender: Contender
    draw: int
    num_requests: int


def run_svf_lab(
    *, num_draws: int = 3, num_requests: int = 200, progress: Progress | None = None, jobs: int = 1
) -> SVFReport:
    """Runs all scenarios with all policies.

    Args:
        num_draws: of each scenario's requests, at least 1; figures are medians over them.
        num_requests: of each draw, at least 10.
        progress: told what is done.
        jobs: processes that share the work.

    Raises:
        ConfigurationError: an argument is too small.
        MissingExtraError: vLLM or scikit-learn is not installed.
    """
    for name, value, least in (("num_draws", num_draws, 1), ("num_requests", num_requests, 10), ("jobs", jobs, 1)):
        if not is_whole(value, least):
            raise ConfigurationError(f"{name}={value!r:.80}: give a whole number, at least {least}")
    predictors = {load: _train(load) for load in dict.fromkeys(scenario.load for scenario, _ in SCENARIOS)}
    cells = list(_cells(num_draws, num_requests))
    results: list[SVFResult | None] = [None] * len(cells)
    for num_done, (index, result) in enumerate(_run(cells, predictors, jobs), 1):
        results[index] = result
        if progress is not None:
            progress(num_done, len(cells))
    return SVFReport(
        results=tuple(result for result in results if result is not None),
        accuracies={name: of_load.accuracy for name, of_load in predictors.items()},
        num_requests=num_requests,
    )


def _cells(num_draws: int, num_requests: int) -> Iterator[_Cell]:
    for scenario, contenders in SCENARIOS:
        for contender in contenders:
            for draw in range(num_draws):
                yield _Cell(scenario, contender, draw, num_requests)


def _run(cells: Sequence[_Cell], predictors: dict[str, Predictors], jobs: int) -> Iterator[tuple[int, SVFResult]]:
    if jobs == 1:
        for index, cell in enumerate(cells):
            yield index, _serve(cell, predictors[cell.scenario.load])
        return
    from stream2llm_sdk.serving.orphans import exit_with_parent

    with worker_pool(jobs, exit_with_parent) as pool:
        futures = {pool.submit(_serve, cell, predictors[cell.scenario.load]): index for index, cell in enumerate(cells)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _serve(cell: _Cell, predictors: Predictors) -> SVFResult:
    scenario, contender = cell.scenario, cell.contender
    requests = _requests(scenario, cell.num_requests, cell.draw)
    if contender.knows == "all":
        requests = with_known_lengths(requests)
    utilization = _GPU_MEMORY_UTILIZATION[scenario.load, scenario.memory]
    num_blocks = num_kv_blocks(LLAMA_3_1_8B, A100, gpu_memory_utilization=utilization, block_size=_BLOCK_SIZE)
    result = simulate(
        requests,
        policy=contender.policy,
        streaming=contender.streaming,
        num_gpu_blocks=1 + num_blocks,
        max_num_batched_tokens=_TOKEN_BUDGET,
        max_model_len=MAX_CONTEXT_TOKENS,
        block_size=_BLOCK_SIZE,
        latency=_A100_LLAMA_8B,
        length_predictor=predictors.of(contender),
    )
    return _figures(cell, requests, result)


def _figures(cell: _Cell, requests: Sequence[SimulatedRequest], result: SimulationResult) -> SVFResult:
    latencies_s = result.values("finished_s") - result.values("arrival_s")
    service_s = np.array([_service_s(request) for request in requests])
    waits_s = result.values("finished_s") - result.values("context_complete_s") - service_s
    return SVFResult(
        scenario=cell.scenario,
        policy=cell.contender.name,
        draw=cell.draw,
        mean_latency_s=float(latencies_s.mean()),
        p95_latency_s=float(np.percentile(latencies_s, 95)),
        p99_latency_s=float(np.percentile(latencies_s, 99)),
        p95_ttft_s=result.percentile("ttft_from_context_complete_s", 95),
        share_waiting_long=float((waits_s > _LONG_WAIT * service_s).mean()),
        max_wait_s=max(0.0, float(waits_s.max())),
        requests_per_s=len(requests) / result.virtual_s,
        output_tokens_per_s=result.total("num_output_tokens") / result.virtual_s,
        num_preemptions=result.total("num_preemptions"),
    )


def _service_s(request: SimulatedRequest) -> float:
    """What the request takes from the completion of its prompt on an idle device, were nothing computed before."""
    num_prompt, num_decodes = request.num_prompt_tokens, request.num_output_tokens - 1
    prefill_s = sum(
        _A100_LLAMA_8B(StepFacts(0, ((first, min(first + _TOKEN_BUDGET, num_prompt)),), 1))
        for first in range(0, num_prompt, _TOKEN_BUDGET)
    )
    middle = num_prompt + num_decodes // 2  # the time of a decode grows linearly with the context
    return (
        prefill_s + num_decodes * _A100_LLAMA_8B(StepFacts(0, ((middle, middle + 1),), 1)) + _A100_LLAMA_8B.messaging_s
    )


def _requests(scenario: Scenario, num_requests: int, seed: int) -> list[SimulatedRequest]:
    rate_per_s = None if scenario.arrivals == "burst" else _RATES_PER_S[scenario.load]
    if scenario.load in _LOADS:
        return draw_requests(_LOADS[scenario.load], num_requests, seed=seed, rate_per_s=rate_per_s)
    assert rate_per_s is not None
    num_streams = num_requests // 2
    return _crawls(num_streams, seed, rate_per_s / 2) + draw_requests(
        CHAT, num_requests - num_streams, seed=seed + _OTHER_SEED, rate_per_s=rate_per_s / 2
    )


def _crawls(num_streams: int, seed: int, rate_per_s: float) -> list[SimulatedRequest]:
    """Open streams with the published crawler statistics, and answers as long as those of chats are on average."""
    options = SynthesisOptions(
        arrivals=Arrivals(rate_per_s=rate_per_s),
        max_tokens=OutputLength(median=155.0, spread=0.8, most=MAX_OUTPUT_TOKENS),
        max_prompt_tokens=MAX_CONTEXT_TOKENS - MAX_OUTPUT_TOKENS - 1 - NUM_TEMPLATE_TOKENS,
    )
    return [
        replace(request, max_tokens=MAX_OUTPUT_TOKENS, stops_after=request.max_tokens)
        for request in simulated_requests(synthesize("crawler", num_streams, seed=seed, options=options))
    ]


def _train(load: str) -> Predictors:
    scenario = Scenario(load, "Poisson", "short")
    records = length_records(_requests(scenario, NUM_TRAINING_REQUESTS, _TRAINING_SEED))
    held_out = length_records(_requests(scenario, NUM_TRAINING_REQUESTS, _HELD_OUT_SEED))
    return Predictors.trained(records, held_out)
