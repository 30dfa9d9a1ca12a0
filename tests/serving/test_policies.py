"""Orders: whom a policy serves first, and who loses its blocks first."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.lcp import token_array
from stream2llm_sdk.serving.policies import (
    FCFS,
    LCAS,
    MCPS,
    POLICIES,
    SJF,
    SRPF,
    SVF,
    DefaultVLLM,
    OneBitSVF,
    SchedulingPolicy,
    Standing,
    make_policy,
)
from stream2llm_sdk.serving.streaming_prompt import StreamingPrompt
from stream2llm_sdk.serving.victims import (
    VICTIM_ORDERS,
    AdmissionOrder,
    IdleFirst,
    LatestCompletion,
    VictimOrder,
    make_victim_order,
)


def prompt(*, is_open: bool) -> StreamingPrompt:
    flags = {"is_streaming_prompt": True, "is_streaming_prompt_finished": not is_open}
    return StreamingPrompt.from_flags(flags, token_array([1]), 0.0)


OPEN, FINISHED, PLAIN = prompt(is_open=True), prompt(is_open=False), None


def standing(streaming: StreamingPrompt | None = PLAIN, **facts: Any) -> Standing:
    """A request that waits, with nothing computed and nothing expected of it but what `facts` say."""
    values = {"priority": 0, "arrival_time": 0.0, "num_prompt_tokens": 100}
    request: Any = SimpleNamespace(**{name: facts.pop(name, value) for name, value in values.items()})
    expected = {
        "is_admitted": False,
        "final_num_tokens": request.num_prompt_tokens,
        "completion_s": 0.0,
        "last_chunk_s": 0.0,
        "num_available_tokens": 0,
        "num_output_tokens": 10,
    }
    return Standing(request, streaming, **{**expected, **facts})


def order(policy: SchedulingPolicy, requests: dict[str, Standing]) -> list[str]:
    """Names by rank."""
    return sorted(requests, key=lambda name: policy.key(requests[name]))


def test_fcfs_serves_complete_requests_by_arrival_then_open_ones_by_arrival() -> None:
    assert order(
        FCFS(),
        {
            "open, late": standing(OPEN, arrival_time=9.0, is_admitted=True),
            "open, early": standing(OPEN, arrival_time=1.0, is_admitted=True),
            "plain, late": standing(arrival_time=8.0),
            "finished": standing(FINISHED, arrival_time=2.0),
            "plain, early": standing(arrival_time=3.0, is_admitted=True),
        },
    ) == ["finished", "plain, early", "plain, late", "open, early", "open, late"]


def test_fcfs_puts_priority_before_arrival_but_not_before_completeness() -> None:
    assert order(
        FCFS(),
        {
            "open, urgent": standing(OPEN, arrival_time=1.0),
            "plain": standing(priority=5, arrival_time=1.0),
            "plain, urgent": standing(arrival_time=9.0),
        },
    ) == ["plain, urgent", "plain", "open, urgent"]


def test_vllms_order_keeps_what_is_admitted_in_front_and_does_not_look_at_arrival() -> None:
    assert order(
        DefaultVLLM(),
        {
            "waiting, urgent": standing(arrival_time=1.0),
            "admitted": standing(OPEN, priority=5, arrival_time=9.0, is_admitted=True),
            "admitted, urgent": standing(priority=1, arrival_time=9.0, is_admitted=True),
            "waiting": standing(priority=3, arrival_time=2.0),
            "waiting too": standing(priority=3, arrival_time=1.0),
        },
    ) == ["admitted, urgent", "admitted", "waiting, urgent", "waiting", "waiting too"]


def test_lcas_serves_complete_requests_first_and_the_oldest_last_chunk_first() -> None:
    assert order(
        LCAS(),
        {
            "open": standing(OPEN, last_chunk_s=1.0, arrival_time=0.0),
            "late": standing(FINISHED, last_chunk_s=9.0, arrival_time=1.0),
            "early": standing(FINISHED, last_chunk_s=5.0, arrival_time=2.0),
        },
    ) == ["early", "late", "open"]


def test_mcps_serves_the_most_computed_first_open_or_not() -> None:
    assert order(
        MCPS(),
        {
            "little": standing(num_available_tokens=10),
            "much": standing(OPEN, num_available_tokens=90),
            "none": standing(num_available_tokens=0),
        },
    ) == ["much", "little", "none"]


def test_sjf_looks_at_the_output_and_svf_at_the_volume() -> None:
    requests = {
        "short answer, long prompt": standing(final_num_tokens=10_000, num_output_tokens=10),
        "long answer, short prompt": standing(final_num_tokens=10, num_output_tokens=100),
        "middle": standing(final_num_tokens=100, num_output_tokens=50),
    }
    assert order(SJF(), requests) == ["short answer, long prompt", "middle", "long answer, short prompt"]
    assert order(SVF(), requests) == ["long answer, short prompt", "middle", "short answer, long prompt"]


def test_svf_takes_the_length_that_an_open_prompt_is_expected_to_end_with() -> None:
    assert order(
        SVF(),
        {
            "short now": standing(OPEN, num_prompt_tokens=10, final_num_tokens=900),
            "long now": standing(OPEN, num_prompt_tokens=500, final_num_tokens=500),
        },
    ) == ["long now", "short now"]


def test_one_bit_svf_knows_the_class_only() -> None:
    short, long = {"class_num_output_tokens": 20.0}, {"class_num_output_tokens": 400.0}
    assert order(
        OneBitSVF(),
        {
            "long": standing(num_output_tokens=1, **long),
            "short, long prompt": standing(num_prompt_tokens=200, num_output_tokens=9_999, **short),
            "short": standing(num_output_tokens=9_999, **short),
        },
    ) == ["short", "short, long prompt", "long"]


def test_srpf_serves_the_least_remaining_prefill_first_and_open_prompts_by_their_completion() -> None:
    assert order(
        SRPF(),
        {
            "open, late": standing(OPEN, completion_s=9.0, num_prompt_tokens=1),
            "open, unknown": standing(OPEN, completion_s=math.inf),
            "open, soon": standing(OPEN, completion_s=2.0, num_prompt_tokens=9_000),
            "long": standing(num_prompt_tokens=9_000),
            "nearly done": standing(num_prompt_tokens=10_000, num_available_tokens=9_900),
            "decoding": standing(num_prompt_tokens=100, num_available_tokens=140),
        },
    ) == ["decoding", "nearly done", "long", "open, soon", "open, late", "open, unknown"]


def test_srpf_lets_nobody_wait_for_ever() -> None:
    """What completes more than n / ageing seconds later does not overtake one with n tokens left."""
    policy = SRPF(ageing=1_000.0)
    old = standing(num_prompt_tokens=5_000, completion_s=0.0)
    assert order(policy, {"old": old, "new": standing(num_prompt_tokens=1, completion_s=4.9)}) == ["new", "old"]
    assert order(policy, {"old": old, "new": standing(num_prompt_tokens=1, completion_s=5.1)}) == ["old", "new"]


# ---- victims ------------------------------------------------------------------------------------------------------


def victims(policy: VictimOrder) -> list[str]:
    """Names in the order of eviction, of idle and busy holders."""
    holders = {
        "busy first": SimpleNamespace(rank=0, is_idle=False, completion_s=0.0, admission=0),
        "idle soon": SimpleNamespace(rank=3, is_idle=True, completion_s=1.0, admission=2),
        "busy last": SimpleNamespace(rank=4, is_idle=False, completion_s=99.0, admission=9),
        "idle late": SimpleNamespace(rank=1, is_idle=True, completion_s=9.0, admission=1),
    }

    def key(name: str) -> Any:
        holder: Any = holders[name]
        return policy.key(holder)

    return sorted(holders, key=key)


def test_idle_streams_are_evicted_first_then_who_would_be_served_last() -> None:
    assert victims(IdleFirst()) == ["idle soon", "idle late", "busy last", "busy first"]


def test_the_one_that_completes_last_may_be_evicted_first() -> None:
    assert victims(LatestCompletion()) == ["idle late", "idle soon", "busy last", "busy first"]


def test_the_published_order_evicts_the_latest_admitted_idle_stream_first() -> None:
    assert victims(AdmissionOrder()) == ["idle soon", "idle late", "busy last", "busy first"]


# ---- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FCFS", "fcfs", " Fcfs\n"])
def test_a_policy_is_found_by_its_name_in_any_case(name: str) -> None:
    assert isinstance(make_policy(name), FCFS)


def test_every_policy_and_order_has_the_name_it_is_found_by() -> None:
    assert {name: make_policy(name).name for name in POLICIES} == {name: name for name in POLICIES}
    assert {name: make_victim_order(name).name for name in VICTIM_ORDERS} == {name: name for name in VICTIM_ORDERS}


@pytest.mark.parametrize("name", ["", "FIFO"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}'.*ADAPTIVE, DEFAULT_VLLM, FCFS, LCAS, MCPS, SJF, SRPF, SVF"):
        make_policy(name)
    with pytest.raises(ConfigurationError, match=f"'{name}'.*ADMISSION, IDLE_FIRST"):
        make_victim_order(name)
