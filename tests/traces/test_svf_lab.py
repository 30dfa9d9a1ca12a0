"""Whole requests that decode: their draws, and the SVF experiments in small."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.length_prediction import LengthPrediction, LengthPredictor, RequestFeatures
from stream2llm_sdk.serving.length_training import evaluate, train
from stream2llm_sdk.serving.simulator.load import simulate
from stream2llm_sdk.traces.chat_loads import (
    CHAT,
    LONG_CONTEXT,
    MAX_CONTEXT_TOKENS,
    MAX_OUTPUT_TOKENS,
    Load,
    draw_requests,
    length_records,
    with_known_lengths,
)
from stream2llm_sdk.traces.svf_lab import run_svf_lab
from stream2llm_sdk.traces.svf_report import Scenario, SVFReport, SVFResult

SHORT = Scenario("chat", "burst", "short")


def result(policy: str, latency_s: float, *, draw: int = 0, scenario: Scenario = SHORT) -> SVFResult:
    figures = {"mean_latency_s": latency_s, "p95_latency_s": 2 * latency_s, "p99_latency_s": 3 * latency_s}
    return SVFResult(
        scenario,
        policy,
        draw,
        **figures,
        p95_ttft_s=1.0,
        share_waiting_long=0.5,
        max_wait_s=latency_s,
        requests_per_s=1 / latency_s,
        output_tokens_per_s=10 / latency_s,
        num_preemptions=0,
    )


def report(*results: SVFResult) -> SVFReport:
    return SVFReport(results, {"chat": 0.75}, num_requests=200)


AS_PUBLISHED = {
    "FCFS": 10.0,
    "SJF": 6.0,
    "Oracle-SJF": 5.0,
    "SVF": 4.0,
    "Oracle-SVF": 3.0,
    "1-bit SVF": 4.5,
}


# ---- loads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "prompt", "output"),
    [(CHAT, 69.5, 214.5), (LONG_CONTEXT, 10_640, 81)],
    ids=["chat: published", "long context: published words, assumed tokens"],
)
def test_mean_lengths_are_those_that_the_load_is_to_have(load: Load, prompt: float, output: float) -> None:
    requests = draw_requests(load, 4_000, seed=1)
    assert np.mean([request.num_prompt_tokens for request in requests]) == pytest.approx(prompt, rel=0.1)
    assert np.mean([request.num_output_tokens for request in requests]) == pytest.approx(output, rel=0.1)


def test_requests_stay_within_context_and_output_limit() -> None:
    for load in (CHAT, LONG_CONTEXT):
        for request in draw_requests(load, 2_000, seed=2):
            assert 1 <= request.num_output_tokens <= request.max_tokens == MAX_OUTPUT_TOKENS
            assert request.num_prompt_tokens + request.max_tokens <= MAX_CONTEXT_TOKENS


def test_bursts_and_poisson_arrivals_meet_the_same_requests() -> None:
    burst = draw_requests(CHAT, 50, seed=3)
    spread = draw_requests(CHAT, 50, seed=3, rate_per_s=2.0)
    assert {request.arrival_s for request in burst} == {0.0}
    assert [request.arrival_s for request in spread] == sorted(request.arrival_s for request in spread)
    assert [request.chunks for request in burst] == [request.chunks for request in spread]
    assert draw_requests(CHAT, 50, seed=4) != burst == draw_requests(CHAT, 50, seed=3)


def test_a_predictor_learns_the_kind_of_request_and_no_more() -> None:
    for load, kinds_known in ((CHAT, 0.16), (LONG_CONTEXT, 0.2)):
        records = length_records(draw_requests(load, 1_500, seed=5))
        gained = evaluate(train(records[:1_000]), records[1_000:]).accuracy_over_always_short
        assert 0.02 < gained < kinds_known


def test_known_lengths_change_nothing_but_who_knows_them() -> None:
    requests = draw_requests(CHAT, 20, seed=6)
    known = with_known_lengths(requests)
    lengths = [request.num_output_tokens for request in requests]
    assert [request.num_output_tokens for request in known] == lengths
    assert [request.max_tokens for request in known] == [length + 1 for length in lengths]
    assert [request.chunks for request in known] == [request.chunks for request in requests]


def test_no_requests_are_no_load() -> None:
    with pytest.raises(ConfigurationError, match="num_requests=0"):
        draw_requests(CHAT, 0, seed=0)


# ---- outputs that end of themselves ---------------------------------------------------------------------------------


class Recording(LengthPredictor):
    """Says the same of every request, and keeps what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[RequestFeatures] = []
        self.told: list[int] = []

    def predict(self, features: RequestFeatures) -> LengthPrediction:
        self.asked.append(features)
        return LengthPrediction(100.0, False)

    def observe(self, features: RequestFeatures, num_output_tokens: int) -> None:
        self.told.append(num_output_tokens)


def test_a_request_puts_out_its_tokens_and_the_scheduler_learns_of_them_at_its_end() -> None:
    requests = draw_requests(CHAT, 12, seed=7)
    predictor = Recording()
    outcome = simulate(requests, policy="SVF", num_gpu_blocks=520, max_model_len=8_192, length_predictor=predictor)
    assert [request.num_output_tokens for request in outcome.requests] == [
        request.num_output_tokens for request in requests
    ]
    assert sorted(predictor.told) == sorted(request.num_output_tokens for request in requests)
    assert {features.max_tokens for features in predictor.asked} == {MAX_OUTPUT_TOKENS}
    asked = {features.question_token_ids for features in predictor.asked}
    assert asked == {record.features.question_token_ids for record in length_records(requests)}


# ---- the laboratory -------------------------------------------------------------------------------------------------


def test_what_was_published_is_found_or_found_missing() -> None:
    found = report(*(result(policy, latency_s) for policy, latency_s in AS_PUBLISHED.items())).orderings
    assert len(found) == 7
    assert all(found.values())
    missing = report(*(result(policy, latency_s) for policy, latency_s in (AS_PUBLISHED | {"SJF": 2.0}).items()))
    assert not missing.orderings[f"{SHORT}: SVF has a lower mean latency than FCFS and SJF"]


def test_orderings_are_asked_where_memory_is_short_only() -> None:
    ample = Scenario("chat", "burst", "ample")
    results = (result(policy, latency_s, scenario=ample) for policy, latency_s in AS_PUBLISHED.items())
    assert report(*results).orderings == {}


def test_figures_are_medians_and_ratios_are_paired() -> None:
    draws = ((1.0, 2.0), (10.0, 10.0), (100.0, 300.0))
    results = [
        result(policy, latency_s, draw=draw)
        for draw, pair in enumerate(draws)
        for policy, latency_s in zip(("SVF", "SJF"), pair, strict=True)
    ]
    medians = report(*reversed(results))
    assert medians.median(SHORT, "SVF", "mean_latency_s") == 10.0
    assert medians.ratio(SHORT, "mean_latency_s", "SJF", "SVF") == 2.0
    with pytest.raises(ConfigurationError, match="FCFS"):
        medians.median(SHORT, "FCFS", "mean_latency_s")


def test_a_report_is_a_table_and_json() -> None:
    whole = report(*(result(policy, latency_s) for policy, latency_s in AS_PUBLISHED.items()))
    text = whole.to_markdown()
    assert "| Oracle-SVF | 3.00 | 6.00 |" in text
    assert "75%" in text
    content = json.loads(json.dumps(whole.to_dict()))
    assert len(content["medians"]) == len(content["results"]) == 6
    assert content["orderings"] == whole.orderings


def test_the_laboratory_runs_every_policy_on_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    from stream2llm_sdk.traces import svf_lab

    whole, streamed = svf_lab.SCENARIOS[0], svf_lab.SCENARIOS[-1]
    few = [(whole[0], whole[1][-2:]), (streamed[0], streamed[1][-2:])]
    monkeypatch.setattr(svf_lab, "SCENARIOS", few)
    monkeypatch.setattr(svf_lab, "NUM_TRAINING_REQUESTS", 60)
    seen: list[tuple[int, int]] = []
    outcome = run_svf_lab(num_draws=1, num_requests=10, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(outcome.results)) for done in range(1, len(outcome.results) + 1)]
    assert [result.policy for result in outcome.results] == [each.name for _, contenders in few for each in contenders]
    assert all(
        0 < result.mean_latency_s <= result.p99_latency_s < math.inf and result.requests_per_s > 0
        for result in outcome.results
    )


@pytest.mark.parametrize("option", ["num_draws", "num_requests", "jobs"])
def test_too_few_are_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}=0"):
        run_svf_lab(**{option: 0})


def test_policies_that_memory_does_not_tell_apart_are_called_equal() -> None:
    same = report(*(result(policy, 2.0) for policy in AS_PUBLISHED))
    assert all(same.orderings.values())
    rows = [line for line in same.to_markdown().splitlines() if "has a lower mean" in line]
    assert rows
    assert all(line.endswith("| equal: memory was never short |") for line in rows)
    told_apart = report(*(result(policy, latency_s) for policy, latency_s in AS_PUBLISHED.items()))
    assert "equal:" not in told_apart.to_markdown()
