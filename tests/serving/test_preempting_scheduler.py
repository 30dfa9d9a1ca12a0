"""How victims lose their KV on the real scheduler: by cost for the victim, with what the trail says of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from prompt_scripts import SCHEDULER, Prompts, tokens
from scheduler_checks import SchedulerChecks

from stream2llm_sdk.serving.cost_model import H200_LLAMA_8B, CostCurve, CostModel
from stream2llm_sdk.serving.policies import POLICIES, SRPF
from stream2llm_sdk.serving.simulator.host_memory import CheckedSwap
from stream2llm_sdk.serving.swap import swap_config
from stream2llm_sdk.testing.core_driver import CoreDriver

HELD, BESIDE = 64, 72


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama_config(tmp_path_factory.mktemp("models") / "llama")


@contextmanager
def core(model: Path, **options: Any) -> Iterator[Prompts]:
    """A core in whose memory an idle stream of 64 tokens and a request of 72 do not fit together."""
    prefix_caching = options.pop("prefix_caching", False)
    with CoreDriver(
        model,
        scheduler_cls=SCHEDULER,
        prefix_caching=prefix_caching,
        num_gpu_blocks=13,
        block_size=8,
        max_model_len=96,
        max_num_batched_tokens=32,
        scheduler_reserve_full_isl=False,
        additional_config={"stream2llm": {"policy": "FCFS", **options}},
        kv_transfer_config=swap_config(num_host_blocks=20),
    ) as driver:
        driver.executor.kv_transfer = CheckedSwap()
        yield Prompts(driver)


def life_of_a_victim(prompts: Prompts) -> dict[str, Mapping[str, Any]]:
    """What the trail says, by event, of a stream that loses its KV to a request and gets on afterwards."""
    checks, rng = SchedulerChecks(prompts), random.Random(1)
    prompts.open_stream("victim", tokens(rng, HELD))
    prompts.driver.run_until_idle(after_step=checks.between_steps)
    prompts.add_plain("other", tokens(rng, BESIDE))
    prompts.driver.run_until_idle(after_step=checks.between_steps)
    prompts.append("victim", tokens(rng, 8), final=True)
    prompts.driver.run_until_idle(after_step=checks.between_steps)
    records = prompts.driver.call("trail", [["victim"]])["victim"]
    checks.idle()
    return {record[0]: record[3] or {} for record in records}


def slower(costs: CostModel, factor: float) -> CostModel:
    curve = costs.swap_out
    slow = CostCurve(curve.num_tokens, tuple(factor * seconds for seconds in curve.seconds))
    return replace(costs, swap_out=slow, swap_in=slow)


@pytest.mark.parametrize(
    ("mode", "factor", "swaps"),
    [("cost", 1.0, True), ("cost", 1_000.0, False), ("swap", 1_000.0, True), ("recompute", 1.0, False)],
)
def test_a_victim_is_preempted_in_the_way_that_is_cheaper_for_it(
    model: Path, tmp_path: Path, mode: str, factor: float, swaps: bool
) -> None:
    file = tmp_path / "costs.json"
    costs = slower(H200_LLAMA_8B, factor)
    costs.save(file)
    with core(model, preemption_mode=mode, cost_model=str(file), frozen_costs=True) as prompts:
        events = life_of_a_victim(prompts)
    preempted = events["PREEMPTED_SWAP" if swaps else "PREEMPTED_RECOMPUTE"]
    num_tokens = HELD - 1
    assert (preempted["num_tokens"], preempted["num_blocks"]) == (num_tokens, 8)
    expected_s = costs.swap_out_s(num_tokens) + costs.swap_in_s(num_tokens) if swaps else costs.recompute_s(num_tokens)
    # In update mode half of the tokens are expected to survive, before anything is known.
    future_s = costs.swap_in_s(num_tokens) if swaps else costs.recompute_s(num_tokens)
    assert preempted["predicted_s"] == pytest.approx(expected_s - future_s / 2)
    resumed = events["RESUMED"]
    assert (resumed["num_loaded"], resumed["num_recomputed"]) == ((num_tokens, 0) if swaps else (0, num_tokens))
    assert resumed["actual_s"] > 0


def test_what_the_prefix_cache_would_give_back_is_not_worth_a_copy(model: Path, tmp_path: Path) -> None:
    """Without anything that takes the blocks, recompute costs next to nothing."""
    file = tmp_path / "costs.json"
    H200_LLAMA_8B.save(file)
    with core(model, cost_model=str(file), prefix_caching=True) as prompts:
        scheduler = prompts.driver.scheduler
        prompts.open_stream("victim", tokens(random.Random(2), HELD))
        prompts.driver.run_until_idle()
        facts = scheduler._victim_facts(scheduler.requests["victim"])
        assert facts.num_tokens_cached_again == 56
        scheduler._num_blocks_short = 3
        assert scheduler._victim_facts(scheduler.requests["victim"]).num_tokens_cached_again == 56 - 24
        scheduler._num_blocks_short = 0


@pytest.mark.parametrize(("mode", "first"), [("swap", "victim"), ("recompute", "other")])
def test_what_host_memory_gives_back_is_no_prefill_left_for_srpf(
    model: Path, mode: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "SRPF", lambda: SRPF(ageing=0.0))
    rng = random.Random(5)
    with core(model, policy="SRPF", preemption_mode=mode) as prompts:
        prompts.open_stream("victim", tokens(rng, HELD))
        prompts.driver.run_until_idle()
        prompts.add_plain("evicts it", tokens(rng, BESIDE))
        prompts.driver.run_until_idle()
        prompts.driver.outputs.clear()
        prompts.add_plain("other", tokens(rng, 40))
        prompts.append("victim", tokens(rng, 8), final=True)
        prompts.driver.run_until_idle()
        assert next(iter(prompts.driver.outputs)) == first


def test_a_cost_model_of_another_machine_is_used_and_said_to_be_one(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "costs.json"
    H200_LLAMA_8B.save(file)
    with caplog.at_level(logging.WARNING, "stream2llm_sdk"), core(model, cost_model=str(file)) as prompts:
        costs = prompts.driver.scheduler.costs
        assert costs.model.recompute_s(500) == H200_LLAMA_8B.recompute_s(500)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "stream2llm_sdk"]
    assert "H200" in message
    assert "stream2llm calibrate" in message


def test_the_snapshot_says_how_the_scheduler_stands(model: Path) -> None:
    with core(model, preemption_mode="swap") as prompts:
        prompts.open_stream("idle", tokens(random.Random(3), HELD))
        prompts.driver.run_until_idle()
        prompts.add_plain("other", tokens(random.Random(4), BESIDE))
        prompts.driver.run_until_idle()
        snapshot = prompts.driver.call("snapshot", [])
        assert {
            name: snapshot[name] for name in ("num_parked", "policy", "num_host_blocks", "num_host_blocks_used")
        } == {
            "num_parked": 1,
            "policy": "FCFS",
            "num_host_blocks": 20,
            "num_host_blocks_used": 8,
        }
        assert snapshot["num_free_blocks"] == 12
        assert set(snapshot["cost_factors"]) == {"recompute", "swap_out", "swap_in"}
        prompts.abort("idle")
        prompts.driver.run_until_idle()
        assert prompts.driver.call("snapshot", [])["num_host_blocks_used"] == 0
