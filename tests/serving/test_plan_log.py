"""Plans of a simulated load: what is kept of them, that the reasons are true, and that keeping changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.planner import Plan
from stream2llm_sdk.serving.simulator.load import simulate
from stream2llm_sdk.serving.simulator.plan_log import Outcome, PlanLog, PlannedStep
from stream2llm_sdk.serving.simulator.workloads import SimulatedRequest
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.traces.simulated import simulated_requests
from stream2llm_sdk.traces.synthesis import SynthesisOptions, synthesize

NUM_BLOCKS = 2_500


@pytest.fixture(scope="module")
def load() -> list[SimulatedRequest]:
    options = SynthesisOptions(
        delay_multiplier=10, arrivals=Arrivals(rate_per_s=2.0), max_prompt_tokens=20_000, update_share=0.3
    )
    return simulated_requests(synthesize("mixed", 16, seed=3, options=options))


@pytest.fixture(scope="module")
def plans(load: list[SimulatedRequest]) -> PlanLog:
    log = PlanLog()
    simulate(load, policy="FCFS", num_gpu_blocks=NUM_BLOCKS, plans=log)
    return log


def taker_of(step: PlannedStep, victim_id: str) -> str:
    """Whom the reason of a victim names."""
    (reason,) = (request.reason for request in step.victims if request.request_id == victim_id)
    return next(
        request.request_id for request in step.requests if f"request {request.request_id} needs memory" in reason
    )


def test_keeping_plans_changes_nothing(load: list[SimulatedRequest]) -> None:
    for policy in ("FCFS", "SRPF"):
        alone = simulate(load, policy=policy, num_gpu_blocks=NUM_BLOCKS)
        assert simulate(load, policy=policy, num_gpu_blocks=NUM_BLOCKS, plans=PlanLog()) == alone


def test_a_step_accounts_for_tokens_and_blocks(plans: PlanLog) -> None:
    assert len(plans) > 100
    for step in plans:
        assert step.policy == "FCFS"
        assert 0 <= step.num_tokens <= step.token_budget == 2048
        assert step.num_blocks == NUM_BLOCKS - 1
        # No prefix cache: nothing is shared, and what nobody holds is free.
        assert sum(request.num_blocks for request in step.requests) + step.num_free_blocks == step.num_blocks
        for request in step.requests:
            assert request.num_granted <= request.num_wanted or not request.num_granted
            assert (request.num_granted > 0) == (request.outcome in (Outcome.SERVED, Outcome.ADMITTED))
            assert request.num_computed <= request.num_prompt_tokens
    places = [request.place for step in plans for request in step.requests if request.place is not None]
    assert min(places) == 1


def test_victims_lose_what_somebody_takes(plans: PlanLog) -> None:
    taking = [step for step in plans if step.victims]
    assert taking
    for step in taking:
        for victim in step.victims:
            assert victim.num_blocks > 0
            assert not victim.num_granted
            (taker,) = (r for r in step.requests if r.request_id == taker_of(step, victim.request_id))
            assert taker.num_granted > 0
            assert victim.request_id in taker.reason
            assert "waits for its next chunk" in victim.reason or (taker.place or 0) < (victim.place or 10**6)


def test_open_prompts_are_told_why_they_get_little_or_nothing(load: list[SimulatedRequest]) -> None:
    log = PlanLog()
    simulate(load * 3, policy="SRPF", num_gpu_blocks=10 * NUM_BLOCKS, plans=log)
    reasons = {request.reason for step in log for request in step.requests}
    assert "a complete prompt ends its prefill in this step, and would wait for more than that" in reasons
    assert "the share of the step for open prompts is used up" in reasons


def test_only_what_is_asked_for_is_kept(load: list[SimulatedRequest], plans: PlanLog) -> None:
    log = PlanLog(keep=lambda plan: plan.victims)
    simulate(load, policy="FCFS", num_gpu_blocks=NUM_BLOCKS, plans=log)
    assert list(log) == [step for step in plans if step.victims]
    few = PlanLog(most=3)
    simulate(load, policy="FCFS", num_gpu_blocks=NUM_BLOCKS, plans=few)
    assert list(few) == list(plans[:3])
    with pytest.raises(ConfigurationError, match="most must be at least 1, got 0"):
        PlanLog(most=0)


def test_a_scheduler_that_does_not_plan_is_refused(load: list[SimulatedRequest]) -> None:
    with pytest.raises(ConfigurationError, match="makes no plans"):
        simulate(load, policy=None, streaming=False, num_gpu_blocks=NUM_BLOCKS, plans=PlanLog())
    with pytest.raises(ConfigurationError, match="makes no plans"):
        simulate(load, policy="FCFS", system="published", num_gpu_blocks=NUM_BLOCKS, plans=PlanLog())


def test_a_step_shows_itself(plans: PlanLog) -> None:
    step = max(plans, key=lambda step: len(step.victims))
    page = step._repr_html_()
    assert "<svg" in page
    assert f"{step.num_free_blocks:,} of {step.num_blocks:,}" in page
    for request in step.victims:
        assert f"<b>{request.request_id}</b>" in page
    assert "taken from victims" in page


def test_a_plan_alone_shows_itself() -> None:
    new, victim, found = (SimpleNamespace(request_id=name) for name in ("new", "<victim>", "found"))
    plan = Plan({"old": 1, "new": 100}, [new], [victim], [found], {"new"}, is_forced=True, num_blocks_short=7)
    page = plan._repr_html_()
    for told in ("101", "admitted, less than it wants", "&lt;victim&gt;", "found in the prefix cache", "forced"):
        assert told in page
    assert "nobody gets tokens" in Plan()._repr_html_()


def test_host_memory_is_an_argument(load: list[SimulatedRequest]) -> None:
    options = {"preemption_mode": "swap"}
    swapped = simulate(
        load, policy="FCFS", num_gpu_blocks=NUM_BLOCKS, num_host_blocks=100_000, scheduler_options=options
    )
    assert swapped.total("num_swap_preemptions") > 0
    assert swapped.total("num_recompute_preemptions") == 0
