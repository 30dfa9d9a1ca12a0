"""Loads in virtual time: hand-computed cases, and what streaming gains on the published workload."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator.clock import StepFacts
from stream2llm_sdk.serving.simulator.latency import H100_LLAMA_8B, H200_LLAMA_8B, StepLatency
from stream2llm_sdk.serving.simulator.load import simulate
from stream2llm_sdk.serving.simulator.load_result import RequestResult, SimulationResult
from stream2llm_sdk.serving.simulator.workloads import (
    SimulatedChunk,
    SimulatedRequest,
    TokenSpan,
)
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.traces.simulated import simulated_requests
from stream2llm_sdk.traces.synthesis import SynthesisOptions, synthesize

# A step takes half a second and ten milliseconds a token; the client sees it a tenth of a second later.
EASY = StepLatency(
    overhead_s=0.5, flops_per_token=1.0, flops_per_pair=0.0, effective_flops_per_s=100.0, messaging_s=0.1
)


def appending(*chunks: tuple[float, int], first_id: int = 0, **options: Any) -> SimulatedRequest:
    """A request of `(offset, tokens)` chunks."""
    firsts = itertools.accumulate((length for _, length in chunks), initial=first_id)
    spans = [(offset_s, (first, length)) for (offset_s, length), first in zip(chunks, firsts, strict=False)]
    return of_chunks("append", [(offset_s, [span]) for offset_s, span in spans], **options)


def of_chunks(
    kind: Literal["append", "replace"], chunks: Sequence[tuple[float, Sequence[TokenSpan]]], **options: Any
) -> SimulatedRequest:
    parts = tuple(SimulatedChunk(offset_s, kind, tuple(spans)) for offset_s, spans in chunks)
    return SimulatedRequest(**{"arrival_s": 0.0, "chunks": parts, **options})


def serve(*requests: SimulatedRequest, **options: Any) -> SimulationResult:
    """A small engine with the easy latency."""
    sizes = {
        "num_gpu_blocks": 200,
        "max_model_len": 2048,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "latency": EASY,
    }
    return simulate(requests, **{**sizes, **options})


def crawls(num_requests: int, rate_per_s: float, *, seed: int, **options: Any) -> list[SimulatedRequest]:
    chosen = SynthesisOptions(arrivals=Arrivals(rate_per_s=rate_per_s), **options)
    return simulated_requests(synthesize("crawler", num_requests, seed=seed, options=chosen))


def times(result: RequestResult) -> tuple[float, float]:
    return result.ttft_from_context_complete_s, result.ttft_from_request_s


# ---- latency --------------------------------------------------------------------------------------------------------


def test_a_step_takes_its_overhead_and_its_tokens_and_pairs_at_the_effective_speed() -> None:
    latency = StepLatency(overhead_s=1.0, flops_per_token=2.0, flops_per_pair=3.0, effective_flops_per_s=10.0)
    # Positions 0, 1, 2 attend to 1, 2, 3 positions, and 5, 6 to 6, 7: 5 tokens and 19 pairs.
    assert latency(StepFacts(1, ((0, 3), (5, 7)), 0)) == pytest.approx(1.0 + (2 * 5 + 3 * 19) / 10)
    assert latency(StepFacts(2, (), 0)) == 1.0


def test_chunks_of_a_prefill_have_the_pairs_of_the_whole() -> None:
    latency = StepLatency(overhead_s=0.0, flops_per_token=1.0, flops_per_pair=1.0, effective_flops_per_s=1.0)
    parts = sum(latency(StepFacts(1, (span,), 0)) for span in ((0, 7), (7, 8), (8, 40)))
    assert parts == latency(StepFacts(1, ((0, 40),), 1)) == 40 + 40 * 41 / 2


def test_a_prefill_of_9k_tokens_takes_a_seventh_of_a_second_on_two_h200() -> None:
    num_tokens = 8_889
    linear_s = 16.06e9 * num_tokens / (0.54 * 1978e12)
    attention_s = 524_288 * num_tokens * (num_tokens + 1) / 2 / (0.7 * 1978e12)
    took_s = H200_LLAMA_8B(StepFacts(1, ((0, num_tokens),), 1))
    assert took_s == pytest.approx(0.003 + linear_s + attention_s)
    assert 0.14 < took_s < 0.17
    assert took_s < H100_LLAMA_8B(StepFacts(1, ((0, num_tokens),), 1)) < 1.15 * took_s


@pytest.mark.parametrize(
    "wrong", [{"overhead_s": -1.0}, {"flops_per_token": float("nan")}, {"effective_flops_per_s": 0.0}]
)
def test_a_latency_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    good = {"overhead_s": 1.0, "flops_per_token": 1.0, "flops_per_pair": 1.0, "effective_flops_per_s": 1.0}
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        StepLatency(**{**good, **wrong})


# ---- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunks": ()}, "at least one chunk"),
        ({"chunks": (SimulatedChunk(2.0, "append", ((0, 5),)), SimulatedChunk(1.0, "append", ()))}, "decrease"),
        ({"arrival_s": -1.0, "chunks": (SimulatedChunk(0.0, "append", ((0, 5),)),)}, "negative"),
        ({"chunks": (SimulatedChunk(0.0, "append", ()),)}, "empty"),
        ({"max_tokens": 0, "chunks": (SimulatedChunk(0.0, "append", ((0, 5),)),)}, "max_tokens"),
    ],
)
def test_a_request_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SimulatedRequest(**{"arrival_s": 0.0, **wrong})


# ---- hand-computed loads --------------------------------------------------------------------------------------------


def test_a_streamed_prompt_waits_only_for_what_came_last() -> None:
    # At 2 s: 100 tokens (one is held back) until 3.5 s. At 6 s: the other 51, until 7.01 s.
    result = serve(appending((1.0, 101), (5.0, 50), arrival_s=1.0))
    assert times(result.requests[0]) == (pytest.approx(1.11), pytest.approx(6.11))
    assert (result.num_steps, result.virtual_s, result.busy_s) == (2, pytest.approx(7.01), pytest.approx(2.51))


def test_a_prompt_that_is_not_streamed_waits_for_all_of_it() -> None:
    result = serve(appending((1.0, 101), (5.0, 50), arrival_s=1.0), streaming=False)
    assert times(result.requests[0]) == (pytest.approx(2.11), pytest.approx(7.11))
    assert result.num_steps == 1


def test_a_step_is_not_interrupted_by_a_chunk() -> None:
    # The chunk comes at 2.5 s, the step of the first one ends at 3.5 s.
    result = serve(appending((1.0, 101), (1.5, 50), arrival_s=1.0))
    assert result.requests[0].context_complete_s == 2.5
    assert times(result.requests[0]) == (pytest.approx(3.5 + 1.01 + 0.1 - 2.5), pytest.approx(3.61))


def test_output_tokens_take_a_step_each() -> None:
    result = serve(appending((0.0, 100), max_tokens=3)).requests[0]
    assert result.first_token_s == pytest.approx(1.6)
    assert (result.finished_s, result.num_output_tokens) == (pytest.approx(1.6 + 2 * 0.51), 3)
    assert result.num_tokens_computed == 102


def test_a_replaced_prompt_keeps_its_common_prefix_and_counts_what_became_void() -> None:
    result = serve(of_chunks("replace", [(0.0, [(0, 60), (500, 40)]), (5.0, [(0, 60), (900, 41)])])).requests[0]
    # 99 computed, 39 of them past the LCP of 60; then the other 41.
    assert result.ttft_from_context_complete_s == pytest.approx(0.5 + 0.41 + 0.1)
    assert (result.num_tokens_invalidated, result.num_tokens_recomputed) == (39, 0)
    assert (result.num_tokens_computed, result.num_prompt_tokens) == (99 + 41, 101)


def test_prompts_share_what_the_prefix_cache_holds() -> None:
    first, second = appending((0.0, 100)), appending((5.0, 100), (6.0, 10))
    with_cache = serve(first, second, prefix_caching=True)
    assert with_cache.total("num_tokens_cached") == 96, "six whole blocks"
    assert serve(first, second).total("num_tokens_cached") == 0


def test_a_tenants_figures_are_its_own() -> None:
    quick = appending((0.0, 100), tenant="quick", tag="a")
    slow = appending((9.0, 200), first_id=1_000, tenant="slow")
    result = serve(quick, slow)
    assert result.tenants == ("quick", "slow")
    assert result.percentile("ttft_from_context_complete_s", 50, tenant="quick") == pytest.approx(1.6)
    assert result.percentile("ttft_from_context_complete_s", 50, tenant="slow") == pytest.approx(2.6)
    assert result.summary(tenant="slow")["num_tokens_computed"] == 200
    with pytest.raises(ConfigurationError, match=r"'other'.*quick, slow"):
        result.values("num_preemptions", tenant="other")
    with pytest.raises(ConfigurationError, match=r"'tag'.*ttft_from_request_s"):
        result.values("tag")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": None}, "streaming=False"),
        ({"policy": "FIFO"}, "FIFO"),
        ({"num_gpu_blocks": 5}, "request 0 needs 101 tokens.*allow 64"),
        ({"max_model_len": 100}, "allow 100"),
        ({"no_such_argument": 1}, "no_such_argument"),
    ],
)
def test_a_load_that_cannot_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        serve(appending((0.0, 100)), **options)


# ---- larger loads ---------------------------------------------------------------------------------------------------

CROWD = crawls(60, 4.0, seed=5, delay_multiplier=10.0, max_prompt_tokens=30_000)


def under_pressure(policy: str, **options: Any) -> SimulationResult:
    return simulate(CROWD, policy=policy, num_gpu_blocks=8_000, **options)


@pytest.mark.parametrize("policy", ["FCFS", "DEFAULT_VLLM"])
def test_every_request_of_a_load_under_pressure_ends_and_every_token_is_accounted_for(policy: str) -> None:
    result = under_pressure(policy)
    assert len(result.requests) == len(CROWD)
    assert result.peak_kv_usage > 0.95
    assert result.total("num_recompute_preemptions") > 5
    for request, simulated in zip(result.requests, CROWD, strict=True):
        assert request.num_output_tokens == 1
        assert request.num_prompt_tokens == simulated.num_prompt_tokens
        assert request.num_tokens_computed == request.num_prompt_tokens + request.num_tokens_recomputed
        assert (request.num_preemptions > 0) >= (request.num_tokens_recomputed > 0)
        assert simulated.context_complete_s < request.first_token_s == request.finished_s


def test_a_load_gives_the_same_result_again_whatever_the_hosts_clocks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    once = under_pressure("FCFS")
    strange = itertools.cycle([5.0, 1e9, -3.0, 7e5])
    monkeypatch.setattr(time, "monotonic", lambda: next(strange))
    monkeypatch.setattr(time, "time", lambda: next(strange))
    assert under_pressure("FCFS") == once


@pytest.fixture(scope="module")
def light_load() -> dict[str, SimulationResult]:
    """250 crawler-like requests at 2 a second: streamed, whole, and whole on vLLM's own scheduler."""
    requests = crawls(250, 2.0, seed=0)
    return {
        "streamed": simulate(requests, policy="FCFS"),
        "whole": simulate(requests, policy="DEFAULT_VLLM", streaming=False),
        "vllm": simulate(requests, policy=None, streaming=False),
    }


def test_without_streams_the_scheduler_does_what_vllms_own_does(light_load: dict[str, SimulationResult]) -> None:
    assert light_load["whole"] == light_load["vllm"]


def test_without_streams_its_counters_are_those_of_vllms_own_under_pressure_too() -> None:
    burst = [appending((0.1 * index, 1_500), first_id=5_000 * index, max_tokens=400) for index in range(12)]
    ours, vllms = (simulate(burst, policy=name, streaming=False, num_gpu_blocks=700) for name in ("DEFAULT_VLLM", None))
    assert ours == vllms
    assert vllms.total("num_recompute_preemptions") > 0
    assert vllms.total("num_tokens_computed") - vllms.total("num_tokens_recomputed") == 12 * (1_500 + 400 - 1)


def test_streaming_takes_most_of_the_median_ttft_away_as_published(light_load: dict[str, SimulationResult]) -> None:
    metric = "ttft_from_context_complete_s"
    whole, streamed = (light_load[name].percentile(metric, 50) for name in ("vllm", "streamed"))
    assert whole == pytest.approx(0.1815, rel=0.25)
    assert 0.038 / 2 < streamed < 0.038 * 2
    assert whole / streamed > 3
    assert light_load["vllm"].percentile(metric, 95) / light_load["streamed"].percentile(metric, 95) > 3


def test_with_the_retrieval_included_streaming_gains_a_few_per_cent(light_load: dict[str, SimulationResult]) -> None:
    whole, streamed = (light_load[name].values("ttft_from_request_s").mean() for name in ("vllm", "streamed"))
    assert 0.85 < streamed / whole < 1
